"""`rapid generate`: forms of output, and how many images of each class."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from rapid.cli import main
from rapid.cli.class_counts import read_class_counts
from rapid.errors import InputError

CLASSES = ("cat", "7", "a=b", "x,y", "dog")


def generate(model: Path, out: Path, *arguments: str) -> int:
    command = ["generate", "--model", str(model), "--out", str(out), "--seed", "4", *arguments]
    return main([*command, "--set", "generation.attempts=1"])


def test_forms_hold_the_same_images(private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("folder", "images.npz", "images.parquet", "grid.png"):
        assert generate(private_bundle, tmp_path / name, "--class-counts", "7=3,1=1") == 0
        assert f"{name}: 4 images, seed 4" in capfd.readouterr().out
    with np.load(tmp_path / "images.npz") as found:
        images = found["images"]
        assert found["labels"].tolist() == [7, 7, 7, 1]
    lines = [json.loads(line) for line in (tmp_path / "folder" / "metadata.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == ["7", "7", "7", "1"]
    for line, image in zip(lines, images, strict=True):
        with Image.open(tmp_path / "folder" / line["file_name"]) as png:
            assert (np.asarray(png) == image).all()
    table = parquet.read_table(tmp_path / "images.parquet")
    assert table["label"].to_pylist() == [7, 7, 7, 1]
    assert json.loads(table.schema.metadata[b"rapid"])["synthetic"] is True
    with Image.open(tmp_path / "grid.png") as png:
        assert json.loads(png.text["rapid"])["synthetic"] is True  # type: ignore[attr-defined]
        # two rows, one for each class
        assert png.height < 3 * 68 < png.width + 68
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_soft_labels_from_the_model_to_the_report(
    private_bundle: Path, digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(private_bundle), "--count", "40", "--seed", "4", "--set", "generation.attempts=2"]
    assert main(["generate", *words, "--out", str(tmp_path / "plain.npz")]) == 0
    assert main(["generate", *words, "--out", str(tmp_path / "soft.npz"), "--soft-labels"]) == 0
    with np.load(tmp_path / "plain.npz") as plain, np.load(tmp_path / "soft.npz") as soft:
        assert "soft_labels" not in plain.files
        assert (plain["images"] == soft["images"]).all()
        assert soft["soft_labels"].shape == (40, 10)
    report = tmp_path / "report.json"
    words = ["evaluate", "--real", str(digits), "--classifiers", "small", "--epochs", "1", "--soft-labels"]
    assert main([*words, "--synthetic", str(tmp_path / "soft.npz"), "--out", str(report)]) == 0
    assert "trained on synthetic images with soft labels: " in capfd.readouterr().out
    utility = json.loads(report.read_text())["utility"]
    assert list(utility) == ["protocol", "synthetic", "synthetic_soft"]
    assert "at temperature 3 in place of the labels" in utility["protocol"]
    assert "40 synthetic images with soft labels" in report.with_suffix(".html").read_text("utf-8")
    report = tmp_path / "other.json"
    assert main([*words, "--synthetic", str(tmp_path / "plain.npz"), "--out", str(report)]) == 2
    assert "has no soft labels; make images by rapid generate --soft-labels" in capfd.readouterr().err
    words[words.index("small")] = "none"
    assert main([*words, "--synthetic", str(tmp_path / "soft.npz"), "--out", str(report)]) == 2
    assert "--soft-labels: is for classifiers; leave it out with --classifiers none" in capfd.readouterr().err


def test_images_for_training_are_varied_and_none_is_refused(private_bundle: Path, tmp_path: Path) -> None:
    words = ["generate", "--model", str(private_bundle), "--seed", "4", "--count", "40"]
    soft = ["--soft-labels", "--set", "generation.attempts=1", "--set", "generation.epsilon_scale=1.2"]
    other = ["--for-training", "--set", "generation.epsilon_scale=1"]
    assert main([*words, "--out", str(tmp_path / "soft.npz"), *soft]) == 0
    assert main([*words, "--out", str(tmp_path / "training.npz"), "--for-training"]) == 0
    assert main([*words, "--out", str(tmp_path / "other.npz"), *other]) == 0
    with (
        np.load(tmp_path / "soft.npz") as drawn,
        np.load(tmp_path / "training.npz") as training,
        np.load(tmp_path / "other.npz") as plainer,
    ):
        assert (training["images"] == drawn["images"]).all()
        assert (training["soft_labels"] == drawn["soft_labels"]).all()
        # what the probe sees in them, not what they were drawn for
        assert (drawn["labels"] == np.arange(40) % 10).all()
        assert (training["labels"] == drawn["soft_labels"].argmax(1)).all()
        # --set has the last word
        assert (plainer["images"] != drawn["images"]).any()


def test_images_for_training_need_a_probe_and_room_for_soft_labels(
    private_bundle: Path, public_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--count", "2", "--for-training"]
    assert generate(public_bundle, tmp_path / "a.npz", *words) == 2
    assert "--for-training" in (said := capfd.readouterr().err)
    assert "the model has no probe that tells soft labels; leave it out" in said
    assert generate(private_bundle, tmp_path / "grid.png", *words) == 2
    assert "--for-training: a picture holds no soft labels" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_soft_labels_that_cannot_be_written(
    private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(private_bundle, tmp_path / "grid.png", "--count", "2", "--soft-labels") == 2
    assert "--soft-labels: a picture holds no soft labels" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_report_tells_how_the_images_were_made(
    private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--model", str(private_bundle), "--seed", "4", "--count", "20", "--report"]
    report = str(tmp_path / "r.json")
    assert main([*words, report, "--out", str(tmp_path / "a.npz"), "--set", "generation.attempts=3"]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    shares = [one["accepted"] / one["candidates"] for one in found["acceptance_by_class"].values()]
    assert found["acceptance"] == pytest.approx(sum(shares) / len(shares))
    offered = sum(one["candidates"] for one in found["acceptance_by_class"].values())
    assert 20 <= offered == found["offered"] <= found["candidates"]
    assert found["calls_per_image"] == found["calls_per_candidate"] * found["candidates"] / 20
    assert f"; {told(found)}\n" in capfd.readouterr().out
    assert found["model"]["name"] == private_bundle.name
    # without the probe each candidate is an image
    report = str(tmp_path / "drawn.json")
    assert main([*words, report, "--out", str(tmp_path / "b.npz"), "--set", "generation.attempts=1"]) == 0
    found = json.loads((tmp_path / "drawn.json").read_text())
    assert (found["candidates"], found["offered"]) == (20, 0)
    assert (found["acceptance"], found["acceptance_by_class"]) == (None, {})
    assert main([*words, str(tmp_path / "r.txt"), "--out", str(tmp_path / "c.npz")]) == 2
    assert "--report" in capfd.readouterr().err


def told(report: dict[str, Any]) -> str:
    """What the last line says of the candidates of a report."""
    share = f"{report['acceptance']:.1%} of these accepted for their class"
    return f"{report['candidates']:,} candidates made, {report['offered']:,} offered to open places, {share}"


def test_a_share_is_told_of_the_candidates_that_it_counts(
    private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some are made for nothing: the last place was filled before they were offered."""
    words = ["generate", "--model", str(private_bundle), "--seed", "4", "--set", "generation.attempts=8"]
    in_vain = 0
    # the probe of the bundle is small, and does not find every class
    for label in range(10):
        report, out = tmp_path / f"{label}.json", tmp_path / f"{label}.npz"
        assert main([*words, "--class-counts", f"{label}=1", "--out", str(out), "--report", str(report)]) == 0
        found = json.loads(report.read_text())
        assert 1 <= found["offered"] <= found["candidates"]
        assert told(found) in capfd.readouterr().out
        in_vain += found["candidates"] - found["offered"]
    assert in_vain > 0


def test_a_report_replaces_nothing(private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report, link = tmp_path / "r.json", tmp_path / "link.json"
    report.write_text("earlier")
    link.symlink_to(tmp_path / "none.json")
    for path in (report, link):
        assert generate(private_bundle, tmp_path / "a.npz", "--count", "2", "--report", str(path)) == 2
        told = f"rapid: --report {path}: exists already; choose another name, or remove it first\n"
        assert capfd.readouterr().err.endswith(told)
    assert report.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "r.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--count: say how many images, or give --class-counts"),
        (["--class-counts", "7=1", "--labels", "7"], "--labels: --class-counts says"),
        (["--class-counts", "7=2", "--count", "3"], "--class-counts 7=2: adds up to 2 images, but --count is 3"),
        (["--class-counts", "11=2"], "--class-counts 11=2: '11' is unknown; the model knows 0, 1"),
        (["--class-counts", "7=1,7=2"], "names class '7' twice"),
        (["--class-counts", "none.csv"], "--class-counts none.csv: is no file that can be read; give 7=500"),
    ],
)
def test_bad_counts_are_one_line(
    arguments: list[str], words: str, private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(private_bundle, tmp_path / "new", *arguments) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rapid: ")]
    assert words in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("inner", ["", "missing/"])
def test_a_name_that_is_too_long(
    inner: str, private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for suffix in (".npz", ".png", "/folder"):
        out = tmp_path / (inner + "n" * 300 + suffix)
        assert generate(private_bundle, out, "--count", "2") == 2
        told = f"rapid: --out {out}: is a name that is too long for a file; choose a shorter one\n"
        assert capfd.readouterr().err.endswith(told)
    assert main(["build-kb", "--public", str(tmp_path), "--out", str(out)]) == 2
    assert "is a name that is too long for a file" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_of_too_many_classes_counts(
    private_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--count", "2501"], ["--class-counts", "7=2501"]):
        assert generate(private_bundle, tmp_path / "grid.png", *arguments) == 2
        assert "a picture shows at most 2,500 images" in capfd.readouterr().err


@given(st.dictionaries(st.sampled_from(range(5)), st.integers(0, 50), min_size=1))
def test_every_form_gives_the_same(tmp_path_factory: pytest.TempPathFactory, counts: dict[int, int]) -> None:
    folder = tmp_path_factory.mktemp("counts")
    named = {CLASSES[label]: count for label, count in counts.items()}
    (folder / "counts.json").write_text(json.dumps(named))
    rows = "".join(f'"{name}",{count}\n' for name, count in named.items())
    (folder / "header.csv").write_text("class,count\n" + rows)
    (folder / "plain.csv").write_text(rows)
    # by number: a name with a comma cannot be given in the line itself
    line = ",".join(f"{CLASSES[label] if label in (0, 1, 2) else label}={count}" for label, count in counts.items())
    expected = [label for label, count in counts.items() for _ in range(count)]
    for value in (line, *(str(folder / name) for name in ("counts.json", "header.csv", "plain.csv"))):
        if expected:
            assert read_class_counts(value, CLASSES) == expected
        else:
            with pytest.raises(InputError, match="asks for no images"):
                read_class_counts(value, CLASSES)


def test_many_classes_need_no_file() -> None:
    """The list is longer than the name of a file can be."""
    classes = [f"class {number}" for number in range(100)]
    value = ",".join(f"{name}=1" for name in classes)
    assert read_class_counts(value, classes) == list(range(100))
    with pytest.raises(InputError, match="is no file"):
        read_class_counts("\x00", classes)


def test_names_go_before_numbers() -> None:
    assert Counter(read_class_counts("7=2, 4 = 1", ("4", "7", "a", "b", "c"))) == {1: 2, 0: 1}
    assert read_class_counts("1=1", ("a", "b")) == [1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("counts.json:[1, 2]", "is not a JSON object"),
        ("counts.json:{", "is not JSON"),
        ("counts.json:" + "[" * 100_000, "is not JSON"),
        (f'counts.csv:"{"x" * 200_000}",1', "is not CSV"),
        ('counts.json:{"cat": 1.5}', "'cat' needs a whole number of images, not '1.5'"),
        ('counts.json:{"cat": true}', "not 'True'"),
        ('counts.json:{"cat": {"dog": 1}}', "'cat' needs a whole number"),
        ('counts.json:{"cat": 1, "cat": 2}', "names class 'cat' twice"),
        ("counts.csv:cat,1\ndog\n", "has a line without two columns"),
        ("counts.csv:cat,-1\n", "not '-1'"),
        ("counts.csv:", "asks for no images"),
        ("cat=1,dog", "'dog' needs a whole number of images, not ''"),
        ("cat=many", "not 'many'"),
        ("cat=9999999999", "not '9999999999'"),
        ("cat=9000000,7=1000001", "asks for more than 10,000,000 images; make the rest with other seeds"),
        ("=2", "=2: has a number without a class; give 7=500,cat=200"),
        ("counts.csv:,2\n", "has a number without a class"),
        ('counts.JSON:{"cat": 1.5}', "'cat' needs a whole number of images, not '1.5'"),
        ("bird=1", "'bird' is unknown; the model knows cat, 7"),
        (",", "is no file"),
    ],
)
def test_malformed_counts(tmp_path: Path, content: str, words: str) -> None:
    name, _, text = content.partition(":")
    value = content
    if name.startswith("counts."):
        (tmp_path / name).write_text(text)
        value = str(tmp_path / name)
    with pytest.raises(InputError) as caught:
        read_class_counts(value, CLASSES)
    assert words in str(caught.value)
    assert caught.value.field == "class_counts"


def test_without_classes() -> None:
    with pytest.raises(InputError, match="the model has no classes; give --count"):
        read_class_counts("1=1", ())
