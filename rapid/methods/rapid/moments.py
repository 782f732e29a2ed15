"""Class means and covariances of private latents in a public subspace, released before DP-SGD.

Where noise dominates, the best denoiser depends on the first two moments alone. So images can begin at a middle step
from a Gaussian with these moments, and the late steps, which need more, are what DP-SGD trains.

Formal guarantee: the releases of `rapid.methods.rapid.ball`, and one `mean` release of `access`. All else here is
post-processing of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rapid.dp.access import PrivateAccess
from rapid.dp.releases import QuerySpec
from rapid.dp.rows import PrivateTensor
from rapid.methods.rapid.ball import RANGE, SHARES, Ball, ball_specs, release_ball
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.settings import MomentsSettings
from rapid.methods.rapid.subspace import Subspace

NAME = "moments"
WEIGHTS = {"means": math.sqrt(0.35), "counts": math.sqrt(0.05), "rest": math.sqrt(0.05), "second": math.sqrt(0.55)}
"""Largest norm of each part of an image's row, which together have norm 1."""
LEAST_SHARE = 0.1
"""A class counts as at least this share of an equal part of the images."""

LARGEST_CLASS_NOISE = 5e-4
"""Largest noise in the mean over the images of a class for covariances by class. Below it they are nearer to the true
ones than a shared one, in the Wasserstein distance, on four sets: letters, letters in colour, classes of CIFAR-100 and
drawn blood smears."""

FARTHEST = 2
"""No variance is moved by more of the deviations of its noise towards what is expected."""

LEAST = 1e-300
"""Stands for 0 in a denominator, far below the squares of small covariances."""

LARGEST_ROW = 1 << 18
"""Numbers that an image contributes to covariances by class, most of which are 0; above it there is a shared one."""

Covariance = Literal["auto", "shared", "class"]


def moments_specs(settings: MomentsSettings, dataset_size: int) -> list[QuerySpec]:
    """The releases of the moments and of their ball, if they have a share: their squares add up to its square."""
    if settings.share == 0:
        return []
    own = QuerySpec(
        name=NAME,
        kind="mean",
        title="sizes, means and covariances of the classes, around that mean; variance outside of the subspace",
        share=settings.share * math.sqrt(1 - sum(share**2 for share in SHARES.values())),
        sensitivity=1.0,
        dataset_size=dataset_size,
    )
    return [*ball_specs(settings.share, dataset_size), own]


def release_moments(
    access: PrivateAccess, latents: PrivateTensor, subspace: Subspace, covariance: Covariance
) -> tuple[ClassMoments, NDArray[np.float64]]:
    """Release the moments of private latents.

    Args:
        access: its budget lists the releases of `moments_specs`.
        latents: normalised, float (n, c, h, w).
        subspace: public.
        covariance: shared by all classes, or one for each; auto: by the noise, which follows from releases, and the
            number of classes.

    Returns:
        The moments, and the shares of the classes that were released with them, (classes,).
    """
    classes, d = max(1, len(access.facts.classes)), subspace.dimensions
    ball = release_ball(access, latents, subspace, NAME)
    noise = access.budget.release(NAME).noise_stddev / access.facts.dataset_size
    # in parts of the public ball's radius, squared
    seen = classes * noise * (ball.radius / Ball.public(subspace).radius) ** 2
    known = seen <= LARGEST_CLASS_NOISE and classes * d * (d + 1) // 2 <= LARGEST_ROW
    by_class = known if covariance == "auto" else covariance == "class"
    own = classes if by_class else 1

    def features(rows: Tensor, labels: Tensor) -> Tensor:
        return image_row(rows, labels, ball, classes, own)

    labels = (
        access.labels if access.facts.classes else access.map(lambda rows: rows.new_zeros(len(rows)).long(), latents)
    )
    mean = access.mean(NAME, features, latents, labels)
    sizes = [classes * d, classes, subspace.shape[0], own * d * (d + 1) // 2]
    means, counts, rest, second = (
        part / weight for part, weight in zip(mean.split(sizes), WEIGHTS.values(), strict=True)
    )
    moments = ClassMoments({**subspace.config, "dimensions": d, "classes": classes, "covariances": own})
    moments.basis.copy_(subspace.basis)
    found = estimate(
        means.view(classes, d),
        counts,
        unpacked(second.view(own, -1), d),
        noise,
        ball.variances,
        ball.doubt / ball.radius,
    )
    moments.means.copy_(ball.means(found["means"]))
    moments.factors.copy_(ball.factors(found["factors"]))
    # a channel of h w numbers of which the subspace has some; the bound of `image_row` undone
    bound = _rest_bound(subspace)
    moments.rest.copy_(scaled_like(rest * bound, noise / WEIGHTS["rest"] * bound, subspace.rest.cpu().double()).sqrt())
    return moments.eval(), class_shares(counts, noise).numpy()


def estimate(
    means: Tensor, counts: Tensor, second: Tensor, noise: float, variances: Tensor, doubt: float = math.inf
) -> Mapping[str, Tensor]:
    """Means and covariance factors from noisy sums over N, each divided by N and by its weight.

    Args:
        means: sums of the coordinates of each class, float64 (classes, d).
        counts: shares of the classes, float64 (classes,).
        second: sums of outer products, of all images or of each class, float64 (1 or classes, d, d), symmetric.
        noise: standard deviation of the release's noise over N, before the weights.
        variances: mean squares of the coordinates of public images, float64 (d,): what is not told by the release
            is assumed to vary like them.
        doubt: standard deviation of the mean of all images around 0, which was released before, in each direction.

    Returns:
        `means`, float64 (classes, d), and `factors`, float64 (1 or classes, d, d).
    """
    share = class_shares(counts, noise)
    centre = _near_zero(means.sum(0), math.sqrt(len(means)) * noise / WEIGHTS["means"], doubt)
    # off the diagonal the noise is smaller by sqrt(2)
    spread = noise / WEIGHTS["second"] / math.sqrt(2)
    of_all = spread * math.sqrt(len(second))
    total = _denoised(second.sum(0) - torch.outer(centre, centre), of_all, variances)
    # no direction's variance is known better than this; one taken for 0 would lose what classes differ by in it
    total = total + of_all * torch.eye(len(total), dtype=total.dtype)
    found = centre + _class_offsets(means / share[:, None] - centre, share, noise / WEIGHTS["means"] / share, total)
    outer = found[:, :, None] * found[:, None, :]
    between = (share[:, None, None] * outer).sum(0)
    together = _denoised(second.sum(0) - between, of_all, variances)
    if len(second) == 1:
        return {"means": found, "factors": _root(together)[None]}
    own = [
        _near(one / weight - product, spread / float(weight), together)
        for one, weight, product in zip(second, share, outer, strict=True)
    ]
    return {"means": found, "factors": torch.stack([_root(covariance) for covariance in own])}


def _class_offsets(found: Tensor, share: Tensor, noise: Tensor, covariance: Tensor) -> Tensor:
    """Posterior means of where class means lie around the mean of all, float64 (classes, d).

    They are expected to spread as images do: normal, with the covariance of all images times one factor, which is as
    large as what was found tells beyond the noise (empirical Bayes by the method of moments). So noise in directions in
    which images hardly vary is taken out, and that of a rare class most of all.

    Args:
        found: with noise, float64 (classes, d).
        share: of the classes, of sum 1, float64 (classes,).
        noise: its standard deviation by class, float64 (classes,).
        covariance: of all images, float64 (d, d).
    """
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(0)
    beyond = (share * (found.square().sum(1) - found.shape[1] * noise.square())).sum().clamp_min(0)
    prior = _in_proportion(values, beyond)
    weights = prior / (prior + noise.square()[:, None]).clamp_min(LEAST)
    offsets: Tensor = (weights * (found @ vectors)) @ vectors.mT
    return offsets


def _near_zero(found: Tensor, noise: float, doubt: float) -> Tensor:
    """A mean that was found with noise, (d,), and once before as 0, give or take `doubt` in each direction.

    The two are means of latents within different bounds, so they may differ by more than by noise: by as much as was
    found tells (empirical Bayes by the method of moments).
    """
    differ = max(doubt**2, float(found.square().mean()) - noise**2)
    return found * (differ / (differ + noise**2)) if math.isfinite(differ) and noise else found


def class_shares(counts: Tensor, noise: float) -> Tensor:
    """Shares of the classes, of sum 1, as much of what sets them apart from equal ones as noise does not explain.

    Args:
        counts: shares with noise, float64 (classes,).
        noise: standard deviation of the release's noise over N, before the weights.
    """
    classes = len(counts)
    apart = counts - 1 / classes
    variance = (noise / WEIGHTS["counts"]) ** 2
    kept = (1 - classes * variance / apart.square().sum().clamp_min(LEAST)).clamp_min(0)
    share = (1 / classes + kept * apart).clamp_min(LEAST_SHARE / classes)
    return share / share.sum()


def scaled_like(found: Tensor, noise: float, public: Tensor) -> Tensor:
    """Variances that are known up to noise, drawn towards those of public images, scaled to the same sum.

    Args:
        found: variances with noise, float64 (n,).
        noise: its standard deviation, in the unit of variances.
        public: variances of public images, float64 (n,).

    Returns:
        Posterior means, float64 (n,), none below 0 (see `_variances`).
    """
    return _variances(found, _in_proportion(public, found.sum().clamp_min(0)), noise)


def _denoised(covariance: Tensor, noise: float, variances: Tensor) -> Tensor:
    """A covariance that is known up to symmetric Gaussian noise, as far as public images help.

    A variance is expected to be the one of public images, scaled to the trace, and a covariance to be 0, give or take a
    share of the variances in question.
    """
    return _near(covariance, noise, torch.diag(_in_proportion(variances, covariance.trace().clamp_min(0))))


def _near(covariance: Tensor, noise: float, expected: Tensor) -> Tensor:
    """A covariance that is known up to symmetric Gaussian noise, each entry drawn towards what is expected.

    The weights of covariances are squared: the posterior mean of each has the least error in squares, but what is left
    of their noise spreads over the directions of little variance, where the Wasserstein distance minds it most.
    """
    own = _variances(covariance.diag(), expected.diag(), math.sqrt(2) * noise)
    rows, columns = torch.triu_indices(len(own), len(own), offset=1)
    beyond = covariance[rows, columns] - expected[rows, columns]
    weights = _weights(beyond, own[rows] * own[columns], noise**2)
    made = torch.diag(own)
    made[rows, columns] = made[columns, rows] = expected[rows, columns] + weights.square() * beyond
    return _positive(made)


def _variances(found: Tensor, usual: Tensor, noise: float) -> Tensor:
    """Posterior means of variances that are known up to noise of a standard deviation; all (n,).

    None is moved by more than `FARTHEST` deviations, but to 0, which bounds the harm of a wrong expectation (Efron and
    Morris 1971).
    """
    own = usual + _weights(found - usual, usual.square(), noise**2) * (found - usual)
    return own.clamp(found - FARTHEST * noise, found + FARTHEST * noise).clamp_min(0)


def _positive(matrix: Tensor) -> Tensor:
    """A symmetric matrix without its negative eigenvalues, of the same trace."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(0)
    scaled = _in_proportion(values, matrix.trace())
    positive: Tensor = (vectors * scaled) @ vectors.mT
    return positive


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    return root


def _weights(found: Tensor, scale: Tensor, noise: float) -> Tensor:
    """How much of numbers around 0, found with noise of a variance, their posterior means are; all (n,).

    The prior of each is normal with a variance in proportion to `scale`, as large in all as what was found tells beyond
    the noise (empirical Bayes by the method of moments).
    """
    beyond = (found.square() - noise).sum().clamp_min(0)
    prior = _in_proportion(scale, beyond)
    weights: Tensor = prior / (prior + noise).clamp_min(LEAST)
    return weights


def _in_proportion(shares: Tensor, total: Tensor) -> Tensor:
    """A total, divided in proportion to `shares`, (n,); 0 where all of them are, as with much noise."""
    # first the shares: a large total over next to nothing would be infinite
    return total * (shares / shares.sum().clamp_min(LEAST))


def unpacked(packed: Tensor, d: int) -> Tensor:
    """Symmetric matrices (m, d, d) of what `_packed` made of them, (m, d (d + 1) / 2)."""
    rows, columns = torch.triu_indices(d, d)
    scale = torch.where(rows == columns, 1.0, math.sqrt(0.5)).to(packed)
    matrices = packed.new_zeros(len(packed), d, d)
    matrices[:, rows, columns] = packed * scale
    matrices[:, columns, rows] = packed * scale
    return matrices


def _packed(outer: Tensor) -> Tensor:
    """The upper triangles of symmetric matrices (n, d, d), scaled so that norms are kept: (n, d (d + 1) / 2)."""
    rows, columns = torch.triu_indices(outer.shape[1], outer.shape[1], device=outer.device)
    scale = torch.where(rows == columns, 1.0, math.sqrt(2.0)).to(outer)
    return outer[:, rows, columns] * scale


def image_row(latents: Tensor, labels: Tensor, ball: Ball, classes: int, covariances: int) -> Tensor:
    """What each image contributes to the release, float (n, m): each part has at most the norm of its weight.

    Args:
        latents: normalised, float (n, c, h, w).
        labels: int64 (n,).
        ball: holds most latents.
        classes: number of classes, at least 1.
        covariances: 1, or as many as classes.
    """
    coordinates = ball.coordinates(latents)
    rest = ball.subspace.outside(latents).square().mean((2, 3)) / _rest_bound(ball.subspace)
    rest = rest / rest.norm(dim=1, keepdim=True).clamp_min(1)
    member = F.one_hot(labels.to(latents.device), classes).to(latents)
    second = _packed(coordinates[:, :, None] * coordinates[:, None, :])[:, None]
    if covariances > 1:
        second = member[:, :, None] * second
    means = member[:, :, None] * coordinates[:, None]
    parts = {"means": means, "counts": member, "rest": rest, "second": second}
    return torch.cat([WEIGHTS[name] * part.flatten(1) for name, part in parts.items()], 1)


def _rest_bound(subspace: Subspace) -> float:
    # not 0 where the subspace is all there is; latents have variance 1
    return RANGE**2 * max(1e-3, float(subspace.rest.sum()))
