"""A ball that holds most private latents: its centre and its radius, two small releases before that of the moments.

What an image contributes to a mean is bounded, and the noise is in proportion to the bound. By public images alone it
has to be wide: private latents may lie anywhere. Around their own mean they lie closer together, often much closer. So
a part of the budget finds that mean and how far latents are from it, as CoinPress does (Biswas, Dong, Kamath and Ullman
2020, https://arxiv.org/abs/2006.06618); then the moments have less noise.

Coordinates are divided by the fourth root of what public images have of them in variance. Of all linear maps that one
gives the mean of a Gaussian with that covariance the least error for its bound: noise spreads evenly over all
directions, and would else hide those of little variance.

Formal guarantee: two `mean` releases of `access`. All else here is post-processing of them. An image has one vote for
its distance, which the two nearest of the compared radii share: a vote for one alone would jump, and the last bits of a
latent depend on where in a batch it is, so leaving out one image could move the votes of others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rapid.dp.access import PrivateAccess
from rapid.dp.releases import QuerySpec
from rapid.dp.rows import PrivateTensor
from rapid.methods.rapid.subspace import Subspace
from rapid.precision import exact_float32

CENTRE, RADIUS = "centre", "radius"
SHARES = {CENTRE: 0.3, RADIUS: 0.2}
"""Of the share of the moments; what these have besides is their own."""
TITLES = {
    CENTRE: "mean of the latents of all classes, in a public subspace",
    RADIUS: "distribution of the distances of latents from that mean",
}
RANGE = 1.5
"""Without private images, a ball is as wide as so many times the root mean square of public coordinates."""
STEP = 2**0.25
EDGES = tuple(STEP**step for step in range(-16, 1))
"""Radii that are compared, in parts of that of the public ball, which is the last one. One more stands for all
beyond."""
PRICE = 0.3
"""What counts of the noise beside the harm to latents that are pulled in: estimates take most of it out again. Chosen
by the Wasserstein distance from true moments, on four sets (letters, letters in colour, classes of CIFAR-100, drawn
blood smears), for 5,600 to 60,000 images and epsilon 0.3 to 10."""
SEEN = 4
"""Deviations of its noise by which a share counts as seen: noise far out must not widen the ball."""
LEAST = 1e-12
"""Stands for 0 in a denominator."""


@dataclass(frozen=True)
class Ball:
    """A ball in the scaled coordinates of a subspace.

    Attributes:
        subspace: public.
        scale: by which its coordinates are multiplied, float (d,).
        centre: of the ball, in scaled coordinates, float (d,).
        radius: of the ball, above 0.
        doubt: standard deviation, in each direction, of the centre around the mean of all latents; infinite where it is
            not known to be near it.
    """

    subspace: Subspace
    scale: Tensor
    centre: Tensor
    radius: float
    doubt: float = math.inf

    @classmethod
    def public(cls, subspace: Subspace) -> Ball:
        """Around 0, where the mean of public images is a direction; known without private images."""
        variances = subspace.variances
        # a direction that public images lack must not outweigh all others
        scale = variances.clamp_min(max(LEAST, 1e-6 * float(variances.max()))) ** -0.25
        radius = RANGE * math.sqrt(float((variances * scale.square()).sum()))
        return cls(subspace, scale, torch.zeros_like(scale), max(radius, LEAST))

    def distances(self, latents: Tensor) -> Tensor:
        """Distances from the centre, in radii, float (n,), of normalised latents, float (n, c, h, w)."""
        found: Tensor = self._offsets(latents).norm(dim=1)
        return found

    def votes(self, latents: Tensor) -> Tensor:
        """How each latent shares its vote between `EDGES` and one radius more, float (n, 18), from 0 on, of sum 1."""
        nodes = torch.arange(len(EDGES) + 1, device=latents.device)
        places = self.distances(latents).clamp_min(LEAST).log() / math.log(STEP) + len(EDGES) - 1
        return (1 - (places.clamp(0, len(EDGES))[:, None] - nodes).abs()).clamp_min(0)

    def coordinates(self, latents: Tensor) -> Tensor:
        """Offsets from the centre in radii, float (n, d), of norm 1 at most: what lies outside is pulled in."""
        offsets = self._offsets(latents)
        held: Tensor = offsets / offsets.norm(dim=1, keepdim=True).clamp_min(1)
        return held

    def means(self, means: Tensor) -> Tensor:
        """Coordinates in the subspace, float64 (m, d), of means of `coordinates`, float64 (m, d)."""
        return (self.radius * means + self.centre.cpu().double()) / self.scale.cpu().double()

    def factors(self, factors: Tensor) -> Tensor:
        """Factors of covariances in the subspace, float64 (m, d, d), of those of `coordinates`, float64 (m, d, d)."""
        return self.radius * factors / self.scale.cpu().double()[:, None]

    @property
    def variances(self) -> Tensor:
        """What the mean squares of public coordinates are in the unit of `coordinates`, float64 (d,), on the CPU."""
        scaled: Tensor = self.subspace.variances.cpu().double() * self.scale.cpu().double().square()
        return scaled / self.radius**2

    @exact_float32()
    def _offsets(self, latents: Tensor) -> Tensor:
        offsets: Tensor = (self.subspace.coordinates(latents) * self.scale - self.centre) / self.radius
        return offsets


def ball_specs(share: float, dataset_size: int) -> list[QuerySpec]:
    """The two releases of a ball.

    Args:
        share: of epsilon, of the moments with their ball.
        dataset_size: N.
    """
    return [
        QuerySpec(
            name=name,
            kind="mean",
            title=title,
            share=SHARES[name] * share,
            sensitivity=1.0,
            dataset_size=dataset_size,
        )
        for name, title in TITLES.items()
    ]


def release_ball(access: PrivateAccess, latents: PrivateTensor, subspace: Subspace, moments: str) -> Ball:
    """Find a ball that holds most private latents, as wide as the noise of the release within it allows.

    Args:
        access: its budget lists the releases of `ball_specs`, and the one within the ball.
        latents: normalised, float (n, c, h, w).
        subspace: public.
        moments: name of the release within the ball, of sensitivity 1.
    """
    public = Ball.public(subspace)
    mean = access.mean(CENTRE, public.coordinates, latents)
    size = access.facts.dataset_size
    of_centre, of_shares, within = (
        access.budget.release(name).noise_multiplier / size for name in (CENTRE, RADIUS, moments)
    )
    centre, doubt = public.radius * mean.to(public.centre), public.radius * of_centre
    centred = replace(public, centre=centre, doubt=doubt)
    shares = access.mean(RADIUS, centred.votes, latents)
    return replace(centred, radius=public.radius * radius_of(shares, of_shares, within, subspace.dimensions))


def radius_of(shares: Tensor, of_shares: float, within: float, dimensions: int) -> float:
    """The one of `EDGES` with the least error of the covariance.

    Latents outside of a ball are pulled in, which makes the trace smaller; the noise of d^2 entries grows with the
    square of the radius. Both are compared as Frobenius norms, the first as if it were spread evenly over d directions.

    Args:
        shares: of the latents at each of `EDGES` and beyond, with noise, float64 (18,).
        of_shares: standard deviation of the noise in each share.
        within: that of the noise in each entry of the covariance, for a radius of 1.
        dimensions: d.
    """
    held = torch.where(shares > SEEN * of_shares, shares.double(), 0.0)
    if held.sum() == 0:
        return EDGES[-1]
    squares = torch.tensor([*EDGES, EDGES[-1] * STEP], dtype=torch.float64).square()
    lost = (held / held.sum() * (squares - squares[:-1, None]).clamp_min(0)).sum(1)
    errors = lost.square() / dimensions + (PRICE * within * dimensions * squares[:-1]).square()
    return EDGES[int(errors.argmin())]
