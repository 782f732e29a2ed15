"""Gaussian noise on a public grid, rounded as if sum and noise had been computed with unlimited precision.

Floating-point noise has gaps: which numbers a noisy sum can be depends on the sum, so its low bits tell it apart from
the sum without one image (Mironov, On significance of the least significant bits, CCS 2012). Here the noisy sum is
rounded to a multiple of a public step, about a thousandth of the noise, and the rounding is exact: the result is that
of the mathematical Gaussian mechanism, rounded, which is post-processing.

A Gaussian is sqrt(-2 ln U) cos(2 pi V) or ... sin(2 pi V) (Box and Muller 1958) of two uniform real numbers, of which
52 bits are drawn first. float64 then gives the noisy sum up to a known error. Where that error, or the bits of U and V
that are not known yet, leave the nearest multiple open, more bits are drawn, and interval arithmetic decides. So the
result depends on the random bits alone, not on the device, the number of threads or the library of float64 functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from mpmath.ctx_iv import MPIntervalContext
from torch import Tensor

from rapid.dp.cipher import KeyStream

STEPS_PER_STDDEV = 1 << 10
"""Least number of grid steps in one standard deviation of the noise."""
BITS = 52
"""Bits of a uniform number that are drawn first; the middle of what they leave open is exact in float64."""
MORE_BITS = 64
LEAST, FIRST, LAST = 1 << 26, 1 << 36, (1 << BITS) - (1 << 26)
"""Bounds of U's bits. From LAST on and below LEAST interval arithmetic decides; below FIRST the error is larger."""
ERROR, RELATIVE_ERROR = 2.0**-26, 2.0**-50
"""Largest error of a noisy sum in float64, in grid steps: ERROR + RELATIVE_ERROR * |noisy sum|.

The radius is at most 4.71 between FIRST and LAST, and there unknown bits change it by at most 2^-39. The rounding of
logarithm, root, sine, cosine (4 units in the last place each), of the angle and of the scale adds less than 2^-45 in
all. A standard deviation has at most 2^11 steps: less than 2^-27 in all, half of ERROR. The sum is exact; adding it
rounds by 2^-53 of the result.
"""
FAR, NEAR = 4.709, 1.73e-4
"""Radii of U's that are certainly from FIRST on and below LAST, where it is sqrt(32 ln 2) = 4.7096 and 1.7264e-4."""
SMALL_ERROR = 2.0**10
"""Below FIRST, SMALL_ERROR / (bits of U) is added: unknown bits change -ln U by at most 1 / (2 bits), the radius, which
is at least 4.7, by at most 1 / (9.4 bits), and the noisy sum by 2^11 times that. Roundings are as above: the radius is
at most 6.01."""
BLOCK = 1 << 16
"""Numbers that share a stretch of the key stream, U's before V's; few enough to stay in a core's cache."""
DEVICE_BLOCKS = 1 << 7
"""Blocks at a time on a device: worth the calls, with some 0.6 GB of memory."""
CIPHER_BLOCKS = 1 << 5
"""Blocks whose bits a CPU draws at a time, so that starting threads costs little."""
DEVICE_LEAST = 1 << 17
"""Numbers from which on a device is faster than a CPU, with all its calls of tiny operations."""

_INTERVALS = MPIntervalContext()  # of our own: its precision is a state
Words = Callable[[int], Tensor]
"""count -> int64 (count,), each of uniformly random bits."""


class Open(NamedTuple):
    """A number that float64 cannot round with certainty: its place in the sum, and the arguments of `nearest`."""

    place: int
    shift: float
    first: int
    second: int
    sine: bool


def grid_step(stddev: float) -> float:
    """The step of the grid for noise of this standard deviation: a power of two, stddev / 2048 < step <= stddev / 1024.

    Raises:
        ValueError: no noise, or a step that float64 cannot hold.
    """
    if not 1e-200 < stddev < 1e200:
        raise ValueError(f"noise of standard deviation {stddev} cannot be added exactly")
    return 2.0 ** math.floor(math.log2(stddev / STEPS_PER_STDDEV))


def add_noise(total: Tensor, stddev: float, stream: KeyStream, words: Words) -> None:
    """Replace each number by the grid point nearest to it plus an independent Gaussian; the upper one of two.

    On a CPU PyTorch's threads share the work; on another device the noise of a large sum is computed there.

    Args:
        total: float64 (n,), finite, on any device; changed in place.
        stddev: of the Gaussians; 0 leaves `total` as it is.
        stream: the source of the bits that are drawn first, not used otherwise.
        words: the source of further bits.

    Raises:
        ValueError: see `grid_step`.
    """
    if stddev == 0:
        return
    step = grid_step(stddev)
    held = total if total.device.type == "cpu" or len(total) >= DEVICE_LEAST else total.cpu()
    # many blocks at a time on a device; on a CPU as many as there are cores, so that they stay in the caches
    together = DEVICE_BLOCKS if held.device.type != "cpu" else torch.get_num_threads()
    for start, part in _parts(held, together):
        blocks, block = part.shape
        half = (block + 1) // 2
        bits = stream.words(start, blocks * 2 * half, held.device).view(blocks, 2, half)
        for rows, own_bits in zip(part.split(together), bits.split(together), strict=True):
            result, open_ = _rounded(rows / step, stddev / step, own_bits)
            torch.mul(result, step, out=rows)
            drawn: dict[tuple[int, int], list[Tensor]] = {}
            for place, shift, first, second, sine in open_:
                pair = place // block, place % block % half
                own = _of_pair(drawn.setdefault(pair, []), words)
                exact = nearest(shift, stddev / step, first, second, sine=sine, words=own)
                rows[divmod(place, block)] = exact * step
    if held is not total:
        total.copy_(held)


def _of_pair(drawn: list[Tensor], words: Words) -> Words:
    """Further bits of a pair: those that its other number has drawn, if that was open, too, and then new ones."""
    before = iter(drawn[:])

    def take(count: int) -> Tensor:
        if (known := next(before, None)) is not None:
            return known
        drawn.append(words(count))
        return drawn[-1]

    return take


def _parts(total: Tensor, together: int) -> Iterator[tuple[int, Tensor]]:
    """Parts of a vector, (blocks, numbers), with the number of the first: whole blocks, then what is left of one."""
    size, whole = BLOCK * max(together, CIPHER_BLOCKS // together * together), len(total) // BLOCK * BLOCK
    for start in range(0, whole, size):
        yield start, total[start : min(start + size, whole)].view(-1, BLOCK)
    if whole < len(total):
        yield whole, total[whole:].view(1, -1)


def round_to_grid(total: Tensor, stddev: float) -> None:
    """Round a noisy sum to its grid, in place; for noise that was added in floating point."""
    if stddev:
        step = grid_step(stddev)
        total.div_(step).round_().mul_(step)


def _rounded(shift: Tensor, scale: float, bits: Tensor) -> tuple[Tensor, list[Open]]:
    """The whole numbers nearest to shift + scale * Gaussian, and those of them that are not certain.

    Args:
        shift: float64 (blocks, n).
        scale: standard deviation.
        bits: of U and V, int64 (blocks, 2, (n + 1) / 2), of which the upper `BITS` count.
    """
    count, half = shift.shape[1], bits.shape[2]
    bits = (bits >> (64 - BITS)).bitwise_and_((1 << BITS) - 1)
    first, second = bits.unbind(1)
    radius = first.double().add_(0.5).mul_(2.0**-BITS).log_().mul_(-2 * scale * scale).sqrt_()
    angle = second.double().add_(0.5).mul_(2.0**-BITS * 2 * math.pi)
    value = torch.empty_like(shift)
    torch.addcmul(shift[:, :half], radius, angle.cos(), out=value[:, :half])
    torch.addcmul(shift[:, half:], radius[:, : count - half], angle.sin_()[:, : count - half], out=value[:, half:])
    # not round(), whose -0.0 would tell more than the nearest number
    result = (value + 0.5).floor_()
    gap = torch.sub(value, result, out=value).abs_()
    size = result.abs().add_(1)
    # extremes first: comparing each number takes far longer, and in most blocks none is uncertain
    places = [torch.zeros(0, 2, dtype=torch.int64, device=shift.device)]
    if not float(gap.amax()) < 0.5 - ERROR - RELATIVE_ERROR * float(size.amax()):
        places.append((gap >= torch.mul(size, -RELATIVE_ERROR).add_(0.5 - ERROR)).nonzero())
    if not (float(radius.amax()) < FAR * scale and float(radius.amin()) > NEAR * scale):
        pairs = ((first < FIRST) | (first >= LAST)).nonzero()
        both = torch.cat([pairs, pairs + torch.tensor([0, half], device=pairs.device)])
        places.append(both[both[:, 1] < count])
    if not sum(map(len, places)):
        return result, []
    uncertain = torch.cat(places).unique(dim=0)
    block, index = uncertain.unbind(1)
    columns = [gap[block, index], size[block, index], shift[block, index]]
    columns += [own[block, index % half] for own in (first, second)]
    open_ = []
    for place, own_gap, own_size, own_shift, u, v in zip(
        (block * count + index).tolist(), *(column.tolist() for column in columns), strict=True
    ):
        # what was looked for is meant for most numbers; here each has its own error
        error = ERROR + RELATIVE_ERROR * own_size + (SMALL_ERROR / u if u < FIRST and u else 0)
        if not LEAST <= u < LAST or own_gap >= 0.5 - error:
            open_.append(Open(place, own_shift, u, v, sine=place % count >= half))
    return result, open_


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
