"""Noisy sums: clipping against a loop, the scale of the noise, and what one image can change."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles.queries import clipped_sum
from scipy import stats
from torch import Tensor

from rapid.data import ImageSet
from rapid.dp import Budget, PrivateAccess, PublicFacts, QuerySpec, Ranks, Release
from rapid.dp.queries import clipped_rows, noisy_sum, pairwise_sum
from rapid.dp.randomness import Randomness
from rapid.training import RunFolder

CPU = torch.device("cpu")
SIZE = 1000
"""N of the budgets, as public as it is where an image contributes nothing."""

shapes = st.one_of(
    st.tuples(st.integers(0, 7)),
    hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
numbers = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-30, 1e30, math.inf, -math.inf, math.nan]),
)
many_rows = hnp.arrays(np.float32, shapes, elements=numbers)
bounds = st.floats(1e-6, 1e6)


def stream(seed: int) -> Callable[[int], bytes]:
    """The same bytes in every run."""
    return np.random.default_rng(seed).bytes


def release(kind: str, noise_multiplier: float, **changes: object) -> Release:
    spec = {"name": kind, "kind": kind, "dataset_size": SIZE} | changes
    return Release(spec=QuerySpec.model_validate(spec), noise_multiplier=noise_multiplier)


@settings(deadline=None)
@given(many_rows, bounds)
def test_rows_are_clipped_as_in_a_loop(rows: np.ndarray, bound: float) -> None:
    found = clipped_rows(torch.from_numpy(rows), bound)
    assert found.dtype == torch.float64
    assert found.shape == (len(rows), math.prod(rows.shape[1:]))
    assert (torch.linalg.vector_norm(found, dim=1) <= bound * (1 + 1e-12)).all()
    expected = clipped_sum(rows, bound).reshape(-1)
    np.testing.assert_allclose(found.sum(0), expected, rtol=1e-9, atol=1e-9 * bound)


@settings(deadline=None)
@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 4))), bounds)
def test_numbers_whose_square_overflows_are_clipped(rows: np.ndarray, bound: float) -> None:
    assert (torch.linalg.vector_norm(clipped_rows(torch.from_numpy(rows), bound), dim=1) <= bound * (1 + 1e-12)).all()


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2**32 - 1), bounds)
def test_many_rows_are_clipped_as_in_a_loop(count: int, seed: int, bound: float) -> None:
    draws = np.random.default_rng(seed)
    rows = draws.normal(size=(count, 3, 5)) * bound * draws.exponential(size=(count, 1, 1))
    rows[draws.random(count) < 0.1, 0, 0] = np.nan
    found = clipped_rows(torch.from_numpy(rows), bound).sum(0)
    np.testing.assert_allclose(found, clipped_sum(rows, bound).reshape(-1), rtol=1e-9, atol=1e-9 * bound)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_pairwise_sums_against_exact_ones(terms: list[float]) -> None:
    found = pairwise_sum(torch.tensor([term, 1.0], dtype=torch.float64) for term in terms)
    assert found[1] == len(terms)
    # each of at most ten additions on the way of a term rounds by 2^-53
    assert abs(float(found[0]) - math.fsum(terms)) <= 10 * 2.0**-53 * math.fsum(map(abs, terms))


class Term:
    """A number that knows how many additions one of its parts has gone through at most."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def __add__(self, other: Term) -> Term:
        return Term(1 + max(self.depth, other.depth))


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_no_term_goes_through_more_additions_than_stated(count: int) -> None:
    """Each addition rounds; sums in the order of the terms would be off by n^2 instead of n log2(n)."""
    assert pairwise_sum(Term() for _ in range(count)).depth <= math.ceil(math.log2(count))


def test_wide_rows_of_a_mean_are_not_held(tmp_path: Path) -> None:
    count, held = 3000, WeakSet[Tensor]()
    images = ImageSet(np.random.default_rng(0).integers(0, 256, (count, 2, 2), np.uint8), None, ())
    mean = Release(spec=QuerySpec(name="mean", kind="mean", dataset_size=count), noise_multiplier=1e-3)
    budget = Budget(epsilon=1, delta=1e-3, dataset_size=count, releases=(mean,))
    access = PrivateAccess(images, PublicFacts.of(images), budget, RunFolder(tmp_path), device=CPU)

    def wide(rows: Tensor) -> Tensor:
        assert len(held) <= 1
        features = rows.flatten(1).double().mean(1, keepdim=True).expand(-1, 5000) / 255 / 5000**0.5
        if len(rows) > 1:
            held.add(features)
        return features

    found = access.mean("mean", wide, access.images)
    np.testing.assert_allclose(found, images.images.mean() / 255 / 5000**0.5, atol=6e-3 / count)


@pytest.mark.parametrize(
    ("query", "scale"),
    [
        (release("count", 3.0), 3.0),
        (release("histogram", 0.25), 0.25),
        (release("mean", 2.0, sensitivity=0.05), 0.1),
    ],
)
def test_noise_has_the_stated_standard_deviation_at_every_seed(query: Release, scale: float) -> None:
    own = torch.arange(5, dtype=torch.float64)
    drawn = torch.stack([noisy_sum(own, query, Ranks(), Randomness(stream(seed))) for seed in range(2000)])
    assert drawn.dtype == torch.float64
    noise = ((drawn - own) / scale).numpy()
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    assert noise.std() == pytest.approx(1, abs=4 / math.sqrt(2 * noise.size))
    assert np.abs(np.corrcoef(noise.T) - np.eye(5)).max() < 0.12
    # the sum itself stays as it was
    assert own.tolist() == [0, 1, 2, 3, 4]


def test_noise_is_fresh_in_every_query() -> None:
    query, own = release("count", 1.0), torch.zeros(3, dtype=torch.float64)
    assert len({tuple(noisy_sum(own, query, Ranks()).tolist()) for _ in range(50)}) == 50


def access_to(images: np.ndarray, releases: tuple[Release, ...], folder: Path) -> PrivateAccess:
    budget = Budget(epsilon=1, delta=1e-3, dataset_size=SIZE, releases=releases)
    facts = PublicFacts(SIZE, (), images.shape[1:])
    return PrivateAccess(ImageSet(images, None, (), "private"), facts, budget, RunFolder(folder), device=CPU)


def bright(images: Tensor) -> Tensor:
    return images.flatten(1).max(1).values > 100


def bin_of(images: Tensor) -> Tensor:
    """Some images fall into none of three bins."""
    return images.flatten(1).long().sum(1) % 6 - 1


def wild(images: Tensor) -> Tensor:
    """Features of any size; infinite or NaN for some images."""
    values = images.double().flatten(1)
    return torch.stack([values.sum(1).exp(), 1 / values[:, 0], values[:, 0] / values[:, -1], -values.mean(1)], 1)


def noiseless(images: np.ndarray, bound: float, folder: Path) -> dict[str, np.ndarray]:
    """The sums behind a count, a mean and a histogram."""
    queries = (release("count", 0.0), release("mean", 0.0, sensitivity=bound), release("histogram", 0.0))
    access = access_to(images, queries, folder)
    return {
        "count": np.array([access.count("count", bright, access.images)]),
        "mean": access.mean("mean", wild, access.images).numpy() * SIZE,
        "histogram": access.histogram("histogram", 3, bin_of, access.images).numpy(),
    }


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 6), st.just(2), st.just(3))), bounds)
def test_one_image_changes_a_sum_by_at_most_the_sensitivity(
    tmp_path_factory: pytest.TempPathFactory, images: np.ndarray, bound: float
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    whole = noiseless(images, bound, folder / "whole")
    with np.errstate(all="ignore"):
        expected = clipped_sum(wild(torch.from_numpy(images)).numpy(), bound)
    np.testing.assert_allclose(whole["mean"], expected, rtol=1e-9, atol=1e-9 * bound)
    assert whole["count"] == (images.reshape(len(images), -1).max(1) > 100).sum()
    for left_out in range(len(images)):
        less = noiseless(np.delete(images, left_out, 0), bound, folder / str(left_out))
        for name, sensitivity in (("count", 1), ("mean", bound), ("histogram", 1)):
            assert np.linalg.norm(whole[name] - less[name]) <= sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("count", [0, 7])
def test_released_numbers_have_the_stated_standard_deviation(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a method gets them; so much noise that rounding does not show."""
    monkeypatch.setattr("os.urandom", stream(count))
    images = np.random.default_rng(3).integers(0, 256, (count, 2, 3), dtype=np.uint8)
    queries = (release("count", 500.0), release("mean", 2.0, sensitivity=0.5), release("histogram", 300.0))
    found: dict[str, list[float]] = {"count": [], "mean": [], "histogram": []}
    for number in range(200):
        access = access_to(images, queries, tmp_path / str(number))
        counted = access.count("count", bright, access.images)
        assert isinstance(counted, int)
        found["count"].append(counted)
        found["mean"] += access.mean("mean", wild, access.images).tolist()
        bins = access.histogram("histogram", 3, bin_of, access.images)
        assert torch.equal(bins, bins.round())
        found["histogram"] += bins.tolist()
    exact = noiseless(images, 0.5, tmp_path / "exact")
    for name, scale in (("count", 500.0), ("mean", 2.0 * 0.5 / SIZE), ("histogram", 300.0)):
        centre = exact[name] / (SIZE if name == "mean" else 1)
        noise = (np.array(found[name]).reshape(200, -1) - centre) / scale
        assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
        assert noise.std() == pytest.approx(1, abs=4 / math.sqrt(2 * noise.size))
        assert abs(stats.pearsonr(noise[1:, 0], noise[:-1, 0]).statistic) < 0.25
