"""Thumbnails in public bundles, and bundles of earlier versions, which have none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rapid.bundle.format import Bundle
from rapid.data import fit_images, load_images
from rapid.data.thumbnails import thumbnails
from rapid.errors import InputError
from rapid.files import content_hash
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages import build_public_bundle, train_private_bundle

CPU = torch.device("cpu")


@pytest.fixture
def earlier(tmp_path: Path, public_bundle: Path) -> Path:
    """The public bundle as it was before there were thumbnails and the settings of the check."""
    out = tmp_path / "earlier"
    shutil.copytree(public_bundle, out)
    (out / "thumbnails.npy").unlink()
    for file in (out / "config.json", out / "checkpoints" / "plan.json"):
        content = json.loads(file.read_text())
        content.pop("thumbnails", None)
        content["settings"].setdefault("private", {}).pop("overlap", None)
        file.write_text(json.dumps(content))
    return out


def test_all_public_images_have_a_thumbnail(public_bundle: Path, letters: Path, tiny_settings: RapidSettings) -> None:
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-").images
    assert (Bundle.open(public_bundle, "base").thumbnails() == thumbnails(images)).all()
    assert "`thumbnails.npy`" in (public_bundle / "README.md").read_text()


def test_altered_thumbnails_are_refused(tmp_path: Path, public_bundle: Path) -> None:
    out = tmp_path / "altered"
    shutil.copytree(public_bundle, out)
    np.save(out / "thumbnails.npy", np.zeros((60, 256), np.uint8))
    with pytest.raises(InputError, match=r"thumbnails\.npy: is missing or not the one"):
        Bundle.open(out, "base").thumbnails()
    (out / "thumbnails.npy").unlink()
    with pytest.raises(InputError, match=r"thumbnails\.npy: is missing or not the one"):
        Bundle.open(out, "base").thumbnails()


def test_a_bundle_of_an_earlier_version_is_finished_by_resuming(
    tmp_path: Path, earlier: Path, public_bundle: Path, letters: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    with pytest.raises(InputError, match=r"no thumbnails\.npy.*build-kb --resume.*private\.overlap\.share=0"):
        train_private_bundle(
            earlier, digits, tmp_path / "out", tiny_settings, epsilon=10.0, delta=None, device=CPU, resume=False
        )
    assert not (tmp_path / "out").exists()
    before = {p: p.stat().st_mtime_ns for p in earlier.rglob("*") if p.parent.parent == earlier}
    with pytest.raises(InputError, match="public"):
        build_public_bundle([digits], earlier, tiny_settings, CPU, resume=True)
    bundle = build_public_bundle([letters], earlier, tiny_settings, CPU, resume=True)
    assert (
        content_hash(earlier / "thumbnails.npy")
        == bundle.config.thumbnails
        == Bundle.open(public_bundle, "").config.thumbnails
    )
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert len(bundle.thumbnails()) == 60
