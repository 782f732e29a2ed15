"""`rapid ledger show`, `rapid ledger limit` and `rapid ledger verify`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rapid.data import load_images
from rapid.data.canvas import Canvas
from rapid.data.units import ONE_IMAGE, PeopleFrom
from rapid.dp.entry import Entry, Limit
from rapid.dp.events import has_selection
from rapid.dp.ledger import Ledger, default_path, ledger_exists
from rapid.dp.releases import check_budget
from rapid.dp.spending import Balance, balance, balances, set_limit
from rapid.errors import DENIED, InputError
from rapid.rounding import as_typed, rounded_up

ACCOUNT_DIGITS = 4
"""Shortest prefix that may stand for an account."""
NO_DATASET = "is neither a path of images nor an account of rapid ledger show"
FILTER_MEANS = "its limit holds even if plans are chosen after seeing earlier results"
MIXED = "not all of these runs protect the same: the figures add them up as if they did"
PRV_MEANS = "holds if all plans had been fixed in advance, and no run was stopped because of its results"


def show(options: argparse.Namespace) -> None:
    """`rapid ledger show`."""
    path: Path = options.ledger or default_path()
    if options.ledger is not None:
        _check_there(path)
    # at the default place none is made before the first run
    ledger = Ledger(path, reads=True) if ledger_exists(path) else None
    entries = _entries(ledger) if ledger else []
    if options.dataset is None or ledger is None:
        found = balances(entries)
    else:
        found = [balance(entries, _account(ledger, entries, options))]
    if options.json:
        print(json.dumps({"ledger": str(path), "datasets": [_row(one) for one in found]}, indent=2))
        return
    print(f"{path}: {len(entries)} lines")
    for one in found:
        print(f"\ndata set {one.dataset}")
        if not one.runs and one.limit is None:
            print("  nothing was spent on it, no limit set")
            continue
        limit = f" of {as_typed(one.limit.epsilon)}" if one.limit else ", no limit set"
        print(f"  epsilon {rounded_up(one.epsilon, 4)}{limit} at delta {rounded_up(one.delta)}")
        if one.epsilon_filter is not None:
            print(f"  {rounded_up(one.epsilon_filter, 4)} by the limit's Renyi filter: {FILTER_MEANS}")
        print(f"  {rounded_up(one.epsilon_prv, 4)} by {_composition(one)}: {PRV_MEANS}")
        for entry in one.runs:
            state = {"settle": "spent", "spend": "spent at most"}.get(entry.kind, "reserved")
            asked = f"asked for {as_typed(entry.epsilon)} at {rounded_up(entry.delta, 6)}"
            # the default goes without saying
            unit = f", for {entry.unit}" if entry.unit not in ("", ONE_IMAGE) else ""
            print(f"  run {entry.run}  {entry.time}  {state}, {asked}{unit}")
        if len({entry.unit for entry in one.runs} - {""}) > 1:
            print(f"  {MIXED}")


def limit(options: argparse.Namespace) -> None:
    """`rapid ledger limit`."""
    if not 0 < options.delta < 1:
        # N is not known before the images are read
        problem = "must lie in (0, 1), and well under 1/N for N images, or people"
        raise InputError("delta", problem, as_typed(options.delta))
    check_budget(options.epsilon, options.delta, 1)
    path = options.ledger or default_path()
    if not ledger_exists(path) and not Path(options.dataset).exists():
        # before the ledger is made
        raise InputError("DATASET", NO_DATASET, options.dataset)
    ledger = Ledger(path)
    account = _account(ledger, _entries(ledger), options)
    found = set_limit(ledger, account, Limit(options.epsilon, options.delta))
    limited = f"epsilon {as_typed(options.epsilon)} spent at delta {as_typed(options.delta)}"
    full = "; nothing more will be admitted" if found.epsilon >= options.epsilon else ""
    print(f"data set {account}: {rounded_up(found.epsilon, 4)} of {limited}{full}")


def verify(options: argparse.Namespace) -> None:
    """`rapid ledger verify`."""
    path: Path = options.ledger or default_path()
    _check_there(path)
    print(f"{path}: {len(_entries(Ledger(path, reads=True)))} lines, none altered")


def _check_there(path: Path) -> None:
    """Refuse a ledger that does not exist: "nothing was spent" would be told of a mistyped name."""
    if not ledger_exists(path):
        raise InputError("ledger", "does not exist; nothing was spent with it", path)


def _entries(ledger: Ledger) -> list[Entry]:
    """All lines."""
    try:
        return ledger.entries()
    except PermissionError as error:
        raise InputError("ledger", DENIED, error.filename) from None


def _composition(found: Balance) -> str:
    """What `epsilon_prv` is computed by."""
    if found.accountant.startswith("PRV"):
        return "numerical composition (PRV)"
    selected = any(has_selection(release.dp_event) for entry in found.runs for release in entry.releases)
    return f"Renyi divergences (RDP){', as private selection needs' if selected else ''}"


def _row(found: Balance) -> dict[str, object]:
    """A balance, ready for JSON."""
    return {
        "dataset": found.dataset,
        "limit": found.limit._asdict() if found.limit else None,
        "epsilon": found.epsilon,
        "epsilon_filter": found.epsilon_filter,
        "epsilon_prv": found.epsilon_prv,
        "accountant": found.accountant,
        "delta": found.delta,
        "runs": [entry.model_dump(mode="json", exclude={"mac", "dataset"}) for entry in found.runs],
    }


def _account(ledger: Ledger, entries: Sequence[Entry], options: argparse.Namespace) -> str:
    """The account of a data set, which is given as the path of its images or as the prefix of a known account."""
    dataset: str = options.dataset
    known = {entry.dataset for entry in entries if entry.dataset.startswith(dataset)}
    if len(known) == 1 and len(dataset) >= ACCOUNT_DIGITS:
        return known.pop()
    if not Path(dataset).exists():
        raise InputError("DATASET", NO_DATASET, dataset)
    people = PeopleFrom() if options.unit_folders else None
    # the account depends on the pixels as they are stored alone, so any form will do
    images = load_images(
        Path(dataset), "DATASET", show_paths=options.show_paths, people=people, label_column="none", target=Canvas(),
        digests=True,
    )  # fmt: skip
    assert images.digests is not None
    return ledger.account(images.digests)
