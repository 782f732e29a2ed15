"""The forms of a convolution's per-example gradients: a ghost, gradients, and gradients by position of the kernel.

New here: the inner products of patches in a ghost are sums of those of pixels, without forming the patches; and
gradients are formed without patches, too, from images with zeros between their rows (`ConvolutionGhost._by_position`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp.gradients.forms import PIECE, Direct, Factors, Gradient, cached_floats, in_full_precision, inner_products
from rapid.dp.gradients.shift import Shift

COPIED = 40
"""Multiplications of large matrices in the time in which a float is copied within short rows, on a CPU (measured)."""
NARROW = 32
"""Input channels below which products by position of the kernel are too small to be fast."""


@dataclass
class KernelGradients(Gradient):
    """Gradients of a convolution's weights, by position of the kernel.

    Attributes:
        gradients: float (kh * kw, N, groups, p / groups, C / groups).
        shape: of the weights, (p, C / groups, kh, kw).
    """

    gradients: Tensor
    shape: torch.Size

    def norms_squared(self) -> Tensor:
        """See `Gradient`."""
        positions, count = self.gradients.shape[:2]
        return Direct(self.gradients.flatten(0, 1)).norms_squared().view(positions, count).sum(0)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """See `Gradient`."""
        return torch.stack([factors.combine(gradients) for gradients in self.gradients], -1).view(self.shape)

    def instantiate(self) -> Direct:
        """See `Gradient`."""
        return Direct(self.gradients.movedim(0, -1).reshape(-1, *self.shape))


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
        return inner_products(*products, max(self.layer.weight[0].numel(), grams.shape[2]), self.count)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """See `Gradient`."""
        layer = self.layer
        scaled = factors.scaled(in_full_precision(self.output_grads))
        # contiguous, because oneDNN's 1x1 convolutions with strides write out of bounds for channels-last inputs
        inputs = factors.kept(in_full_precision(self.inputs)).contiguous()
        weight = layer.weight.detach().to(inputs.dtype)
        only_weight = (False, True, False)
        args = (layer.stride, self.padding, layer.dilation, False, (0, 0), layer.groups, only_weight)
        total = torch.zeros_like(weight, dtype=torch.float64, memory_format=torch.contiguous_format)
        rows = PIECE * (len(inputs) // self.count)
        for grads, images in zip(scaled.split(rows), inputs.split(rows), strict=True):
            total += torch.ops.aten.convolution_backward(grads, images, weight, None, *args)[1]
        return total

    def formed(self) -> Gradient:
        """The gradients themselves, in the form that takes less time."""
        rows, pitch, length = self._grid()
        draws, (_, outputs, *size) = len(self.inputs) // self.count, self.output_grads.shape
        fits = self.layer.stride == (1, 1) and size[0] <= rows and size[1] <= pitch
        # on GPUs patches are formed fast
        if not fits or self.inputs.device.type != "cpu":
            return self.instantiate()
        positions, weight = draws * size[0] * size[1], self.layer.weight
        width, kernel = self.inputs.shape[1] + outputs, weight[0, 0].numel()
        cheaper = positions_are_cheaper(positions, length, width, weight.shape[1], weight.numel(), kernel)
        return self._by_position() if cheaper else self.instantiate()

    def instantiate(self) -> Direct:
        """See `Gradient`."""
        draws = len(self.inputs) // self.count
        groups, weight = self.layer.groups, self.layer.weight
        positions = draws * self.output_grads[0, 0].numel()
        chunk = max(1, cached_floats(weight) // (positions * weight[0].numel() * groups))
        pairs = zip(self.inputs.split(chunk * draws), self.output_grads.split(chunk * draws), strict=True)
        dtype = torch.promote_types(self.inputs.dtype, torch.float32)
        gradients = self.inputs.new_empty(self.count, groups, weight.shape[0] // groups, weight[0].numel(), dtype=dtype)
        for target, (inputs, grads) in zip(gradients.split(chunk), pairs, strict=True):
            patches = self._patches(inputs, draws, grads.shape[2:])
            torch.matmul(self._by_group(grads, draws), patches.mT, out=target)
        return Direct(gradients.view(self.count, *weight.shape))

    def _grid(self) -> tuple[int, int, int]:
        """Rows and columns of a draw with padding on top and to the left, and where the last output of an example ends.

        The padding of a row is to the right of the row above, too, and that of a draw below the draw before.
        """
        (height, width), (top, left) = self.inputs.shape[2:], self.padding
        rows, pitch = height + top, width + left
        (high, wide), draws = self.output_grads.shape[2:], len(self.inputs) // self.count
        return rows, pitch, ((draws - 1) * rows + high - 1) * pitch + wide

    def _by_position(self) -> KernelGradients:
        """The gradients without patches.

        On the grid each position of the kernel reads the inputs at one distance from the outputs, whichever the output.
        """
        layer, (top, left) = self.layer, self.padding
        (kh, kw), (dh, dw) = layer.kernel_size, layer.dilation
        _, pitch, length = self._grid()
        shape = (kh, kw, self.count * layer.groups, layer.weight.shape[0] // layer.groups, layer.weight.shape[1])
        gradients = in_full_precision(self.inputs[:0]).new_empty(shape)
        draws = len(self.inputs) // self.count
        part = max(1, cached_floats(gradients) // (length * (self.inputs.shape[1] + self.output_grads.shape[1])))
        pairs = self.inputs.split(part * draws), self.output_grads.split(part * draws)
        for inputs, grads, target in zip(*pairs, gradients.split(part * layer.groups, 2), strict=True):
            outputs = self._on_grid(grads, 0, length)[..., :length]
            read = self._on_grid(inputs, top * pitch + left, length + (kh - 1) * dh * pitch + (kw - 1) * dw)
            for i in range(kh):
                for j in range(kw):
                    distance = i * dh * pitch + j * dw
                    torch.bmm(outputs, read[..., distance : distance + length].mT, out=target[i, j])
        by_group = gradients.view(kh * kw, self.count, layer.groups, *shape[3:])
        return KernelGradients(by_group, layer.weight.shape)

    def _on_grid(self, rows: Tensor, start: int, least: int) -> Tensor:
        """(N * K, C, h, w) -> (N * groups, C / groups, `least` or more): 0 around the draws, which begin at `start`."""
        draws, groups = len(self.inputs) // self.count, self.layer.groups
        height, pitch, _ = self._grid()
        count, size = len(rows) // draws, draws * height * pitch
        result = in_full_precision(rows[:0]).new_zeros(count, rows.shape[1], max(least, start + size))
        grid = result[..., start : start + size].unflatten(2, (draws, height, pitch))
        grid[..., : rows.shape[2], : rows.shape[3]] = rows.unflatten(0, (-1, draws)).transpose(1, 2)
        return result.view(count * groups, rows.shape[1] // groups, -1)

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


def positions_are_cheaper(positions: int, length: int, width: int, inputs: int, elements: int, kernel: int) -> bool:
    """Whether gradients by position of the kernel take less time than those of patches, for one example, on a CPU.

    Patches copy each input once for each position of the kernel. The grid copies inputs and gradients once, and
    multiplies its padding, too.

    Args:
        positions: P, where the layer is applied.
        length: of the grid, which has these and the padding.
        width: input plus output channels.
        inputs: input channels of a group.
        elements: of the weights.
        kernel: positions of the kernel.
    """
    if kernel == 1 or inputs < NARROW:
        return False
    return positions * width + (length - positions) * elements / COPIED < positions * kernel * inputs
