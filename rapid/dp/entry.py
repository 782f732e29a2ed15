"""A line of the ledger: a limit, or what an attempt is charged for."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from dp_accounting import DpEvent
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rapid.dp.events import check_known, event_from_json, event_to_json, has_selection, poisson_gaussian_steps

Kind = Literal["limit", "reserve", "spend", "settle"]
"""Kind of a line; see `Entry`."""


class Spent(NamedTuple):
    """One release of a run, as recorded in a line."""

    name: str
    """Name of the release; empty in lines of rapid 0.1, which had no names."""
    event: dict[str, Any]
    """Its privacy event; see `rapid.dp.events.event_to_json`."""

    @classmethod
    def of(cls, name: str, event: DpEvent) -> Spent:
        """A release with this event."""
        return cls(name, event_to_json(event))

    @property
    def dp_event(self) -> DpEvent:
        """The event, for an accountant."""
        return event_from_json(self.event)

    @property
    def steps(self) -> dict[tuple[str, float, float], int]:
        """Number of steps by name, noise multiplier and sample rate; private selection is one step of its own name."""
        if has_selection(self.dp_event):
            return {(f"{self.name} {json.dumps(self.event, sort_keys=True)}", 0.0, 0.0): 1}
        found: dict[tuple[str, float, float], int] = {}
        for noise_multiplier, sample_rate, steps in poisson_gaussian_steps(self.dp_event):
            key = (self.name, noise_multiplier, sample_rate)
            found[key] = found.get(key, 0) + steps
        return found


class Saved(NamedTuple):
    """A checkpoint of a release."""

    name: str
    """Name of the release."""
    step: int
    """Number of steps that it has; 0 without a checkpoint."""
    sha256: str
    """Of the file, hexadecimal; empty without a checkpoint."""


class Entry(BaseModel):
    """One line of the ledger.

    Attributes:
        number: of the line, from 0.
        time: when it was written, UTC.
        kind: `limit` sets the limit of the data set, and the last one counts. The others charge an attempt: `reserve`
            for all that it may take, before its first step; `spend` for the steps up to its next checkpoint at most,
            before they are taken; `settle` for what it took, at its end. `rapid.dp.attempts` tells which line counts.
        dataset: identifier of the data set.
        run: the charged run; empty for a limit.
        epsilon: of a limit; for a run, the requested epsilon.
        delta: at which `epsilon` holds.
        releases: of the attempt; empty for a limit.
        attempt: number of the attempt in its run, from 1; 0 in lines of rapid 0.2 and earlier, which had none.
        checkpoints: from which the attempt goes on (`reserve`), or its newest ones.
        order: of a limit, the Renyi order of its filter; None in lines of rapid 0.2 and earlier.
        continues: of a reserve line: earlier names of the run, whose folder was moved or copied.
        unit: of a reserve line: whose data the run protects, `rapid.data.units`; empty in lines that do not tell.
        mac: keyed hash; see `rapid.dp.ledger`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    time: str
    kind: Kind
    dataset: str
    run: str
    epsilon: float
    delta: float
    releases: tuple[Spent, ...]
    attempt: int = 0
    checkpoints: tuple[Saved, ...] = ()
    order: int | None = Field(None, ge=2)
    continues: tuple[str, ...] = ()
    unit: str = ""
    mac: str

    @field_validator("releases", mode="before")
    @classmethod
    def _of_rapid_0_1(cls, releases: Any) -> Any:
        """Lines of rapid 0.1 hold [noise_multiplier, sample_rate, steps] instead of [name, event]."""
        if not isinstance(releases, list):
            return releases
        return [
            ("", event_to_json(event_from_json(one))) if isinstance(one, list) and len(one) == 3 else one
            for one in releases
        ]

    @field_validator("releases")
    @classmethod
    def _can_be_composed(cls, releases: tuple[Spent, ...]) -> tuple[Spent, ...]:
        """Reject releases that the accountants cannot read: they would be spent without being counted."""
        for release in releases:
            check_known(release.dp_event)
        return releases


class Limit(NamedTuple):
    """Limit on the total spending of a data set."""

    epsilon: float
    delta: float
