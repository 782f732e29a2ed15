"""The tests of noise, on numbers drawn by numpy: how often they are wrong, and what they find."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from rapid.dp.audit.findings import Finding, StepAudit
from rapid.dp.audit.noise import noise_findings
from rapid.dp.audit.sampling import batch_findings

Rng = np.random.Generator
STEPS, SIZE = 12, 4096
PARTS = [("weight", SIZE - 16), ("bias", 16)]


def find(rows: NDArray[np.float64]) -> list[Finding]:
    return noise_findings("normals", torch.from_numpy(rows), PARTS)


def refuted(findings: list[Finding]) -> bool:
    return StepAudit(tuple(findings), 0.0).refuted


def rounded(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.round(rows * 1024) / 1024


def test_p_values_of_true_noise_are_not_too_small() -> None:
    """At most uniform, up to the error of 200 draws: on the grid, too."""
    rng = np.random.default_rng(0)
    p_values: dict[str, list[float]] = {}
    for _ in range(200):
        for finding in find(rounded(rng.standard_normal((STEPS, SIZE)))):
            p_values.setdefault(finding.test, []).append(finding.p_value)
    for test, found in p_values.items():
        assert stats.kstest(found, "uniform", alternative="greater").pvalue > 1e-4, test
        assert np.mean(np.array(found) < 0.05) < 0.12, test


def test_p_values_of_true_batches_are_not_too_small() -> None:
    rng = np.random.default_rng(1)
    p_values: dict[str, list[float]] = {}
    for _ in range(300):
        for finding in batch_findings("batches", rng.random((60, 50)) < 0.3, 0.3):
            p_values.setdefault(finding.test, []).append(finding.p_value)
    for test, found in p_values.items():
        assert stats.kstest(found, "uniform", alternative="greater").pvalue > 1e-4, test


def zero_bias(rows: Tensor) -> Tensor:
    rows[:, -16:] = 0
    return rows


def repeated_places(rows: Tensor) -> Tensor:
    rows[:, 100:1100] = rows[:, 3000:4000]
    return rows


def one_step_is_quieter(rows: Tensor) -> Tensor:
    rows[5] *= 0.9
    return rows


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a tenth too little": lambda rows: rows * 0.9,
    "a tenth too much": lambda rows: rows * 1.1,
    "none": lambda rows: rows * 0,
    "not a number": lambda rows: rows / 0,
    "none in one parameter": zero_bias,
    "less in one step": one_step_is_quieter,
    "the same in every step": lambda rows: rows[:1].expand(STEPS, -1),
    "half of the variance common to all steps": lambda rows: (rows + rows[:1].roll(77, 1)) / 2**0.5,
    "half of the variance common to all places": lambda rows: (rows + rows[:, :1]) / 2**0.5,
    "two steps in turn": lambda rows: rows[[0, 1] * (STEPS // 2)],
    "each step undoes the one before": lambda rows: rows[:1] * torch.tensor([1.0, -1.0] * (STEPS // 2))[:, None],
    "shifted by one place each step": lambda rows: torch.stack([rows[0].roll(t) for t in range(STEPS)]),
    "some places twice": repeated_places,
    "neighbours alike": lambda rows: (rows + rows.roll(1, 1)) / 2**0.5,
    "uniform": lambda rows: (torch.special.ndtr(rows) - 0.5) * 12**0.5,
    "Laplace": lambda rows: rows.sign() * -torch.log1p(-torch.special.erf(rows.abs() / 2**0.5)) / 2**0.5,
    "cut off at three": lambda rows: rows.clamp(-3, 3),
    "coarse": lambda rows: rows.round(),
    "off centre": lambda rows: rows + 0.1,
}


@pytest.mark.parametrize("name", BROKEN)
def test_other_noise_is_found(name: str) -> None:
    rows = torch.from_numpy(np.random.default_rng(2).standard_normal((STEPS, SIZE)))
    assert refuted(noise_findings("broken", BROKEN[name](rows), PARTS))


def in_turn(rng: Rng) -> NDArray[np.bool_]:
    return np.arange(200) // 50 == (np.arange(80) % 4)[:, None]


def shuffled(rng: Rng) -> NDArray[np.bool_]:
    return np.concatenate([rng.permutation(200) // 50 == np.arange(4)[:, None] for _ in range(20)])


def fixed_size(rng: Rng) -> NDArray[np.bool_]:
    return np.stack([rng.permutation(200) < 50 for _ in range(80)])


def pairs(rng: Rng) -> NDArray[np.bool_]:
    return np.repeat(rng.random((200, 100)) < 0.25, 2, axis=1)


@pytest.mark.parametrize("batches", [in_turn, shuffled, fixed_size, pairs])
def test_other_batches_are_found(batches: Callable[[Rng], NDArray[np.bool_]]) -> None:
    present = batches(np.random.default_rng(3))
    assert present.mean() == pytest.approx(0.25, abs=0.05)
    assert refuted(batch_findings("batches", present, 0.25))
