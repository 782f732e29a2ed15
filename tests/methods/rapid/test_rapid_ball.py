"""The ball around private latents: what an image contributes, what is found, and what it is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rapid.data import ImageSet
from rapid.dp import PrivateAccess, PublicFacts, calibrate
from rapid.dp.releases import QuerySpec
from rapid.dp.rows import PrivateTensor
from rapid.methods.rapid.ball import EDGES, STEP, Ball, radius_of, release_ball
from rapid.methods.rapid.moments import moments_specs, release_moments
from rapid.methods.rapid.settings import MomentsSettings
from rapid.methods.rapid.subspace import Subspace
from rapid.training import RunFolder

SHAPE, D = (2, 4, 4), 12


def subspace() -> Subspace:
    """Of public latents whose first numbers vary most, up to 15 times as much as the last ones."""
    made = Subspace({"shape": list(SHAPE), "dimensions": D})
    scale = torch.linspace(3, 0.2, 32).view(SHAPE)
    made.fit(torch.randn(4000, *SHAPE, generator=torch.Generator().manual_seed(0)) * scale)
    return made


def latents(count: int, spread: float) -> Tensor:
    """Far from the centre of public ones, around a point of their own."""
    generator = torch.Generator().manual_seed(1)
    offset = torch.linspace(3, 0.2, 32) * torch.randn(32, generator=generator).sign()
    return (offset + spread * torch.randn(count, 32, generator=generator)).view(-1, *SHAPE)


def opened(tmp_path: Path, count: int, epsilon: float, specs: list[QuerySpec]) -> PrivateAccess:
    budget = calibrate([*specs[:-1], specs[-1].model_copy(update={"share": None})], epsilon=epsilon, delta=1e-5)
    images = ImageSet(np.zeros((count, 4, 4), np.uint8), None, (), "")
    facts = PublicFacts(count, (), (4, 4))
    return PrivateAccess(images, facts, budget, RunFolder(tmp_path), device=torch.device("cpu"))


@given(st.floats(0, 1e6), st.floats(0, 100), st.floats(1e-3, 1), st.integers(0, 5), st.integers(0, 99))
def test_offsets_are_in_the_ball_and_of_one_image_each(
    scale: float, away: float, part: float, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    public = Ball.public(subspace())
    ball = replace(public, centre=away * torch.randn(D, generator=generator), radius=part * public.radius)
    rows = scale * torch.randn(count, *SHAPE, generator=generator)
    found, distances = ball.coordinates(rows), ball.distances(rows)
    assert found.shape == (count, D)
    assert (found.double().norm(dim=1) <= 1 + 1e-5).all()
    assert torch.allclose(found.norm(dim=1), distances.clamp_max(1), atol=1e-4)
    for row, one in zip(rows, found, strict=True):
        assert torch.allclose(ball.coordinates(row[None])[0], one, atol=1e-5)


@given(st.floats(1e-4, 1e2), st.integers(-20, 3), st.integers(0, 4))
def test_a_vote_for_a_distance_is_shared_and_does_not_jump(scale: float, edge: int, count: int) -> None:
    """Also at the very edges: the last bits of a distance move votes by about as little."""
    ball = Ball.public(subspace())
    row = scale * torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(6))
    rows = row * (STEP**edge / ball.distances(row)) * torch.linspace(1 - 1e-6, 1 + 1e-6, count).view(-1, 1, 1, 1)
    votes = ball.votes(rows)
    assert votes.shape == (count, len(EDGES) + 1)
    assert (votes >= 0).all()
    assert votes.sum(1).numpy() == pytest.approx(np.ones(count), abs=1e-5)
    assert (votes.double().norm(dim=1) <= 1 + 1e-5).all()
    nearest = min(max(edge + len(EDGES) - 1, 0), len(EDGES))
    assert votes[:, nearest].numpy() == pytest.approx(np.ones(count), abs=1e-4)


@given(st.integers(0, 99), st.floats(0.1, 1))
def test_moments_of_offsets_are_those_of_the_coordinates(seed: int, part: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    made = subspace()
    public = Ball.public(made)
    # wide enough, so that nothing is pulled in
    ball = replace(public, centre=torch.randn(D, generator=generator), radius=(1 + part) * 20 * public.radius)
    rows = torch.randn(200, *SHAPE, generator=generator)
    offsets, inside = ball.coordinates(rows).double(), made.coordinates(rows).double()
    assert ball.means(offsets.mean(0)[None])[0].numpy() == pytest.approx(inside.mean(0).numpy(), abs=1e-3)
    values, vectors = torch.linalg.eigh(torch.cov(offsets.T))
    (factor,) = ball.factors((vectors * values.clamp_min(0).sqrt())[None])
    assert (factor @ factor.T).numpy() == pytest.approx(np.cov(inside.T.numpy()), abs=1e-3)
    expected = (made.variances * public.scale.square()).double() / ball.radius**2
    assert ball.variances.numpy() == pytest.approx(expected.numpy(), rel=1e-5)


def test_directions_that_public_images_lack_are_not_divided_by_zero() -> None:
    made = Subspace({"shape": list(SHAPE), "dimensions": D})
    for rows in (torch.zeros(3, *SHAPE), torch.ones(1, *SHAPE)):
        made.fit(rows)
        found = Ball.public(made).coordinates(torch.ones(2, *SHAPE))
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("held", range(len(EDGES)))
def test_without_noise_all_latents_are_held(held: int) -> None:
    shares = torch.zeros(len(EDGES) + 1, dtype=torch.float64)
    shares[held] = 1
    assert radius_of(shares, 0.0, 0.0, 64) == EDGES[held]


def test_noise_makes_the_ball_narrower() -> None:
    shares = torch.from_numpy(np.exp(-((np.arange(len(EDGES) + 1) - 11) ** 2) / 4))
    shares[-3:] = 0
    shares /= shares.sum()
    found = [radius_of(shares, 0.0, noise, 64) for noise in (0, 1e-4, 1e-3, 1e-2, 1e-1)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1]
    # nothing is known, or all is beyond the public ball
    assert radius_of(-shares, 1.0, 1e-4, 64) == radius_of(0 * shares, 0.0, 1e-4, 64) == 1
    # what is noise alone does not widen it
    noisy = shares + 1e-3 * torch.randn(len(EDGES) + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert radius_of(noisy, 1e-3, 1e-6, 64) < EDGES[-1]


@pytest.mark.parametrize("spread", [0.2, 0.4])
def test_the_ball_is_where_the_latents_are(tmp_path: Path, spread: float) -> None:
    x, made = latents(4000, spread), subspace()
    specs = moments_specs(MomentsSettings(share=0.9), len(x))
    ball = release_ball(opened(tmp_path, len(x), 20.0, specs), PrivateTensor(x), made, "moments")
    public = Ball.public(made)
    scaled = made.coordinates(x) * public.scale
    assert float((ball.centre - scaled.mean(0)).norm()) < 0.02 * public.radius
    far = (scaled - ball.centre).norm(dim=1)
    assert 0.9 * float(far.median()) < ball.radius < 1.3 * float(far.max())
    assert ball.radius < 0.6 * public.radius


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 20.0])
def test_moments_are_nearer_than_without_a_ball(tmp_path: Path, epsilon: float) -> None:
    """Compared with the noise alone that the covariance and the mean would have by the bound of public images."""
    x, made = latents(4000, 0.3), subspace()
    access = opened(tmp_path, len(x), epsilon, moments_specs(MomentsSettings(share=0.5), len(x)))
    found, _ = release_moments(access, PrivateTensor(x), made, "shared")
    inside = made.coordinates(x).double()
    radius = 1.5 * float(made.variances.sum()) ** 0.5
    noise = access.budget.release("moments").noise_stddev / len(x)
    factor = found.factors[0].double()
    off = (factor @ factor.T - torch.cov(inside.T)).square().mean().sqrt()
    assert float(off) < 0.5 * radius**2 * noise / 1.1
    assert float((found.means[0].double() - inside.mean(0)).square().mean().sqrt()) < radius * noise / 0.35**0.5
