"""`rapid ledger show`, `rapid ledger limit` and `rapid ledger verify`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rapid.data import load_images
from rapid.dp.ledger import Entry, Ledger, Limit, default_path
from rapid.dp.releases import check_budget
from rapid.dp.spending import Balance, balance, balances, set_limit
from rapid.errors import InputError

ACCOUNT_DIGITS = 4
"""Shortest prefix that may stand for an account."""


def show(options: argparse.Namespace) -> None:
    """`rapid ledger show`."""
    path: Path = options.ledger or default_path()
    ledger = Ledger(path) if path.exists() else None
    entries = ledger.entries() if ledger else []
    if options.dataset is None or ledger is None:
        found = balances(entries)
    else:
        found = [balance(entries, _account(ledger, entries, options.dataset))]
    if options.json:
        print(json.dumps({"ledger": str(path), "datasets": [_row(one) for one in found]}, indent=2))
        return
    print(f"{path}: {len(entries)} lines")
    for one in found:
        print(f"\ndata set {one.dataset}")
        limit = f" of {one.limit.epsilon:g}" if one.limit else ", no limit set"
        print(f"  epsilon {one.epsilon:.4g}{limit} at delta {one.delta:.2g}, all runs composed (PRV)")
        for entry in one.runs:
            state = "spent" if entry.kind == "settle" else "reserved"
            print(f"  run {entry.run}  {entry.time}  {state}, asked for {entry.epsilon:g} at {entry.delta:.2g}")


def limit(options: argparse.Namespace) -> None:
    """`rapid ledger limit`."""
    check_budget(options.epsilon, options.delta, 1)
    ledger = Ledger(options.ledger or default_path())
    account = _account(ledger, ledger.entries(), options.dataset)
    found = set_limit(ledger, account, Limit(options.epsilon, options.delta))
    print(f"data set {account}: {found.epsilon:.4g} of epsilon {options.epsilon:g} spent at delta {options.delta:.2g}")


def verify(options: argparse.Namespace) -> None:
    """`rapid ledger verify`."""
    path: Path = options.ledger or default_path()
    if not path.exists():
        raise InputError("ledger", "does not exist; nothing was spent with it", path)
    print(f"{path}: {len(Ledger(path).entries())} lines, none altered")


def _row(found: Balance) -> dict[str, object]:
    """A balance, ready for JSON."""
    return {
        "dataset": found.dataset,
        "limit": found.limit._asdict() if found.limit else None,
        "epsilon": found.epsilon,
        "delta": found.delta,
        "runs": [entry.model_dump(mode="json", exclude={"mac", "dataset"}) for entry in found.runs],
    }


def _account(ledger: Ledger, entries: Sequence[Entry], dataset: str) -> str:
    """The account of a data set, which is given as the path of its images or as the prefix of a known account."""
    known = {entry.dataset for entry in entries if entry.dataset.startswith(dataset)}
    if len(known) == 1 and len(dataset) >= ACCOUNT_DIGITS:
        return known.pop()
    if not Path(dataset).exists():
        raise InputError("DATASET", "is neither a path of images nor an account of rapid ledger show", dataset)
    return ledger.account(load_images(Path(dataset), "DATASET").images)
