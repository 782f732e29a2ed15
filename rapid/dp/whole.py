"""Charges for a release in one piece, such as a private choice among settings.

What lies between its beginning and its end is never released, so it has no steps that could be charged one by one. Each
attempt at it is charged in full before it begins, and begins anew. The exception is an attempt that goes on from the
very state in which the last one stopped in order: both together are one uninterrupted attempt, and nothing more is
charged. The ledger knows that state by its hash, and only one attempt may go on from it. So a crash, a removed file or
a copy that is put back costs the whole charge again.

Its lines are those of `rapid.dp.attempts`; the `settle` line names the state.
"""

from __future__ import annotations

from collections.abc import Sequence

from rapid.dp.entry import Entry, Limit, Saved, Spent
from rapid.dp.ledger import Ledger
from rapid.errors import PrivacyRefused


class WholeAttempt:
    """An attempt that was charged.

    Args:
        ledger: that holds its lines.
        dataset: identifier of the data set.
        run: name of the run.
        asked: requested epsilon and delta of the run.
        number: of the attempt.
        name: of the release.
        charged: the release, or nothing if it goes on.

    Attributes:
        number: of the attempt in its run, from 1.
        goes_on: whether it goes on from the state of the one before.
    """

    def __init__(
        self, ledger: Ledger, dataset: str, run: str, asked: Limit, number: int, name: str, charged: Sequence[Spent]
    ) -> None:
        self._ledger, self._dataset, self._run, self._asked = ledger, dataset, run, asked
        self._name, self._charged = name, list(charged)
        self.number = number
        self.goes_on = not charged

    def settle(self, state: str) -> None:
        """Before anything is released, or at an orderly stop: name the state from which it may go on, once.

        Args:
            state: hash of all that the rest depends on, hexadecimal; empty: the release has failed, and is over.

        Raises:
            PrivacyRefused: another process has gone on with the run.
            TamperedLedger: see `Ledger`.
        """
        with self._ledger.transaction() as transaction:
            own = [entry for entry in transaction.entries if (entry.run, entry.dataset) == (self._run, self._dataset)]
            if not own or own[-1].attempt != self.number or own[-1].kind == "settle":
                raise PrivacyRefused("this run goes on in another process, or has ended; nothing more is released here")
            transaction.charge(
                "settle",
                self._dataset,
                self._run,
                self._asked,
                self._charged,
                attempt=self.number,
                checkpoints=[saved_state(self._name, state)] if state else [],
            )


def saved_state(name: str, state: str) -> Saved:
    """How a line names a state."""
    return Saved(name, 1, state)


def may_go_on(own: Sequence[Entry], name: str, state: str) -> bool:
    """Whether an attempt may go on from a state: the last one stopped there in order.

    Args:
        own: all lines of the run.
        name: of the release.
        state: its hash; empty if there is none.
    """
    return bool(state and own) and own[-1].kind == "settle" and own[-1].checkpoints == (saved_state(name, state),)
