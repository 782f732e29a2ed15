"""Attempts: every start of a run, new or resumed, is charged for the steps that it takes itself.

The files in the run's folder are not trusted; the ledger with its key is. An attempt goes on from the checkpoints that
it finds, and each of its steps from there on is charged. Steps that are taken again, because a checkpoint was removed
or an older one put back, are therefore charged again. Its lines in the ledger are

    reserve   at its beginning: all that it may take, which the limit must allow
    spend     before the steps are taken: what it has begun at most, up to the next checkpoint
    settle    at an orderly end: what it took

What an attempt is charged for is its settle line if there is one; else, as long as it is the run's last attempt, its
reserve line; once there is a later one, its last spend line, and nothing if it has none: no step is taken before its
spend line is written. So a crash costs at most the steps up to the next checkpoint twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from dp_accounting import NoOpDpEvent

from rapid.dp.entry import Entry, Limit, Saved, Spent
from rapid.dp.ledger import Ledger, Transaction
from rapid.dp.releases import Release
from rapid.errors import PrivacyRefused


def counted(entries: Sequence[Entry], dataset: str, *, superseded: Collection[str] = ()) -> list[Entry]:
    """The line that each attempt on a data set is charged by, without attempts that took nothing.

    Each has the unit that its attempt was reserved for. Lines of rapid 0.2 and earlier have no attempts: the last one
    of each run counts.

    Args:
        entries: all lines of the ledger.
        dataset: identifier of the data set.
        superseded: names of runs that go on with another attempt than their last one.
    """
    attempts: dict[tuple[str, int], list[Entry]] = {}
    newest: dict[str, int] = {}
    for entry in entries:
        if entry.kind != "limit" and entry.dataset == dataset:
            attempts.setdefault((entry.run, entry.attempt), []).append(entry)
            newest[entry.run] = max(newest.get(entry.run, 0), entry.attempt)
    found = [
        (_counted_line(lines, may_go_on=attempt == newest[run] and run not in superseded), lines[0].unit)
        for (run, attempt), lines in attempts.items()
    ]
    return [line.model_copy(update={"unit": unit}) for line, unit in found if line is not None and line.releases]


def _counted_line(lines: Sequence[Entry], *, may_go_on: bool) -> Entry | None:
    """See the module; `lines` are those of one attempt."""
    last = lines[-1]
    if last.attempt == 0 or last.kind == "settle":
        return last
    if may_go_on:
        return lines[0]
    return last if last.kind == "spend" else None


def steps_of(releases: Iterable[Spent]) -> dict[tuple[str, float, float], int]:
    """Number of steps (with a band, of rounds) of several releases by name, noise multiplier and sample rate."""
    total: dict[tuple[str, float, float], int] = {}
    for release in releases:
        for key, steps in release.steps.items():
            total[key] = total.get(key, 0) + steps
    return total


class Attempt:
    """An attempt that was reserved: it writes its charge ahead of the steps, and settles it.

    Args:
        ledger: that holds its reserve line.
        dataset: identifier of the data set.
        run: name of the run.
        asked: requested epsilon and delta of the run.
        number: of the attempt.
        releases: of the budget.
        starts: the checkpoint of each release from which it goes on, by name.
    """

    def __init__(
        self,
        ledger: Ledger,
        dataset: str,
        run: str,
        asked: Limit,
        number: int,
        releases: Sequence[Release],
        starts: Mapping[str, Saved],
    ) -> None:
        self._ledger = ledger
        self._dataset, self._run, self._asked, self.number = dataset, run, asked, number
        self._releases = {release.name: release for release in releases}
        self._starts = {name: starts[name].step for name in self._releases}
        self._newest = dict(starts)
        self._noted = dict(starts)
        self._begun = dict(self._starts)
        self._ahead = dict(self._starts)

    def begin(self, name: str, step: int) -> None:
        """Before a step is taken: count it, and write the charge ahead if the last line does not cover it.

        Args:
            name: of the release.
            step: number of the step in its release, from 1.

        Raises:
            PrivacyRefused: the release has no such step, or see `allow`.
        """
        if step > self._ahead[name]:
            self.allow(name, step)
        self._begun[name] = max(step, self._begun[name])

    def allow(self, name: str, step: int) -> None:
        """Write ahead that steps up to `step` of a release may be taken, and the rest of its round; what was written
        before stays allowed.

        Raises:
            PrivacyRefused: a later attempt of the run has begun, or this one has ended.
            TamperedLedger: see `Ledger`.
        """
        # never less than before: a training that has become slower is charged ahead for fewer steps
        self._charge_ahead(self._ahead | {name: max(self._ahead[name], self._releases[name].spec.round_end(step))})

    def used_up(self, name: str) -> bool:
        """Whether the last line covers no further step of a release, and the release has more."""
        return self._begun[name] == self._ahead[name] < self._releases[name].spec.steps

    def begun(self, name: str) -> int:
        """Number of steps of a release that were begun, including those before this attempt."""
        return self._begun[name]

    def check_loaded(self, name: str, step: int) -> None:
        """Check that a checkpoint has the steps from which the attempt is charged.

        Raises:
            PrivacyRefused: it was exchanged since the attempt began.
        """
        if step != self._newest[name].step:
            raise PrivacyRefused(
                f"the checkpoint of '{name}' was exchanged while the run went on; start again with --resume"
            )

    def saved(self, checkpoint: Saved) -> None:
        """Note the newest checkpoint of a release, for the next line."""
        self._newest[checkpoint.name] = checkpoint

    def note(self) -> None:
        """Before anything else is computed from the newest checkpoints: see to it that a line has them.

        Raises:
            PrivacyRefused: see `allow`.
            TamperedLedger: see `Ledger`.
        """
        if self._newest != self._noted:
            self._charge_ahead(self._ahead)

    def settle(self) -> None:
        """Charge what was begun; nothing changes if a later attempt has begun, which closes this one.

        Raises:
            TamperedLedger: see `Ledger`.
        """
        with self._ledger.transaction() as transaction:
            if self._is_last(transaction.entries):
                self._add(transaction, "settle", self._begun)

    def _charge_ahead(self, ahead: dict[str, int]) -> None:
        with self._ledger.transaction() as transaction:
            if not self._is_last(transaction.entries):
                raise PrivacyRefused("this run goes on in another process, or has ended; nothing more is released here")
            self._add(transaction, "spend", ahead)
        self._ahead = ahead

    def _is_last(self, entries: Sequence[Entry]) -> bool:
        own = [entry for entry in entries if entry.run == self._run and entry.dataset == self._dataset]
        return bool(own) and own[-1].attempt == self.number and own[-1].kind != "settle"

    def _add(self, transaction: Transaction, kind: Literal["spend", "settle"], until: Mapping[str, int]) -> None:
        releases = spent_by(self._releases.values(), self._starts, until)
        this = (self._dataset, self._run, self.number)
        own = [entry for entry in transaction.entries if (entry.dataset, entry.run, entry.attempt) == this]
        check_rise(own, kind, releases, {name: release.spec.band for name, release in self._releases.items()})
        transaction.charge(
            kind,
            self._dataset,
            self._run,
            self._asked,
            releases,
            attempt=self.number,
            checkpoints=[place for place in self._newest.values() if place.step],
        )
        self._noted = dict(self._newest)


def spent_by(releases: Iterable[Release], start: Mapping[str, int], until: Mapping[str, int]) -> list[Spent]:
    """The steps behind `start` up to `until` of each release, for a line; without releases that have none."""
    parts = [Spent.of(release.name, release.event(until[release.name] - start[release.name])) for release in releases]
    return [part for part in parts if not isinstance(part.dp_event, NoOpDpEvent)]


def check_rise(
    own: Sequence[Entry],
    kind: Literal["spend", "settle"],
    releases: Sequence[Spent],
    bands: Mapping[str, int] | None = None,
) -> None:
    """Check a new line of an attempt against its earlier ones: what it is charged for only rises.

    Args:
        own: its lines, the reserve line first.
        kind: of the new line.
        releases: of the new line.
        bands: of each release, by name: so many steps of a checkpoint are one in the event; default: 1.

    Raises:
        PrivacyRefused: it would charge more than was reserved, or less than the lines before prove.
    """
    new, reserved = steps_of(releases), steps_of(own[0].releases)
    if any(steps > reserved.get(key, 0) for key, steps in new.items()):
        raise PrivacyRefused("the ledger was not charged for these steps; nothing more is released")
    begun = next((steps_of(line.releases) for line in reversed(own) if line.kind == "spend"), {})
    starts = {place.name: place.step for place in own[0].checkpoints}
    least = dict(begun)
    if kind == "settle":
        # a spend line reaches ahead; its checkpoints are what was surely taken
        taken: dict[str, int] = {}
        for place in (place for line in own[1:] for place in line.checkpoints):
            taken[place.name] = max(taken.get(place.name, 0), place.step - starts.get(place.name, 0))
        least = {key: -(-taken.get(key[0], 0) // (bands or {}).get(key[0], 1)) for key in begun}
    if any(new.get(key, 0) < steps for key, steps in least.items()):
        raise PrivacyRefused("less would be charged than was released; the charge stays as it is")
