"""Mistakes of a method's author: told by its name in one line, before anything is spent where that is possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from methods import mistaken
from tests_children import train_privately

from rapid.dp.ledger import Ledger
from rapid.errors import InputError, RapidError
from rapid.methods import apply_overrides


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path_factory.mktemp("site")
    mistaken.install(site)
    monkeypatch.syspath_prepend(site)


def run(folder: Path, digits: Path, mistake: str) -> None:
    settings = apply_overrides({"method": mistaken.NAME, "mistake": mistake}, [])
    train_privately(None, digits, folder / "out", settings, folder / "ledger.jsonl")


def charged(folder: Path) -> list[str]:
    """Kinds of the lines in the ledger."""
    return [entry.kind for entry in Ledger(folder / "ledger.jsonl").entries()]


def test_the_method_without_a_mistake(tmp_path: Path, digits: Path) -> None:
    run(tmp_path, digits, "")
    assert charged(tmp_path)[-1] == "settle"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("returns none", r"releases\(\) must return a list of DpSgdSpec and QuerySpec, not NoneType"),
        ("returns words", r"releases\(\) must return a list of DpSgdSpec and QuerySpec, not list of str"),
        ("no releases", "exactly one release must have no share of epsilon, and there is no release"),
        ("two without a share", "exactly one release must have no share of epsilon, and means, count have none"),
        ("all with a share", "exactly one release must have no share of epsilon, and all have one"),
        ("one name twice", r"releases\(\) names 2 releases 'means'; give each another name"),
        ("the name of the score", r"releases\(\) names a release 'tuning-score', as rapid tune names its count"),
        ("twice the images", r"'means' has dataset_size 200, not 100; give it facts\.dataset_size"),
        ("half the images", r"'means' has dataset_size 50, not 100; give it facts\.dataset_size"),
        ("other images for one", r"'count' has dataset_size 101, not 100; give it facts\.dataset_size"),
    ],
)
def test_releases_that_no_budget_can_hold(tmp_path: Path, digits: Path, mistake: str, words: str) -> None:
    with pytest.raises(RapidError, match=f"^the method mistaken: .*{words}") as caught:
        run(tmp_path, digits, mistake)
    assert not isinstance(caught.value, InputError)
    assert not (tmp_path / "out").exists()
    assert charged(tmp_path) == []
