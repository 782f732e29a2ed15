"""Copies of bundles and components have what a component's hash covers, and nothing that lies beside it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from rapid.bundle import Bundle, BundleConfig, write_bundle
from rapid.bundle.components import Thumbnails
from rapid.config.sections import ImageSettings
from rapid.errors import InputError

CONFIG = BundleConfig(kind="private", method="m", settings={}, image=ImageSettings(size=28), classes=(), public=None)


class Listed:
    """A component with a manifest, and a file in a folder."""

    def save(self, folder: Path) -> None:
        """Write both."""
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "values").write_bytes(b"values")
        files = {"inner/values": hashlib.sha256(b"values").hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({"files": files}))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle in whose components files were put that are none of theirs."""
    parts = {"plain": Thumbnails(np.zeros((3, 256), np.uint8)), "listed": Listed()}
    bundle = write_bundle(tmp_path / "first", CONFIG, parts, card="", privacy={"epsilon": 1.0})
    for name in ("plain/.images.npz", "plain/.smith/.images.npz", "listed/.images.npz", "listed/smith.npz"):
        (bundle.path / name).parent.mkdir(exist_ok=True)
        (bundle.path / name).write_bytes(b"private")
    return Bundle.open(bundle.path, "model")


def inside(folder: Path) -> list[str]:
    """Everything in a folder but the files at its top."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return sorted(name for name in found if "/" in name)


OWN = ["listed/inner", "listed/inner/values", "listed/manifest.json", "plain/thumbnails.npy"]


def test_a_copy_has_what_the_hashes_cover(bundle: Bundle, tmp_path: Path) -> None:
    bundle.copy_to(tmp_path / "copy")
    assert inside(tmp_path / "copy") == OWN
    copy = Bundle.open(tmp_path / "copy", "model")
    assert (copy.digest, copy.verify()) == (bundle.digest, len(b"values"))


def test_another_bundle_takes_what_the_hashes_cover(bundle: Bundle, tmp_path: Path) -> None:
    parts = {name: bundle.stored(name) for name in bundle.config.components}
    second = write_bundle(tmp_path / "second", CONFIG, parts, card="", privacy={"epsilon": 1.0})
    assert inside(second.path) == OWN
    assert second.config.components == bundle.config.components
    for name in ("listed/inner/values", "plain/thumbnails.npy"):
        assert (second.path / name).samefile(bundle.path / name)


@pytest.mark.parametrize("name", ["../README.md", "/etc/hostname"])
def test_a_manifest_takes_nothing_from_elsewhere(bundle: Bundle, tmp_path: Path, name: str) -> None:
    (bundle.path / "listed" / "manifest.json").write_text(json.dumps({"files": {name: "0"}}))
    with pytest.raises(InputError, match="is damaged; copy the bundle again"):
        write_bundle(tmp_path / "second", CONFIG, {"listed": bundle.stored("listed")}, card="", privacy={})
    assert not (tmp_path / "second" / "listed").exists()
