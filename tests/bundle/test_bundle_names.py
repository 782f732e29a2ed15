"""Names of components: one that leads elsewhere is refused before anything is written or removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rapid.bundle import BundleConfig, write_bundle
from rapid.bundle.builder import BundleBuilder
from rapid.bundle.components import Thumbnails
from rapid.config.sections import ImageSettings
from rapid.errors import RapidError
from rapid.files import content_hash
from rapid.training import RunFolder
from rapid.training.recipe import Recipe

ELSEWHERE = [
    "../neighbour", "..", ".", "", "a/b", "privacy.json", "config.json", "README.md", ".hidden", "name\n",
    "checkpoints", "Checkpoints", 3,
]  # fmt: skip
REFUSAL = r"^a component is named "
CONFIG = BundleConfig(kind="private", method="m", settings={}, image=ImageSettings(size=28), classes=(), public=None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run that is not finished, with another folder beside it."""
    for file in ("out/checkpoints/net.pt", "out/one/thumbnails.npy", "neighbour/precious.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    return tmp_path / "out"


def rows() -> Thumbnails:
    return Thumbnails(np.zeros((3, 256), np.uint8))


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): content_hash(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("privacy", [None, {"epsilon": 1.0}])
def test_a_bundle_with_such_a_component(out: Path, name: str, privacy: dict[str, float] | None) -> None:
    before = files(out.parent)
    with pytest.raises(RapidError, match=REFUSAL):
        write_bundle(out, CONFIG, {"one": rows(), name: rows()}, card="", privacy=privacy)
    assert files(out.parent) == before


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_builder_that_makes_such_a_component(out: Path, name: str) -> None:
    before = files(out.parent)
    builder = BundleBuilder(RunFolder(out), "images", torch.device("cpu"))
    recipe = Recipe(images="images")
    with pytest.raises(RapidError, match=REFUSAL):
        builder.make(name, Thumbnails, recipe, lambda _: rows())
    with pytest.raises(RapidError, match=REFUSAL):
        builder.write(name, ("m", "n"), recipe, lambda folder: rows().save(folder))
    with pytest.raises(RapidError, match=REFUSAL):
        builder.keep(name, rows())
    with pytest.raises(RapidError, match=REFUSAL):
        builder.add(name, rows())
    assert files(out.parent) == before
    assert builder.components == {}
