"""Thumbnails in public bundles."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from rapid.bundle import Bundle, Thumbnails
from rapid.data import fit_images, load_images
from rapid.data.thumbnails import thumbnails
from rapid.errors import InputError
from rapid.methods.rapid.settings import RapidSettings


def test_all_public_images_have_a_thumbnail(public_bundle: Path, letters: Path, tiny_settings: RapidSettings) -> None:
    images = fit_images(load_images(letters, "public"), tiny_settings.image, "public").images
    stored = Bundle.open(public_bundle, "base").component("thumbnails", Thumbnails)
    assert (stored.rows == thumbnails(images)).all()
    assert "`thumbnails/`" in (public_bundle / "README.md").read_text()


def test_private_bundles_have_none(private: Bundle) -> None:
    assert not private.has("thumbnails")


def test_altered_thumbnails_are_refused(tmp_path: Path, public_bundle: Path) -> None:
    out = tmp_path / "altered"
    shutil.copytree(public_bundle, out)
    Thumbnails(np.zeros((60, 256), np.uint8)).save(out / "thumbnails")
    with pytest.raises(InputError, match="thumbnails/ is missing or not the one"):
        Bundle.open(out, "base")
    shutil.rmtree(out / "thumbnails")
    with pytest.raises(InputError, match="thumbnails/ is missing or not the one"):
        Bundle.open(out, "base")


def test_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"thumbnails\.npy is missing or damaged"):
        Thumbnails.load(tmp_path)
