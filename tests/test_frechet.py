"""The Frechet distance against scipy's matrix square root and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from rapid.errors import InputError
from rapid.frechet import Features, frechet_distance


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


def test_frechet_of_one_image_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2"):
        frechet_distance(normal(1, 3, 0), normal(9, 3, 1))
