"""What a private data set has cost, and whether it may cost more: the rules for reading the lines of a ledger.

The releases of all runs on a data set are composed numerically, by the accountant of the single run; their epsilons are
not added up. A run is charged in full before its first step. A run that stops in an orderly way is charged for the
steps that it took until it is resumed; a run that crashes stays charged in full.
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
    """What a data set has cost.

    Attributes:
        dataset: its account.
        limit: what it may cost; None if that was never set.
        runs: the last line of each run, without those that made nothing known.
        delta: that of the limit, or else the smallest that a run was asked for.
        epsilon: spent or reserved, at `delta`.
    """

    dataset: str
    limit: Limit | None
    runs: list[Entry]
    delta: float
    epsilon: float


def balance(entries: Sequence[Entry], dataset: str) -> Balance:
    """What a data set has cost by the lines of a ledger."""
    limit, runs = _limit(entries, dataset), _runs(entries, dataset)
    delta = limit.delta if limit else min((e.delta for e in entries if e.dataset == dataset), default=1.0)
    return Balance(dataset, limit, list(runs.values()), delta, _epsilon(_all(runs.values()), delta))


def balances(entries: Sequence[Entry]) -> list[Balance]:
    """Those of all data sets, in the order in which they were first seen."""
    return [balance(entries, dataset) for dataset in dict.fromkeys(entry.dataset for entry in entries)]


@dataclass(frozen=True)
class Charge:
    """The account of one run.

    Attributes:
        ledger: where it is kept.
        dataset: the account of the data set.
        run: name of the run, the same when it is resumed.
        asked: epsilon and delta of the run alone.
    """

    ledger: Ledger
    dataset: str
    run: str
    asked: Limit

    def reserve(self, releases: Sequence[Spent]) -> None:
        """Charge the run with all that it may make known, before its first step.

        Raises:
            PrivacyRefused: the data set would cost more than its limit; nothing is charged.
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
        """Charge the run with what it has made known; it may be resumed, and is then reserved anew."""
        taken = tuple(release for release in releases if not isinstance(release.dp_event, NoOpDpEvent))
        with self.ledger.transaction() as transaction:
            own = [e for e in transaction.entries if e.dataset == self.dataset and e.run == self.run]
            if own and own[-1].kind == "settle" and own[-1].releases == taken:
                return
            transaction.add("settle", self.dataset, self.run, self.asked, list(taken))


def set_limit(ledger: Ledger, dataset: str, limit: Limit) -> Balance:
    """Set what a data set may cost from now on; lower than what was spent means that nothing more is."""
    with ledger.transaction() as transaction:
        transaction.add("limit", dataset, "", limit, [])
        return balance(transaction.entries, dataset)


def _limit(entries: Sequence[Entry], dataset: str) -> Limit | None:
    limits = [Limit(e.epsilon, e.delta) for e in entries if e.kind == "limit" and e.dataset == dataset]
    return limits[-1] if limits else None


def _runs(entries: Sequence[Entry], dataset: str) -> dict[str, Entry]:
    """The last line of each run that made something known, or may."""
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
