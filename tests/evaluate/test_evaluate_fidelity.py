"""Fidelity against the reference package and closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prdc import compute_prdc

from rapid.errors import InputError
from rapid.evaluate import fidelity
from rapid.evaluate.fidelity import neighbourhoods
from rapid.frechet import Features


def normal(count: int, size: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Features:
    return shift + scale * np.random.default_rng(seed).standard_normal((count, size))


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


@pytest.mark.parametrize(("size", "offset"), [(1, 0.0), (3, 100.0), (128, 0.0), (128, 100.0), (700, 1e6)])
def test_balls_of_vectors_that_coincide_are_empty(size: int, offset: float) -> None:
    """With any number of rows: by it libraries choose the order in which they add."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        real, synthetic = int(rng.integers(50, 700)), int(rng.integers(50, 700))
        a, b = normal(real, size, seed, offset + 100), normal(synthetic, size, seed + 99, offset - 100)
        same = rng.standard_normal(size) * 3 + offset
        a[rng.permutation(real)[:10]] = b[rng.permutation(synthetic)[:20]] = same
        assert neighbourhoods(a, b) == (0, 0, 0, 0)


def test_distances_that_are_no_rounding_are_kept() -> None:
    """As small as they can be told from rounding: a millionth of the length of the vectors."""
    a = torch.from_numpy(normal(50, 128, 0))
    b = a + 1e-6 * torch.from_numpy(normal(50, 128, 1))
    ((_, distances),) = fidelity._blocks(a, b)
    torch.testing.assert_close(distances, torch.cdist(a, b).square(), rtol=0, atol=1e-10)
    assert (distances.diagonal() > 0).all()
    assert not next(fidelity._blocks(a, a))[1].diagonal().any()


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
