"""Gaussian noise on a public grid, rounded as if sum and noise had been computed with unlimited precision.

Floating-point noise has gaps: which numbers a noisy sum can be depends on the sum, so its low bits tell it apart from
the sum without one image (Mironov, On significance of the least significant bits, CCS 2012). Here the noisy sum is
rounded to a multiple of a public step, about a thousandth of the noise, and the rounding is exact: the result is that
of the mathematical Gaussian mechanism, rounded, which is post-processing.

A Gaussian is sqrt(-2 ln U) cos(2 pi V) or ... sin(2 pi V) (Box and Muller 1958) of two uniform real numbers, of which
52 bits are drawn first. float64 then gives the noisy sum up to a known error. Where that error, or the bits of U and V
that are not known yet, leave the nearest multiple open, more bits are drawn, and interval arithmetic decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from mpmath.ctx_iv import MPIntervalContext
from torch import Tensor

STEPS_PER_STDDEV = 1 << 10
"""Least number of grid steps in one standard deviation of the noise."""
BITS = 52
"""Bits of a uniform number that are drawn first; the middle of what they leave open is exact in float64."""
MORE_BITS = 64
FIRST, LAST = 1 << 36, (1 << BITS) - (1 << 26)
"""Bounds of U's bits; outside of them the radius is too sensitive to bits that are not known yet."""
ERROR, RELATIVE_ERROR = 2.0**-26, 2.0**-50
"""Largest error of a noisy sum in float64, in grid steps: ERROR + RELATIVE_ERROR * |noisy sum|.

The radius is at most 4.71 between FIRST and LAST, and there unknown bits change it by at most 2^-39. The rounding of
logarithm, root, sine, cosine (4 units in the last place each) and of the angle adds less than 2^-46 in all. A standard
deviation has at most 2^11 steps: 2^-28 in all, a fourth of ERROR. The sum is exact; adding it rounds by 2^-53 of the
result.
"""
CHUNK = 1 << 18
"""Numbers handled at a time, so that intermediate results stay in the cache."""

_INTERVALS = MPIntervalContext()  # of our own: its precision is a state
Words = Callable[[int], Tensor]
"""count -> int64 (count,), each of uniformly random bits."""


def grid_step(stddev: float) -> float:
    """The step of the grid for noise of this standard deviation: a power of two, stddev / 2048 < step <= stddev / 1024.

    Raises:
        ValueError: no noise, or a step that float64 cannot hold.
    """
    if not 1e-200 < stddev < 1e200:
        raise ValueError(f"noise of standard deviation {stddev} cannot be added exactly")
    return 2.0 ** math.floor(math.log2(stddev / STEPS_PER_STDDEV))


def add_noise(total: Tensor, stddev: float, words: Words) -> None:
    """Replace each number by the grid point nearest to it plus an independent Gaussian; the upper one of two.

    Args:
        total: float64 (n,), finite, on any device; changed in place.
        stddev: of the Gaussians; 0 leaves `total` as it is.
        words: the source of random bits.

    Raises:
        ValueError: see `grid_step`.
    """
    if stddev == 0:
        return
    step = grid_step(stddev)
    for part in total.split(CHUNK):
        part.copy_(_rounded(part.cpu() / step, stddev / step, words) * step)


def round_to_grid(total: Tensor, stddev: float) -> None:
    """Round a noisy sum to its grid, in place; for noise that was added in floating point."""
    if stddev:
        step = grid_step(stddev)
        total.div_(step).round_().mul_(step)


def _rounded(shift: Tensor, scale: float, words: Words) -> Tensor:
    """The whole numbers nearest to shift + scale * Gaussian; float64 (n,)."""
    half = (len(shift) + 1) // 2
    drawn = (words(2 * half) >> (64 - BITS)) & ((1 << BITS) - 1)
    first, second = drawn.view(2, half)
    radius = first.double().add_(0.5).mul_(2.0**-BITS).log_().mul_(-2).sqrt_()
    angle = second.double().add_(0.5).mul_(2.0**-BITS * 2 * math.pi)
    value = torch.cat([radius * angle.cos(), angle.sin_().mul_(radius)])[: len(shift)].mul_(scale).add_(shift)
    result = (value + 0.5).floor_()
    open_ = ((first < FIRST) | (first >= LAST)).repeat(2)[: len(shift)]
    open_ |= (value - value.floor() - 0.5).abs_() <= value.abs().mul_(RELATIVE_ERROR).add_(ERROR)
    for index in open_.nonzero().flatten().tolist():
        pair, sine = index % half, index >= half
        bits = int(first[pair]), int(second[pair])
        result[index] = nearest(float(shift[index]), scale, *bits, sine=sine, words=words)
    return result


def nearest(shift: float, scale: float, first: int, second: int, *, sine: bool, words: Words) -> int:
    """The whole number nearest to shift + scale * Gaussian, exactly.

    Args:
        shift: a float64, taken as it is.
        scale: a float64, taken as it is.
        first: the first 52 bits of U.
        second: the first 52 bits of V.
        sine: whether the Gaussian is the sine of the pair, not the cosine.
        words: the further bits.
    """
    context, bits = _INTERVALS, BITS
    while True:
        more = [int(word) & ((1 << MORE_BITS) - 1) for word in words(2)]
        first, second = (first << MORE_BITS) | more[0], (second << MORE_BITS) | more[1]
        bits += MORE_BITS
        if first == 0:
            continue
        context.prec = 2 * bits
        u, v = (context.mpf([number, number + 1]) / context.mpf(2) ** bits for number in (first, second))
        wave = (context.sin if sine else context.cos)(2 * context.pi * v)
        value = context.sqrt(-2 * context.log(u)) * wave * context.mpf(scale) + context.mpf(shift) + context.mpf(0.5)
        low, high = _floor(value.a), _floor(value.b)
        if low == high:
            return low


def _floor(end: Any) -> int:
    """The floor of an end of an interval."""
    sign, mantissa, exponent, _ = end._mpi_[0]
    number, power = -int(mantissa) if sign else int(mantissa), int(exponent)
    return number << power if power >= 0 else number >> -power
