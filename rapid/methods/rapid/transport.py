"""Public latents that are moved to where private ones are: what the denoiser can be warmed up on before DP-SGD.

Images that are drawn from Gaussians have grain where real ones have edges. Public images have edges; a linear map gives
them the means and covariances of the private classes. Moments and public latents are all that is used, so this is
post-processing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rapid.methods.rapid.class_moments import ClassMoments

RELATIVE = 1e-6
"""Public variances below this part of the largest count as none: what has none cannot be moved."""
LEAST = 1e-12
"""Stands for 0 in a denominator."""


class MovedLatents:
    """Latents of public images with the moments of private classes.

    Inside of the subspace they are moved by the optimal transport between Gaussians with the moments of both (Dowson
    and Landau 1982): no other linear map changes them less. What lies outside is scaled by channel.

    Args:
        moments: of the private classes.
        examples: PUBLIC normalised latents, float (n, c, h, w), with n >= 1; on the device of the moments.
    """

    def __init__(self, moments: ClassMoments, examples: Tensor) -> None:
        self._moments = moments
        inside, outside = moments.split(examples.float())
        self._inside = inside - inside.mean(0)
        spread = outside - outside.mean(0)
        rms = spread.square().mean((0, 2, 3)).sqrt()
        # scaled by channel, it is no longer quite outside
        _, self._outside = moments.split(spread * (moments.rest / rms.clamp_min(LEAST)).view(-1, 1, 1))
        own = self._inside.double().cpu()
        values, vectors = torch.linalg.eigh(own.T @ own / len(own))
        seen = values > RELATIVE * values.max()
        root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
        inverse = (vectors * torch.where(seen, values.clamp_min(LEAST).rsqrt(), 0.0)) @ vectors.mT
        maps = []
        for factor in moments.factors.double().cpu():
            squares, directions = torch.linalg.eigh(root @ factor @ factor.mT @ root)
            maps.append(inverse @ (directions * squares.clamp_min(0).sqrt()) @ directions.mT @ inverse)
        self._maps = torch.stack(maps).to(examples.device, torch.float32)

    def draw(self, labels: Tensor | None, count: int, generator: torch.Generator) -> Tensor:
        """Random ones, float (count, c, h, w), of classes, int64 (count,); without classes None.

        Args:
            labels: as above.
            count: their number.
            generator: on the CPU.
        """
        return self.moved(labels, torch.randint(len(self._inside), (count,), generator=generator).to(self._maps.device))

    def moved(self, labels: Tensor | None, chosen: Tensor) -> Tensor:
        """The public latents of these numbers, int64 (n,), moved to classes, int64 (n,): float (n, c, h, w)."""
        own = torch.zeros_like(chosen) if labels is None else labels
        maps = self._maps[own if len(self._maps) > 1 else torch.zeros_like(own)]
        inside = torch.einsum("ni,nij->nj", self._inside[chosen], maps)
        return self._outside[chosen] + self._moments.latents(self._moments.means[own] + inside)
