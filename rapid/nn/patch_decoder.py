"""Patches of pixels from principal components: their own, and those of the patches around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

REACH = 1
"""Patches to each side whose latents are used."""
SIDE = 2 * REACH + 1


class PatchDecoder(nn.Module):
    """The linear estimate of a patch from 3x3 latents that has the least mean squared error (Wiener, 1949).

    Decoded from its own components alone, each patch ends where it ends: what was left out, and any error of the
    latents, shows as an edge. The latents around it tell how the patch is continued, and what of it is error.

    Args:
        channels: of the latents.
        numbers: of a patch: channels of the image times `patch` squared.
        patch: side of a patch, pixels.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int, numbers: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        # until `fit`, all patches are grey
        self.register_buffer("weight", torch.zeros(numbers, channels, SIDE, SIDE))
        self.register_buffer("bias", torch.zeros(numbers))

    def forward(self, latents: Tensor) -> Tensor:
        """Images (N, C, H, W) of unnormalised latents (N, c, h, w)."""
        found = torch.einsum("pcij,ncijhw->nphw", self.weight, _around(latents))
        return F.pixel_shuffle(found + self.bias.view(-1, 1, 1), self.patch)

    def products(self, latents: Tensor, images: Tensor) -> Tensor:
        """What `fit` needs, summed over patches: float64 (9 c + 1, 9 c + 1 + numbers).

        Args:
            latents: unnormalised, (N, c, h, w).
            images: of which they are the latents, (N, C, H, W).
        """
        known = _around(latents).flatten(1, 3).movedim(1, -1).flatten(0, -2).double()
        known = torch.cat([known, known.new_ones(len(known), 1)], 1)
        wanted = F.pixel_unshuffle(images, self.patch).movedim(1, -1).flatten(0, -2).double()
        return known.T @ torch.cat([known, wanted], 1)

    def fit(self, products: Tensor, std: Tensor, noise: float) -> None:
        """Set the estimate that is best for noisy latents of the images that `products` saw.

        Args:
            products: the sum of `products` over PUBLIC images.
            std: standard deviations of the latents' channels, (c,).
            noise: standard deviation of the noise in latents, in units of `std`; above 0. Copies at the edges of an
                image count as having noise of their own.
        """
        products = products / products[-1, len(products) - 1]
        means = products[-1]
        # about the means, so that what never changes has no weight
        known = len(products) - 1
        covariances = products[:-1] - means[:known, None] * means
        # noise that is independent of everything adds nothing but variances
        variance = (noise * std.double()).square().repeat_interleave(SIDE**2)
        found = torch.linalg.solve(covariances[:, :known] + variance.diag(), covariances[:, known + 1 :]).T
        self.weight.copy_(found.reshape(self.weight.shape))
        self.bias.copy_(means[known + 1 :] - found @ means[:known])


def _around(latents: Tensor) -> Tensor:
    """The latents at and around each place, (N, c, 3, 3, h, w); beyond an edge they are those of the edge."""
    for _ in range(REACH):
        # the gradient of torch's own padding is not deterministic on CUDA
        latents = torch.cat([latents[..., :1, :], latents, latents[..., -1:, :]], -2)
        latents = torch.cat([latents[..., :1], latents, latents[..., -1:]], -1)
    return latents.unfold(-2, SIDE, 1).unfold(-2, SIDE, 1).movedim((-2, -1), (2, 3))
