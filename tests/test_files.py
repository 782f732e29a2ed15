"""Files and folders appear whole, or what was there stays."""

from __future__ import annotations

import os
import tracemalloc
from contextlib import nullcontext
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


def test_an_error_of_the_disk_is_told_whichever_file_it_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a folder are written to the disk at the same time."""
    written: list[str] = []

    def fsync(handle: int) -> None:
        name = str(Path(f"/proc/self/fd/{handle}").readlink())
        written.append(name)
        if name.endswith("/37"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    for last, fails in ((30, False), (60, True)):
        told = pytest.raises(OSError, match="Input/output") if fails else nullcontext()
        with told, replacing(tmp_path / "out") as new:
            (new / "inner").mkdir(parents=True)
            for number in range(last):
                (new / "inner" / str(number)).write_text("x")
    assert len(content(tmp_path / "out")) == 30
    assert {Path(name).name for name in written} >= {"out", "inner", *map(str, range(30))}


def test_a_large_folder_is_written_to_the_disk_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: written.add(os.fstat(handle).st_ino))
    with replacing(tmp_path / "out") as new:
        (new / "a" / "b").mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "file").write_text("x")
        (new / "link").symlink_to(tmp_path / "elsewhere")
        (new / "nothing").symlink_to(tmp_path / "missing")
        for number in range(5000):
            (new / "a" / "b"[: number % 2] / str(number)).touch()
        expected = {path.stat().st_ino for path in (new, *new.rglob("*")) if path.exists()}
        tracemalloc.start()
    try:
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written >= expected
    assert (tmp_path / "elsewhere" / "file").stat().st_ino not in written
    assert peak < 5e6
