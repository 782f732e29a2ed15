"""Image sets of other formats as a user meets them: from files to a private bundle, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet
from tests_process import run
from tests_support import TINY

from rapid.cli import main

CLASSES = ("lymph", "plate", "mono")
TINY_ARGUMENTS = ["--preset", "demo", *(word for one in [*TINY, "image.channels=3"] for word in ("--set", one))]


def png(pixels: NDArray[Any], **how: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", **how)
    return stream.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 colour images with a metadata.csv, some of them turned or with transparency."""
    folder = tmp_path_factory.mktemp("public") / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = ["file_name,label"]
    for number in range(60):
        pixels = rng.integers(0, 256, (32, 32, 4 if number < 3 else 3), np.uint8)
        exif = Image.Exif()
        exif[0x0112] = 6 if number > 58 else 1
        (folder / f"{number}.png").write_bytes(png(pixels, exif=exif))
        lines.append(f"{number}.png,{'cat' if number % 2 else 'dog'}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


def cells(path: Path, **columns: list[Any]) -> Path:
    """80 colour images of 40 people as a Parquet file with names of classes, one of which has no image."""
    rng = np.random.default_rng(1)
    own: dict[str, list[Any]] = {
        "image": [
            {"bytes": png(rng.integers(0, 256, (32, 32, 3), np.uint8)), "path": f"anna-{number}.png"}
            for number in range(80)
        ],
        "kind": [number % 2 for number in range(80)],
        "who": [f"smith{number % 40}" for number in range(80)],
    }
    features = {"image": {"_type": "Image"}, "kind": {"_type": "ClassLabel", "names": list(CLASSES)}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(pa.table(own | columns).replace_schema_metadata(metadata), path)
    return path


def test_from_an_imagefolder_and_parquet_to_a_private_bundle(tmp_path: Path, photos: Path) -> None:
    private, base, out = cells(tmp_path / "cells.parquet"), tmp_path / "base", tmp_path / "out"
    built = run("build-kb", "--public", photos, "--out", base, *TINY_ARGUMENTS)
    assert built.returncode == 0, built.stderr
    said = [line for line in built.stderr.splitlines() if str(photos) in line]
    assert said == [
        f"rapid: {photos}: 8-bit RGB of 32x32; of 60 images 1 turned as their EXIF tag says; 3 with transparency, now "
        "on black"
    ]
    assert json.loads((base / "config.json").read_text())["classes"] == ["cat", "dog"]
    made = run(
        "train-private", "--base", base, "--private", private, "--unit-column", "who", "--epsilon", 5, "--delta", 1e-3,
        "--ledger", tmp_path / "ledger.jsonl", "--out", out,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    # its ClassLabel declares the classes, also the one without images
    assert json.loads((out / "config.json").read_text())["classes"] == list(CLASSES)
    assert "warning: the number of classes" not in made.stderr
    statement = json.loads((out / "privacy.json").read_text())
    assert (statement["unit"], statement["dataset_size"]) == ("one person", 40)
    written = b"".join(path.read_bytes() for path in out.rglob("*") if path.suffix in (".json", ".md", ".pt"))
    shown = (made.stdout + made.stderr).encode()
    assert not re.search(rb"smith|anna|8-bit", written + shown)


def spoil(case: str, photos: Path, path: Path) -> Path:
    """A set with something wrong in it."""
    if case == "no bytes":
        empty = pa.array([{"bytes": None, "path": "anna.png"}] * 80, pa.struct({"bytes": pa.binary(), "path": "str"}))
        return cells(path.with_suffix(".parquet"), image=empty)  # type: ignore[arg-type]
    if case == "no label":
        return cells(path.with_suffix(".parquet"), kind=[None, *[1] * 79])
    if case == "colour":
        return cells(path.with_suffix(".parquet"))
    shutil.copytree(photos, path)
    if case == "not there":
        (path / "7.png").rename(path / ".anna.png")
    elif case == "no line":
        shutil.copy(path / "7.png", path / "anna.png")
    elif case == "mixed channels":
        (path / "7.png").write_bytes(png(np.zeros((32, 32), np.uint8)))
    elif case == "mixed sizes":
        (path / "7.png").write_bytes(png(np.zeros((31, 32, 3), np.uint8)))
    elif case == "too large":
        (path / "7.png").write_bytes(png(np.zeros((35, 32), np.uint8)))
    elif case == "palette":
        image = Image.fromarray(np.zeros((32, 32), np.uint8)).convert("P")
        shutil.rmtree(path)
        path.mkdir()
        image.save(path / "1.png")
        Image.fromarray(np.zeros((32, 32), np.uint8)).save(path / "anna.png")
    elif case == "two columns":
        table = (path / "metadata.csv").read_text().splitlines()
        lines = [f"{table[0]},class", *(f"{line},anna" for line in table[1:])]
        (path / "metadata.csv").write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "not there",
            "a table names a file that is not there; add the file, or remove its line; rerun with --show-paths",
        ),
        ("no line", "an image has no line in a table of labels"),
        ("no label", "some images have no label"),
        ("no bytes", "a row has no bytes of an image"),
        ("mixed channels", "has colour images, and --base makes grey ones"),
        ("mixed sizes", "has colour images, and --base makes grey ones"),
        ("palette", "has colour images, and --base makes grey ones"),
        ("too large", "images larger than 32x32 pixels do not fit, and image.fit=pad never scales"),
        ("two columns", "several columns that may be the labels; name the column of the labels by --label-column"),
        ("colour", "has colour images, and --base makes grey ones"),
    ],
)
def test_bad_private_sets(
    case: str, words: str, tmp_path: Path, photos: Path, public_bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out, book = spoil(case, photos, tmp_path / "set"), tmp_path / "out", tmp_path / "ledger.jsonl"
    command = ["train-private", "--base", public_bundle, "--private", path, "--epsilon", "5", "--out", out]
    assert main([str(word) for word in [*command, "--ledger", book]]) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert words in shown
    assert "anna" not in shown
    assert "7.png" not in shown
    assert "35" not in shown.replace(str(tmp_path), "")
    assert not out.exists()
    assert not book.exists() or not book.read_text()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith((".", "tmp"))]


def test_bad_public_sets_name_the_file(tmp_path: Path, photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = spoil("not there", photos, tmp_path / "set")
    out = tmp_path / "out"
    assert main(["build-kb", "--public", str(path), "--out", str(out), "--preset", "demo"]) == 2
    shown = capfd.readouterr().err
    problem = "names a file that is not there: '7.png'; add the file, or remove its line"
    assert shown == f"rapid: --public {path}/metadata.csv: {problem}\n"
    assert not out.exists()
