"""Sums of clipped gradients on a GPU: the kernels are recorded for a few sizes, and replayed in each step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rapid.dp.gradients import BookKeeper
from rapid.dp.objective import Objective
from rapid.dp.padding import pad
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec
from rapid.precision import exact_float32
from rapid.recording import Capture, Recorder

SIZES = 8
"""Sizes to which a piece is padded; the last piece of a batch has any number of examples."""


class RecordedSum:
    """The sum of the clipped gradients of a piece of a batch; the same as that of `BookKeeper.clipped_sum`.

    Recording changes nothing in the guarantee: the recorded kernels clip each example and add them up, whatever the
    numbers are that they are replayed with. The book-keeper's checks are made when a size comes first, and when it is
    recorded.

    Args:
        keeper: of the network; all its layers have rules.
        objective: its arguments are positions, int64 (rows,).
        spec: multiplicity and clip norm.
        piece: most examples at a time.
        examples: number of examples that the padding is taken from; it counts as zero.
        randomness: of the padding, secret.
        autocast: run the network in bfloat16.
        capture: see `Recorder`.
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
        autocast: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self._objective, self._spec = objective, spec
        self._piece, self._examples, self._randomness = piece, examples, randomness
        self._step = -(-piece // SIZES)
        self._device = device = keeper.parameters[0].device

        # not a method: it would keep this object and its recordings alive
        def clipped(counted: Tensor, *prepared: Tensor) -> Sequence[Tensor]:
            total = keeper.empty_sum()
            keeper.clipped_sum(
                lambda: objective.computed(prepared, device, autocast=autocast),
                len(counted),
                spec.clip_norm,
                multiplicity=spec.multiplicity,
                counted=counted,
                into=lambda: keeper.split(total),
            )
            return [total]

        self._recorder = Recorder(clipped, self._device, capture)

    @property
    def recordings(self) -> int:
        """Number of sizes that are replayed."""
        return self._recorder.recordings

    def clipped_sum(self, positions: Tensor, counted: Tensor | None = None) -> Tensor:
        """The sum of the clipped gradients of examples, float64, all parameters in one vector. Private: without noise.

        Args:
            positions: int64 (n,), 1 <= n <= piece, on the CPU.
            counted: bool (n,), on the CPU; false for examples that add nothing; by default all count.
        """
        count = len(positions)
        size = min(self._piece, -(-count // self._step) * self._step)
        filled = pad(positions, self._examples, size, 1, self._randomness)
        used = filled.drawn
        if counted is not None:
            used[:count] &= counted
        with exact_float32():
            prepared = self._objective.prepare(filled.indices.repeat_interleave(self._spec.multiplicity))
        (total,) = self._recorder(used.to(self._device, non_blocking=True), *prepared)
        return total
