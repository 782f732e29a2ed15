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

from rapid.dp.cipher import KeyStream
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.noise import (
    BITS,
    BLOCK,
    ERROR,
    FIRST,
    LAST,
    LEAST,
    RELATIVE_ERROR,
    SMALL_ERROR,
    Words,
    _rounded,
    add_noise,
    grid_step,
    nearest,
)
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


class NoBits(KeyStream):
    """A stream of zeros: all numbers are open."""

    def words(self, start: int, count: int, device: torch.device | None = None) -> Tensor:
        return torch.zeros(count, dtype=torch.int64)


def test_both_numbers_of_a_pair_are_of_the_same_two_uniform_numbers() -> None:
    """cos^2 + sin^2 = 1: what is drawn beyond the first bits is one U and one V for both."""
    counts, after = [], seeded(3)

    def words(count: int) -> Tensor:
        counts.append(after(count))
        return counts[-1]

    total = torch.zeros(6, dtype=torch.float64)
    add_noise(total, 1.0, NoBits(b"0" * 32), words)
    assert len(counts) == 3
    for number, (word, _) in enumerate(torch.stack(counts).tolist()):
        radius = math.sqrt(-2 * math.log((word % (1 << 64)) * 2.0 ** -(BITS + 64)))
        assert math.hypot(total[number], total[3 + number]) == pytest.approx(radius, abs=2 * grid_step(1.0))


def drawn_bits(count: int) -> Tensor:
    """Bits of `count` pairs, int64 (1, 2, count): a third of the U's are small, the last ones edges."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << BITS, (2, count))
    bits[0, : count // 3] = np.exp2(rng.uniform(26, 36, count // 3)).astype(np.int64)
    bits[0, -6:] = (0, 1, LEAST, FIRST - 1, LAST, (1 << BITS) - 1)
    return torch.from_numpy(bits << (64 - BITS))[None]


@pytest.mark.parametrize(("scale", "count"), [(1024.0, 300), (1700.3, 301), (2047.99, 601)])
def test_float64_and_unlimited_precision_agree(scale: float, count: int) -> None:
    """What float64 decides, interval arithmetic decides alike; small sums and large ones, small U's and others."""
    torch.manual_seed(0)
    shift = torch.cat([torch.randn(count // 3, dtype=torch.float64) * 10**power for power in (0, 3, 7)])
    shift = torch.cat([shift, torch.zeros(count - len(shift), dtype=torch.float64)])
    half = (count + 1) // 2
    bits = drawn_bits(half)
    found, open_ = _rounded(shift[None], scale, bits)
    left = {place for place, *_ in open_}
    # the edges, and next to none besides
    assert {half - 6, half - 5, half - 2, half - 1} <= left
    assert len(left) < 12
    first, second = (bits[0] >> (64 - BITS) & ((1 << BITS) - 1)).tolist()
    for place in set(range(count)) - left:
        pair, sine = place % half, place >= half
        exact = nearest(float(shift[place]), scale, first[pair], second[pair], sine=sine, words=seeded(place))
        assert exact == found[0, place]


@pytest.mark.parametrize("size", [0, 10**6, 10**9])
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_what_lies_near_a_half_is_open(size: int, together: bool) -> None:
    """Sums nearer to a half than half of the stated error, beyond 1.5 of it, and on both sides of both."""
    rng, pairs, scale = np.random.default_rng(size), 200, 1500.3
    first, second = rng.integers(FIRST, LAST, (2, pairs))
    shifts, errors, distances, rounded = [], [], [], []
    with mpmath.workdps(80):
        for u, v, part in zip(first.tolist(), second.tolist(), rng.choice([0, 0.2, 0.4, 1.6, 3], pairs), strict=True):
            noise = gaussian(2 * u + 1, 2 * v + 1, BITS + 1, sine=False) * mpmath.mpf(scale)
            half = mpmath.nint(noise) + size + mpmath.mpf(0.5)
            errors.append(ERROR + RELATIVE_ERROR * float(abs(half)))
            shifts.append(float(half - noise + rng.choice([-1, 1]) * part * errors[-1]))
            # a shift of this size has no bits for parts of the error, so what counts is where the sum came to lie
            value = noise + mpmath.mpf(shifts[-1])
            distances.append(float(abs(value - half)))
            rounded.append(int(mpmath.floor(value + mpmath.mpf(0.5))))
    # the sine of each pair goes to a number nearer to 0, which has a smaller error
    shift = torch.tensor([shifts, [0.25] * pairs], dtype=torch.float64)
    bits = torch.from_numpy(np.stack([first, second]) << (64 - BITS))
    if together:
        found, left = _rounded(shift.reshape(1, -1), scale, bits[None])
        results, opened = found[0, :pairs].tolist(), {place for place, *_ in left}
    else:
        alone = [_rounded(shift[:, k].view(1, 2), scale, bits[:, k].view(1, 2, 1)) for k in range(pairs)]
        results = [float(found[0, 0]) for found, _ in alone]
        opened = {k for k, (_, left) in enumerate(alone) if left and left[0].place == 0}
    near = {k for k in range(pairs) if distances[k] <= errors[k] / 2}
    far = {k for k in range(pairs) if distances[k] >= 1.5 * errors[k]}
    assert len(near) > 50
    assert len(far) > 30
    assert near <= opened
    assert not far & opened
    assert all(results[k] == rounded[k] for k in far)


@pytest.mark.parametrize(
    ("first", "opened"),
    [
        (0, True), (1, True), (LEAST - 1, True), (LEAST, False),
        (FIRST - 1, False), (FIRST, False), (LAST - 1, False), (LAST, True), ((1 << BITS) - 1, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", [1024.0, 2047.9])
def test_a_single_extreme_number_is_found_among_others(first: int, opened: bool, scale: float) -> None:
    others = (1 << 51, 1 << 50)
    bits = torch.tensor([[[others[0], first, others[1]], [1 << 48, 3 << 47, 1 << 49]]]) << (64 - BITS)
    # far from a half, so that U alone decides
    plain = _rounded(torch.zeros(1, 6, dtype=torch.float64), scale, bits)[0]
    radius = math.sqrt(-2 * math.log((first + 0.5) * 2.0**-BITS)) * scale
    angle = 2 * math.pi * (3 << 47) * 2.0**-BITS
    shift = torch.zeros(1, 6, dtype=torch.float64)
    for place, wave in ((1, math.cos(angle)), (4, math.sin(angle))):
        shift[0, place] = round(radius * wave) - radius * wave
    found, left = _rounded(shift, scale, bits)
    assert [one.place for one in left] == ([1, 4] if opened else [])
    assert torch.equal(found[0, [0, 2, 3, 5]], plain[0, [0, 2, 3, 5]])


def test_what_is_open_keeps_its_numbers() -> None:
    shift = torch.arange(8, dtype=torch.float64)[None] + 0.25
    # of the last pair U is too small: both of its numbers are open
    bits = torch.tensor([[[1 << 62, 3 << 61, 1 << 61, 5], [1 << 60, 1 << 61, 1 << 62, 77 << 12]]])
    _, open_ = _rounded(shift, 1024.0, bits)
    assert open_ == [(3, 3.25, 0, 77, False), (7, 7.25, 0, 77, True)]


def test_blocks_together_are_the_blocks_alone() -> None:
    torch.manual_seed(0)
    shift, bits = torch.randn(5, 999, dtype=torch.float64), seeded(7)(5000).view(5, 2, 500)
    # some that are open
    bits[2:4, 0, :3] = 1
    together, open_ = _rounded(shift, 1500.0, bits)
    alone = [_rounded(shift[k : k + 1], 1500.0, bits[k : k + 1]) for k in range(5)]
    assert torch.equal(together, torch.cat([result for result, _ in alone]))
    assert open_ == [found._replace(place=999 * k + found.place) for k, (_, some) in enumerate(alone) for found in some]
    assert len(open_) == 12


def test_the_stated_error_is_generous() -> None:
    """float64 against 80 digits, over U from where to where interval arithmetic takes over."""
    rng = np.random.default_rng(4)
    near = rng.integers(1, 1 << 20, (3, 200))
    small = np.exp2(rng.uniform(26, 36, 400)).astype(np.int64)
    edges = [FIRST + near[0], LAST - near[1], LEAST + near[2], small]
    first = np.concatenate([rng.integers(FIRST, LAST, 500), *edges])
    second = rng.integers(0, 1 << BITS, len(first))
    radius = torch.from_numpy(first).double().add_(0.5).mul_(2.0**-BITS).log_().mul_(-2 * 2048.0**2).sqrt_()
    angle = torch.from_numpy(second).double().add_(0.5).mul_(2.0**-BITS * 2 * math.pi)
    found = radius * angle.cos()
    with mpmath.workdps(80):
        for k, (u, v) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
            ends = [gaussian(2 * u + a, 2 * v + b, BITS + 1, sine=False) * 2048 for a in (0, 2) for b in (0, 2)]
            # with a half to spare
            stated = (ERROR + (SMALL_ERROR / u if u < FIRST else 0)) / 2
            assert max(abs(end - float(found[k])) for end in ends) < stated


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    key, count = bytes(range(32)), 3 * BLOCK + 5
    before = torch.get_num_threads()

    def noise(threads: int) -> Tensor:
        total = torch.linspace(-1, 1, count, dtype=torch.float64)
        torch.set_num_threads(threads)
        try:
            add_noise(total, 0.7, KeyStream(key), seeded(1))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        return total

    assert torch.equal(noise(threads), noise(1))


def test_no_two_numbers_share_bits() -> None:
    """Nothing repeats, neither within a block nor from one to the next, nor with another key."""
    total = torch.zeros(2 * BLOCK + 7, dtype=torch.float64)
    add_noise(total, 1.0, KeyStream(bytes(32)), seeded(1))
    other = torch.zeros_like(total)
    add_noise(other, 1.0, KeyStream(bytes(31) + b"x"), seeded(1))
    for first, second in ((total[:BLOCK], total[BLOCK : 2 * BLOCK]), (total[:-1], total[1:]), (total, other)):
        assert abs(stats.pearsonr(first.numpy(), second.numpy()).statistic) < 5 / len(first) ** 0.5


@pytest.mark.parametrize("shift", [0.0, 0.5, 123456.789])
def test_probabilities_are_those_of_a_rounded_gaussian(shift: float) -> None:
    """Chi-square against intervals of the normal distribution, with few steps a standard deviation."""
    scale, count = 2.0, 200_000
    bits = Randomness().words(count).view(1, 2, count // 2)
    drawn = _rounded(torch.full((1, count), shift, dtype=torch.float64), scale, bits)[0].flatten().numpy()
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
    Randomness().add_noise(total, stddev)
    assert math.log2(step).is_integer()
    assert stddev / 2048 < step <= stddev / 1024
    assert torch.equal((total / step).frac(), torch.zeros_like(total))
    # a zero has no sign, which would tell on which side of it the noisy sum was
    assert not total[total == 0].signbit().any()
    # several blocks and a part of one
    if count > BLOCK:
        assert stats.kstest(((total - before) / stddev).numpy(), "norm").pvalue > 1e-5


def test_no_noise_leaves_the_sum_and_absurd_noise_is_refused() -> None:
    total = torch.tensor([0.1, 0.2], dtype=torch.float64)
    Randomness().add_noise(total, 0.0)
    assert total.tolist() == [0.1, 0.2]
    for stddev in (1e-300, 1e300, math.nan, -1.0):
        with pytest.raises(ValueError, match="standard deviation"):
            Randomness().add_noise(total, stddev)


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
