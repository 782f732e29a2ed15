"""Plans: what a run reserved before any result on its data set was known.

Numerical composition may count only for releases whose mechanisms were all fixed in advance: those of the plan of the
first run. There it counts in whatever order they are made, in however many attempts, and under whichever names of the
run, because all of them together are at most the plan (concurrent composition, Vadhan and Zhang 2023). What is taken
twice, such as by a copy of the folder, is in the plan only once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rapid.dp.attempts import steps_of
from rapid.dp.entry import Entry, Spent


def earlier_names(entries: Sequence[Entry], run: str) -> set[str]:
    """Other names of a run, under which it began in folders from which its own was moved or copied."""
    return {name for entry in entries if entry.run == run for name in entry.continues}


def first_plan(entries: Sequence[Entry], dataset: str, names: Collection[str]) -> list[Spent] | None:
    """What the first attempt of a run reserved; None if none of its attempts did.

    Args:
        entries: all lines of the ledger.
        dataset: identifier of the data set.
        names: all names of the run.
    """
    for entry in entries:
        if entry.kind == "reserve" and entry.dataset == dataset and entry.run in names:
            return list(entry.releases)
    return None


def common_plan(entries: Sequence[Entry], dataset: str, charged: Sequence[Entry]) -> list[Spent] | None:
    """The plan of the one run that was charged, under whatever names; None if another was, too, or it took more.

    Args:
        entries: all lines of the ledger.
        dataset: identifier of the data set.
        charged: the line that each attempt is charged by, at least one.
    """
    # the latest name first: its lines have all earlier ones
    runs = [entry.run for entry in reversed(charged)]
    for run in runs:
        names = {run} | earlier_names(entries, run)
        if names.issuperset(runs):
            plan = first_plan(entries, dataset, names)
            return plan if plan is not None and within(plan, releases_of(charged)) else None
    return None


def within(plan: Iterable[Spent], releases: Iterable[Spent]) -> bool:
    """Whether the releases are part of a plan: the same mechanisms, and no more steps of any."""
    planned = steps_of(plan)
    return all(steps <= planned.get(key, 0) for key, steps in steps_of(releases).items())


def releases_of(entries: Iterable[Entry]) -> list[Spent]:
    """The releases of several lines."""
    return [release for entry in entries for release in entry.releases]
