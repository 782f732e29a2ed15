"""The directions of latents in which public images vary most: what the moments of private images are released of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rapid.config.sections import AugmentSettings
from rapid.data.augmented import AugmentedImages
from rapid.methods.rapid.networks import encode_views
from rapid.nn import Autoencoder
from rapid.nn.storage import StoredNetwork
from rapid.ranks import Ranks
from rapid.training.recipe import Recipe

NAME = "subspace"
TINY = 1e-12
"""Stands for 0 in a denominator: where nothing varies, the numerator is 0, too."""
VIEWS = 8192
"""Views of public images that the directions are computed from."""


class SubspaceRecipe(Recipe):
    """All inputs of the subspace, besides the autoencoder."""

    views: int
    augment: AugmentSettings
    dimensions: int
    detail: int
    latent_shape: tuple[int, int, int]


class Detail(nn.Module):
    """How public latents vary outside of the subspace, along further directions.

    Args:
        directions: their number, m.
        shape: of the latents, (c, h, w).

    Attributes:
        basis: orthonormal rows, orthogonal to the subspace, float (m, c * h * w).
        deviations: root mean squares of the coordinates of public latents, float (m,), falling.
        left: root mean squares, per channel, of what lies outside of these directions, too, float (c,).
        whole: the same of all that lies outside of the subspace, float (c,).
    """

    basis: Tensor
    deviations: Tensor
    left: Tensor
    whole: Tensor

    def __init__(self, directions: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(directions, math.prod(shape)))
        self.register_buffer("deviations", torch.zeros(directions))
        self.register_buffer("left", torch.ones(shape[0]))
        self.register_buffer("whole", torch.ones(shape[0]))

    def fit(self, basis: Tensor, outside: Tensor) -> None:
        """Set everything by what lies outside of the subspace of PUBLIC latents, float (n, c, h, w), with n >= 1.

        Args:
            basis: at most m orthonormal rows, orthogonal to the subspace, float (., c * h * w).
            outside: as above.
        """
        self.basis.zero_()
        self.basis[: len(basis)] = basis
        coordinates = outside.flatten(1) @ self.basis.T
        self.deviations.copy_(coordinates.square().mean(0).sqrt())
        others = outside - (coordinates @ self.basis).view_as(outside)
        self.left.copy_(others.square().mean((0, 2, 3)).sqrt())
        self.whole.copy_(outside.square().mean((0, 2, 3)).sqrt())

    def shaped(self, noise: Tensor) -> Tensor:
        """Standard normal noise outside of the subspace, float (n, c, h, w), as public latents vary there.

        Mean squares are 1 in each channel.
        """
        coordinates = noise.flatten(1) @ self.basis.T
        others = noise - (coordinates @ self.basis).view_as(noise)
        along = ((coordinates * self.deviations) @ self.basis).view_as(noise)
        return (along + self.left.view(-1, 1, 1) * others) / self.whole.clamp_min(TINY).view(-1, 1, 1)


class Subspace(StoredNetwork):
    """The leading principal directions of public latents, and what lies outside of them.

    Args:
        config: JSON-ready: shape [c, h, w], dimensions d, directions of the detail; without them there is none.

    Attributes:
        basis: orthonormal rows, float (d, c * h * w).
        variances: mean squares of the coordinates of public latents, float (d,), falling.
        rest: mean squares of what lies outside, per channel, float (c,).
        detail: how public latents vary outside, if that was asked for.
    """

    basis: Tensor
    variances: Tensor
    rest: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.shape: tuple[int, int, int] = tuple(config["shape"])
        size, dimensions = math.prod(self.shape), config["dimensions"]
        self.register_buffer("basis", torch.eye(dimensions, size))
        self.register_buffer("variances", torch.ones(dimensions))
        self.register_buffer("rest", torch.ones(self.shape[0]))
        self.detail = Detail(config["detail"], self.shape) if config.get("detail") else None

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
        """Set everything by PUBLIC normalised latents, float (n, c, h, w), with n >= 1.

        Not centred: the mean of public images becomes a direction, so that no offset is needed.
        """
        torch.manual_seed(3)
        rows = latents.flatten(1)
        wanted = self.dimensions + (0 if self.detail is None else len(self.detail.basis))
        _, _, vectors = torch.svd_lowrank(rows, q=min(*rows.shape, wanted + 16), niter=4)
        found = vectors.T[:wanted]
        # the sign of a direction is arbitrary, and may differ between machines
        found = found * found.gather(1, found.abs().argmax(1, keepdim=True)).sign()
        # with fewer images than dimensions the other rows are zero: nothing is known of them
        inside, beside = found[: self.dimensions], found[self.dimensions :]
        self.basis.zero_()
        self.basis[: len(inside)] = inside
        self.variances.copy_(self.coordinates(latents).square().mean(0))
        outside = self.outside(latents)
        self.rest.copy_(outside.square().mean((0, 2, 3)))
        if self.detail is not None:
            self.detail.fit(beside, outside)


def fit_subspace(
    recipe: SubspaceRecipe, views: AugmentedImages, autoencoder: Autoencoder, ranks: Ranks | None = None
) -> Subspace:
    """Find the leading directions of public latents.

    Args:
        recipe: the numbers of directions.
        views: augmented images of D_pre.
        autoencoder: frozen.
        ranks: the processes that share the work.
    """
    size = math.prod(recipe.latent_shape)
    dimensions = min(recipe.dimensions, size)
    detail = min(recipe.detail, size - dimensions)
    subspace = Subspace({"shape": list(recipe.latent_shape), "dimensions": dimensions, "detail": detail})
    subspace.to(next(iter(autoencoder.buffers())).device).fit(encode_views(autoencoder, views, ranks))
    return subspace.eval()
