"""The number of private steps that fit into some minutes, for any method that trains by DP-SGD.

The number must be known before the noise is calibrated, and nothing private may decide it. So the private stage is run
for a few steps on images of random pixels, with the settings of the real run and a ledger of its own that is thrown
away. Its steps take as long as those of the real run, because their work depends on the shapes alone.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid.config.sections import DpSgdSettings, ImageSettings, MethodSettings
from rapid.data.private import PrivateImages
from rapid.data.units import PeopleFrom
from rapid.dp.access import PrivateAccess
from rapid.dp.execution import Execution
from rapid.dp.rows import PrivateTensor, Rows
from rapid.errors import InputError, RapidError
from rapid.methods import apply_overrides, find_method
from rapid.methods.base import Paced
from rapid.progress import hidden
from rapid.ranks import Ranks
from rapid.stages.automatic import WORK, check_minutes
from rapid.stages.private import train_private_bundle
from rapid.training import Trainer

CLASSES = 10
"""Of the random images."""
BATCHES = 4
"""There are so many random images as this number of batches has."""
LEAST_SECONDS, LEAST_SHARE, LEAST_STEPS = 10.0, 0.05, 3
"""What is measured, after a first step that is not: the smaller of these, in seconds and as share of the minutes."""
PLANNED_STEPS = 1000
"""Of the measured run, which ends before."""
EPSILON, DELTA = 1.0, 1e-5
"""Of the measurement; the noise takes the same time at any scale."""
STEPS = "private.steps"
PERSON = "person"
"""Array of the random set."""


@dataclass(frozen=True)
class TimedSteps:
    """A request to take as many private steps as fit into some minutes; all other settings stay.

    Attributes:
        base: public bundle of the run; None without one.
        overrides: what the user set, as `section.name=value`.
        minutes: of wall time for the private stage.
        say: gets a line for the user.
        people: whether people are the units.
    """

    base: Path | None
    overrides: tuple[str, ...]
    minutes: float
    say: Callable[[str], None]
    people: bool = False

    def __post_init__(self) -> None:
        check_minutes(self.minutes)
        if any(override.partition("=")[0].strip() == STEPS for override in self.overrides):
            raise InputError("minutes", f"decides the number of steps, as --set {STEPS} does; leave one of them out")

    def measured(self, settings: MethodSettings, device: torch.device, processes: int) -> float:
        """Seconds of a step of all processes together.

        Raises:
            InputError: the method has no steps, or settings that do not fit the base.
        """
        _with_steps(settings)
        least = min(LEAST_SECONDS, LEAST_SHARE * 60 * self.minutes)
        self.say("private: measuring a step on random images ...")
        return seconds_per_step(self.base, settings, device, least, people=self.people) / processes

    def private_settings(
        self,
        settings: MethodSettings,
        facts: Any,
        epsilon: float,
        found: float,
        earlier: Mapping[str, Any],
        ranks: Ranks,
    ) -> MethodSettings:
        """With the steps that fit; see `rapid.stages.automatic.PrivateChoice`."""
        _with_steps(settings)
        if earlier:
            steps = earlier.get("private", {}).get("steps")
        else:
            steps = self._fitting(settings, found, ranks.count)
            if ranks.first:
                self.say(f"private: {steps:,} steps in {self.minutes:g} minutes, {found:.3g} s each as measured")
        return apply_overrides(settings.model_dump(mode="json"), [f"{STEPS}={steps}"])

    def _fitting(self, settings: MethodSettings, seconds: float, processes: int) -> int:
        """The number of steps of so many seconds that fit, beside the other work of the method, by the first process.

        Raises:
            InputError: none fits.
        """
        method, own = find_method(settings.method), _with_steps(settings)
        other = 0.0
        if isinstance(method, Paced):
            other = method.other_work(settings) / (own.expected_batch * own.multiplicity) * seconds * processes
        steps = int((WORK * 60 * self.minutes - other) / seconds)
        if steps < 1:
            needed = (other + seconds * LEAST_STEPS) / WORK / 60
            # epsilon would be spent on a network that is hardly trained
            takes = f"a step takes {seconds:.3g} s, as measured"
            if other:
                takes = f"all that comes beside DP-SGD takes about {other / 60:.1f} minutes"
            least = math.ceil(needed) if other else f"{needed:.2g}"
            raise InputError("minutes", f"are too few: {takes}; give at least {least}, or leave it out", self.minutes)
        return steps


def _with_steps(settings: MethodSettings) -> DpSgdSettings:
    """The private settings of a method that trains by DP-SGD; others have no steps to choose."""
    if not isinstance(settings.private, DpSgdSettings):
        raise InputError("minutes", f"{settings.method} has no steps of which there could be more or fewer")
    return settings.private


def seconds_per_step(
    base: Path | None,
    settings: MethodSettings,
    device: torch.device,
    least: float = LEAST_SECONDS,
    *,
    people: bool = False,
) -> float:
    """Mean time of a step of DP-SGD in the private stage, measured on random images, in one process.

    Args:
        base: public bundle; None for a run without one.
        settings: of the run; the `private` section is a `DpSgdSettings`.
        device: where to train.
        least: seconds that are measured, at least; and at least `LEAST_STEPS` steps.
        people: whether people are the units; here each has one image.

    Raises:
        InputError: settings that do not fit the base.
        Stopped: a stop was requested.
    """
    method: object = find_method(settings.method)
    typical = method.typical(settings) if isinstance(method, Paced) else settings
    typical = apply_overrides(typical.model_dump(mode="json"), [f"{STEPS}={PLANNED_STEPS}", "private.group_size=1"])
    assert isinstance(typical.private, DpSgdSettings)
    clocks: list[_ClockedAccess] = []

    def clocked(*arguments: Any, **options: Any) -> _ClockedAccess:
        clocks.append(_ClockedAccess(*arguments, least=least, **options))
        return clocks[0]

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), hidden():
        # advice to the owner of private images
        warnings.simplefilter("ignore", UserWarning)
        place = Path(folder)
        count = BATCHES * typical.private.noise_band * typical.private.expected_batch
        _save_random_images(place / "random.npz", max(CLASSES, count), settings.image)
        with contextlib.suppress(_Measured):
            train_private_bundle(
                base,
                PrivateImages(place / "random.npz", people=PeopleFrom(PERSON) if people else None),
                place / "out",
                typical,
                epsilon=EPSILON,
                delta=DELTA,
                device=device,
                resume=False,
                ledger=place / "ledger.jsonl",
                access=clocked,
            )
    if not clocks or not clocks[0].times:
        raise RapidError("the time of a step could not be measured: the method's main release is no training")
    return sum(clocks[0].times) / len(clocks[0].times)


class _Measured(Exception):
    """Ends a measurement."""


class _ClockedAccess(PrivateAccess):
    """Access to random images that takes the time of the steps of the main training, and then ends the run.

    Args:
        arguments: of `PrivateAccess`.
        least: seconds to measure.
        options: of `PrivateAccess`.

    Attributes:
        times: seconds of each step.
    """

    def __init__(self, *arguments: Any, least: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times: list[float] = []
        self._least = least

    def train(
        self,
        name: str,
        trainer: Trainer,
        losses: Rows,
        data: Sequence[PrivateTensor],
        *,
        execution: Execution | None = None,
        before_update: Callable[[], None] | None = None,
        between_steps: Callable[[int], None] | None = None,
    ) -> None:
        """As `PrivateAccess.train`, for a release with a share of epsilon; else until enough is measured."""
        main, begin = self.budget.release(name).spec.share is None, time.monotonic()

        def clock(step: int) -> None:
            nonlocal begin
            if between_steps is not None:
                between_steps(step)
            if not main:
                return
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.monotonic()
            if step > 1:
                self.times.append(now - begin)
            begin = now
            if len(self.times) >= LEAST_STEPS and sum(self.times) >= self._least:
                raise _Measured

        super().train(
            name, trainer, losses, data, execution=execution, before_update=before_update, between_steps=clock
        )


def _save_random_images(path: Path, count: int, form: ImageSettings) -> None:
    rng = np.random.default_rng(0)
    shape = (count, form.size, form.size) if form.channels == 1 else (count, form.size, form.size, 3)
    images = rng.integers(0, 256, shape, np.uint8)
    names = np.array([str(n) for n in range(CLASSES)])
    np.savez(path, images=images, labels=np.arange(count) % CLASSES, classes=names, person=np.arange(count))
