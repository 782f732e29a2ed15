"""Arguments that are wrong by themselves are refused before a word of the run is told, and before images are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests_support import TINY

from rapid.cli import main
from rapid.methods import load_settings
from rapid.stages.public import build_public_bundle

TRAIN = "train-private --base {base} --private {digits} --epsilon 1 --out {tmp}/out"
TUNE = "tune --base {base} --private {digits} --epsilon 1 --candidates {tmp}/candidates.yaml --out {tmp}/out"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"--epsilon 1": "--epsilon 0"}, "--epsilon 0.0: must be a positive number, such as 1 or 10"),
        ({"--epsilon 1": "--epsilon -1"}, "--epsilon -1.0: must be a positive number, such as 1 or 10"),
        ({"--epsilon 1": "--epsilon nan"}, "--epsilon nan: must be a positive number, such as 1 or 10"),
        ({"--epsilon 1": "--epsilon inf"}, "--epsilon inf: must be a positive number, such as 1 or 10"),
        (
            {"--epsilon 1": "--epsilon 1 --delta 2"},
            "--delta 2: must lie in (0, 1), and well under 1/N for N images, or people",
        ),
        (
            {"{digits}": "{tmp}/nope/"},
            "--private {tmp}/nope: does not exist; give a folder of images, an .npz",
        ),
        ({"{tmp}/out": "{tmp}/full"}, "--out {tmp}/full: holds other files and no run of rapid; give a new folder"),
        ({"{tmp}/out": "{tmp}/new --resume"}, "--out {tmp}/new: holds no run to resume"),
    ],
)
@pytest.mark.parametrize("command", [TRAIN, TUNE])
def test_of_a_private_run(
    command: str, changes: dict[str, str], line: str, tmp_path: Path, contained: Path, digits: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for old, new in changes.items():
        command = command.replace(old, new)
    check(command, line, tmp_path, contained, digits, capfd)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (f"{TRAIN} --minutes 0", "--minutes 0.0: must be a positive number of minutes, such as 20"),
        (
            f"{TRAIN} --minutes 1 --set private.steps=3",
            "--minutes: decides the number of steps, as --set private.steps",
        ),
        (f"{TUNE} --mean-trials 0.5", "--mean-trials 0.5: must be above 1"),
        (f"{TUNE} --shape -1", "--shape -1.0: must lie in [0, 100]"),
        (f"{TUNE} --score-share 2", "--score-share 2.0: must lie in (0, 1), such as 0.1"),
        (f"{TUNE} --score-images 2", "--score-images 2: must be at least 10"),
        ("plan --base {base} --private {tmp}/nope --epsilon 0", "--epsilon 0.0: must be a positive number"),
        ("plan --base {base} --private {tmp}/nope --delta 2", "--delta 2: must lie in (0, 1)"),
    ],
)
def test_of_one_command(
    command: str, line: str, tmp_path: Path, contained: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(command, line, tmp_path, contained, digits, capfd)


def check(command: str, line: str, folder: Path, base: Path, digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command is refused by one line, the only one on both outputs."""
    (folder / "candidates.yaml").write_text("one: {}")
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    assert main(command.format(base=base, digits=digits, tmp=folder).split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"rapid: {line.format(tmp=folder)}")


def test_what_is_done_to_private_images_is_a_note(
    tmp_path: Path, contained: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not in the words of an error."""
    command = TRAIN + " --set private.expected_batch=101"
    assert main(command.format(base=contained, digits=digits, tmp=tmp_path).split()) == 2
    note, error = capfd.readouterr().err.splitlines()
    assert note.startswith("private images are fitted into 32x32: larger ones are scaled down")
    assert error.startswith("rapid: --set private.expected_batch=101: ")


@pytest.fixture(scope="module")
def contained(tmp_path_factory: pytest.TempPathFactory, letters: Path) -> Path:
    """A public bundle that images are fitted into."""
    out = tmp_path_factory.mktemp("contained") / "public"
    chosen = [*(one for one in TINY if not one.startswith("private.")), "image.size=32", "image.fit=contain"]
    settings = load_settings("demo", chosen)
    return build_public_bundle([letters], out, settings, torch.device("cpu"), resume=False).path
