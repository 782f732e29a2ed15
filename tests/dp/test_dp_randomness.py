"""Uniform and Gaussian numbers from the system's entropy."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from rapid.dp.noise import BLOCK
from rapid.dp.randomness import Randomness, SystemStream


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


def test_noise_has_the_right_tails() -> None:
    """Counts in bins out to 4.8 standard deviations, by chi-square, over several chunks."""
    total = torch.zeros(3_000_000, dtype=torch.float64)
    Randomness().add_noise(total, 2.0)
    edges = np.array([-np.inf, -4.6, -4, -3.5, -3, -2, -1, -0.1, 0, 0.1, 1, 2, 3, 3.5, 4, 4.6, np.inf])
    counts = np.array([((total / 2 > a) & (total / 2 <= b)).sum().item() for a, b in pairwise(edges)])
    expected = len(total) * np.diff(stats.norm.cdf(edges))
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6


def test_blocks_are_independent() -> None:
    first = torch.zeros(2 * BLOCK, dtype=torch.float64)
    Randomness().add_noise(first, 1.0)
    assert abs(stats.pearsonr(first[:BLOCK].numpy(), first[BLOCK:].numpy()).statistic) < 5 / BLOCK**0.5


@pytest.mark.parametrize("count", [0, 1, 64, 130, 1000])
def test_bytes_are_chacha20_by_rfc_8439(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    monkeypatch.setattr("os.urandom", lambda length: key[:length])
    blocks = b"".join(chacha20_block(key, number) for number in range(count // 64 + 1))
    assert bytes(SystemStream()(count)) == blocks[:count]


def chacha20_block(key: bytes, counter: int) -> bytes:
    """One block of the key stream with a zero nonce, as in RFC 8439, section 2.3."""
    start = [*struct.unpack("<12I", b"expand 32-byte k" + key), counter, 0, 0, 0]
    state = list(start)

    def turn(a: int, b: int, c: int, d: int) -> None:
        for x, y, z, shift in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) & 0xFFFFFFFF
            mixed = state[z] ^ state[x]
            state[z] = ((mixed << shift) | (mixed >> (32 - shift))) & 0xFFFFFFFF

    for _ in range(10):
        for column in range(4):
            turn(column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            turn(column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(state, start, strict=True)))


def test_the_reference_block_is_that_of_the_rfc() -> None:
    """Key of zeros, counter 0: the first bytes are test vector 1 of RFC 8439, appendix A.1."""
    assert chacha20_block(bytes(32), 0).hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")


def test_box_muller_against_the_closed_form() -> None:
    words = [1 << 40, (1 << 63) + 12345, 3 << 61, 77 << 50]
    found = Randomness(lambda count: struct.pack("<4Q", *words)[:count]).normal(4)
    u = [((word >> 11) + 1) / 2**53 for word in words]
    radius = [math.sqrt(-2 * math.log(x)) for x in u[:2]]
    angle = [2 * math.pi * x for x in u[2:]]
    expected = [r * math.cos(a) for r, a in zip(radius, angle, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radius, angle, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected))
