"""Gaussians of latents by class, in a subspace, and what lies outside of it by channel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rapid.nn.storage import StoredNetwork

LEAST_OUTSIDE = 1e-3
"""A share of a channel outside of the subspace counts as at least this: below it little is left to draw."""


class ClassMoments(StoredNetwork):
    """Gaussians of latents, one for each class; made from a noisy release, so no longer private.

    Args:
        config: JSON-ready: shape and dimensions of the subspace; classes, at least 1; covariances, 1 or classes.

    Attributes:
        basis: of the subspace, float (d, c * h * w).
        means: coordinates of the class means, float (classes, d).
        factors: F with covariance F F^T, float (covariances, d, d).
        rest: standard deviation of what lies outside of the subspace, by channel, float (c,).
    """

    basis: Tensor
    means: Tensor
    factors: Tensor
    rest: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.shape: tuple[int, int, int] = tuple(config["shape"])
        d = config["dimensions"]
        self.register_buffer("basis", torch.eye(d, math.prod(self.shape)))
        self.register_buffer("means", torch.zeros(config["classes"], d))
        self.register_buffer("factors", torch.zeros(config["covariances"], d, d))
        self.register_buffer("rest", torch.zeros(self.shape[0]))

    def sample(self, labels: Tensor | None, noise: Tensor) -> Tensor:
        """Latents of the Gaussians, float (n, c, h, w).

        Args:
            labels: classes, int64 (n,); None where there are no classes.
            noise: standard normal, float (n, c, h, w).
        """
        inside, outside = self.split(noise)
        chosen = torch.zeros(len(noise), dtype=torch.int64, device=noise.device) if labels is None else labels
        factors = self.factors[chosen if len(self.factors) > 1 else torch.zeros_like(chosen)]
        coordinates = self.means[chosen] + torch.einsum("nij,nj->ni", factors, inside)
        # scaled by channel, it is no longer quite outside
        _, outside = self.split(outside * self.outside_deviation().view(-1, 1, 1))
        return outside + self.latents(coordinates)

    def draw(self, labels: Tensor | None, count: int, generator: torch.Generator) -> Tensor:
        """Latents of the Gaussians, float (count, c, h, w), of classes, int64 (count,), or without classes.

        Args:
            labels: as above.
            count: their number.
            generator: of the noise; on the CPU.
        """
        return self.sample(labels, torch.randn(count, *self.shape, generator=generator).to(self.means.device))

    def split(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates in the subspace, float (n, d), and what lies outside of it, (n, c, h, w)."""
        flat = latents.flatten(1)
        inside = flat @ self.basis.T
        return inside, (flat - inside @ self.basis).view(-1, *self.shape)

    def latents(self, coordinates: Tensor) -> Tensor:
        """Latents in the subspace, float (n, c, h, w), with the given coordinates, (n, d)."""
        return (coordinates @ self.basis).view(-1, *self.shape)

    def outside_deviation(self) -> Tensor:
        """Standard deviation, float (c,), of numbers of which the part outside of the subspace has that of `rest`."""
        numbers = self.shape[1] * self.shape[2]
        share = 1 - self.basis.square().view(-1, self.shape[0], numbers).sum((0, 2)) / numbers
        return self.rest / share.clamp_min(LEAST_OUTSIDE).sqrt()

    def spectra(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, float (covariances, d), and eigenvectors in columns, (covariances, d, d), of the covariances.

        Computed in float64 on the CPU, so that they are the same for each device.
        """
        factors = self.factors.cpu().double()
        values, vectors = torch.linalg.eigh(factors @ factors.mT)
        return values.clamp_min(0).float(), vectors.float()
