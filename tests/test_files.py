"""Files and folders appear whole, or what was there stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid.files import replacing, write_json


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fails", ["in the block", "at the rename"])
def test_a_folder_stays_if_the_new_one_cannot_take_its_place(tmp_path: Path, fails: str) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises((RuntimeError, OSError)), replacing(path) as target:
        target.mkdir()
        (target / "new").write_text("new")
        if fails == "in the block":
            raise RuntimeError
        # what is to be renamed is gone by then, and something in it was written after all
        target.rename(target.with_name("replaced"))
    assert content(tmp_path) == {"out/old": "old"}


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("old")
    with replacing(path) as target:
        target.mkdir()
        (target / "new").write_text("new")
    assert content(tmp_path) == {"out/new": "new"}


def test_a_file_does_not_take_the_place_of_a_folder(tmp_path: Path) -> None:
    """What lies in it would be gone."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("content")
    with pytest.raises(IsADirectoryError, match="kept"):
        write_json(tmp_path / "kept", {})
    assert (tmp_path / "kept" / "file").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
