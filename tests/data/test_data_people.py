"""Whose image each is: one rule for columns and for folders."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from tests_sets import some

from rapid.data import load_images
from rapid.data.units import PeopleFrom
from rapid.errors import InputError

NAMES = ("p1", "p1 ", "\u00a0p1", "7", "07", "7.0", "7.00 ", "p7", "jose\u0301", "jos\u00e9", "0", "00", "-7", "7.5")
PEOPLE = (0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 4, 5, 6)
"""Who that is."""
MISSING = ("NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "null", "None")


def units(path: Path, column: str | None) -> list[int]:
    found = load_images(path, "private", people=PeopleFrom(column), show_paths=False)
    assert found.units is not None
    return found.units.tolist()


def in_folders(root: Path, names: tuple[str, ...], *, labelled: bool) -> Path:
    """An image in the folder of each name, in turn of two classes."""
    for number, name in enumerate(names):
        folder = root / "ab"[number % 2] / name if labelled else root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(some().png(0))
    return root


def in_table(root: Path, names: tuple[str, ...]) -> Path:
    root.mkdir()
    with (root / "metadata.csv").open("w", encoding="utf-8", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["file_name", "who"])
        for number, name in enumerate(names):
            (root / f"{number}.png").write_bytes(some().png(0))
            lines.writerow([f"{number}.png", name])
    return root / "metadata.csv"


def in_archive(path: Path, names: tuple[str, ...]) -> Path:
    np.savez(path, images=np.zeros((len(names), 4, 4), np.uint8), who=np.array(names))
    return path


@pytest.mark.parametrize("first", range(len(NAMES)))
def test_two_names_are_one_person_wherever_they_are(tmp_path: Path, first: int) -> None:
    for second in range(first):
        names, one = (NAMES[first], NAMES[second]), PEOPLE[first] == PEOPLE[second]
        root = tmp_path / str(second)
        root.mkdir()
        found = [
            units(in_folders(root / "labelled", names, labelled=True), None),
            units(in_folders(root / "plain", names, labelled=False), None),
            units(in_table(root / "table", names), "who"),
            units(in_archive(root / "a.npz", names), "who"),
        ]
        assert [len(set(people)) for people in found] == [1 if one else 2] * 4, names


@pytest.mark.parametrize("name", [*MISSING, " nan ", "\u00a0"])
def test_a_value_that_is_missing_is_no_person(tmp_path: Path, name: str) -> None:
    names = ("anna", name, name)
    for path in (in_table(tmp_path / "table", names), in_archive(tmp_path / "a.npz", names)):
        with pytest.raises(InputError, match=r"^unit_column who: has an empty entry, or one such as NA, nan") as caught:
            units(path, "who")
        assert "anna" not in str(caught.value)
    if "/" in name:
        return
    for labelled in (True, False):
        with pytest.raises(InputError, match=r"^unit_folders: a folder has a name such as NA, nan, NULL") as caught:
            units(in_folders(tmp_path / f"folders {labelled}", names, labelled=labelled), None)
        assert "anna" not in str(caught.value)


def test_what_numpy_writes_for_a_missing_person(tmp_path: Path) -> None:
    for missing in (None, np.nan):
        names = tuple(np.array(["anna", missing], dtype=np.str_).tolist())
        with pytest.raises(InputError, match="has an empty entry"):
            units(in_archive(tmp_path / "a.npz", names), "who")


def test_names_that_only_look_like_missing_ones_are_people(tmp_path: Path) -> None:
    assert len(set(units(in_archive(tmp_path / "a.npz", ("Na", "Nan", "Null", "Noneman", "na")), "who"))) == 5


@pytest.mark.parametrize("splits", [("train", "test"), ("Training", "valid"), ("train",), ("test", "cat"), ("test",)])
def test_people_in_folders_that_are_called_as_splits(tmp_path: Path, splits: tuple[str, ...]) -> None:
    """They were classes of these names, which a private model would have published."""
    for number, split in enumerate(splits):
        (tmp_path / split / "anna").mkdir(parents=True)
        (tmp_path / split / "anna" / f"{number}.png").write_bytes(some().png(number))
    if splits[0].lower().startswith("train"):
        with pytest.raises(InputError, match="called as splits, not classes: give the path of one of them, or declare"):
            units(tmp_path, None)
        assert len(units(tmp_path / splits[0], None)) == 1
    found = load_images(tmp_path, "private", list(splits), people=PeopleFrom())
    assert found.classes == splits
