"""How one epsilon is shared between what is trained privately: the judge's linear layer, and the denoiser."""

from __future__ import annotations

from typing import NamedTuple

from rapid.config import PrivateSettings
from rapid.private.plan import Plan


class Budget(NamedTuple):
    """The plans of one private stage."""

    judge: Plan | None
    """Of the judge's linear layer, by itself; None without a judge."""
    denoiser: Plan
    """Of the denoiser; its `others` hold what the judge releases, so its epsilon is that of the whole stage."""


def allot(settings: PrivateSettings, size: int, epsilon: float, delta: float, *, judged: bool) -> Budget:
    """Plans that together spend at most `epsilon` at `delta`, for one image.

    The judge would spend `judge.share` of epsilon by itself. Releases compose like squares rather than like sums, so
    the noise of the denoiser rises by much less than that share.

    Args:
        settings: expected batch, steps, clip norms and shares.
        size: number of private images.
        epsilon: of all together.
        delta: in (0, 1).
        judged: whether there is a judge to be trained.

    Raises:
        InputError: an argument out of range; the message names the command-line argument.
    """
    judge = None
    if judged and settings.judge.share > 0:
        judge = Plan.solve(
            epsilon=epsilon * settings.judge.share,
            delta=delta,
            dataset_size=size,
            expected_batch=size,
            steps=settings.judge.steps,
            clip_norm=settings.judge.clip_norm,
            group_size=settings.group_size,
        )
    denoiser = Plan.solve(
        epsilon=epsilon,
        delta=delta,
        dataset_size=size,
        expected_batch=settings.expected_batch,
        steps=settings.steps,
        clip_norm=settings.clip_norm,
        multiplicity=settings.multiplicity,
        group_size=settings.group_size,
        others=judge.releases() if judge else (),
    )
    return Budget(judge, denoiser)
