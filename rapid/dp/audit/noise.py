"""Tests of noise alone: scale, shape and independence of numbers that should be standard normal.

All p-values are exact or upper bounds for independent standard normals; sums have so many terms that what rounding to
the public grid adds to their variance, grid^2 / 12 (Widrow and Kollar, Quantization Noise, 2008), is far below what
can be seen. Tests that rest on single values allow for `ROUNDING` explicitly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, chi2, kstwo, norm
from torch import Tensor

from rapid.dp.audit.findings import Finding, deviations_needed, smallest

ROUNDING = 1.5e-3
"""Most that rounding moves a value, in standard deviations: half of a grid of 2^-9, twice over in a difference."""
SHAPE_VALUES = 1 << 20
TAILS = (3.0, 3.5, 4.0)
SHIFTED_ROWS = 2
"""Rows that are compared at all shifts."""


def noise_findings(subject: str, rows: Tensor, parts: Sequence[tuple[str, int]]) -> list[Finding]:
    """Test that all numbers are independent standard normals.

    | test               | null distribution of its statistic                                                     |
    |--------------------|----------------------------------------------------------------------------------------|
    | scale              | sum of squares: chi-square                                                             |
    | scale of parts     | sum of squares of each parameter and of each step: chi-square, Bonferroni              |
    | repeated parts     | sum of squares of the sum over steps: chi-square with d degrees of freedom             |
    | shape              | Kolmogorov-Smirnov distance to the normal less that by rounding: at most exact         |
    | tails              | numbers beyond 3, 3.5, 4: binomial, Bonferroni                                           |
    | independent steps  | inner product of two steps over the norm of one: normal; all pairs, Bonferroni         |
    | independent places | the same for parts of a step and for neighbouring steps, at all circular shifts        |

    Args:
        subject: for the findings.
        rows: float (T, d), d >= 2 values a step, in units of the claimed standard deviation; T >= 2.
        parts: names and sizes of the parameters; the sizes add up to d.
    """
    if not bool(rows.isfinite().all()):
        return [Finding(subject, "noise: finite", 0.0, math.nan)]
    rows = rows.double()
    steps, size = rows.shape
    squares = torch.stack([part.square().sum(1) for part in rows.split([size for _, size in parts], 1)], 1).numpy()
    count = steps * size
    spread = deviations_needed() / math.sqrt(2 * count)
    total = float(squares.sum())
    by_part = [(name, *_scale(float(squares[:, n].sum()), steps * own)) for n, (name, own) in enumerate(parts)]
    by_step = [(f"step {t + 1}", *_scale(float(squares[t].sum()), size)) for t in range(steps)]
    summed = float((rows.sum(0) / math.sqrt(steps)).square().sum())
    return [
        Finding(subject, "noise: scale", *_scale(total, count), spread),
        smallest(subject, "noise: scale of each parameter and step", [*by_part, *by_step]),
        Finding(subject, "noise: nothing repeats from step to step", *_scale(summed, size)),
        _shape(subject, rows),
        _tails(subject, rows),
        _steps(subject, rows),
        _places(subject, rows),
    ]


def scale_finding(subject: str, test: str, values: NDArray[np.float64]) -> Finding:
    """The chi-square test of scale alone, of numbers in units of the claimed standard deviation."""
    spread = deviations_needed() / math.sqrt(2 * values.size)
    return Finding(subject, test, *_scale(float(np.square(values).sum()), values.size), spread)


def _scale(squares: float, count: int) -> tuple[float, float]:
    """Two-sided p-value of a sum of squares, and the observed standard deviation."""
    p_value = 2 * min(float(chi2.cdf(squares, count)), float(chi2.sf(squares, count)))
    return min(1.0, p_value), math.sqrt(squares / count)


def _shape(subject: str, rows: Tensor) -> Finding:
    flat = rows.flatten()
    values = np.sort(flat[:: max(1, len(flat) // SHAPE_VALUES)].numpy())
    count = len(values)
    below = norm.cdf(values)
    place = np.arange(count)
    distance = float(max((below - place / count).max(), ((place + 1) / count - below).max()))
    # rounding moves the distribution function by at most its steepest slope times the rounding
    allowed = ROUNDING * float(norm.pdf(0))
    return Finding(subject, "noise: normal shape", float(kstwo.sf(max(0.0, distance - allowed), count)), distance)


def _tails(subject: str, rows: Tensor) -> Finding:
    sizes, count = rows.abs(), rows.numel()
    parts = []
    for limit in TAILS:
        chance = 2 * float(norm.sf(limit))
        # counts that rounding cannot have made larger, or smaller
        surely, at_most = (int((sizes > limit + shift).sum()) for shift in (ROUNDING, -ROUNDING))
        p_value = 2 * min(float(binom.sf(surely - 1, count, chance)), float(binom.cdf(at_most, count, chance)))
        parts.append((f"beyond {limit:g}", min(1.0, p_value), surely / (count * chance)))
    return smallest(subject, "noise: normal tails", parts)


def _steps(subject: str, rows: Tensor) -> Finding:
    products = rows @ rows.T
    # given row s, its inner product with another row is normal with the norm of row s as standard deviation
    scores = products / rows.norm(dim=1).clamp_min(1e-300)
    pairs = torch.tril_indices(len(rows), len(rows), -1)
    found = scores[pairs[0], pairs[1]].abs()
    worst = int(found.argmax())
    correlation = products[pairs[0, worst], pairs[1, worst]] / (
        rows[pairs[0, worst]].norm() * rows[pairs[1, worst]].norm()
    ).clamp_min(1e-300)
    p_value = min(1.0, 2 * len(found) * float(norm.sf(float(found[worst]))))
    where = f"steps {int(pairs[1, worst]) + 1} and {int(pairs[0, worst]) + 1}"
    detects = deviations_needed(len(found)) / math.sqrt(rows.shape[1])
    return Finding(subject, "noise: independent steps", p_value, float(correlation), detects, where)


def _places(subject: str, rows: Tensor) -> Finding:
    parts = []
    for t, row in enumerate(rows[:SHIFTED_ROWS]):
        half = len(row) // 2
        pairs = [
            ("halves", row[:half], row[half : 2 * half]),
            ("even and odd", row[: 2 * half : 2], row[1 : 2 * half : 2]),
        ]
        if t + 1 < len(rows):
            pairs.append((f"steps {t + 1} and {t + 2}", row, rows[t + 1]))
        parts += [(f"step {t + 1}: {name}", *_shifted(a, b)) for name, a, b in pairs]
    return smallest(subject, "noise: independent places, at all shifts", parts)


def _shifted(a: Tensor, b: Tensor) -> tuple[float, float]:
    """P-value of the largest inner product of a with b at any circular shift, and the correlation there."""
    # fast transforms need lengths with small factors: at most a thirty-second is left out
    factor = 1 << max(0, len(a).bit_length() - 6)
    length = len(a) // factor * factor
    a, b = a[:length], b[:length]
    products = torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b).conj(), len(a)).abs()
    largest, width = float(products.max()), max(float(b.norm()), 1e-300)
    return min(1.0, 2 * len(a) * float(norm.sf(largest / width))), largest / max(width * float(a.norm()), 1e-300)
