"""Files of a bundle: what belongs to it, and what changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from rapid.bundle import Bundle
from rapid.release.contents import contents, differences


@pytest.fixture
def copy(private_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(private_bundle, tmp_path / "copy"))


def test_every_file_is_hashed(copy: Path) -> None:
    found = contents(Bundle.open(copy, "model"))
    expected = {
        str(path.relative_to(copy)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in copy.rglob("*")
        if path.is_file() and path.relative_to(copy).parts[0] != "checkpoints"
    }
    assert found.hashes == expected
    assert {"config.json", "privacy.json", "README.md", "knowledge_base/values.npy"} <= expected.keys()
    assert (found.foreign, found.has_state) == (0, True)
    assert differences(found.hashes, copy) == ([], 0)
    shutil.rmtree(copy / "checkpoints")
    assert not contents(Bundle.open(copy, "model")).has_state
    assert differences(found.hashes, copy) == ([], 0)


def test_foreign_files_are_counted_and_neither_named_nor_hashed(copy: Path) -> None:
    before = contents(Bundle.open(copy, "model")).hashes
    (copy / "smith.png").write_bytes(b"private")
    (copy / "notes").mkdir()
    (copy / "notes" / "config.json").write_text("{}")
    # a component with a manifest: its hash does not cover other files
    (copy / "knowledge_base" / "smith.png").write_bytes(b"private")
    (copy / "link").symlink_to(copy / "README.md")
    found = contents(Bundle.open(copy, "model"))
    assert (found.hashes, found.foreign) == (before, 4)
    assert "smith" not in json.dumps(found.hashes)
    assert differences(before, copy) == ([], 4)


@pytest.mark.parametrize(
    "name", ["denoiser/.private-images.npz", "knowledge_base/.smith.npy", "denoiser/.smith/.images.npz", ".smith.npz"]
)
def test_hidden_files_are_foreign(copy: Path, name: str) -> None:
    """The hash of a component does not cover them."""
    before = contents(Bundle.open(copy, "model")).hashes
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"private")
    found = contents(Bundle.open(copy, "model"))
    assert (found.hashes, found.foreign) == (before, 1)
    # what --verify compares
    assert differences(before, copy) == ([], 1)


def test_each_change_is_found(copy: Path) -> None:
    recorded = contents(Bundle.open(copy, "model")).hashes
    for name in recorded:
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
        assert differences(recorded, copy) == ([name], 0)
        (copy / name).unlink()
        assert differences(recorded, copy) == ([name], 0)
        (copy / name).write_bytes(kept)
    assert differences(recorded, copy) == ([], 0)


def test_a_file_that_its_manifest_disowns_is_foreign(copy: Path) -> None:
    values = copy / "knowledge_base" / "values.npy"
    kept = values.read_bytes()
    values.unlink()
    values.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert contents(Bundle.open(copy, "model")).foreign == 1
