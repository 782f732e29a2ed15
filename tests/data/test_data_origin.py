"""The private models behind generated images, as every form of them tells, and texts that tell nothing of the kind."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from rapid.data import load_images
from rapid.data.export import write_samples
from rapid.data.image_set import ImageSet, join
from rapid.data.origin import Origin, listed, origins_in, union

TOLD = {"model": "m1", "sha256": "0f" * 32, "method": "dpdm", "epsilon": 2, "delta": 1e-5, "adjacency": "add one"}
MODEL = Origin(model="m1", sha256="0f" * 32, method="dpdm", epsilon=2.0, delta=1e-5, adjacency="add one")
OTHER = MODEL.model_copy(update={"model": "m2", "sha256": "1e" * 32, "epsilon": 0.5})
TEXT = {"Software": "rapid", "rapid": json.dumps({"synthetic": True} | TOLD)}
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
LABELS = np.arange(6) % 2


@pytest.mark.parametrize("labels", [LABELS, None])
@pytest.mark.parametrize("name", ["folder", "set.parquet", "set.npz"])
def test_every_form_tells_it(tmp_path: Path, name: str, labels: np.ndarray | None) -> None:
    write_samples(tmp_path / name, IMAGES, labels, ("a", "b"), TEXT)
    assert load_images(tmp_path / name, "public").origins == (MODEL,)
    # nothing is kept of what private images say
    assert load_images(tmp_path / name, "private", show_paths=False).origins == ()
    write_samples(tmp_path / f"plain-{name}", IMAGES, labels, ("a", "b"))
    assert load_images(tmp_path / f"plain-{name}", "public").origins == ()


def png(told: dict[str, object] | None) -> bytes:
    """As Pillow writes it."""
    stream, text = io.BytesIO(), PngImagePlugin.PngInfo()
    if told is not None:
        text.add_text("rapid", json.dumps(told))
    Image.fromarray(IMAGES[0]).save(stream, "PNG", pnginfo=text)
    return stream.getvalue()


def test_a_mixed_set_tells_each_once(tmp_path: Path) -> None:
    """Such as images that were saved from the server, in a folder and in a tar, among others."""
    files = [png(None), png(TOLD), png(OTHER.model_dump()), png(TOLD), png({"synthetic": True, "model": "public"})]
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for number, content in enumerate(files):
            (tmp_path / "folder" / f"{number}.png").write_bytes(content)
            archive.add(tmp_path / "folder" / f"{number}.png", f"{number}.png")
    for name in ("folder", "set.tar"):
        assert load_images(tmp_path / name, "public").origins == (MODEL, OTHER)


def test_joined_sets_keep_them() -> None:
    sets = [ImageSet(IMAGES, LABELS, ("a", "b"), f"{n}.npz", origins=one) for n, one in enumerate([(OTHER,), ()])]
    assert join(sets, "public").origins == (OTHER,)
    plain = [ImageSet(IMAGES, None, (), f"{n}.npz", origins=one) for n, one in enumerate([(MODEL,), (OTHER, MODEL)])]
    assert join(plain, "public").origins == (MODEL, OTHER)
    assert union() == ()


def test_models_behind_the_base_are_told_too() -> None:
    text = json.dumps(TOLD | {"made_from": [OTHER.model_dump(), TOLD, {"epsilon": -1}, "x"]})
    assert origins_in(text) == (MODEL, OTHER)
    # a public model, whose base has private models behind it
    assert origins_in(json.dumps({"model": "b", "sha256": "22" * 32, "made_from": [TOLD]})) == (MODEL,)


def test_images_of_earlier_versions_name_no_method() -> None:
    (found,) = origins_in(json.dumps({name: value for name, value in TOLD.items() if name != "method"}))
    assert str(found) == "'m1' (epsilon 2, delta 1e-05, add one)"
    assert listed([found, OTHER]) == f"the private models {found} and 'm2' (dpdm, epsilon 0.5, delta 1e-05, add one)"


@given(st.one_of(st.text(), st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps)))
def test_other_texts_tell_nothing(text: str) -> None:
    assert origins_in(text) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": float("nan")}, {"epsilon": float("inf")}, {"epsilon": 0}, {"epsilon": None}, {"delta": 1},
        {"delta": -1e-9}, {"sha256": "0f"}, {"model": 7}, {"made_from": 3, "epsilon": "x"},
    ],
)  # fmt: skip
def test_a_guarantee_that_is_none_is_left_out(change: dict[str, object]) -> None:
    assert origins_in(json.dumps(TOLD | change)) == ()


def test_hostile_texts_do_no_harm(tmp_path: Path) -> None:
    assert origins_in("[" * 200_000) == ()
    (found,) = origins_in(json.dumps(TOLD | {"model": "\x1b[2J\n" + "m" * 1000}))
    assert len(found.model) == 200
    assert str(found).isprintable()
    for number, odd in enumerate([np.array([TEXT["rapid"]] * 6), np.arange(6), np.array([{}], object)]):
        np.savez(tmp_path / f"{number}.npz", images=IMAGES, rapid=odd)
        assert load_images(tmp_path / f"{number}.npz", "public").origins == ()
