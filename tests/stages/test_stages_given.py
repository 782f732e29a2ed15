"""Mistakes of a method's author: told by its name in one line, before anything is spent where that is possible."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods import mistaken
from tests_children import train_privately
from tests_ranks import ends_of, two_ranks
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rapid.bundle import Bundle
from rapid.config.sections import MethodSettings
from rapid.data import ImageSet
from rapid.data.private import PrivateImages
from rapid.dp import DpSgdSpec, Execution, PrivateAccess, PublicFacts, calibrate
from rapid.dp.ledger import Ledger
from rapid.dp.spending import balances
from rapid.dp.trials import Trials
from rapid.errors import InputError, RapidError
from rapid.methods import apply_overrides
from rapid.stages.given import checked_components
from rapid.stages.tuned import Labeller, Scoring, tune_private_bundle
from rapid.training import RunFolder, Trainer


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path_factory.mktemp("site")
    mistaken.install(site)
    monkeypatch.syspath_prepend(site)
    # for processes that a test starts
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))


def settings_with(mistake: str) -> MethodSettings:
    return apply_overrides({"method": mistaken.NAME, "mistake": mistake}, [])


def run(folder: Path, digits: Path, mistake: str) -> None:
    train_privately(None, digits, folder / "out", settings_with(mistake), folder / "ledger.jsonl")


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


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("describes none", r"describe_private\(\) must return a Description, not NoneType"),
        ("describes a tensor", r"facts of describe_private\(\) are not ready for JSON \(.*Tensor"),
    ],
)
def test_texts_that_cannot_be_written(tmp_path: Path, digits: Path, mistake: str, words: str) -> None:
    with pytest.raises(RapidError, match=f"^the method mistaken: {words}"):
        run(tmp_path, digits, mistake)
    assert not (tmp_path / "out").exists()
    assert charged(tmp_path) == []


@pytest.mark.parametrize("notes", [None, "one sentence", [3]])
def test_notes_that_cannot_be_written(
    tmp_path: Path, digits: Path, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistaken.METHOD, "notes", notes)
    with pytest.raises(RapidError, match=r"^the method mistaken: privacy_notes\(\) must return a list of sentences"):
        run(tmp_path, digits, "")
    assert charged(tmp_path) == []


def test_an_error_of_the_texts_comes_before_anything_is_spent(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(KeyError, match="author"):
        run(tmp_path, digits, "fails to describe")
    assert charged(tmp_path) == []


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("releases nothing", r"train_private\(\) has made 0 of 1 steps of the release 'means' that releases\(\) plans"),
        ("skips a release", r"train_private\(\) has made 0 of 1 steps of the release 'count' that releases\(\) plans"),
        ("gives none", r"train_private\(\) must return components by name, not NoneType"),
        ("gives no components", r"train_private\(\) returned no component"),
        ("gives a tensor", r"its component 'means' is a Tensor, which has no save\(folder\)"),
        ("gives a plain module", r"its component 'more' is a Linear, which has no save\(folder\)"),
        ("leads elsewhere", r"a component is named '\.\./neighbour'"),
        ("names the checkpoints", "a component is named 'checkpoints', as the folder with the state of the run"),
    ],
)
def test_a_result_that_the_statement_would_be_wrong_about(
    tmp_path: Path, digits: Path, mistake: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written as finished. The mended method goes on, and is charged as if it had made no mistake."""
    (tmp_path / "neighbour").mkdir()
    with pytest.raises(RapidError, match=f"^the method mistaken: .*{words}.*; mend it, and go on with --resume$"):
        run(tmp_path, digits, mistake)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"]
    assert (tmp_path / "neighbour").is_dir()
    if mistake == "skips a release":
        return
    monkeypatch.setattr(mistaken.METHOD, "mended", True)
    run(tmp_path, digits, mistake)
    assert Bundle.open(tmp_path / "out", "out").has("means")
    (spent,) = balances(Ledger(tmp_path / "ledger.jsonl").entries())
    assert 0.99 * 2 < spent.epsilon <= 2


def test_an_unfinished_training_is_told_by_its_steps(tmp_path: Path) -> None:
    spec = DpSgdSpec(name="net", dataset_size=20, expected_batch=10, steps=5, clip_norm=1.0)
    images = ImageSet(np.zeros((20, 2, 2), np.uint8), np.arange(20) % 3, ("a", "b", "c"), "private")
    budget = calibrate([spec], epsilon=1.0, delta=1e-3)
    access = PrivateAccess(images, PublicFacts.of(images), budget, RunFolder(tmp_path), device=torch.device("cpu"))
    network = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def losses(rows: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(network(rows.flatten(1).float()), labels, reduction="none")

    def leave(step: int) -> None:
        if step == 4:
            raise KeyError("the author's own")

    # a method that catches its own error, and goes on as if it had trained
    with pytest.raises(KeyError, match="the author's own"):
        access.train(
            "net", Trainer(network, optimizer, LambdaLR(optimizer, lambda _: 1.0)), losses,
            [access.images, access.labels], execution=Execution(checkpoint_seconds=-1.0), between_steps=leave,
        )  # fmt: skip
    with pytest.raises(RapidError, match="has made 3 of 5 steps of the release 'net'"):
        checked_components("m", {"net": network}, access)


def test_the_first_of_two_processes_tells_it(tmp_path: Path, digits: Path) -> None:
    command = ["train-private", "--method", mistaken.NAME, "--private", digits, "--epsilon", 2]
    ends = ends_of(two_ranks(*command, "--set", "mistake=skips a release", "--out", tmp_path / "out"))
    assert ends[0].returncode == 1
    assert [end.stderr.count("the release 'count'") for end in ends] == [1, 0]
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("mistake", "words", "lines"),
    [
        ("twice the images", "'means' has dataset_size 200, not 100", []),
        ("describes none", "must return a Description", []),
        ("skips a release", "has made 0 of 1 steps of the release 'count'", ["reserve", "spend"]),
    ],
)
def test_a_private_choice(tmp_path: Path, digits: Path, mistake: str, words: str, lines: list[str]) -> None:
    """The score, which no method makes, is not missed; what a trial left is no bundle."""

    def labeller(path: Path, device: torch.device) -> Labeller:
        return lambda images: torch.zeros(len(images), 10)

    def tune(mistake: str, out: Path) -> Bundle:
        return tune_private_bundle(
            None, PrivateImages(digits), out, {"one": settings_with(mistake)}, Scoring(labeller, 0.1, {}),
            epsilon=60.0, delta=1e-4, trials=Trials(mean=1.5), device=torch.device("cpu"), resume=False,
            ledger=tmp_path / "ledger.jsonl",
        )  # fmt: skip

    with pytest.raises(RapidError, match=f"^the method mistaken: .*{words}"):
        tune(mistake, tmp_path / "out")
    assert charged(tmp_path) == lines
    assert not (tmp_path / "out" / "config.json").exists()
    assert tune("", tmp_path / "mended").has("means")
