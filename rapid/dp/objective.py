"""Losses of private examples in two parts: what is prepared, and what the trained network makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor


class Objective(ABC):
    """Losses of rows: row i depends only on row i of each argument.

    Called as a function it returns the losses of rows, float (n,).
    """

    @abstractmethod
    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        """What the losses are computed from, n rows each, on the device of the network.

        Everything that the trained network has no part in: draws, views, retrieval, copies to the device.

        Args:
            rows: of the private tensors, (n, ...) each.
        """

    @abstractmethod
    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses, float (n,), of what was prepared, by the network.

        By the shapes alone it always does the same, and all of it on the device; see `rapid.recording.Recorder`.
        """

    def __call__(self, *rows: Tensor) -> Tensor:
        """Losses of rows, float (n,)."""
        return self.compute(*self.prepare(*rows))


class Selected(Objective):
    """An objective of positions: of the rows that are taken there.

    Args:
        objective: of the rows.
        take: positions int64 (n,) -> the rows of each private tensor.
    """

    def __init__(self, objective: Objective, take: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._objective, self._take = objective, take

    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        """See `Objective`; of one tensor, the positions."""
        return self._objective.prepare(*self._take(*rows))

    def compute(self, *prepared: Tensor) -> Tensor:
        """See `Objective`."""
        return self._objective.compute(*prepared)
