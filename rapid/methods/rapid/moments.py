"""Class means and covariances of private latents in a public subspace: one noisy release before DP-SGD.

Where noise dominates, the best denoiser depends on the first two moments alone. So images can begin at a middle step
from a Gaussian with these moments, and the late steps, which need more, are what DP-SGD trains.

Formal guarantee: one `mean` release of `access`. All else here is post-processing of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.dp.access import PrivateAccess
from rapid.dp.releases import QuerySpec
from rapid.dp.rows import PrivateTensor
from rapid.methods.rapid.settings import MomentsSettings
from rapid.methods.rapid.subspace import Subspace
from rapid.nn.storage import StoredNetwork

NAME = "moments"
WEIGHTS = {"means": math.sqrt(0.35), "counts": math.sqrt(0.05), "rest": math.sqrt(0.05), "second": math.sqrt(0.55)}
"""Largest norm of each part of an image's row, which together have norm 1."""
RANGE = 1.5
"""Coordinates are clipped to so many times their root mean square over public images."""
LEAST_SHARE = 0.1
"""A class counts as at least this share of an equal part of the images."""

LARGEST_CLASS_NOISE = 4e-3
"""Largest noise in the mean over the images of a class for covariances by class. They are nearer to the true ones than
a shared one, in the Wasserstein distance, up to 0.0008 on letters and 0.0027 on classes of CIFAR-100. On letters at
0.0032, images were taken for their class as often as with a shared one, or more."""

Covariance = Literal["auto", "shared", "class"]


def moments_spec(settings: MomentsSettings, dataset_size: int) -> QuerySpec:
    """The release of the moments."""
    return QuerySpec(
        name=NAME,
        kind="mean",
        title="means of the latents of each class, and their covariance, in a public subspace",
        share=settings.share,
        sensitivity=1.0,
        dataset_size=dataset_size,
    )


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
        return outside * self.rest.view(-1, 1, 1) + self.latents(coordinates)

    def split(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates in the subspace, float (n, d), and what lies outside of it, (n, c, h, w)."""
        flat = latents.flatten(1)
        inside = flat @ self.basis.T
        return inside, (flat - inside @ self.basis).view(-1, *self.shape)

    def latents(self, coordinates: Tensor) -> Tensor:
        """Latents in the subspace, float (n, c, h, w), with the given coordinates, (n, d)."""
        return (coordinates @ self.basis).view(-1, *self.shape)

    def spectra(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, float (covariances, d), and eigenvectors in columns, (covariances, d, d), of the covariances.

        Computed in float64 on the CPU, so that they are the same for each device.
        """
        factors = self.factors.cpu().double()
        values, vectors = torch.linalg.eigh(factors @ factors.mT)
        return values.clamp_min(0).float(), vectors.float()


def release_moments(
    access: PrivateAccess, latents: PrivateTensor, subspace: Subspace, covariance: Covariance
) -> ClassMoments:
    """Release the moments of private latents.

    Args:
        access: its budget lists the release of `moments_spec`.
        latents: normalised, float (n, c, h, w).
        subspace: public.
        covariance: shared by all classes, or one for each; auto: by the noise, which follows from public facts.
    """
    classes, d = max(1, len(access.facts.classes)), subspace.dimensions
    noise = access.budget.release(NAME).noise_stddev / access.facts.dataset_size
    by_class = classes * noise <= LARGEST_CLASS_NOISE if covariance == "auto" else covariance == "class"
    own = classes if by_class else 1
    radius = _radius(subspace)

    def features(rows: Tensor, labels: Tensor) -> Tensor:
        return image_row(rows, labels, subspace, classes, own)

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
        subspace.variances.cpu().double() / radius**2,
    )
    moments.means.copy_(radius * found["means"])
    moments.factors.copy_(radius * found["factors"])
    # a channel of h w numbers of which the subspace has some; the bound of `image_row` undone
    moments.rest.copy_((rest.clamp_min(0) * _rest_bound(subspace)).sqrt())
    return moments.eval()


def estimate(means: Tensor, counts: Tensor, second: Tensor, noise: float, variances: Tensor) -> Mapping[str, Tensor]:
    """Means and covariance factors from noisy sums over N, each divided by N and by its weight.

    Args:
        means: sums of the coordinates of each class, float64 (classes, d).
        counts: shares of the classes, float64 (classes,).
        second: sums of outer products, of all images or of each class, float64 (1 or classes, d, d), symmetric.
        noise: standard deviation of the release's noise over N, before the weights.
        variances: mean squares of the coordinates of public images, float64 (d,): what is not told by the release
            is assumed to vary like them.

    Returns:
        `means`, float64 (classes, d), and `factors`, float64 (1 or classes, d, d).
    """
    classes, d = means.shape
    share = counts.clamp_min(LEAST_SHARE / classes)
    share = share / share.sum()
    centre = means.sum(0)
    apart = means / share[:, None] - centre
    # James and Stein: as much of a class's distance from the centre as noise alone does not explain
    deviation = noise / WEIGHTS["means"] / share
    kept = (1 - d * deviation.square() / apart.square().sum(1).clamp_min(1e-12)).clamp_min(0)
    found = centre + kept[:, None] * apart
    outer = found[:, :, None] * found[:, None, :]
    if len(second) == 1:
        weights, between = torch.ones(1, dtype=torch.float64), (share[:, None, None] * outer).sum(0, keepdim=True)
    else:
        weights, between = share, outer
    # off the diagonal the noise is smaller by sqrt(2)
    spread = noise / WEIGHTS["second"] / weights / math.sqrt(2)
    factors = torch.stack(
        [
            _factor(own, float(deviation), variances)
            for own, deviation in zip(second / weights[:, None, None] - between, spread, strict=True)
        ]
    )
    return {"means": found, "factors": factors}


def _factor(covariance: Tensor, noise: float, variances: Tensor) -> Tensor:
    """A square root of a covariance that is known up to symmetric Gaussian noise.

    Eigenvalues beyond the noise's spectrum are kept and corrected for its bias (Benaych-Georges and Nadakuditi 2011);
    the rest of the trace is given to the other directions in the proportions of `variances`.
    """
    d = len(covariance)
    edge = noise * math.sqrt(d)
    values, vectors = torch.linalg.eigh(covariance)
    above = values > 2 * edge
    kept = torch.where(above, (values + (values.square() - 4 * edge**2).clamp_min(0).sqrt()) / 2, 0.0)
    strong = vectors * kept.sqrt()
    left = (covariance.trace() - kept.sum()).clamp_min(0)
    others = vectors * (~above)
    profile = others.T @ torch.diag(variances) @ others
    weak_values, weak = torch.linalg.eigh(profile)
    shares = weak_values.clamp_min(0)
    scaled = shares * left / shares.sum().clamp_min(1e-12)
    root = others @ (weak * scaled.sqrt()) @ weak.T @ others.T
    factor: Tensor = strong @ vectors.T + root
    return factor


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


def image_row(latents: Tensor, labels: Tensor, subspace: Subspace, classes: int, covariances: int) -> Tensor:
    """What each image contributes to the release, float (n, m): each part has at most the norm of its weight.

    Args:
        latents: normalised, float (n, c, h, w).
        labels: int64 (n,).
        subspace: public.
        classes: number of classes, at least 1.
        covariances: 1, or as many as classes.
    """
    coordinates = subspace.coordinates(latents) / _radius(subspace)
    coordinates = coordinates / coordinates.norm(dim=1, keepdim=True).clamp_min(1)
    rest = subspace.outside(latents).square().mean((2, 3)) / _rest_bound(subspace)
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


def _radius(subspace: Subspace) -> float:
    return RANGE * math.sqrt(float(subspace.variances.sum()))
