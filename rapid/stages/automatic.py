"""Settings that a method chooses by public facts, where the user gave no preset."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rapid.config.presets import AUTO, section_overrides
from rapid.config.sections import ImageSettings, MethodSettings
from rapid.data import ImageSet
from rapid.data.canvas import LARGEST_SIDE, Canvas
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method
from rapid.methods.base import Automatic, Resources
from rapid.ranks import Ranks
from rapid.rounding import as_typed
from rapid.training import RunFolder
from rapid.training.run_folder import REMEMBERED

WORK = 0.9
"""Share of the minutes of the private stage that gradients may take."""
MEASURED_SHARE, MEASURED_SECONDS = 0.01, 20.0
"""How long a gradient is measured: a share of the minutes, at most so many seconds. A program that disturbed a
shorter measurement cost half of the batch."""
BATCH = "private.expected_batch"
"""Who gives it has decided what the minutes are too short for."""
RESUMED = "the settings of the earlier run stay, for the time that it was given; another --minutes changes nothing"
"""What is told where a run is resumed, and nothing is chosen."""


class PrivateChoice(Protocol):
    """A request to choose settings of a private run by public facts and a measurement, before anything is spent."""

    def measured(self, settings: MethodSettings, device: torch.device, processes: int) -> float:
        """What is measured on the first rank, and told to the others; only where there is no earlier run."""

    def private_settings(
        self,
        settings: MethodSettings,
        facts: Any,
        epsilon: float,
        found: float,
        earlier: Mapping[str, Any],
        ranks: Ranks,
    ) -> MethodSettings:
        """The settings of the run; those of an earlier run in its folder, if there is one.

        Args:
            settings: as the user gave them.
            facts: `PublicFacts` of the private images.
            epsilon: of the whole run.
            found: what `measured` found; 0 if there is an earlier run.
            earlier: settings of an earlier run, see `earlier_settings`; empty if there is none.
            ranks: the processes that share the work; the first one tells what was chosen.

        Raises:
            InputError: settings that do not fit.
        """


@dataclass(frozen=True)
class AutomaticChoice:
    """A request to choose settings.

    Attributes:
        method: name of the method.
        overrides: what the user set, as `section.name=value`; it wins.
        minutes: of wall time that the stage may take.
        say: gets lines for the user: what was chosen and why.
        begun: when the stage began, by `time.monotonic`.
    """

    method: str
    overrides: tuple[str, ...]
    minutes: float
    say: Callable[[str], None]
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        check_minutes(self.minutes)

    def public_settings(
        self, sets: Sequence[ImageSet], out: Path, device: torch.device, processes: int = 1
    ) -> MethodSettings:
        """Settings of the public stage; those of an earlier run in `out`, if there is one.

        Raises:
            InputError: the method does not choose, too few images, or an override that does not fit.
        """
        chooser, tree = self._chooser(), earlier_settings(out, "build-kb")
        if REMEMBERED not in (RunFolder(out).earlier() or {}):
            resources = Resources(device, self.minutes, processes, self.begun)
            choice = chooser.choose_public(sets, resources, self._image)
            # a run with a preset may have begun here
            chosen, tree = ({} if tree else choice.settings), choice.settings | tree
            settings = apply_overrides({**tree, "preset": AUTO}, self.overrides)
            if chosen:
                self._tell([*choice.why, *replaced(chosen, settings.model_dump(mode="json"), self.overrides)])
            return settings
        self._tell([RESUMED])
        return apply_overrides({**tree, "preset": AUTO}, self.overrides)

    def canvas(self) -> Canvas:
        """How the public images are read before their settings are chosen; what the user set of `image` is known.

        Raises:
            InputError: an override that does not fit.
        """
        image = ImageSettings(**{"size": LARGEST_SIDE, "fit": "contain"} | self._image)
        return Canvas(image.size, max(image.size, LARGEST_SIDE), image.fit)

    @property
    def _image(self) -> dict[str, Any]:
        """What the user set of the section `image`."""
        return section_overrides("image", ImageSettings, self.overrides)

    def measured(self, settings: MethodSettings, device: torch.device, processes: int) -> float:
        """Number of per-example gradients for which the private stage has time, by a measurement."""
        least = min(MEASURED_SECONDS, MEASURED_SHARE * 60 * self.minutes)
        seconds = self._chooser().seconds_per_gradient(settings, device, least)
        # the time may be over already
        return max(1.0, WORK * Resources(device, self.minutes, processes, self.begun).seconds_left / seconds)

    def private_settings(
        self,
        settings: MethodSettings,
        facts: Any,
        epsilon: float,
        found: float,
        earlier: Mapping[str, Any],
        ranks: Ranks,
    ) -> MethodSettings:
        """By the gradients for which there is time; see `PrivateChoice`.

        Raises:
            InputError: as there; or there is time for so few that epsilon would be spent for nothing.
        """
        tree = dict(earlier)
        if not tree:
            choice = self._chooser().choose_private(settings, facts, epsilon, found, ranks.count)
            if choice.too_short and not any(one.partition("=")[0].strip() == BATCH for one in self.overrides):
                fix = f"give more, or choose a batch that takes longer by --set {BATCH}=N"
                raise InputError("minutes", f"{choice.too_short}; {fix}", as_typed(self.minutes))
            tree = settings.model_dump(mode="json")
            for name, section in choice.settings.items():
                tree[name] = tree[name] | section
            if ranks.first:
                wanted = apply_overrides(tree, self.overrides).model_dump(mode="json")
                self._tell([*choice.why, *replaced(choice.settings, wanted, self.overrides)])
        elif ranks.first:
            self._tell([RESUMED])
        return apply_overrides({**tree, "preset": AUTO}, self.overrides).for_private_run(self.overrides)

    def _chooser(self) -> Automatic:
        method: object = find_method(self.method)
        if not isinstance(method, Automatic):
            raise InputError("preset", f"{self.method} does not choose its settings; name a preset", AUTO)
        return method

    def _tell(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line)


def replaced(chosen: Mapping[str, Any], settings: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """A line that tells which of the chosen settings the user set to something else; none if there are none.

    Args:
        chosen: by `auto`.
        settings: after the overrides.
        overrides: as `section.name=value`.
    """
    told = []
    for path in dict.fromkeys(override.partition("=")[0].strip() for override in overrides):
        planned, value = (_at(path, tree) for tree in (chosen, settings))
        if planned is not None and not isinstance(planned, Mapping) and planned != value:
            told.append(f"{path}={_shown(value)} (chosen: {_shown(planned)})")
    return [f"set by --set, and not as planned above: {', '.join(told)}"] if told else []


def _at(path: str, tree: Any) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _shown(value: Any) -> str:
    return as_typed(value) if isinstance(value, float) else str(value)


def check_minutes(minutes: float) -> None:
    """Refuse minutes that are none.

    Raises:
        InputError: not a positive number.
    """
    if not 0 < minutes < 1e6:
        raise InputError("minutes", "must be a positive number of minutes, such as 20", minutes)


def earlier_settings(out: Path, command: str) -> dict[str, Any]:
    """Settings in the manifest of an earlier run of the command in this folder; empty if there is none.

    Both those that the run is bound to, and those that it only remembers.
    """
    manifest = RunFolder(out).earlier() or {}
    if manifest.get("command") != command:
        return {}
    found = (manifest.get(REMEMBERED), manifest.get("settings"))
    return {name: section for part in found if isinstance(part, dict) for name, section in part.items()}
