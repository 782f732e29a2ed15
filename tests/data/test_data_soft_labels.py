"""Soft labels of generated images: written and read back in each form, and refused where they are no probabilities."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pyarrow import parquet

from rapid.data import load_images
from rapid.data.export import write_samples
from rapid.errors import InputError

CLASSES = ("cat", "a/b", "नमस्ते", ".dot", "no image of it")
FORMS = ("folder", "set.npz", "set.parquet")


def probabilities(count: int, classes: int, seed: int = 0) -> NDArray[np.float32]:
    """Of all orders of magnitude, with zeros and ones."""
    rng = np.random.default_rng(seed)
    found = rng.dirichlet(np.full(classes, 0.05), count).astype(np.float32)
    found[0] = np.eye(classes, dtype=np.float32)[0]
    return found


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9), classes=st.integers(1, 5), seed=st.integers(0, 99))
def test_they_are_read_as_they_were_written(form: str, count: int, classes: int, seed: int) -> None:
    rows = probabilities(count, classes, seed)
    labels = np.arange(count) % classes
    images = np.zeros((count, 4, 4), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / form
        write_samples(path, images, labels, CLASSES[:classes], soft_labels=rows)
        found = load_images(path, "synthetic", soft_labels=True)
        plain = load_images(path, "synthetic")
    assert found.labels is not None
    assert found.soft_labels is not None
    assert found.soft_labels.dtype == np.float32
    # also of a class without images, in the order of the classes
    assert found.classes == CLASSES[:classes]
    np.testing.assert_array_equal(found.labels, labels)
    np.testing.assert_array_equal(found.soft_labels, rows)
    # who did not ask has the same images without them
    assert plain.soft_labels is None
    assert plain.labels is not None
    assert [plain.classes[label] for label in plain.labels] == [found.classes[label] for label in found.labels]


def test_other_readers_find_them(tmp_path: Path) -> None:
    rows = probabilities(3, 2)
    for form in FORMS:
        write_samples(tmp_path / form, np.zeros((3, 4, 4), np.uint8), np.array([1, 0, 1]), ("x", "y"), None, rows)
    first = json.loads((tmp_path / "folder" / "metadata.jsonl").read_text().splitlines()[0])
    assert first == {"file_name": "y/0.png", "label": "y", "soft_labels": {"x": 1.0, "y": 0.0}}
    table = parquet.read_table(tmp_path / "set.parquet")
    np.testing.assert_array_equal(np.array(table["soft_labels"].to_pylist(), np.float32), rows)
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["soft_labels"] == {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "Sequence"}
    with np.load(tmp_path / "set.npz") as archive:
        np.testing.assert_array_equal(archive["soft_labels"], rows)


@pytest.mark.parametrize("form", FORMS)
def test_a_set_without_them_is_refused_if_they_are_asked_for(tmp_path: Path, form: str) -> None:
    write_samples(tmp_path / form, np.zeros((3, 4, 4), np.uint8), np.array([1, 0, 1]), ("x", "y"))
    with pytest.raises(InputError, match="has no soft labels; make images by rapid generate --soft-labels"):
        load_images(tmp_path / form, "synthetic", soft_labels=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows[:, :1],
        lambda rows: rows[:2],
        lambda rows: rows[0],
        lambda rows: rows * 0.9,
        lambda rows: rows * [[2, -1]],
        lambda rows: np.where(rows == 1, np.nan, rows),
        lambda rows: np.where(rows == 1, np.inf, rows),
        lambda rows: np.full(rows.shape, "a"),
        lambda rows: rows + 1j,
        lambda rows: rows.astype(float) * 1e300,
    ],
)
def test_an_archive_whose_rows_are_no_probabilities(
    tmp_path: Path, spoil: Callable[[NDArray[np.float32]], object]
) -> None:
    rows = np.eye(2, dtype=np.float32)[[0, 1, 0]]
    arrays = {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.array([0, 1, 0])}
    np.savez(tmp_path / "set.npz", **arrays, soft_labels=spoil(rows))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'soft_labels' must hold one probability for each class"):
        load_images(tmp_path / "set.npz", "synthetic", soft_labels=True)
    # and nobody else minds
    assert len(load_images(tmp_path / "set.npz", "synthetic")) == 3


@pytest.mark.parametrize(
    "second",
    [
        None,
        [0.5, 0.5],
        {"x": 1.0},
        {"x": 0.5, "z": 0.5},
        {"x": None, "y": 1.0},
        {"x": "half", "y": 0.5},
        {"x": 10**400, "y": 0},
        0.5,
    ],
)
def test_a_folder_whose_objects_do_not_fit(tmp_path: Path, second: object) -> None:
    write_samples(
        tmp_path / "set", np.zeros((2, 4, 4), np.uint8), np.arange(2), ("x", "y"), None, np.eye(2, dtype=np.float32)
    )
    table = tmp_path / "set" / "metadata.jsonl"
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    lines[1]["soft_labels"] = second
    table.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match="'soft_labels' must hold one probability for each class"):
        load_images(tmp_path / "set", "synthetic", soft_labels=True)


@pytest.mark.parametrize("form", FORMS)
def test_classes_in_another_order_are_refused(tmp_path: Path, form: str) -> None:
    write_samples(
        tmp_path / form, np.zeros((3, 4, 4), np.uint8), np.array([1, 0, 1]), ("x", "y"), None, np.eye(2)[[1, 0, 1]]
    )
    with pytest.raises(InputError, match="soft_labels: their order is that of the set's classes"):
        load_images(tmp_path / form, "synthetic", classes=("y", "x"), soft_labels=True)


def test_names_without_an_order_are_refused(tmp_path: Path) -> None:
    """As of a table whose numbers became names: the order of the model's classes is not known any more."""
    write_samples(tmp_path / "set.parquet", np.zeros((2, 4, 4), np.uint8), np.arange(2), ("z", "a"), None, np.eye(2))
    table = parquet.read_table(tmp_path / "set.parquet")
    column = table.schema.get_field_index("label")
    named = table.set_column(column, "label", [["z", "a"]]).replace_schema_metadata(None)
    parquet.write_table(named, tmp_path / "named.parquet")
    with pytest.raises(InputError, match="labels that are names without an order; write a ClassLabel"):
        load_images(tmp_path / "named.parquet", "synthetic", soft_labels=True)
    assert load_images(tmp_path / "named.parquet", "synthetic").classes == ("a", "z")


def test_objects_may_name_the_classes_in_any_order(tmp_path: Path) -> None:
    rows = probabilities(2, 2)
    write_samples(tmp_path / "set", np.zeros((2, 4, 4), np.uint8), np.arange(2), ("x", "y"), None, rows)
    table = tmp_path / "set" / "metadata.jsonl"
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    lines[1]["soft_labels"] = dict(reversed(lines[1]["soft_labels"].items()))
    table.write_text("\n".join(map(json.dumps, lines)))
    np.testing.assert_array_equal(load_images(tmp_path / "set", "synthetic", soft_labels=True).soft_labels, rows)


def test_labels_that_soft_labels_do_not_know(tmp_path: Path) -> None:
    write_samples(
        tmp_path / "set", np.zeros((2, 4, 4), np.uint8), np.arange(2), ("x", "y"), None, np.eye(2, dtype=np.float32)
    )
    table = tmp_path / "set" / "metadata.jsonl"
    table.write_text(table.read_text().replace('"label": "y"', '"label": "z"'))
    with pytest.raises(InputError, match="'soft_labels' must hold"):
        load_images(tmp_path / "set", "synthetic", soft_labels=True)


def test_without_labels_there_are_no_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=np.zeros((2, 4, 4), np.uint8), soft_labels=np.eye(2, dtype=np.float32))
    with pytest.raises(InputError, match="has 'soft_labels' but no labels; add them"):
        load_images(tmp_path / "set.npz", "synthetic", soft_labels=True)


def test_tables_that_cannot_hold_them(tmp_path: Path) -> None:
    """Text of a CSV, and labels that are no names."""
    write_samples(
        tmp_path / "set", np.zeros((2, 4, 4), np.uint8), np.arange(2), ("x", "y"), None, np.eye(2, dtype=np.float32)
    )
    lines = (tmp_path / "set" / "metadata.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for label in (["x"], {"x": 1}, 0):
        rows[0]["label"] = label
        (tmp_path / "set" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(InputError, match="must hold one probability for each class"):
            load_images(tmp_path / "set", "synthetic", soft_labels=True)
    (tmp_path / "set" / "metadata.jsonl").unlink()
    (tmp_path / "set" / "metadata.csv").write_text("file_name,label,soft_labels\nx/0.png,x,0.5\ny/1.png,y,0.5\n")
    with pytest.raises(InputError, match="must hold one probability for each class"):
        load_images(tmp_path / "set", "synthetic", soft_labels=True)
