"""The margin for rounding against the fast convolutions of GPUs, computed here as they were published.

Source: Lavin and Gray: Fast Algorithms for Convolutional Neural Networks (CVPR 2016): F(4x4, 3x3), the largest tiles
there, turned into the gradient of the weights, F(3x3, 4x4).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.dp.gradients.forms import PIECE, ROUNDING_MARGIN

POINTS = torch.tensor([0.0, 1, -1, 2, -2], dtype=torch.float64)
TILE, OUTPUTS = 4, 3
"""Sides of a tile of output gradients, and of the kernel."""
INPUT = torch.tensor(
    [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
     [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]], dtype=torch.float64,
)  # fmt: skip


def vandermonde(width: int) -> Tensor:
    """Powers of the points, and infinity; (6, width)."""
    infinity = torch.zeros(1, width, dtype=torch.float64)
    infinity[0, -1] = 1
    return torch.cat([POINTS[:, None] ** torch.arange(width), infinity])


def gradient_matrix() -> Tensor:
    differences = POINTS[:, None] - POINTS + torch.eye(len(POINTS), dtype=torch.float64)
    return vandermonde(TILE) / torch.cat([differences.prod(1), torch.ones(1, dtype=torch.float64)])[:, None]


def winograd(x: Tensor, grads: Tensor) -> Tensor:
    """Gradient of the weights of a 3x3 convolution with padding 1, in the dtype of x.

    Args:
        x: (n, c, h, w); h and w are multiples of TILE.
        grads: (n, d, h, w).
    """
    of_input, of_grads = INPUT.to(x.dtype), gradient_matrix().to(x.dtype)
    size = TILE + OUTPUTS - 1
    padded = F.pad(x, (1, 1, 1, 1))
    tiles = of_input @ padded.unfold(2, size, TILE).unfold(3, size, TILE) @ of_input.T
    own = of_grads @ grads.unfold(2, TILE, TILE).unfold(3, TILE, TILE) @ of_grads.T
    # one matrix product for each element of a tile, over all tiles of all examples
    rows = tiles.permute(4, 5, 1, 0, 2, 3).flatten(3)
    columns = own.permute(4, 5, 1, 0, 2, 3).flatten(3)
    products = torch.einsum("ijck,ijdk->dcij", rows, columns)
    last = vandermonde(OUTPUTS).to(x.dtype)
    return last.T @ products @ last


def reference(x: Tensor, grads: Tensor) -> Tensor:
    weight = (grads.shape[1], x.shape[1], OUTPUTS, OUTPUTS)
    return torch.nn.grad.conv2d_weight(x.double(), weight, grads.double(), padding=1)


def test_the_algorithm_is_a_convolution() -> None:
    torch.manual_seed(0)
    x, grads = (torch.randn(3, channels, 8, 12, dtype=torch.float64) for channels in (4, 5))
    torch.testing.assert_close(winograd(x, grads), reference(x, grads))


def test_the_margin_is_above_its_rounding() -> None:
    """A piece whose gradients all point the same way, of activations that are all positive: the sums are largest."""
    torch.manual_seed(0)
    image, gradient = torch.rand(1, 16, 32, 32), torch.rand(1, 16, 32, 32)
    x = image + 0.01 * torch.randn(PIECE, 16, 32, 32)
    grads = gradient + 0.01 * torch.randn(PIECE, 16, 32, 32)
    error = (winograd(x, grads).double() - reference(x, grads)).norm()
    single = reference(x[:1], grads[:1]).norm()
    assert float(error / single) < ROUNDING_MARGIN / 8
