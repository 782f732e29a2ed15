"""How one epsilon is shared between what is made known of the private images: the overlap, the probe, the denoiser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from rapid.config.sections import PrivateSettings
from rapid.dp.accounting import Release, single_noise_multiplier
from rapid.dp.releases import Plan, check_budget
from rapid.errors import InputError

FINEST_OVERLAP = 1e-4
"""Share of the private images that the noise of the overlap check is never smaller than: some are alike by chance."""
SOLVED_AGAIN = 1e-3
"""By how much the epsilon of one plan may differ between machines, relatively."""


class Budget(NamedTuple):
    """The plans of one private stage."""

    overlap: Release | None
    """Of the overlap check, with sensitivity 1; None if it is not made."""
    probe: Plan | None
    """Of the probe's linear layer, by itself; None without a probe."""
    denoiser: Plan
    """Of the denoiser; its `others` hold what the two others release, so its epsilon is that of the whole stage."""

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "overlap": self.overlap,
            "probe": self.probe.model_dump(mode="json") if self.probe else None,
            "plan": self.denoiser.model_dump(mode="json"),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], epsilon: float) -> Self:
        """The budget of an earlier run, instead of one that is solved again and may differ in the last digit.

        Args:
            record: made by `record`, and read from JSON.
            epsilon: what the run was asked to spend at most.

        Raises:
            InputError: the record was altered: its parts do not fit together, or would spend more.
        """
        altered = InputError("--resume: checkpoints/plan.json was altered; restore it, or begin in a new folder")
        try:
            overlap = None if record["overlap"] is None else Release(*record["overlap"])
            probe = None if record["probe"] is None else Plan.model_validate(record["probe"])
            denoiser = Plan.model_validate(record["plan"])
        except (KeyError, TypeError, ValueError):
            raise altered from None
        if denoiser.others != _others(overlap, probe) or denoiser.epsilon() > epsilon * (1 + SOLVED_AGAIN):
            raise altered
        return cls(overlap, probe, denoiser)


def allot(settings: PrivateSettings, size: int, epsilon: float, delta: float, *, probed: bool) -> Budget:
    """Plans that together spend at most `epsilon` at `delta`, for one image.

    The overlap check would spend `overlap.share` of epsilon by itself, or less, and the probe `probe.share`. Releases
    compose like squares rather than like sums, so the noise of the denoiser rises by much less than these shares.

    Args:
        settings: expected batch, steps, clip norms and shares.
        size: number of private images.
        epsilon: of all together.
        delta: in (0, 1).
        probed: whether there is a probe to be trained.

    Raises:
        InputError: an argument out of range; the message names the command-line argument.
    """
    check_budget(epsilon, delta, size)
    overlap = None
    if settings.overlap.share > 0:
        noise = single_noise_multiplier(epsilon * settings.overlap.share, delta)
        overlap = Release(max(noise, 1.0, FINEST_OVERLAP * size), 1.0, 1)
    probe = None
    if probed and settings.probe.share > 0:
        probe = Plan.solve(
            epsilon=epsilon * settings.probe.share,
            delta=delta,
            dataset_size=size,
            expected_batch=size,
            steps=settings.probe.steps,
            clip_norm=settings.probe.clip_norm,
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
        others=_others(overlap, probe),
    )
    return Budget(overlap, probe, denoiser)


def _others(overlap: Release | None, probe: Plan | None) -> tuple[Release, ...]:
    return (*([overlap] if overlap else []), *(probe.releases() if probe else []))
