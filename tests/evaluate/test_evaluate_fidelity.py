"""Fidelity against the reference package, scipy's matrix square root and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prdc import compute_prdc
from scipy import linalg

from rapid.errors import InputError
from rapid.evaluate import fidelity
from rapid.evaluate.fidelity import Features, frechet_distance, neighbourhoods


def normal(count: int, size: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Features:
    return shift + scale * np.random.default_rng(seed).standard_normal((count, size))


def reference_frechet(first: Features, second: Features) -> float:
    c1, c2 = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    root = linalg.sqrtm(c1 @ c2).real
    return float(np.square(first.mean(0) - second.mean(0)).sum() + np.trace(c1 + c2 - 2 * root))


@given(
    size=st.integers(2, 12), first=st.integers(30, 60), second=st.integers(30, 60), seed=st.integers(0, 999),
    shift=st.floats(-3, 3), scale=st.floats(0.1, 10),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_frechet_is_scipys(size: int, first: int, second: int, seed: int, shift: float, scale: float) -> None:
    a, b = normal(first, size, seed), normal(second, size, seed + 1, shift, scale)
    expected = reference_frechet(a, b)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_frechet_of_gaussians_in_closed_form() -> None:
    # one dimension: (m1 - m2)^2 + (s1 - s2)^2, exactly, of the sample moments
    a, b = normal(50, 1, 0, 1.0, 2.0), normal(70, 1, 1, -2.0, 0.5)
    expected = (a.mean() - b.mean()) ** 2 + (a.std(ddof=1) - b.std(ddof=1)) ** 2
    assert frechet_distance(a, b) == pytest.approx(expected)
    # d dimensions: d ((m1 - m2)^2 + (s1 - s2)^2) of the true moments, for large samples
    assert frechet_distance(normal(200_000, 4, 2), normal(200_000, 4, 3, 1.0, 3.0)) == pytest.approx(20, rel=0.02)


def test_frechet_of_singular_covariances() -> None:
    a = normal(4, 20, 0)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    moved = a + 1
    assert frechet_distance(a, moved) == pytest.approx(20)
    constant = np.ones((5, 3))
    assert frechet_distance(constant, constant + 2) == pytest.approx(12)
    # orthogonal supports do not overlap: means 1/2 apart on two axes, and a variance of 1/2 on each side
    flat, other = np.diag([1.0, 0, 0])[[0, 1]], np.diag([0, 1.0, 0])[[1, 2]]
    assert frechet_distance(flat, other) == pytest.approx(0.5 + 0.5 + 0.5)


@given(
    size=st.integers(1, 8), real=st.integers(8, 40), synthetic=st.integers(8, 40), seed=st.integers(0, 999),
    k=st.integers(1, 6), shift=st.floats(-2, 2), scale=st.floats(0.2, 3), block=st.sampled_from([1, 64, 1 << 20]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_neighbourhoods_are_those_of_prdc(
    size: int, real: int, synthetic: int, seed: int, k: int, shift: float, scale: float, block: int
) -> None:
    a, b = normal(real, size, seed), normal(synthetic, size, seed + 1, shift, scale)
    expected = compute_prdc(a, b, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "BLOCK", block)
        found = neighbourhoods(a, b, k)._asdict()
    assert found == {name: pytest.approx(value) for name, value in expected.items()}


def test_equal_sets_and_sets_far_apart() -> None:
    a = normal(200, 16, 0)
    same = neighbourhoods(a, a)
    assert (same.precision, same.recall, same.coverage) == (1, 1, 1)
    # each vector is in its own ball, and in those of the vectors that it is among the nearest five of but the last
    assert same.density == pytest.approx(1.0)
    far = neighbourhoods(a, a + 100)
    assert far == (0, 0, 0, 0)
    # far from the origin the differences between squares must not drown
    offset = neighbourhoods(a + 1e6, normal(200, 16, 1) + 1e6)
    assert offset == pytest.approx(neighbourhoods(a, normal(200, 16, 1)))


def test_a_mode_that_is_missing_costs_recall_and_coverage_only() -> None:
    centres = np.repeat([[0.0, 0.0], [50.0, 0.0]], 300, axis=0)
    real = normal(600, 2, 0) + centres
    found = neighbourhoods(real, normal(600, 2, 1))
    assert found.precision > 0.95
    assert 0.45 < found.recall < 0.55
    assert 0.45 < found.coverage < 0.55


@pytest.mark.parametrize(("real", "synthetic"), [(5, 50), (50, 5), (1, 1)])
def test_too_few_images_are_refused(real: int, synthetic: int) -> None:
    with pytest.raises(InputError, match="at least 6 images in each set"):
        neighbourhoods(normal(real, 3, 0), normal(synthetic, 3, 1))


def test_frechet_of_one_image_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2"):
        frechet_distance(normal(1, 3, 0), normal(9, 3, 1))


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "BLOCK", 1000)
    largest = 0
    blocks = fidelity._blocks

    def watched(*sets: object) -> object:
        nonlocal largest
        for start, distances in blocks(*sets):
            largest = max(largest, distances.numel())
            yield start, distances

    monkeypatch.setattr(fidelity, "_blocks", watched)
    done: list[int] = []
    advance: Callable[[int], None] = done.append
    neighbourhoods(normal(300, 4, 0), normal(200, 4, 1), advance=advance)
    assert largest <= 1000
    assert sum(done) == 2 * 300 + 200
