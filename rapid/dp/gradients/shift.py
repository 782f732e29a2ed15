"""Inner products of a convolution's patches, as sums of those of its pixels, without forming the patches."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

MATRIX = 1 << 16
"""Elements up to which the linear map of pixel products is applied as one matrix product."""


class Shift(NamedTuple):
    """From inner products of pixels to those of the patches around them: a sum over the positions of the kernel."""

    draws: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]

    def sum(self, products: Tensor) -> Tensor:
        """(..., K * H * W, K * H * W) -> (..., K * h * w, K * h * w)."""
        if self.kernel == self.stride == (1, 1) and self.inputs == self.outputs:
            return products
        size, leading = products.shape[-1] ** 2, products.shape[:-2]
        flat = products.reshape(-1, size)
        positions = self.draws * self.outputs[0] * self.outputs[1]
        if size * positions**2 <= MATRIX:
            matrix = _shift_matrix(self, size, products.dtype, products.device)
            return (flat @ matrix).view(*leading, positions, positions)
        return self.slices(flat).view(*leading, positions, positions)

    def slices(self, products: Tensor) -> Tensor:
        """The sum by slices: float (n, (K * H * W)^2) -> (n, (K * h * w)^2)."""
        (height, width), (rows, columns) = self.inputs, self.outputs
        products = products.view(-1, self.draws, height, width, self.draws, height, width)
        # the sum over the kernel's columns, then that over its rows
        wide = products.new_zeros(len(products), self.draws, height, columns, self.draws, height, columns)
        for j in range(self.kernel[1]):
            source, target = _span(j * self.dilation[1] - self.padding[1], self.stride[1], width, columns)
            wide[:, :, :, target, :, :, target] += products[:, :, :, source, :, :, source]
        total = products.new_zeros(len(products), self.draws, rows, columns, self.draws, rows, columns)
        for i in range(self.kernel[0]):
            source, target = _span(i * self.dilation[0] - self.padding[0], self.stride[0], height, rows)
            total[:, :, target, :, :, target, :] += wide[:, :, source, :, :, source, :]
        return total.flatten(1)


@cache
def _shift_matrix(shift: Shift, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The map of `Shift.slices` as a matrix: faster than many slices for small images."""
    return shift.slices(torch.eye(size, dtype=dtype)).to(device)


def _span(offset: int, stride: int, inputs: int, outputs: int) -> tuple[slice, slice]:
    """Inputs, and the outputs that read them, along one axis: output o reads input o * stride + offset, if there."""
    first = max(0, -(offset // stride))
    last = min(outputs, (inputs - 1 - offset) // stride + 1)
    count = max(0, last - first)
    start = first * stride + offset
    return slice(start, start + (count - 1) * stride + 1, stride) if count else slice(0, 0), slice(first, first + count)
