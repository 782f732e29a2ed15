"""What the ledger was charged for a run that was killed, and its bundle, beside those of a run that nobody killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from rapid.bundle import Bundle
from rapid.dp.attempts import counted
from rapid.dp.budget import Budget
from rapid.dp.entry import Entry
from rapid.dp.ledger import Ledger
from rapid.dp.spending import balances

TRAINED = frozenset({"probe", "denoiser", "generator", "classifier", "tones"})
"""Components that a private stage trains or fits to a release; all others are public."""


def steps_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["step"]) if checkpoint.exists() else 0


def budget_of(out: Path) -> Budget:
    return Budget.model_validate(json.loads((out / "checkpoints" / "manifest.json").read_text())["budget"])


def charged(ledger: Path) -> list[Entry]:
    """What a killed run leaves: one reserve line for each attempt, and at most one settle line, at the end."""
    entries = Ledger(ledger).entries()
    reserved = [entry.attempt for entry in entries if entry.kind == "reserve"]
    assert reserved == list(range(1, len(reserved) + 1))
    assert "settle" not in [entry.kind for entry in entries[:-1]]
    return entries


def steps_charged(ledger: Path) -> Counter[str]:
    """Steps that all attempts together are charged for."""
    entries, total = Ledger(ledger).entries(), Counter[str]()
    for line in counted(entries, entries[0].dataset) if entries else []:
        total.update({release.name: sum(release.steps.values()) for release in line.releases})
    return total


def same_as(bundle: Bundle, ledger: Path, quiet: Bundle, quiet_ledger: Path, kills: int) -> None:
    """The bundle, its statement and its budget are those of a run that nobody killed; so is what it cost, but for one
    step of one release for each kill."""
    assert bundle.privacy is not None
    assert quiet.privacy is not None
    timeless = [
        {name: value for name, value in one.items() if name != "created"} for one in (bundle.privacy, quiet.privacy)
    ]
    assert timeless[0] == timeless[1]
    assert budget_of(bundle.path) == budget_of(quiet.path)
    assert bundle.config.components.keys() == quiet.config.components.keys()
    private = TRAINED & quiet.config.components.keys()
    assert private
    for name in quiet.config.components.keys() - private:
        assert bundle.config.components[name] == quiet.config.components[name]
    for name in private:
        files = [
            [(path.name, path.stat().st_size) for path in sorted((one.path / name).iterdir())]
            for one in (bundle, quiet)
        ]
        assert files[0] == files[1]
    (expected,) = balances(Ledger(quiet_ledger).entries())
    assert expected.epsilon == pytest.approx(quiet.privacy["epsilon"], abs=1e-5)
    steps, planned = steps_charged(ledger), steps_charged(quiet_ledger)
    assert planned == {release.name: release.spec.steps for release in budget_of(quiet.path).releases}
    assert planned <= steps
    assert steps.total() <= planned.total() + kills
    # nothing of the killed runs is left, such as weights from steps that were taken again
    names = {path.name for path in (bundle.path / "checkpoints").iterdir()}
    assert names == {"manifest.json", "run.json", "lock"}
    assert not list(bundle.path.glob(".*"))
