"""Which rows belong to which unit, and sums to which each unit contributes once.

Without an assignment each row is a unit. With one, a unit is a person with any number of rows: its contribution to any
sum is computed from its own rows and bounded as a whole, however many they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rapid.dp.queries import MOVED_MARGIN, clipped_rows, pairwise_sum
from rapid.dp.randomness import Randomness

PART = 1 << 22
"""Numbers that are clipped at a time."""
VOTE = 2**24
"""A person's votes in a histogram are whole multiples of 1 / VOTE, so that sums of them are exact."""


class Units:
    """The units of this process, numbered from 0.

    | case                                  | contribution of the person                       |
    |---------------------------------------|--------------------------------------------------|
    | a non-finite number in one of its rows | zero to a mean                                   |
    | all rows in no bin                    | zero to a histogram                              |
    | rows in several bins                  | shares of one vote, rounded down                 |

    Args:
        units: unit of each row, int64 (n,), each of 0..count-1 at least once; None: each row is a unit.

    Raises:
        ValueError: a unit has no row.
    """

    def __init__(self, units: Tensor | None) -> None:
        self._of_row = units
        if units is None:
            return
        self._rows = units.argsort(stable=True)
        self._sizes = units.clamp(min=0).bincount()
        if units.numel() and (int(units.min()) < 0 or not bool(self._sizes.all())):
            raise ValueError("units must be numbered from 0, and each must have a row")
        self._starts = self._sizes.cumsum(0) - self._sizes

    @property
    def people(self) -> bool:
        """Whether units have several rows, so that the number of rows is private."""
        return self._of_row is not None

    def draw(self, units: Tensor, randomness: Randomness) -> Tensor:
        """A random row of each of these units, int64 (n,), independently; on the CPU. Private."""
        if self._of_row is None:
            return units
        own = units.cpu()
        sizes = self._sizes[own]
        # uniform numbers lie in (0, 1]
        offsets = (randomness.uniform(len(own)) * sizes).ceil().long().clamp(min=1) - 1
        return self._rows[self._starts[own] + torch.minimum(offsets, sizes - 1)]

    def number(self, holds: Tensor) -> Tensor:
        """How many units have a row for which bool (n,) holds; float64 (1,). One unit changes it by at most 1."""
        holds = holds.detach().cpu().bool()
        if self._of_row is not None:
            holds = torch.zeros(len(self._sizes), dtype=torch.bool).index_fill_(0, self._of_row[holds], True)
        return holds.sum().double().view(1)

    def clipped_sum(self, parts: Iterable[Tensor], bound: float) -> Tensor:
        """Sum of each unit's mean row, clipped; float64 (d,). One unit changes it by at most `bound` in l2.

        Args:
            parts: all rows in their order, (m, ...) at a time, one row per image; there is a part, if only of 0 rows.
            bound: see `clipped_rows`.
        """
        if self._of_row is None:
            return pairwise_sum(clipped_rows(some, bound).sum(0) for part in parts for some in _split(part))
        sums, start = torch.zeros(0), 0
        for part in parts:
            flat = part.detach().cpu().double().reshape(len(part), math.prod(part.shape[1:]))
            if not start:
                sums = torch.zeros(len(self._sizes), flat.shape[1], dtype=torch.float64)
            sums.index_add_(0, self._of_row[start : start + len(part)], flat)
            start += len(part)
        sums.div_(self._sizes.view(-1, 1))
        return pairwise_sum(clipped_rows(some, bound, MOVED_MARGIN).sum(0) for some in _split(sums))

    def votes(self, found: Tensor, bins: int) -> Tensor:
        """Votes for each bin, float64 (bins,). One unit has one vote, so it changes them by at most 1 in l2.

        Args:
            found: int64 (n,), the bin of each row; a row in none of 0..bins-1 has no say.
            bins: number of bins.
        """
        found = found.detach().cpu()
        counted = (found >= 0) & (found < bins)
        if self._of_row is None:
            return torch.bincount(found[counted], minlength=bins).double()
        # pairs of unit and bin, and how many rows of the unit are in the bin
        pairs, rows = (self._of_row[counted] * bins + found[counted]).unique(return_counts=True)
        shares = rows * VOTE // self._sizes[pairs // bins]
        total = torch.zeros(bins, dtype=torch.int64).index_add_(0, pairs % bins, shares)
        return total.double() / VOTE


def _split(rows: Tensor) -> Sequence[Tensor]:
    """In parts, because rows are larger in float64."""
    parts: tuple[Tensor, ...] = rows.split(max(1, PART // max(1, math.prod(rows.shape[1:]))))
    return parts
