"""Sums of clipped gradients on a GPU: the kernels are recorded for a few sizes, and replayed in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rapid.dp.gradients import BookKeeper
from rapid.dp.objective import Objective
from rapid.dp.padding import pad
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec
from rapid.recording import Capture, Recorder

SIZES = 8
"""Sizes to which a piece is padded; the last piece of a batch has any number of examples."""


class RecordedSum:
    """The sum of the clipped gradients of pieces of a batch; the same as `BookKeeper.clipped_sum` of each.

    Recording changes nothing in the guarantee: the recorded kernels clip each example and add them up, whatever the
    numbers are that they are replayed with. The book-keeper's checks are made each time that it records.

    Args:
        keeper: of the network.
        objective: its arguments are positions, int64 (rows,).
        spec: multiplicity and clip norm.
        piece: most examples at a time.
        examples: number of examples that the padding is taken from; it counts as zero.
        randomness: of the padding, secret.
        around: runs the losses, such as within autocast.
        split: a vector as views in the shapes of the parameters.
        capture: see `Recorder`.

    Attributes:
        total: the sum, float64, all parameters in one vector. Private: it has no noise.
    """

    def __init__(
        self,
        keeper: BookKeeper,
        objective: Objective,
        spec: DpSgdSpec,
        *,
        piece: int,
        examples: int,
        randomness: Randomness,
        around: Callable[[Callable[[], Tensor]], Tensor],
        split: Callable[[Tensor], list[Tensor]],
        capture: Capture | None = None,
    ) -> None:
        self._keeper, self._objective, self._spec = keeper, objective, spec
        self._examples, self._randomness = examples, randomness
        self._around = around
        first = keeper.parameters[0]
        self.total = torch.zeros(sum(p.numel() for p in keeper.parameters), dtype=torch.float64, device=first.device)
        self._parts: Sequence[Tensor] = split(self.total)
        self._step = -(-piece // SIZES)
        self._recorder = Recorder(self._sum, first.device, capture)

    def add(self, positions: Tensor, counted: Tensor) -> None:
        """Add the clipped gradients of examples to the sum.

        Args:
            positions: int64 (n,), n >= 1, on the CPU.
            counted: bool (n,), on the CPU; false for examples that add nothing.
        """
        count = len(positions)
        filled = pad(positions, self._examples, -(-count // self._step) * self._step, 1, self._randomness)
        used = filled.drawn
        used[:count] &= counted
        prepared = self._objective.prepare(filled.indices.repeat_interleave(self._spec.multiplicity))
        self._recorder(used.to(self.total.device, non_blocking=True), *prepared)

    def _sum(self, counted: Tensor, *prepared: Tensor) -> Sequence[Tensor]:
        self._keeper.clipped_sum(
            lambda: self._around(lambda: self._objective.compute(*prepared)),
            len(counted),
            self._spec.clip_norm,
            multiplicity=self._spec.multiplicity,
            counted=counted,
            into=lambda: list(self._parts),
        )
        return []
