"""The per-example gradients of a convolution, as a ghost or as they are.

New here: the inner products of patches in a ghost are sums of those of pixels, without forming the patches.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn import functional as F

from rapid.dp.gradients.forms import PIECE, Direct, Factors, Gradient, cached_floats, in_full_precision, inner_products
from rapid.dp.gradients.shift import Shift

BLOCK = 8
"""Channels that oneDNN takes at a time, or twice as many."""


@cache
def _has_fast_kernels() -> bool:
    return mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


class ConvolutionGhost(Gradient):
    """Gradient i is the weight gradient of a 2-d convolution over the K rows of example i.

    Args:
        layer: its strides, dilation, padding and groups are used, its weights are not.
        inputs: float (N * K, C, H, W).
        output_grads: float (N * K, p, h, w).
        count: N.
    """

    def __init__(self, layer: nn.Conv2d, inputs: Tensor, output_grads: Tensor, count: int) -> None:
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        if layer.padding_mode != "zeros" or left != right or top != bottom:
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            inputs = F.pad(inputs, (left, right, top, bottom), mode=mode)
            left = top = 0
        self.layer = layer
        self.padding = (top, left)
        self.inputs = inputs
        self.output_grads = output_grads
        self.count = count

    def norms_squared(self) -> Tensor:
        """See `Gradient`."""
        grams = self._by_group(self.output_grads)
        products = self._patch_products().flatten(0, 1), (grams.mT @ grams).flatten(0, 1)
        lengths = self.layer.weight.shape[1], grams.shape[2]
        return inner_products(*products, lengths, self.layer.weight[0, 0].numel(), self.count)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """See `Gradient`."""
        scaled = factors.scaled(in_full_precision(self.output_grads))
        inputs = factors.kept(in_full_precision(self.inputs))
        weight = self.layer.weight.detach().to(inputs.dtype)
        total = torch.zeros_like(weight, dtype=torch.float64, memory_format=torch.contiguous_format)
        rows = PIECE * (len(inputs) // self.count)
        for grads, images in zip(scaled.split(rows), inputs.split(rows), strict=True):
            total += self._weight_gradient(grads, images, weight, self.layer.groups)
        return total

    def instantiate(self) -> Direct:
        """See `Gradient`."""
        dtype, weight = torch.promote_types(self.inputs.dtype, torch.float32), self.layer.weight
        # what oneDNN has fast kernels for; on GPUs patches are formed fast
        available = self.inputs.device.type == "cpu" and dtype == torch.float32 and _has_fast_kernels()
        # patches of few channels are small
        fast = weight.shape[1] >= BLOCK or len(weight) == self.layer.groups == self.inputs.shape[1]
        return Direct(self._of_groups() if available and fast else self._of_patches(dtype))

    def _of_groups(self) -> Tensor:
        """The weight gradient of a convolution in which examples are groups, and draws are examples.

        Source: Rochette, Manoel, Tramel: Efficient per-example gradient computations in convolutional neural networks
        (2019).
        """
        count, groups, weight = self.count, self.layer.groups, self.layer.weight
        _, inputs, *kernel = weight.shape
        sides = len(weight) // groups, inputs
        # oneDNN's kernels are for blocks of channels, or for single ones
        padded = sides if sides == (1, 1) else tuple(-(-side // BLOCK) * BLOCK for side in sides)
        rows = []
        for part, side, whole in zip((self.output_grads, self.inputs), sides, padded, strict=True):
            own = in_full_precision(part).unflatten(0, (count, -1)).transpose(0, 1).unflatten(2, (groups, side))
            rows.append(F.pad(own, (0, 0, 0, 0, 0, whole - side)).flatten(1, 3).contiguous())
        like = rows[0].new_empty(count * groups * padded[0], padded[1], *kernel)
        grads, images = rows
        found = self._weight_gradient(grads, images, like, count * groups)
        found = found.view(count, groups, *padded, *kernel)[:, :, : sides[0], : sides[1]]
        return found.reshape(count, *weight.shape)

    def _weight_gradient(self, grads: Tensor, inputs: Tensor, like: Tensor, groups: int) -> Tensor:
        """Of a convolution with so many groups, in the shape of `like`, whose values are not read."""
        layer, only_weight = self.layer, (False, True, False)
        # contiguous, because oneDNN's 1x1 convolutions with strides write out of bounds for channels-last inputs
        rows = grads, inputs.contiguous()
        args = (layer.stride, self.padding, layer.dilation, False, (0, 0), groups, only_weight)
        gradient: Tensor = torch.ops.aten.convolution_backward(*rows, like, None, *args)[1]
        return gradient

    def _of_patches(self, dtype: torch.dtype) -> Tensor:
        """Products of output gradients and patches."""
        draws, groups, weight = len(self.inputs) // self.count, self.layer.groups, self.layer.weight
        positions = draws * self.output_grads[0, 0].numel()
        chunk = max(1, cached_floats(weight) // (positions * weight[0].numel() * groups))
        pairs = zip(self.inputs.split(chunk * draws), self.output_grads.split(chunk * draws), strict=True)
        gradients = self.inputs.new_empty(self.count, groups, weight.shape[0] // groups, weight[0].numel(), dtype=dtype)
        for target, (inputs, grads) in zip(gradients.split(chunk), pairs, strict=True):
            patches = self._patches(inputs, draws, grads.shape[2:])
            torch.matmul(self._by_group(grads, draws), patches.mT, out=target)
        return gradients.view(self.count, *weight.shape)

    def _by_group(self, rows: Tensor, draws: int | None = None) -> Tensor:
        """(N * K, C, h, w) -> (N, groups, C / groups, K * h * w)."""
        draws = draws or len(rows) // self.count
        parts: Tensor = in_full_precision(rows).unflatten(0, (-1, draws))
        parts = parts.unflatten(2, (self.layer.groups, -1)).flatten(4)
        return parts.permute(0, 2, 3, 1, 4).flatten(3)

    def _patches(self, inputs: Tensor, draws: int, size: torch.Size) -> Tensor:
        """What the kernel is multiplied by: (n, groups, C / groups * kh * kw, K * h * w)."""
        layer, (top, left) = self.layer, self.padding
        # contiguous, because as_strided is right only for the strides that it is told
        x: Tensor = F.pad(in_full_precision(inputs), (left, left, top, top)).contiguous().unflatten(0, (-1, draws))
        n, _, channels, _, _ = x.shape
        (kh, kw), (dh, dw), (sh, sw) = layer.kernel_size, layer.dilation, layer.stride
        s0, s1, s2, s3, s4 = x.stride()
        inner = channels // layer.groups
        windows = x.as_strided(
            (n, layer.groups, inner, kh, kw, draws, *size),
            (s0, s2 * inner, s2, s3 * dh, s4 * dw, s1, s3 * sh, s4 * sw),
        )
        return windows.reshape(n, layer.groups, inner * kh * kw, -1)

    def _patch_products(self) -> Tensor:
        """Inner products of the patches at all pairs of positions: (N, groups, K * h * w, K * h * w)."""
        layer = self.layer
        pixels = self._by_group(self.inputs)
        draws = len(self.inputs) // self.count
        sizes = tuple(self.inputs.shape[2:]), tuple(self.output_grads.shape[2:])
        shift = Shift(draws, *sizes, layer.kernel_size, layer.stride, layer.dilation, self.padding)
        return shift.sum(pixels.mT @ pixels)
