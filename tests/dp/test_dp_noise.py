"""Noise on the grid: exact by unlimited precision, Gaussian, and the same low bits whatever the sum."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.noise import BITS, FIRST, LAST, Words, _rounded, add_noise, grid_step, nearest
from rapid.dp.queries import noisy_sum
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release
from rapid.ranks import Ranks


def seeded(seed: int) -> Words:
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)


def given_words(*words: int) -> Words:
    """A source of these words, and of random ones after them."""
    left, after = [word - (1 << 64) if word >> 63 else word for word in words], seeded(0)
    return lambda count: torch.tensor([left.pop(0) if left else int(after(1)) for _ in range(count)])


def gaussian(first: int, second: int, bits: int, *, sine: bool) -> mpmath.mpf:
    """Box-Muller of U = first / 2^bits and V = second / 2^bits, to 80 digits."""
    u, v = (mpmath.mpf(number) / mpmath.mpf(2) ** bits for number in (first, second))
    return mpmath.sqrt(-2 * mpmath.log(u)) * (mpmath.sin if sine else mpmath.cos)(2 * mpmath.pi * v)


edges = st.one_of(st.integers(0, 3), st.integers(FIRST - 2, FIRST + 2), st.integers(LAST - 2, (1 << BITS) - 1))
bits52 = st.one_of(st.integers(0, (1 << BITS) - 1), edges)
bits64 = st.integers(0, (1 << 64) - 1)


@settings(max_examples=300, deadline=None)
@given(bits52, bits52, bits64, bits64, st.floats(1024, 2047.9), st.floats(-1e9, 1e9), st.booleans())
def test_nearest_is_that_of_unlimited_precision(
    first: int, second: int, more: int, other: int, scale: float, shift: float, sine: bool
) -> None:
    """With 116 bits known, the interval is far too small to hold a half, except by a chance of 2^-60."""
    u, v = (first << 64) | more, (second << 64) | other
    assume(u)
    found = nearest(shift, scale, first, second, sine=sine, words=given_words(more, other))
    with mpmath.workdps(80):
        corners = [gaussian(u + a, v + b, BITS + 64, sine=sine) for a in (0, 1) for b in (0, 1)]
        values = [z * mpmath.mpf(scale) + mpmath.mpf(shift) + mpmath.mpf(0.5) for z in corners]
        # where the bits that are given decide; with U = 0 but for its last bits they do not
        assume(len({int(mpmath.floor(value + d)) for value in values for d in (-(2.0**-60), 2.0**-60)}) == 1)
        assert found == int(mpmath.floor(values[0]))


def test_more_bits_are_drawn_until_the_nearest_is_known() -> None:
    """cos(2 pi / 4) = 0: the first 52 bits of V, and 64 more, leave open on which side of the half it is."""
    first = 1 << 51
    asked: list[int] = []
    source = given_words(0, 0, 0, 1 << 63)

    def words(count: int) -> Tensor:
        asked.append(count)
        return source(count)

    assert nearest(0.5, 1024.0, first, 1 << 50, sine=False, words=words) == 0
    assert asked == [2, 2]
    # U = 0 so far: its logarithm is not known
    assert nearest(0.0, 1024.0, 0, 1 << 50, sine=False, words=given_words(0, 0, 1 << 63, 5)) == 0


@pytest.mark.parametrize("scale", [1024.0, 1700.3, 2047.99])
def test_float64_and_unlimited_precision_agree(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float64 decides, interval arithmetic decides alike; small sums and large ones."""
    shift = torch.cat([torch.randn(1500, dtype=torch.float64) * 10**power for power in (0, 3, 7)])
    quick = _rounded(shift, scale, seeded(3))
    monkeypatch.setattr("rapid.dp.noise.ERROR", math.inf)
    assert torch.equal(_rounded(shift, scale, seeded(3)), quick)


def test_the_stated_error_is_generous() -> None:
    """float64 against 80 digits, over U up to where interval arithmetic takes over."""
    rng = np.random.default_rng(4)
    near = rng.integers(1, 1 << 20, (2, 300))
    first = np.concatenate([rng.integers(FIRST, LAST, 1500), FIRST + near[0], LAST - near[1]])
    second = rng.integers(0, 1 << BITS, len(first))
    radius = torch.from_numpy(first).double().add_(0.5).mul_(2.0**-BITS).log_().mul_(-2).sqrt_()
    angle = torch.from_numpy(second).double().add_(0.5).mul_(2.0**-BITS * 2 * math.pi)
    found = radius * angle.cos() * 2048
    with mpmath.workdps(80):
        for k, (u, v) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
            ends = [gaussian(2 * u + a, 2 * v + b, BITS + 1, sine=False) * 2048 for a in (0, 2) for b in (0, 2)]
            assert max(abs(end - float(found[k])) for end in ends) < 2.0**-26


@pytest.mark.parametrize("shift", [0.0, 0.5, 123456.789])
def test_probabilities_are_those_of_a_rounded_gaussian(shift: float) -> None:
    """Chi-square against intervals of the normal distribution, with few steps a standard deviation."""
    scale, count = 2.0, 200_000
    drawn = _rounded(torch.full((count,), shift, dtype=torch.float64), scale, Randomness().words).numpy()
    points = np.floor(shift) + np.arange(-7, 9)
    cuts = np.concatenate([[-np.inf], points[:-1] + 0.5, [np.inf]])
    counts = np.histogram(np.clip(drawn, points[0], points[-1]), np.append(points - 0.5, points[-1] + 0.5))[0]
    expected = count * np.diff(stats.norm.cdf((cuts - shift) / scale))
    assert stats.chisquare(counts, expected).pvalue > 1e-5


@pytest.mark.parametrize("count", [0, 1, 2, 7, 70_001])
@pytest.mark.parametrize("stddev", [1e-9, 0.3, 1.0, 7e5])
def test_sums_of_any_size(count: int, stddev: float) -> None:
    total = torch.linspace(-9, 9, count, dtype=torch.float64) * stddev
    before, step = total.clone(), grid_step(stddev)
    add_noise(total, stddev, Randomness().words)
    assert math.log2(step).is_integer()
    assert stddev / 2048 < step <= stddev / 1024
    assert torch.equal((total / step).frac(), torch.zeros_like(total))
    if count > 1000:
        assert stats.kstest(((total - before) / stddev).numpy(), "norm").pvalue > 1e-5


def test_no_noise_leaves_the_sum_and_absurd_noise_is_refused() -> None:
    total = torch.tensor([0.1, 0.2], dtype=torch.float64)
    add_noise(total, 0.0, Randomness().words)
    assert total.tolist() == [0.1, 0.2]
    for stddev in (1e-300, 1e300, math.nan, -1.0):
        with pytest.raises(ValueError, match="standard deviation"):
            add_noise(total, stddev, Randomness().words)


def classifier(present: bool) -> PrivateMechanism:
    """A linear classifier in one step over all of 256 examples, the last of which may contribute nothing."""
    torch.manual_seed(0)
    x, y = F.normalize(torch.randn(256, 64), dim=1), torch.randint(0, 10, (256,))
    weights = torch.ones(256)
    weights[-1] = float(present)
    head = nn.Linear(64, 10, bias=False)
    nn.init.zeros_(head.weight)
    spec = DpSgdSpec(name="head", dataset_size=256, expected_batch=256, steps=1, clip_norm=0.1)
    return PrivateMechanism(
        Release(spec=spec, noise_multiplier=30.0),
        head,
        lambda i: F.cross_entropy(head(x[i]), y[i], reduction="none") * weights[i],
        physical_batch=4096,
    )


def test_which_numbers_a_step_can_give_does_not_depend_on_membership() -> None:
    """In floating point, a membership test by which numbers can be reached is right every time; on a grid all can."""
    step = grid_step(30.0 * 0.1)
    low: dict[bool, list[Tensor]] = {False: [], True: []}
    for present, bits in low.items():
        for _ in range(40):
            (gradient,) = classifier(present).gradient()
            multiples = gradient.double().flatten() * 256 / step
            assert torch.equal(multiples.frac(), torch.zeros_like(multiples))
            bits.append(multiples.long() % 16)
    # nor do the low bits that are left
    counts = [torch.bincount(torch.cat(found), minlength=16).numpy() for found in low.values()]
    assert stats.chi2_contingency(np.stack(counts)).pvalue > 1e-5
    assert all(stats.chisquare(count).pvalue > 1e-5 for count in counts)


def test_queries_are_on_the_grid() -> None:
    query = Release(spec=QuerySpec(name="q", kind="mean", sensitivity=0.3, dataset_size=9), noise_multiplier=2.0)
    drawn = noisy_sum(torch.tensor([0.1, -7.7, 1e4], dtype=torch.float64), query, Ranks())
    assert torch.equal((drawn / grid_step(0.6)).frac(), torch.zeros(3, dtype=torch.float64))
