"""Spending of private data sets and its limits.

A run is charged in full before its first step; `rapid.dp.attempts` tells what it is charged for later. Two figures tell
what all charges of a data set spend together:

    filter   by the Renyi filter of the limit (`rapid.dp.filter`): holds also if runs were chosen after the results of
             earlier ones were seen. It decides whether a run is within the limit.
    PRV      by numerical composition, as for a single run: tighter, and valid if all plans were fixed in advance.
             By Renyi divergences where there is private selection, which has no other accountant.

The first run on a data set has a plan that no result could influence. So it is within the limit also if PRV says so;
if the filter does not, no other run is admitted, even if it was stopped early: whether it goes on or another run begins
would be a choice by its results, which only the filter covers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dp_accounting import DpEvent

from rapid.dp.accounting import composition, prv_epsilon
from rapid.dp.attempts import Attempt, counted, spent_by, steps_of
from rapid.dp.entry import Entry, Limit, Saved, Spent
from rapid.dp.filter import RenyiFilter
from rapid.dp.ledger import Ledger
from rapid.dp.plans import common_plan, first_plan, releases_of, within
from rapid.dp.releases import MIN_DELTA, QuerySpec, Release
from rapid.dp.whole import WholeAttempt, may_go_on, saved_state
from rapid.errors import InputError, PrivacyRefused
from rapid.rounding import as_typed, rounded_up

TOLERANCE = 1e-6
"""Relative tolerance for the epsilon of numerical composition in another order."""
SMALLER = "ask for a smaller --epsilon, or raise the limit with rapid ledger limit"
AS_PLANNED = "this run goes on as it was planned: raise the limit with rapid ledger limit, or begin a smaller one"


@dataclass(frozen=True)
class Balance:
    """Spending of a data set.

    Attributes:
        dataset: its identifier.
        limit: on its spending; None if it was never set.
        runs: the line that each attempt is charged by, without attempts that took nothing.
        delta: of the limit, or else the smallest that a run requested.
        epsilon: spent or reserved, at `delta`, as it counts against the limit; without a limit, `epsilon_prv`.
        epsilon_filter: by the filter of the limit; None without a limit.
        epsilon_prv: by numerical composition.
        accountant: of `epsilon_prv`.
        one_plan: whether all charges belong to the plan of one run, so that `epsilon_prv` may count.
    """

    dataset: str
    limit: Limit | None
    runs: list[Entry]
    delta: float
    epsilon: float
    epsilon_filter: float | None
    epsilon_prv: float
    accountant: str
    one_plan: bool


def balance(entries: Sequence[Entry], dataset: str) -> Balance:
    """Spending of a data set according to the lines of a ledger.

    Raises:
        PrivacyRefused: an accountant gives no number.
    """
    limit, runs = limit_of(entries, dataset), counted(entries, dataset)
    asked = min((entry.delta for entry in entries if entry.dataset == dataset), default=1.0)
    # of an older rapid, below what its accountant can compute
    delta = limit.delta if limit else max(asked, MIN_DELTA)
    events, alone = _events(runs), not runs or common_plan(entries, dataset, runs) is not None
    filtered = None if limit is None else limit.spent(events)
    if filtered is not None and delta < MIN_DELTA:
        composed, accountant = filtered, "Renyi filter of the limit"
    else:
        composed, _, accountant = composition(events, delta)
    counting = composed if filtered is None else min(filtered, composed) if alone else filtered
    found = None if limit is None else Limit(limit.epsilon, limit.delta)
    return Balance(dataset, found, runs, delta, counting, filtered, composed, accountant, alone)


def balances(entries: Sequence[Entry]) -> list[Balance]:
    """Balances of all data sets, in the order in which they first appear."""
    return [balance(entries, dataset) for dataset in dict.fromkeys(entry.dataset for entry in entries)]


@dataclass(frozen=True)
class Charge:
    """The charge of one run.

    Attributes:
        ledger: where it is recorded.
        dataset: identifier of the data set.
        run: name of the run, the same when it is resumed.
        asked: requested epsilon and delta of the run alone.
        earlier: names of the run in folders from which this one was moved or copied.
        unit: whose data the run protects; empty: its lines do not tell.
    """

    ledger: Ledger
    dataset: str
    run: str
    asked: Limit
    earlier: tuple[str, ...] = ()
    unit: str = ""

    def begin(self, releases: Sequence[Release], starts: Mapping[str, Saved] | None = None) -> Attempt:
        """Charge an attempt with all that it may take, before its first step.

        Args:
            releases: of the budget.
            starts: the checkpoint of each release from which it goes on, by name; default: none has any.

        Raises:
            PrivacyRefused: the limit of the data set would be exceeded; nothing is charged.
            InputError: the run, or a checkpoint, belongs to another data set, or a checkpoint to another run.
            TamperedLedger: see `Ledger`.
        """
        starts = starts or {release.name: Saved(release.name, 0, "") for release in releases}
        first = {name: place.step for name, place in starts.items()}
        wanted = spent_by(releases, first, {release.name: release.spec.steps for release in releases})
        with self.ledger.transaction() as transaction:
            entries = transaction.entries
            self._check_owner(entries, starts)
            self._check_checkpoints(_lineage(entries, self.run, self.earlier), releases, starts)
            own = [entry for entry in entries if entry.run == self.run]
            number = 1 + max((entry.attempt for entry in own), default=0)
            limit = limit_of(entries, self.dataset)
            if limit is not None and wanted:
                charged = counted(entries, self.dataset, superseded=(self.run,))
                self._check_limit(limit, entries, charged, wanted)
            transaction.charge(
                "reserve",
                self.dataset,
                self.run,
                self.asked,
                wanted,
                attempt=number,
                checkpoints=[place for place in starts.values() if place.step],
                continues=self.earlier,
                unit=self.unit,
            )
        return Attempt(self.ledger, self.dataset, self.run, self.asked, number, releases, starts)

    def begin_whole(self, release: Spent, state: str = "") -> WholeAttempt:
        """Charge a release in one piece, before it begins; nothing if it goes on from where it stopped.

        Args:
            release: all of it.
            state: hash of the state that was found; empty if there is none.

        Raises:
            PrivacyRefused: the limit of the data set would be exceeded; nothing is charged.
            InputError: the run, or its state, belongs to another data set.
            TamperedLedger: see `Ledger`.
        """
        with self.ledger.transaction() as transaction:
            entries = transaction.entries
            found = saved_state(release.name, state)
            self._check_owner(entries, {release.name: found})
            own = [entry for entry in entries if entry.run == self.run]
            number = 1 + max((entry.attempt for entry in own), default=0)
            goes_on = may_go_on(own, release.name, state)
            wanted = [] if goes_on else [release]
            limit = limit_of(entries, self.dataset)
            if limit is not None and wanted:
                self._check_limit(limit, entries, counted(entries, self.dataset, superseded=(self.run,)), wanted)
            # `spend` follows at once: from here on it is charged, whatever happens
            for kind in ("reserve", "spend") if wanted else ("reserve",):
                transaction.charge(
                    kind,
                    self.dataset,
                    self.run,
                    self.asked,
                    wanted,
                    attempt=number,
                    checkpoints=[found] if goes_on else [],
                    unit=self.unit if kind == "reserve" else "",
                )
        return WholeAttempt(self.ledger, self.dataset, self.run, self.asked, number, release.name, wanted)

    def retaken(self, releases: Sequence[Release]) -> list[Spent]:
        """What all attempts of a run took, if its model may depend on steps that were taken twice; else nothing.

        Steps that a crash lost are no part of the model. Those of a checkpoint that was saved, and from which a later
        attempt did not go on, may be: what was computed from them, such as checkpoints of later releases, may be there.
        No release counts for less than was planned.

        Args:
            releases: of the budget, all of whose steps are taken.

        Raises:
            TamperedLedger: see `Ledger`.
        """
        own = _lineage(self.ledger.entries(), self.run, self.earlier)
        spent = releases_of(counted(own, self.dataset, superseded={entry.run for entry in own}))
        plan = [Spent.of(release.name, release.event()) for release in releases]
        if within(plan, spent) or not _lost_a_checkpoint(own):
            return []
        taken = steps_of(spent)
        for release, planned in zip(releases, plan, strict=True):
            missing = max((turns - taken.get(key, 0) for key, turns in planned.steps.items()), default=0)
            if missing > 0:
                spent.append(Spent.of(release.name, release.event(missing * release.spec.band)))
        return spent

    def settle_finished(self) -> None:
        """Settle a finished run that was killed before it could do so itself.

        Its last line tells what it took; all of its steps are taken, so it did not reach further.
        """
        with self.ledger.transaction() as transaction:
            own = [e for e in transaction.entries if e.run == self.run and e.dataset == self.dataset]
            if not own or own[-1].attempt == 0 or own[-1].kind == "settle":
                return
            last = own[-1]
            taken = list(last.releases) if last.kind == "spend" else []
            transaction.charge(
                "settle",
                self.dataset,
                self.run,
                self.asked,
                taken,
                attempt=last.attempt,
                checkpoints=last.checkpoints,
            )

    def _check_owner(self, entries: Sequence[Entry], starts: Mapping[str, Saved]) -> None:
        hashes = {place.sha256 for place in starts.values() if place.sha256}
        for entry in entries:
            known = entry.run == self.run or bool(hashes & {place.sha256 for place in entry.checkpoints})
            if known and entry.dataset != self.dataset and entry.kind != "limit":
                raise InputError(
                    "private", "differs from the images of the run in --out; give those images, or a new --out"
                )

    @staticmethod
    def _check_checkpoints(own: Sequence[Entry], releases: Sequence[Release], starts: Mapping[str, Saved]) -> None:
        """Refuse what another run saved: a recorded result that is not the run's own, from which later checkpoints may
        have been computed; and more steps than its lines allowed, as they are written before the steps are taken.
        """
        saved: dict[str, Saved] = {}
        for entry in own:
            # an attempt goes on from what it finds
            saved = ({} if entry.kind == "reserve" else saved) | {place.name: place for place in entry.checkpoints}
        most = _allowed(own, {release.name: release.spec.band for release in releases})
        for release in releases:
            known, found = saved.get(release.name), starts[release.name]
            replaced = isinstance(release.spec, QuerySpec) and known and known.sha256 != found.sha256
            if found.step and (replaced or found.step > most.get(release.name, 0)):
                problem = f"holds another checkpoints/{release.name}.pt than this run saved by its ledger"
                raise InputError("out", f"{problem}; restore the one or the other, or give a new folder")

    def _check_limit(
        self, limit: RenyiFilter, entries: Sequence[Entry], charged: Sequence[Entry], wanted: Sequence[Spent]
    ) -> None:
        events = [*_events(charged), *(release.dp_event for release in wanted)]
        names = {self.run, *self.earlier}
        plan = first_plan(entries, self.dataset, names)
        alone = all(entry.run in names for entry in charged)
        # steps that a copy took as well are more than was planned
        first = alone and within(plan or wanted, [*releases_of(charged), *wanted])
        if limit.admits(events):
            if not first and _by_composition_alone(limit, entries, self.dataset, charged):
                raise PrivacyRefused(_taken(limit))
            return
        fix = SMALLER if plan is None else AS_PLANNED
        if first and limit.delta >= MIN_DELTA:
            composed = prv_epsilon(events, limit.delta)
            if composed <= limit.epsilon * (1 + TOLERANCE):
                return
            raise PrivacyRefused(_refusal_of_first(limit, composed, fix))
        spent, together = limit.spent(_events(charged)), limit.spent(events)
        raise PrivacyRefused(_refusal(limit, spent, together, _prv_text(events, limit.delta), fix))


def set_limit(ledger: Ledger, dataset: str, limit: Limit) -> Balance:
    """Set the limit of a data set from now on; below the past spending, it allows nothing more.

    The order of its filter is fixed with it. The filter's guarantee is for limits that were chosen without regard to
    earlier results.
    """
    with ledger.transaction() as transaction:
        transaction.set_limit(dataset, limit, RenyiFilter.of(*limit).order)
        return balance(transaction.entries, dataset)


def limit_of(entries: Sequence[Entry], dataset: str) -> RenyiFilter | None:
    """The limit of a data set, with the order of its filter; None without one."""
    limits = [entry for entry in entries if entry.kind == "limit" and entry.dataset == dataset]
    return RenyiFilter.of(limits[-1].epsilon, limits[-1].delta, limits[-1].order) if limits else None


def _by_composition_alone(limit: RenyiFilter, entries: Sequence[Entry], dataset: str, charged: Sequence[Entry]) -> bool:
    """Whether one run was charged, whose whole plan is within the limit by numerical composition alone."""
    plan = common_plan(entries, dataset, charged) if charged else None
    if plan is None or limit.delta < MIN_DELTA:
        return False
    events = [release.dp_event for release in plan]
    return not limit.admits(events) and prv_epsilon(events, limit.delta) <= limit.epsilon * (1 + TOLERANCE)


def _lineage(entries: Sequence[Entry], run: str, names: Collection[str]) -> list[Entry]:
    """The lines of a run, and those under its earlier names up to where its own begin."""
    own = [entry for entry in entries if entry.run == run]
    first = own[0].number if own else len(entries)
    return [entry for entry in entries[:first] if entry.run in names] + own


def _allowed(own: Sequence[Entry], bands: Mapping[str, int]) -> dict[str, int]:
    """The step of each release up to which the lines of a run allowed it to go."""
    most: dict[str, int] = {}
    starts: dict[str, int] = {}
    for entry in own:
        if entry.kind == "reserve" and entry.attempt:
            starts = {place.name: place.step for place in entry.checkpoints}
            continue
        for (name, _, _), turns in steps_of(entry.releases).items():
            most[name] = max(most.get(name, 0), starts.get(name, 0) + turns * bands.get(name, 1))
    return most


def _lost_a_checkpoint(own: Sequence[Entry]) -> bool:
    """Whether an attempt of a run went on from less than an earlier line has as saved."""
    saved: dict[str, int] = {}
    for entry in own:
        steps = {place.name: place.step for place in entry.checkpoints}
        if entry.kind == "reserve" and any(steps.get(name, 0) < step for name, step in saved.items()):
            return True
        saved |= {name: max(step, saved.get(name, 0)) for name, step in steps.items()}
    return False


def _events(entries: Iterable[Entry]) -> list[DpEvent]:
    return [release.dp_event for release in releases_of(entries)]


def _prv_text(events: Sequence[DpEvent], delta: float) -> str:
    return rounded_up(prv_epsilon(events, delta)) if delta >= MIN_DELTA else "unknown"


def _taken(limit: RenyiFilter) -> str:
    return (
        f"the limit of this data set is epsilon {as_typed(limit.epsilon)} at delta {rounded_up(limit.delta)}, and all "
        "of it is reserved for the first run, even if that run was stopped; resume that run as it was planned, or "
        "raise the limit with rapid ledger limit"
    )


def _refusal_of_first(limit: RenyiFilter, composed: float, fix: str) -> str:
    return (
        f"the limit of this data set is epsilon {as_typed(limit.epsilon)} at delta {rounded_up(limit.delta)}, and this "
        f"first run would spend {rounded_up(composed)}; {fix}"
    )


def _refusal(limit: RenyiFilter, spent: float, together: float, composed: str, fix: str) -> str:
    return (
        f"the limit of this data set is epsilon {as_typed(limit.epsilon)} at delta {rounded_up(limit.delta)}; "
        f"{rounded_up(spent)} is spent or reserved, and this run would raise it to {rounded_up(together)}, which holds "
        f"even if runs are planned after seeing earlier results ({composed} if all plans had been fixed in advance); "
        f"{fix}"
    )
