"""The report as a whole: the command as a process, its files, and what it refuses or leaves out."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import bright_and_dark, save

from rapid.cli import main
from rapid.evaluate import Request, evaluate, training, write_report
from rapid.evaluate.networks import CLASSIFIERS

CPU = torch.device("cpu")
VOID = ("meta", "img")


class Page(HTMLParser):
    """Checks that tags are closed in order; collects pictures and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe")
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith("data:image/png;base64,")
                self.pictures.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_command_writes_json_page_and_picture(
    tmp_path: Path, digits: Path, letters: Path, private_bundle: Path
) -> None:
    out = tmp_path / "sub" / "report.json"
    command = ["evaluate", "--synthetic", digits, "--real", digits, "--train-real", digits, "--open-data", "--public"]
    command += [letters, "--model", private_bundle, "--epochs", "1", "--out", out, "--device", "cpu"]
    found = subprocess.run(
        [sys.executable, "-W", "error", "-m", "rapid", *map(str, command)],
        check=False, capture_output=True, text=True, timeout=90, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "accuracy on digits.npz, trained on synthetic images" in found.stdout
    assert "Not private" in found.stdout
    for title in ("small, synthetic", "resnext, real", "feature network", "decoding records", "copies: public images"):
        assert title in found.stderr
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "report-closest.png", "report.html", "report.json",
    ]  # fmt: skip
    report = json.loads(out.read_text())
    assert "not private" in report["notice"].lower()
    assert report["synthetic"]["images"] == report["real"]["images"] == 100
    for name in ("synthetic", "real"):
        utility = report["utility"][name]
        assert utility["networks"].keys() == CLASSIFIERS.keys()
        for network in utility["networks"].values():
            assert 0 <= network["accuracy"] <= 1
            assert np.sum(network["confusion"]) == 100
        real = [network["accuracy"] for network in utility["networks"].values()]
        assert utility["best"]["accuracy"] == max(real)
        assert utility["regret"] == max(real) - utility["selected"]["accuracy"]
        told = f"regret of the choice by held-out {name} images: {100 * utility['regret']:.2f} points below the best"
        (line,) = (line for line in found.stdout.splitlines() if told in line)
        assert (utility["rank_correlation"] is None) == ("rank correlation" not in line)
    # the sets are one and the same
    assert report["fidelity"]["synthetic"] == report["fidelity"]["real"]
    assert report["fidelity"]["synthetic"]["precision"] == 1
    assert report["fidelity"]["synthetic"]["frechet"] == pytest.approx(0, abs=1e-6)
    assert "letters.npz" in report["fidelity"]["features"]
    assert report["model"]["privacy"]["delta"] > 0
    copies = {entry["reference"]: entry for entry in report["copies"]}
    assert list(copies) == ["public images", "knowledge base", "real training images", "real test images"]
    assert copies["public images"]["images"] == 60
    assert report["image"]["size"] == 32
    assert copies["real test images"]["identical"] == 100
    html = out.with_suffix(".html").read_text(encoding="utf-8")
    told = re.search(r"epsilon ([0-9.]+), delta\s+([0-9.e-]+)\.</p>", html)
    assert told
    for shown, name in zip(map(float, told.groups()), ("epsilon", "delta"), strict=True):
        assert 0 <= shown - report["model"]["privacy"][name] <= 0.01 * shown
    page = Page(html)
    assert len(page.pictures) == 3
    for picture in page.pictures:
        Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))).verify()
    for words in ("Not private", "WideResNet", "precision", "coverage", "knowledge base", "Regret of the choice"):
        assert words in page.text
    Image.open(out.with_name("report-closest.png")).verify()


def test_other_methods_images_in_colour_and_names_that_need_escaping(tmp_path: Path) -> None:
    classes = ("dark", "bright")
    name = "<script>alert(1)</script>"
    made = bright_and_dark(40, 0, classes, (12, 12, 3))
    real = bright_and_dark(30, 1, classes, (9, 11, 3))
    made, real = (replace(images, classes=(f"{name}'\"", "bright")) for images in (made, real))
    request = Request(
        save(tmp_path / "a&b<i>.npz", made), save(tmp_path / "real.npz", real), classifiers=("small",), epochs=1
    )
    report = evaluate(request, CPU)
    write_report(report, tmp_path / "r.json")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert name not in page
    assert "<i>" not in page
    assert name in Page(page).text
    assert report.content["image"] == {"size": 12, "channels": 3}
    assert report.content["utility"]["synthetic"]["mean"] is None
    assert report.content["fid"] is None
    assert "real test images themselves" in report.content["fidelity"]["features"]
    assert report.content["fidelity"]["synthetic"]["frechet_by_class"].keys() == {f"{name}'\"", "bright"}


def test_unlabelled_images_are_evaluated_without_utility(tmp_path: Path) -> None:
    made = replace(bright_and_dark(20, 0, shape=(8, 8, 3)), labels=None, classes=())
    paths = {
        "made": save(tmp_path / "made.npz", made),
        "real": save(tmp_path / "real.npz", replace(bright_and_dark(20, 1), labels=None, classes=())),
        "public": save(tmp_path / "public.npz", bright_and_dark(20, 2)),
        "more": save(tmp_path / "more.npz", replace(bright_and_dark(20, 3), labels=None, classes=())),
    }
    request = Request(paths["made"], paths["real"], public=(paths["public"], paths["more"]), classifiers=(), epochs=1)
    report = evaluate(request, CPU)
    write_report(report, tmp_path / "r.json")
    Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert report.content["utility"] is None
    assert report.content["fidelity"]["synthetic"]["frechet_by_class"] is None
    copies = {entry["reference"]: entry["images"] for entry in report.content["copies"]}
    assert copies == {"public images": 40, "real test images": 20}
    assert not any("accuracy" in line for line in report.summary())


def test_a_class_that_was_never_made_is_no_error_in_fidelity(tmp_path: Path) -> None:
    made = bright_and_dark(20, 0)
    # a class of the list without images, as a folder or a file from another tool may have
    made = replace(made, images=made.images[made.labels == 1], labels=made.labels[made.labels == 1])
    request = Request(
        save(tmp_path / "a.npz", made),
        save(tmp_path / "b.npz", bright_and_dark(20, 1)),
        classifiers=("small",),
        epochs=1,
    )
    report = evaluate(request, CPU)
    assert report.content["fidelity"]["synthetic"]["frechet_by_class"]["dark"] is None
    write_report(report, tmp_path / "r.json")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("r.json", ("--synthetic", "{none}", "--out", "{root}/r.json"), "--out {root}/r.json: exists already;"),
        ("r.html", ("--synthetic", "{none}", "--out", "{root}/r.json"), "--out {root}/r.json: {root}/r.html exists"),
        ("r-closest.png", ("--synthetic", "{none}", "--out", "{root}/r.json"), "{root}/r-closest.png exists already;"),
        ("r.json", ("--model", "{none}", "--out", "{root}/r.json"), "--out {root}/r.json: exists already;"),
        ("r-confusion.png", ("--model", "{none}", "--out", "{root}/r.json"), "{root}/r-confusion.png exists already;"),
        (
            "r.safetensors",
            ("--train-real", "{none}", "--open-data", "--save-features", "{root}/r.safetensors"),
            "--save-features {root}/r.safetensors: exists already;",
        ),
    ],
)
def test_an_earlier_file_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...], words: str
) -> None:
    """Refused before anything is read: the sets are not there."""
    places = {"root": tmp_path, "none": tmp_path / "none.npz"}
    (tmp_path / name).write_bytes(b"earlier")
    given = [part.format(**places) for part in arguments]
    assert main(["evaluate", "--real", str(places["none"]), *given]) == 2
    told = capsys.readouterr().err
    assert words.format(**places) in told
    assert "choose another name, or remove it first" in told
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"earlier"


def test_the_help_tells_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"for each classifier; default: {training.EPOCHS}" in text
    assert ",".join(CLASSIFIERS) in text
