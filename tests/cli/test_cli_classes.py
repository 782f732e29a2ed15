"""`--classes` and `--show-paths` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests_process import run

from rapid.cli import main
from rapid.dp.ledger import Ledger

WARNING = "rapid: warning: the number of classes of --private is taken from its labels"


@pytest.fixture
def undeclared(tmp_path: Path, digits: Path) -> Path:
    """The digits 0 to 8 by number alone."""
    with np.load(digits) as archive:
        known = archive["labels"] < 9
        np.savez(tmp_path / "undeclared.npz", images=archive["images"][known], labels=archive["labels"][known])
    return tmp_path / "undeclared.npz"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder in which one image cannot be read."""
    (tmp_path / "patients" / "ill").mkdir(parents=True)
    for number in range(3):
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "patients" / "ill" / f"other{number}.png")
    (tmp_path / "patients" / "ill" / "smith.png").write_bytes(b"no image")
    return tmp_path / "patients"


def test_a_model_has_the_declared_classes(tmp_path: Path, public_bundle: Path, undeclared: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"digit {number}" for number in range(12)))
    train = ("train-private", "--base", public_bundle, "--private", undeclared, "--epsilon", 5, "--delta", 1e-3)
    book = ("--ledger", tmp_path / "ledger.jsonl")
    taken = run(*train, *book, "--out", tmp_path / "taken")
    assert taken.returncode == 0, taken.stderr
    assert taken.stderr.count(WARNING) == 1
    declared = run(*train, *book, "--out", tmp_path / "declared", "--classes", names)
    assert declared.returncode == 0, declared.stderr
    assert "warning" not in declared.stderr
    bundles = [json.loads((tmp_path / name / "config.json").read_text())["classes"] for name in ("taken", "declared")]
    assert bundles == [[str(number) for number in range(9)], names.read_text().splitlines()]
    told = "was taken from the labels, which is not protected"
    assert told in taken.stdout
    assert told in (tmp_path / "taken" / "README.md").read_text()
    assert told not in declared.stdout
    # three classes without an image can be asked for
    made = run(
        "generate", "--model", tmp_path / "declared", "--count", 2, "--labels", "digit 11", "--out", names.parent / "x"
    )
    assert made.returncode == 0, made.stderr
    # another list is another request
    other = run(*train, *book, "--out", tmp_path / "declared", "--classes", "a,b", "--resume")
    assert other.returncode == 2
    assert "'labels' must lie in 0..1: there are 2 classes" in other.stderr


@pytest.mark.parametrize("command", ["plan", "train-private", "ledger limit"])
def test_private_files_are_named_only_on_request(
    command: str, damaged: Path, tmp_path: Path, public_bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "plan": ["--private", str(damaged)],
        "train-private": ["--base", str(public_bundle), "--private", str(damaged), "--epsilon", "1"],
        "ledger limit": [str(damaged), "--epsilon", "1", "--delta", "1e-5", "--ledger", str(tmp_path / "ledger.jsonl")],
    }[command]
    if command == "train-private":
        arguments += ["--out", str(tmp_path / "out")]
    assert main([*command.split(), *arguments]) == 2
    words = capfd.readouterr().err
    assert "not a readable image" in words
    assert words.endswith("; rerun with --show-paths for details\n")
    assert "smith" not in words
    assert main([*command.split(), *arguments, "--show-paths"]) == 2
    assert "smith.png: is not a readable image" in capfd.readouterr().err


def test_a_plan_counts_the_declared_classes(undeclared: Path) -> None:
    common = ("--epsilon", 5, "--batch", 20, "--steps", 3, "--preset", "demo", "--json")
    parameters = []
    for arguments in (["--size", 90], ["--size", 90, "--classes", "a,b"], ["--private", undeclared]):
        found = run("plan", *arguments, *common)
        assert found.returncode == 0, found.stderr
        parameters.append(json.loads(found.stdout)["parameters"])
        assert (WARNING in found.stderr) == ("--private" in arguments)
    ten, two, nine = parameters
    assert ten > nine > two
    assert (ten - two) == 8 * (ten - nine)


def test_the_account_of_a_set_does_not_need_its_classes(
    undeclared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    book = ["--ledger", str(tmp_path / "ledger.jsonl")]
    # without a warning, which would be an error here
    assert main(["ledger", "limit", str(undeclared), "--epsilon", "1.25", "--delta", "0.00001234567", *book]) == 0
    # requested numbers are shown as they were typed
    assert "of epsilon 1.25 spent at delta 1.234567e-05" in capfd.readouterr().out
    assert len(Ledger(tmp_path / "ledger.jsonl").entries()) == 1
