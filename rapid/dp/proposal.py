"""What a private training would cost, before anything is spent: plans side by side, so that a user picks well."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rapid.config.sections import PrivateSettings, Settings
from rapid.dp.budget import allot
from rapid.dp.releases import Plan
from rapid.dp.training import select_trainable
from rapid.nn import Denoiser

SCALES = (0.25, 0.5, 1, 2, 4)
"""Batches that are compared by default, in units of `private.expected_batch`, at equal gradient computations."""
EXPLANATION = """\
signal/noise: for one step, the norm of the sum if all clipped gradients of an expected batch agree, over that of the
noise; a training averages over its steps: "x sqrt(steps)". Larger is better. Equal gradients take about equal time."""


@dataclass(frozen=True)
class Proposal:
    """A plan, and the epsilon that it was made for.

    Attributes:
        epsilon_wanted: upper limit of epsilon for one image.
        plan: what would be spent.
        parameters: number of trained parameters.
    """

    epsilon_wanted: float
    plan: Plan
    parameters: int

    def row(self) -> dict[str, Any]:
        """The numbers of the plan by name."""
        plan = self.plan
        row: dict[str, Any] = {
            "epsilon_wanted": self.epsilon_wanted,
            "expected_batch": plan.expected_batch,
            "steps": plan.steps,
            "epochs": plan.sample_rate * plan.steps,
            "noise_multiplier": plan.noise_multiplier,
            "epsilon_prv": plan.epsilon(),
            "epsilon_rdp": plan.epsilon_rdp(),
        }
        if plan.group_size > 1:
            row["epsilon_group"] = plan.epsilon_group()
        step = plan.signal_to_noise(self.parameters)
        return row | {
            "signal_to_noise": step,
            "signal_to_noise_all": step * math.sqrt(plan.steps),
            "gradient_computations": plan.gradient_computations(),
        }


def choices(
    settings: PrivateSettings, size: int, batches: Sequence[int], steps: Sequence[int]
) -> list[tuple[int, int]]:
    """Expected batches and numbers of steps to compare.

    Args:
        settings: what is not given follows from its expected batch and steps, at equal gradient computations.
        size: N, which no batch of the default exceeds.
        batches: expected batches to try.
        steps: numbers of steps to try; with each of `batches`, if there are any.

    Returns:
        (expected_batch, steps) in ascending order.
    """
    if batches and steps:
        return sorted({(batch, count) for batch in batches for count in steps})
    work = settings.expected_batch * settings.steps
    if steps:
        return sorted({(max(1, min(size, round(work / count))), count) for count in steps})
    chosen = batches or [max(1, min(size, round(settings.expected_batch * scale))) for scale in SCALES]
    return sorted({(batch, max(1, round(work / batch))) for batch in chosen})


def propose(
    settings: PrivateSettings,
    size: int,
    delta: float,
    epsilons: Sequence[float],
    pairs: Sequence[tuple[int, int]],
    parameters: int,
    *,
    probed: bool,
) -> Iterator[Proposal]:
    """The denoiser's plan with the least noise for each epsilon and (expected_batch, steps); each takes a second.

    Raises:
        InputError: an argument out of range.
    """
    for epsilon in epsilons:
        for batch, steps in pairs:
            chosen = settings.model_copy(update={"expected_batch": batch, "steps": steps})
            budget = allot(chosen, size, epsilon, delta, probed=probed)
            yield Proposal(epsilon, budget.denoiser, parameters)


def count_trained(settings: Settings, classes: int) -> int:
    """Number of parameters that `train-private` would train with these settings."""
    with torch.device("meta"):
        denoiser = Denoiser.build(settings, classes)
    select_trainable(denoiser, settings.private.trainable)
    return sum(p.numel() for p in denoiser.parameters() if p.requires_grad)


def table(rows: Sequence[dict[str, Any]], group_size: int) -> str:
    """Rows of `Proposal.row` as aligned text."""
    columns: list[tuple[str, str, str]] = [
        ("epsilon_wanted", "epsilon", "g"),
        ("expected_batch", "batch", ",d"),
        ("steps", "steps", ",d"),
        ("epochs", "epochs", ".1f"),
        ("noise_multiplier", "noise_multiplier", ".4g"),
        ("epsilon_prv", "by PRV", ".3f"),
        ("epsilon_rdp", "by RDP", ".3f"),
        ("epsilon_group", f"of {group_size} images", ".3g"),
        ("signal_to_noise", "signal/noise", ".3g"),
        ("signal_to_noise_all", "x sqrt(steps)", ".3g"),
        ("gradient_computations", "gradients", ",d"),
    ]
    shown = [column for column in columns if column[0] in rows[0]]
    cells = [[title for _, title, _ in shown], *([format(row[name], f) for name, _, f in shown] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
