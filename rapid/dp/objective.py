"""Losses of private examples in two parts: what is prepared, and what the trained network makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Objective(ABC):
    """Losses of rows: row i depends only on row i of each argument.

    Called as a function it returns the losses of rows, float (n,).

    Attributes:
        recordable: whether `compute` keeps what is said there.
    """

    recordable: bool = True

    @abstractmethod
    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        """What the losses are computed from, n rows each, on the device of the network, without gradients.

        Everything that the trained network has no part in: draws, views, retrieval, copies to the device. Some of the
        rows may be padding, which counts as zero.

        Args:
            rows: of the private tensors, (n, ...) each.
        """

    @abstractmethod
    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses, float (n,), of what was prepared, by the network.

        By the shapes alone it always does the same, and all of it on the device: on a GPU its kernels are recorded, and
        what it reads in Python stays as it was then. Tensors that it reads must stay where they are and outlive the
        training; see `rapid.recording.Recorder`.
        """

    def __call__(self, *rows: Tensor) -> Tensor:
        """Losses of rows, float (n,)."""
        return self.compute(*self.prepare(*rows))

    def computed(self, prepared: Sequence[Tensor], device: torch.device, *, autocast: bool) -> Tensor:
        """`compute` with a network on a device, in bfloat16 if `autocast` says so."""
        # without autocast's cache each use of a weight appears in the graph, where the book-keeper counts it
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
            return self.compute(*prepared)


class Whole(Objective):
    """Losses that are in one part, such as those of an audit: a function of rows, never recorded."""

    recordable = False

    def __init__(self, losses: Callable[..., Tensor]) -> None:
        self._losses = losses

    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        """The rows."""
        return rows

    def compute(self, *prepared: Tensor) -> Tensor:
        """See `Objective`."""
        return self._losses(*prepared)


def as_objective(losses: Callable[..., Tensor]) -> Objective:
    """An objective as it is, any other function of rows as one that is not recorded."""
    return losses if isinstance(losses, Objective) else Whole(losses)


class Selected(Objective):
    """An objective of positions: of the rows that are taken there.

    Args:
        objective: of the rows.
        take: positions int64 (n,) -> the rows of each private tensor.
    """

    def __init__(self, objective: Objective, take: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._objective, self._take = objective, take
        self.recordable = objective.recordable

    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        """See `Objective`; of one tensor, the positions."""
        return self._objective.prepare(*self._take(*rows))

    def compute(self, *prepared: Tensor) -> Tensor:
        """See `Objective`."""
        return self._objective.compute(*prepared)
