"""Proposals for a private training: budgets side by side, computed before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rapid.config.sections import DpSgdSettings
from rapid.data.units import ONE_IMAGE
from rapid.dp.budget import Budget, calibrate
from rapid.dp.releases import DpSgdSpec, QuerySpec

SCALES = (0.25, 0.5, 1, 2, 4)
"""Expected batches compared by default, in units of `private.expected_batch`, at equal gradient computations."""
EXPLANATION = """\
signal/noise: for one step, the norm of the sum if all clipped gradients of an expected batch agree, over that of the
noise; a training averages over its steps: "x sqrt(steps)". Larger is better. Equal gradients take about equal time."""
Specs = Callable[[int, int], Sequence[DpSgdSpec | QuerySpec]]
"""(expected_batch, steps) -> the releases of a private stage with these numbers."""


@dataclass(frozen=True)
class Proposal:
    """A budget, and the epsilon for which it was calibrated.

    Attributes:
        epsilon_wanted: upper limit of epsilon for one unit.
        budget: what would be spent.
        parameters: number of trained parameters.
    """

    epsilon_wanted: float
    budget: Budget
    parameters: int

    def row(self) -> dict[str, Any]:
        """The numbers of the main release by name."""
        main = self.budget.main
        spec = main.spec
        rate = spec.sample_rate / spec.band
        batch = round(rate * spec.dataset_size)
        row: dict[str, Any] = {
            "epsilon_wanted": self.epsilon_wanted,
            "expected_batch": batch,
            "steps": spec.steps,
            "epochs": rate * spec.steps,
            "noise_multiplier": main.noise_multiplier,
            "epsilon_prv": self.budget.spent,
            "epsilon_rdp": self.budget.spent_rdp,
        }
        if self.budget.group_size > 1:
            row["epsilon_group"] = self.budget.spent_group
        step = main.signal_to_noise(self.parameters)
        draws = spec.multiplicity if isinstance(spec, DpSgdSpec) else 1
        return row | {
            "signal_to_noise": step,
            "signal_to_noise_all": step * math.sqrt(spec.steps),
            "gradient_computations": batch * spec.steps * draws,
        }


def choices(settings: DpSgdSettings, size: int, batches: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
    """Expected batches and numbers of steps to compare.

    Args:
        settings: missing values follow from its expected batch and steps, at equal gradient computations.
        size: N; default batches do not exceed it, all batches of a noise band together.
        batches: expected batches to try.
        steps: numbers of steps to try, each with each of `batches`, if there are any.

    Returns:
        (expected_batch, steps) in ascending order.
    """
    if batches and steps:
        return sorted({(batch, count) for batch in batches for count in steps})
    work, largest = settings.expected_batch * settings.steps, size // settings.noise_band
    if steps:
        return sorted({(max(1, min(largest, round(work / count))), count) for count in steps})
    chosen = batches or [max(1, min(largest, round(settings.expected_batch * scale))) for scale in SCALES]
    return sorted({(batch, max(1, round(work / batch))) for batch in chosen})


def propose(
    specs: Specs,
    delta: float,
    epsilons: Sequence[float],
    pairs: Sequence[tuple[int, int]],
    *,
    parameters: int,
    group_size: int = 1,
    unit: str = ONE_IMAGE,
) -> Iterator[Proposal]:
    """The budget with the least noise for each epsilon and (expected_batch, steps); each takes a second.

    Args:
        specs: the planned releases.
        delta: in (0, 1).
        epsilons: to compare.
        pairs: expected batches and steps to compare.
        parameters: number of trained parameters.
        group_size: images of one person, for whom epsilon is reported too.
        unit: of the guarantee.

    Raises:
        InputError: an argument out of range.
    """
    for epsilon in epsilons:
        for batch, steps in pairs:
            budget = calibrate(specs(batch, steps), epsilon=epsilon, delta=delta, group_size=group_size, unit=unit)
            yield Proposal(epsilon, budget, parameters)
