"""Paths: an `--out` among the images that a command reads is refused, and what is printed can be pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests_support import TINY

from rapid.cli import main
from rapid.dp.ledger import default_path


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    """Images of two classes in a folder."""
    for number in range(12):
        path = tmp_path / "cells" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((28, 28), 20 * number, np.uint8)).save(path)
    return tmp_path / "cells"


TRAIN = "train-private --base {public} --private {cells} --epsilon 1 --out "
TUNE = "tune --base {public} --private {cells} --epsilon 1 --candidates {tmp}/candidates.yaml --out "
EVALUATE = "evaluate --synthetic {cells} --real {digits} --out "
RELEASE = "release --model {private} --policy {tmp}/policy.yaml --private {cells} --out "


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (TRAIN + "{cells}/model", "private"),
        (TRAIN + "{cells}", "private"),
        (TRAIN + "{cells}/a/deep/model", "private"),
        (TRAIN + "{tmp}/link/model", "private"),
        (TRAIN + "{tmp}/other/../cells/model", "private"),
        (TRAIN.replace("{cells}", "{tmp}/link") + "{cells}/model", "private"),
        (TUNE + "{cells}/model", "private"),
        ("build-kb --public {digits} --public {cells} --out {cells}/base --preset demo", "public"),
        (EVALUATE + "{cells}/report.json", "synthetic"),
        (EVALUATE + "{cells}/report.json --public {cells}", "synthetic"),
        ("evaluate --synthetic {digits} --real {cells} --out {cells}/report.json", "real"),
        ("predict --model {private} --data {cells} --out {cells}/predictions.csv", "data"),
        (RELEASE + "{cells}/report", "private"),
        (RELEASE.replace("private {cells}", "non-members {cells}") + "{cells}/report", "non-members"),
    ],
)
def test_an_output_among_the_images_is_refused(
    command: str, field: str, tmp_path: Path, cells: Path, public_bundle: Path, private_bundle: Path, digits: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "link").symlink_to(cells)
    (tmp_path / "other").mkdir()
    (tmp_path / "candidates.yaml").write_text("one: {}")
    (tmp_path / "policy.yaml").write_text("")
    before = sorted(tmp_path.rglob("*")), default_path().exists()
    filled = command.format(cells=cells, tmp=tmp_path, public=public_bundle, private=private_bundle, digits=digits)
    assert main(filled.split()) == 2
    out = filled.partition("--out ")[2].split()[0]
    told = f"rapid: --out {out}: lies inside --{field}; choose a folder outside of it\n"
    assert capfd.readouterr().err.endswith(told)
    assert (sorted(tmp_path.rglob("*")), default_path().exists()) == before


def test_an_output_beside_the_images_is_not(
    tmp_path: Path, cells: Path, public_bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also beside a file, and where the name of one folder begins with that of another."""
    for private, out in ((cells, f"{cells}-model"), (cells / "a" / "0.png", cells / "a" / "model")):
        command = f"train-private --base {public_bundle} --private {private} --epsilon 0 --out {out}"
        assert main(command.split()) == 2
        assert "lies inside" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:at this epsilon")
def test_the_next_command_can_be_pasted(
    tmp_path: Path, letters: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, model = tmp_path / "my bundles; now" / "base", tmp_path / "my bundles; now" / "it's a model"
    networks = [word for one in TINY if not one.startswith(("private.", "generation.")) for word in ("--set", one)]
    assert main(["build-kb", "--public", str(letters), "--out", str(base), "--preset", "demo", *networks]) == 0
    (told,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("next: "))
    command = shlex.split(told)[2:]
    assert command == ["train-private", "--base", str(base), "--private", "PATH", "--epsilon", "1", "--out", "DIR"]
    private = [word for one in TINY if one.startswith("private.") for word in ("--set", one)]
    given = {"PATH": str(digits), "DIR": str(model)}
    assert main([given.get(word, word) for word in command] + private) == 0
    (told,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("next: "))
    assert shlex.split(told)[2:] == ["generate", "--model", str(model), "--count", "100", "--out", "images.npz"]
