"""The forms in which the per-example gradients of one parameter are held until their norms are known.

`Direct` keeps the gradients themselves. The others are "ghosts": they keep a layer's inputs and output gradients,
compute the norms from inner products between positions, and form only the weighted sum, as ordinary training does.
`ghost_is_cheaper` chooses between the two. Those of convolutions are in `rapid.dp.gradients.convolution`.

Source: Bu, Wang, Zha, Karypis: Differentially private optimization on large model at small cost (ICML 2023).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

ROUNDING_MARGIN = 2.0**-8
"""Share of the clip norm that is set aside for float32 rounding: gradients are clipped to C / (1 + ROUNDING_MARGIN).

It covers rounding in the norms, in the sums, and in gradients that vary in their last bits with the batch in which they
are computed. See "Finite precision" in docs/guarantee.md for what it is compared with.
"""
PIECE = 256
"""Examples whose convolutions and matrix products are summed in float32."""
SUMMED = 32
"""Gradients that are summed in float32; sums of these, and of pieces, are float64."""
SQUARED = 64
"""Elements whose squares are summed in float32; the bound on its error is in the norm."""
ACCESS, CACHED = 15, 5
"""Multiplications in the time of one access to a float in memory, roughly, on CPUs and GPUs, and in a CPU's cache."""
CHUNK, DEVICE_CHUNK = 1 << 21, 1 << 24
"""Floats of patches to form at a time: few enough to stay in a CPU's cache; on a device, worth the calls."""


class Factors:
    """Weight of each example's gradient in the sum: min(1, clip_norm / norm), or 0 where the norm is not finite.

    Args:
        norms: float64 (N,).
        clip_norm: C.
        counted: bool (N,), false for examples whose weight is 0; by default all count.

    Attributes:
        values: the weights, float64 (N,).
    """

    def __init__(self, norms: Tensor, clip_norm: float, counted: Tensor | None = None) -> None:
        kept = torch.isfinite(norms)
        if counted is not None:
            kept &= counted.to(norms.device)
        values = (clip_norm / (norms * (1 + ROUNDING_MARGIN))).clamp(max=1)
        self.values = torch.where(kept, values, 0)
        # elsewhere all rows are handled: the host would wait for a device's count, and time would tell that of padding
        self._indexed = counted is None and norms.device.type == "cpu"
        self._dropped = (~kept).nonzero().flatten() if self._indexed else ~kept

    @classmethod
    def ones(cls, like: Tensor) -> Self:
        """Factors that leave a single example as it is; the caller must check the norm of the result."""
        return cls(like.new_zeros(1, dtype=torch.float64), 1.0)

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows (N * K, ...) times the factor of their example, as a new tensor; exactly 0 where that is 0."""
        by_example = rows.reshape(len(self.values), -1)
        return self._zeroed(by_example * self.values[:, None].to(rows.dtype)).view(rows.shape)

    def kept(self, rows: Tensor) -> Tensor:
        """Rows (N * K, ...) as they are, but exactly 0 where the factor is 0."""
        by_example = rows.reshape(len(self.values), -1)
        if self._indexed:
            return by_example.index_fill(0, self._dropped, 0).view(rows.shape) if len(self._dropped) else rows
        if rows.device.type != "cpu":
            return by_example.masked_fill(self._dropped[:, None], 0).view(rows.shape)
        return torch.where(self._dropped[:, None], 0, by_example).view(rows.shape)

    def combine(self, gradients: Tensor) -> Tensor:
        """sum_i factor_i gradients_i of (N, ...), float64; sets gradients that are not finite to 0 in place."""
        rows = self._zeroed(gradients.reshape(len(gradients), -1))
        total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
        values = self.values.to(torch.promote_types(rows.dtype, torch.float32))
        for part, own in zip(rows.split(SUMMED), values.split(SUMMED), strict=True):
            total += in_full_precision(part).T @ own
        return total.view(gradients.shape[1:])

    def _zeroed(self, rows: Tensor) -> Tensor:
        """Set the rows (N, n) of dropped examples to 0, in place."""
        if self._indexed:
            return rows.index_fill_(0, self._dropped, 0)
        if rows.device.type != "cpu":
            return rows.masked_fill_(self._dropped[:, None], 0)
        # writes all rows, where masked_fill_ writes those that are dropped
        return torch.where(self._dropped[:, None], rows.new_zeros(()), rows, out=rows)


class Gradient(ABC):
    """Per-example gradients of one parameter for N examples."""

    @abstractmethod
    def norms_squared(self) -> Tensor:
        """float64 (N,), an upper bound, above the true value by rounding margins only."""

    @abstractmethod
    def weighted_sum(self, factors: Factors) -> Tensor:
        """sum_i factor_i gradient_i in the parameter's shape, float64."""

    @abstractmethod
    def instantiate(self) -> Direct:
        """The gradients themselves."""


@dataclass
class Direct(Gradient):
    """Gradients kept as they are: float (N, *shape of the parameter), owned by this object."""

    gradients: Tensor

    def norms_squared(self) -> Tensor:
        """See `Gradient`."""
        rows = in_full_precision(self.gradients).reshape(len(self.gradients), -1)
        precision, whole = torch.finfo(rows.dtype), rows.shape[1] // SQUARED * SQUARED
        norms = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
        if whole:
            blocks = rows[:, :whole].unflatten(1, (-1, SQUARED))
            norms = torch.cat([torch.linalg.vector_norm(blocks, dim=2), norms], 1)
        squared: Tensor = norms.double().square_().sum(1)
        # n squares and n - 1 sums are each off by half an epsilon at most, or by less than the smallest normal number
        return squared.mul_(1 + SQUARED * precision.eps).add_(rows.shape[1] * precision.tiny)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """See `Gradient`."""
        return factors.combine(self.gradients)

    def instantiate(self) -> Direct:
        """Itself."""
        return self

    def add(self, other: Gradient) -> None:
        """Add the gradients of another call of the same layer."""
        self.gradients = self.gradients + other.instantiate().gradients


@dataclass
class MatrixGhost(Gradient):
    """Gradient i is sum_t g_it a_it^T: a linear layer seen at P positions.

    Attributes:
        inputs: a, float (N, P, d).
        output_grads: g, float (N, P, p).
    """

    inputs: Tensor
    output_grads: Tensor

    def norms_squared(self) -> Tensor:
        """See `Gradient`."""
        a, g = in_full_precision(self.inputs), in_full_precision(self.output_grads)
        if a.shape[1] == 1:
            norms = [torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64) for rows in (a, g)]
            squared: Tensor = (norms[0] * norms[1]).square()
            return squared.flatten()
        return inner_products(a @ a.mT, g @ g.mT, (a.shape[2], g.shape[2]))

    def weighted_sum(self, factors: Factors) -> Tensor:
        """See `Gradient`."""
        a, g = in_full_precision(self.inputs), in_full_precision(self.output_grads)
        if a.shape[1] == 1:
            # norms of float64 may be so large that a factor is none of float32's normal numbers
            weighted = factors.scaled(g.double())
            return weighted.flatten(0, 1).T @ factors.kept(a).flatten(0, 1).double()
        g, a = factors.scaled(g), factors.kept(a)
        total = g.new_zeros(g.shape[2], a.shape[2], dtype=torch.float64)
        for grads, inputs in zip(g.split(PIECE), a.split(PIECE), strict=True):
            total += grads.flatten(0, 1).T @ inputs.flatten(0, 1)
        return total

    def instantiate(self) -> Direct:
        """See `Gradient`."""
        return Direct(in_full_precision(self.output_grads).mT @ in_full_precision(self.inputs))


@dataclass
class RowsGhost(Gradient):
    """Gradient i is the sum of the rows g_it at the index of position t: an embedding.

    Attributes:
        indices: int64 (N, P).
        output_grads: g, float (N, P, width).
        table: number of rows of the table.
    """

    indices: Tensor
    output_grads: Tensor
    table: int

    def norms_squared(self) -> Tensor:
        """See `Gradient`."""
        g = in_full_precision(self.output_grads)
        same = (self.indices[:, :, None] == self.indices[:, None, :]).to(g.dtype)
        return inner_products(same, g @ g.mT, (1, g.shape[2]))

    def weighted_sum(self, factors: Factors) -> Tensor:
        """See `Gradient`."""
        g = factors.scaled(self.output_grads.double()).flatten(0, 1)
        return g.new_zeros(self.table, g.shape[1]).index_add_(0, self.indices.flatten(), g)

    def instantiate(self) -> Direct:
        """See `Gradient`."""
        grads = in_full_precision(self.output_grads)
        gradients = grads.new_zeros(len(grads), self.table, grads.shape[2])
        return Direct(gradients.scatter_add_(1, self.indices[:, :, None].expand_as(grads), grads))


def inner_products(
    first: Tensor, second: Tensor, lengths: tuple[int, int], kernel: int = 1, count: int | None = None
) -> Tensor:
    """<first_i, second_i> for Gram matrices (N * groups, P, P), plus a bound on the rounding error; float64 (N,).

    The terms may cancel until the sum is smaller than its rounding error, and with too small a norm an example would be
    clipped too little. With b_t = |a_t| |g_t| the terms sum to at most (sum_t b_t)^2, to which the bound is
    proportional. It is the proven one, for any order of additions: n roundings, each by half an epsilon at most, of an
    inner product of n numbers. In rows of equal numbers all of them have one sign, so no root of n would do. Products
    below the smallest normal float are lost in an element of a Gram, and the other Gram may be large: its elements sum
    to at most (sum_t |g_t|)^2 <= P sum_t |g_t|^2.

    Args:
        first: of vectors a_t.
        second: of vectors g_t.
        lengths: products that an element of each of the two sums.
        kernel: elements of so many positions were added for an element of `first`.
        count: N; None: there are no groups.
    """
    precision = torch.finfo(first.dtype)
    products = first * second
    inner = products.flatten(1).sum(1, dtype=torch.float64).clamp_(min=0)
    b = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1, dtype=torch.float64)
    # both elements, those of the kernel, the product; one to spare for the root; then the sums in float64
    error = (sum(lengths) + kernel + 1) * precision.eps / 2 + first[0].numel() * torch.finfo(torch.float64).eps
    # the b_t that were computed may be too small by as much
    bound = inner.addcmul_(b, b, value=math.expm1(error) * math.exp(error))
    squares = (first.diagonal(dim1=1, dim2=2) + second.diagonal(dim1=1, dim2=2)).sum(1, dtype=torch.float64)
    bound.add_(squares, alpha=max(lengths) * kernel * precision.tiny * first.shape[1])
    return bound if count is None else bound.view(count, -1).sum(1)


def cached_floats(like: Tensor) -> int:
    """Floats to work on at a time."""
    return CHUNK if like.device.type == "cpu" else DEVICE_CHUNK


def in_full_precision(x: Tensor) -> Tensor:
    """`x` in at least float32, for norms and sums; integers and booleans as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def ghost_is_cheaper(positions: int, width: int, elements: int, sums: int = 1, *, cpu: bool) -> bool:
    """Whether a ghost takes less time than instantiated gradients, for one example.

    A ghost costs P^2 inner products, of inputs and of output gradients, and sums of as many numbers. Instantiation
    costs as many multiplications as ordinary training, which count a quarter here (measured), and writes and reads each
    example's gradient.

    Args:
        positions: P, where the layer is applied.
        width: input plus output features.
        elements: of the parameter.
        sums: of the P^2 products with one another: the sides of a kernel.
        cpu: whether this is for a CPU, whose cache has the products.
    """
    ghost = positions**2 * (width + 3 * (CACHED if cpu else ACCESS) * sums)
    instantiated = elements * (positions / 4 + 3 * ACCESS)
    return ghost <= instantiated
