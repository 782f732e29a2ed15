"""Spending of private data sets and its limits: the rules for reading the lines of a ledger.

The releases of all runs on a data set are composed numerically, by the same accountant as a single run's; their
epsilons are not added up. A run is charged in full before its first step. A run that stops in an orderly way is charged
for the steps that it took, until it is resumed; a run that crashes stays charged in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dp_accounting import NoOpDpEvent

from rapid.dp.accounting import prv_epsilon
from rapid.dp.ledger import Entry, Ledger, Limit, Spent
from rapid.errors import PrivacyRefused

TOLERANCE = 1e-6
"""Numerical composition in another order may differ in the last digits."""


@dataclass(frozen=True)
class Balance:
    """Spending of a data set.

    Attributes:
        dataset: its identifier.
        limit: on its spending; None if it was never set.
        runs: the last line of each run, without runs that released nothing.
        delta: of the limit, or else the smallest that a run requested.
        epsilon: spent or reserved, at `delta`.
    """

    dataset: str
    limit: Limit | None
    runs: list[Entry]
    delta: float
    epsilon: float


def balance(entries: Sequence[Entry], dataset: str) -> Balance:
    """Spending of a data set according to the lines of a ledger."""
    limit, runs = _limit(entries, dataset), _runs(entries, dataset)
    delta = limit.delta if limit else min((e.delta for e in entries if e.dataset == dataset), default=1.0)
    return Balance(dataset, limit, list(runs.values()), delta, _epsilon(_all(runs.values()), delta))


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
    """

    ledger: Ledger
    dataset: str
    run: str
    asked: Limit

    def reserve(self, releases: Sequence[Spent]) -> None:
        """Charge the run with all its planned releases, before its first step.

        Raises:
            PrivacyRefused: the limit of the data set would be exceeded; nothing is charged.
            TamperedLedger: see `Ledger`.
        """
        wanted = tuple(releases)
        with self.ledger.transaction() as transaction:
            runs = _runs(transaction.entries, self.dataset)
            if self.run in runs and runs[self.run].releases == wanted:
                return
            limit = _limit(transaction.entries, self.dataset)
            others = _all(entry for run, entry in runs.items() if run != self.run)
            if limit is not None:
                together = _epsilon([*others, *wanted], limit.delta)
                if together > limit.epsilon * (1 + TOLERANCE):
                    raise PrivacyRefused(_refusal(limit, _epsilon(others, limit.delta), together))
            transaction.add("reserve", self.dataset, self.run, self.asked, list(wanted))

    def settle(self, releases: Sequence[Spent]) -> None:
        """Charge the run with what it has released; a run that is resumed is reserved anew."""
        taken = tuple(release for release in releases if not isinstance(release.dp_event, NoOpDpEvent))
        with self.ledger.transaction() as transaction:
            own = [e for e in transaction.entries if e.dataset == self.dataset and e.run == self.run]
            if own and own[-1].kind == "settle" and own[-1].releases == taken:
                return
            transaction.add("settle", self.dataset, self.run, self.asked, list(taken))


def set_limit(ledger: Ledger, dataset: str, limit: Limit) -> Balance:
    """Set the limit of a data set from now on; below the past spending, it allows nothing more."""
    with ledger.transaction() as transaction:
        transaction.add("limit", dataset, "", limit, [])
        return balance(transaction.entries, dataset)


def _limit(entries: Sequence[Entry], dataset: str) -> Limit | None:
    limits = [Limit(e.epsilon, e.delta) for e in entries if e.kind == "limit" and e.dataset == dataset]
    return limits[-1] if limits else None


def _runs(entries: Sequence[Entry], dataset: str) -> dict[str, Entry]:
    """The last line of each run that has released something, or may."""
    runs = {e.run: e for e in entries if e.kind != "limit" and e.dataset == dataset}
    return {run: entry for run, entry in runs.items() if entry.releases}


def _all(entries: Iterable[Entry]) -> list[Spent]:
    return [release for entry in entries for release in entry.releases]


def _epsilon(releases: Iterable[Spent], delta: float) -> float:
    return prv_epsilon([release.dp_event for release in releases], delta)


def _refusal(limit: Limit, spent: float, together: float) -> str:
    return (
        f"the limit of this data set is epsilon {limit.epsilon:g} at delta {limit.delta:.2g}; {spent:.3f} is spent or "
        f"reserved, and with this run it would be {together:.3f}; ask for a smaller --epsilon, or raise the limit by "
        "rapid ledger limit"
    )
