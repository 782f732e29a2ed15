"""Uniform and Gaussian numbers from the system's entropy."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from scipy import stats

from rapid.private.randomness import Randomness, SystemStream


def test_uniforms() -> None:
    u = Randomness().uniform(200_000)
    assert u.dtype == torch.float64
    assert u.min() > 0
    assert u.max() <= 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_normals_are_normal_and_independent() -> None:
    z = Randomness().normal(400_000)
    assert z.dtype == torch.float32
    values = z.double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs(stats.kurtosis(values)) < 0.05
    # the two outputs of a Box-Muller pair, and neighbours
    for lag in (1, 200_000):
        assert abs(stats.pearsonr(values[:-lag], values[lag:]).statistic) < 0.015
        assert abs(stats.pearsonr(values[:-lag] ** 2, values[lag:] ** 2).statistic) < 0.015


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_counts(count: int) -> None:
    assert Randomness().normal(count).shape == (count,)
    assert Randomness().uniform(count).shape == (count,)


def test_no_two_streams_are_alike() -> None:
    assert len({bytes(SystemStream()(32)) for _ in range(100)}) == 100
    stream = SystemStream()
    assert stream(32) != stream(32)


def test_box_muller_against_the_closed_form() -> None:
    words = [1 << 40, (1 << 63) + 12345, 3 << 61, 77 << 50]
    found = Randomness(lambda count: struct.pack("<4Q", *words)[:count]).normal(4)
    u = [((word >> 11) + 1) / 2**53 for word in words]
    radius = [math.sqrt(-2 * math.log(x)) for x in u[:2]]
    angle = [2 * math.pi * x for x in u[2:]]
    expected = [r * math.cos(a) for r, a in zip(radius, angle, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radius, angle, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected))
