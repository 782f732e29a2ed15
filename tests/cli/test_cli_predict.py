"""`rapid predict`, and `rapid evaluate` and `rapid generate` with a classifier."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rapid.cli import main
from rapid.data import load_images
from rapid.methods import open_classifier, open_generator, open_model
from rapid.sampling.classifier import Classifier


def rapid(*arguments: object) -> int:
    return main([str(one) for one in arguments])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Twelve digits as PNG files in sub-folders."""
    root = tmp_path_factory.mktemp("digits") / "pngs"
    images = load_images(digits, "data").images
    for number in range(12):
        path = root / f"part {number % 2}" / f"{number:02d},x.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path)
    return root


def test_rows_have_names_labels_and_probabilities(
    classifier_bundle: Path, folder: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictions.csv"
    assert rapid("predict", "--model", classifier_bundle, "--data", folder, "--out", out) == 0
    assert f"{out}: 12 images" in capsys.readouterr().out
    rows = rows_of(out)
    assert list(rows[0]) == ["image", "label", *(f"p({n})" for n in range(10))]
    expected = [f"part {n % 2}/{n:02d},x.png" for n in (*range(0, 12, 2), *range(1, 12, 2))]
    assert [row["image"] for row in rows] == expected
    classifier = open_classifier(classifier_bundle, "cpu")
    images = np.pad(load_images(digits, "data").images[:12], ((0, 0), (2, 2), (2, 2)))
    for row in rows:
        number = int(row["image"].split("/")[1][:2])
        wanted = classifier.probabilities(images[number : number + 1])[0]
        found = [float(row[f"p({n})"]) for n in range(10)]
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        assert row["label"] == str(int(np.argmax(found)))
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]


def test_rows_of_an_archive_are_numbered(classifier_bundle: Path, digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    assert rapid("predict", "--model", classifier_bundle, "--data", digits, "--out", out) == 0
    assert [row["image"] for row in rows_of(out)] == [str(number) for number in range(100)]


def test_bad_input_is_told_in_one_line(
    classifier_bundle: Path, public_bundle: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.npz"
    np.savez(large, images=np.zeros((2, 40, 40), np.uint8))
    out, there = tmp_path / "p.csv", tmp_path / "labels.csv"
    there.write_text("image,label\n0.png,cat\n")
    cases = [
        ((classifier_bundle, digits, tmp_path / "p.txt"), "--out", "ends in .csv"),
        ((classifier_bundle, digits, there), "--out", "exists already; choose another name"),
        ((classifier_bundle, tmp_path / "none", out), "--data", "does not exist"),
        ((classifier_bundle, large, out), "--data", "has images of 40x40; images larger than 32x32 pixels do not fit"),
        ((public_bundle, digits, out), "--model", "was made by rapid, and has no classifier of images"),
        ((tmp_path, digits, out), "--model", "is no bundle"),
    ]
    for (model, data, target), field, words in cases:
        assert rapid("predict", "--model", model, "--data", data, "--out", target) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert field in told
        assert words in told
    assert {path.name for path in tmp_path.iterdir()} == {"large.npz", "labels.csv"}
    assert there.read_text() == "image,label\n0.png,cat\n"


def test_generate_says_that_it_is_a_classifier(
    classifier_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "images.npz"
    assert rapid("generate", "--model", classifier_bundle, "--count", 2, "--out", out) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "was made by dp-classifier, which makes no images; use rapid predict" in told
    assert not out.exists()


def test_a_classifier_is_evaluated(
    classifier_bundle: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert rapid("evaluate", "--model", classifier_bundle, "--real", digits, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "expected calibration error" in printed
    assert "Not private" in printed
    report = json.loads(out.read_text())
    classifier = open_classifier(classifier_bundle, "cpu")
    images = load_images(digits, "real")
    probabilities = classifier.probabilities(np.pad(images.images, ((0, 0), (2, 2), (2, 2))))
    assert report["accuracy"] == pytest.approx((probabilities.argmax(1) == images.labels).mean())
    assert report["notice"].startswith("Not private")
    assert report["model"]["privacy"]["method"] == "dp-classifier"
    assert np.sum(report["confusion"]) == 100
    with Image.open(tmp_path / "report-confusion.png") as picture:
        assert picture.mode == "RGB"


def test_the_probe_of_a_model_is_a_classifier(
    private_bundle: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its probabilities are those by which the same model selects its images."""
    table, report = tmp_path / "predictions.csv", tmp_path / "report.json"
    assert rapid("predict", "--model", private_bundle, "--data", digits, "--out", table) == 0
    assert rapid("evaluate", "--model", private_bundle, "--real", digits, "--out", report) == 0
    assert "expected calibration error" in capsys.readouterr().out
    images = load_images(digits, "real")
    padded = np.pad(images.images, ((0, 0), (2, 2), (2, 2)))
    expected = open_generator(private_bundle, "cpu", ["generation.attempts=2"]).label(padded)
    assert expected is not None
    found = np.array([[float(row[f"p({n})"]) for n in range(10)] for row in rows_of(table)])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert json.loads(report.read_text())["accuracy"] == pytest.approx((expected.argmax(1) == images.labels).mean())
    assert open_classifier(private_bundle, "cpu").probabilities(padded[:0]).shape == (0, 10)
    # served it makes images, as before
    assert not isinstance(open_model(private_bundle, "cpu"), Classifier)


def test_evaluations_that_do_not_fit_are_refused(
    classifier_bundle: Path, public_bundle: Path, letters: Path, digits: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "report.json"
    cases = [
        (("--real", digits), "--synthetic: give the images"),
        (("--model", public_bundle, "--real", digits), "and has no classifier of images"),
        (("--model", classifier_bundle, "--real", letters), "which the model does not have"),
        (("--model", classifier_bundle, "--synthetic", digits, "--real", digits), "makes no images; use rapid predict"),
        (("--model", classifier_bundle, "--public", letters, "--real", digits), "is for synthetic images"),
    ]
    for arguments, words in cases:
        assert rapid("evaluate", *arguments, "--out", out) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())
