"""The directions of latents in which public images vary most: what the moments of private images are released of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rapid.config.sections import AugmentSettings
from rapid.data.augmented import AugmentedImages
from rapid.methods.rapid.networks import encode_views
from rapid.nn import Autoencoder
from rapid.nn.storage import StoredNetwork
from rapid.ranks import Ranks
from rapid.training.recipe import Recipe

NAME = "subspace"
VIEWS = 8192
"""Views of public images that the directions are computed from."""


class SubspaceRecipe(Recipe):
    """All inputs of the subspace, besides the autoencoder."""

    views: int
    augment: AugmentSettings
    dimensions: int
    examples: int
    latent_shape: tuple[int, int, int]


class Subspace(StoredNetwork):
    """The leading principal directions of public latents, and what lies outside of them.

    Args:
        config: JSON-ready: shape [c, h, w], dimensions d, number of examples; without it there are none.

    Attributes:
        basis: orthonormal rows, float (d, c * h * w).
        variances: mean squares of the coordinates of public latents, float (d,), falling.
        rest: mean squares of what lies outside, per channel, float (c,).
        examples: public latents, float16 (n, c, h, w), if they were asked for.
    """

    basis: Tensor
    variances: Tensor
    rest: Tensor
    examples: Tensor | None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.shape: tuple[int, int, int] = tuple(config["shape"])
        size, dimensions = math.prod(self.shape), config["dimensions"]
        self.register_buffer("basis", torch.eye(dimensions, size))
        self.register_buffer("variances", torch.ones(dimensions))
        self.register_buffer("rest", torch.ones(self.shape[0]))
        count = config.get("examples", 0)
        self.register_buffer("examples", torch.zeros(count, *self.shape, dtype=torch.float16) if count else None)

    @property
    def dimensions(self) -> int:
        """Number of directions, d."""
        return len(self.basis)

    def coordinates(self, latents: Tensor) -> Tensor:
        """Coordinates, float (n, d), of normalised latents, float (n, c, h, w)."""
        return latents.flatten(1) @ self.basis.T

    def outside(self, latents: Tensor) -> Tensor:
        """What is left of latents (n, c, h, w) without their part in the subspace, of the same shape."""
        return latents - self.latents(self.coordinates(latents))

    def latents(self, coordinates: Tensor) -> Tensor:
        """The latents (n, c, h, w) with these coordinates (n, d) and nothing outside."""
        return (coordinates @ self.basis).view(-1, *self.shape)

    def fit(self, latents: Tensor) -> None:
        """Set everything by PUBLIC normalised latents, float (n, c, h, w), with n >= 1 and as many as examples.

        Not centred: the mean of public images becomes a direction, so that no offset is needed.
        """
        torch.manual_seed(3)
        rows = latents.flatten(1)
        size = min(*rows.shape, self.dimensions + 16)
        _, _, vectors = torch.svd_lowrank(rows, q=size, niter=4)
        found = vectors.T[: self.dimensions]
        # the sign of a direction is arbitrary, and may differ between machines
        signs = found.gather(1, found.abs().argmax(1, keepdim=True)).sign()
        # with fewer images than dimensions the other rows are zero: nothing is known of them
        self.basis.zero_()
        self.basis[: len(found)] = found * signs
        self.variances.copy_(self.coordinates(latents).square().mean(0))
        self.rest.copy_(self.outside(latents).square().mean((0, 2, 3)))
        if self.examples is not None:
            self.examples.copy_(latents[: len(self.examples)])


def fit_subspace(
    recipe: SubspaceRecipe, views: AugmentedImages, autoencoder: Autoencoder, ranks: Ranks | None = None
) -> Subspace:
    """Find the leading directions of public latents.

    Args:
        recipe: the numbers of directions and of examples.
        views: augmented images of D_pre.
        autoencoder: frozen.
        ranks: the processes that share the work.
    """
    size = math.prod(recipe.latent_shape)
    latents = encode_views(autoencoder, views, ranks)
    examples = min(recipe.examples, len(latents))
    config = {"shape": list(recipe.latent_shape), "dimensions": min(recipe.dimensions, size), "examples": examples}
    subspace = Subspace(config)
    subspace.to(next(iter(autoencoder.buffers())).device).fit(latents)
    return subspace.eval()
