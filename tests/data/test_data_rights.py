"""Files without the right to read them are not called damaged: their owner would remove them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests_rights import as_anyone, locked
from tests_sets import as_binary_parquet, as_metadata_csv, as_npz, as_tar, some

from rapid.data import load_images
from rapid.data.classes import read_classes
from rapid.errors import InputError

TOLD = "cannot be read (permission denied); give yourself the right to read it"


@pytest.mark.parametrize(
    ("write", "file"),
    [(as_metadata_csv, "001.png"), (as_tar, None), (as_npz, None), (as_binary_parquet, None)],
)
def test_a_file_that_may_not_be_read(write: Callable[..., Path], file: str | None, tmp_path: Path) -> None:
    path = write(some(), tmp_path / "set")
    hidden = locked(path if file is None else path / file)
    with as_anyone(), pytest.raises(InputError) as shown:
        load_images(path, "public")
    assert str(shown.value) == f"public {hidden}: {TOLD}"
    with as_anyone(), pytest.raises(InputError) as told:
        load_images(path, "private", show_paths=False)
    assert str(told.value).startswith(f"private {path}: ")
    assert TOLD in str(told.value)
    assert "001" not in str(told.value)


def test_a_file_of_classes_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\nb\n")
    hidden = locked(tmp_path / "names.txt")
    with as_anyone(), pytest.raises(InputError) as told:
        read_classes(str(hidden))
    assert str(told.value) == f"classes {hidden}: {TOLD}"
