"""The floors beside the distances: which sets they are, how many images, and what the autoencoder makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tests_process
import torch
from PIL import Image
from tests_support import bright_and_dark, save

from rapid.bundle import Bundle
from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, load_images, to_uint8, to_unit_range
from rapid.evaluate import Request, evaluate
from rapid.evaluate.comparisons import compared_sets, thinned
from rapid.evaluate.sets import load_sets
from rapid.methods import open_generator
from rapid.nn.autoencoder import Autoencoder

CPU = torch.device("cpu")


def test_larger_sets_are_thinned_always_alike() -> None:
    one, two = bright_and_dark(50, 0), bright_and_dark(30, 1)
    assert thinned([one], 50) is one
    some = thinned([one], 20)
    assert len(some) == 20
    assert some.labels is not None
    rows = [next(n for n in range(50) if np.array_equal(one.images[n], image)) for image in some.images]
    assert len(set(rows)) == 20
    assert one.labels is not None
    assert some.labels.tolist() == one.labels[rows].tolist()
    assert np.array_equal(thinned([one], 20).images, some.images)
    both = thinned([one, two], 40)
    assert both.labels is None
    known = {image.tobytes() for image in (*one.images, *two.images)}
    found = {image.tobytes() for image in both.images}
    assert len(found) == 40
    assert found < known
    assert found & {image.tobytes() for image in two.images}
    assert len(thinned([one, two], 500)) == 80


def test_the_floors_of_a_model(private_bundle: Path, digits: Path, letters: Path, tmp_path: Path) -> None:
    images = load_images(digits, "digits")
    assert images.labels is not None
    made = save(tmp_path / "made.npz", replace(images, images=images.images[:40], labels=images.labels[:40]))
    model = open_generator(private_bundle, "cpu")
    sets = load_sets(made, digits, digits, [letters], model.bundle.config.image)
    found = compared_sets(sets, model, CPU)
    assert {name: one.title for name, one in found.items()} == {
        "synthetic": "synthetic images",
        "real": "real training images",
        "autoencoder": "real training images through the autoencoder",
        "public": "public images",
    }
    assert {len(one.images) for one in found.values()} == {40}
    autoencoder = Bundle.open(private_bundle, "model").component("autoencoder", Autoencoder)
    expected = to_uint8(autoencoder.decode(autoencoder.encode(to_unit_range(found["real"].images.images))))
    assert np.abs(found["autoencoder"].images.images.astype(int) - expected).max() <= 1
    assert found["autoencoder"].images.labels is not None
    # against the training images, the other real set is that of the test images
    assert compared_sets(sets, model, CPU, against_training=True)["real"].title == "real test images"
    # without training images the test images go through the autoencoder
    alone = compared_sets(load_sets(made, digits, None, [], model.bundle.config.image), model, CPU)
    assert list(alone) == ["synthetic", "autoencoder"]
    assert alone["autoencoder"].title == "the same real test images through the autoencoder"
    # images of another size than the model's are not what its autoencoder is for
    framed = np.pad(images.images[:40], ((0, 0), (4, 4), (4, 4)))
    large = save(tmp_path / "large.npz", replace(images, images=framed, labels=images.labels[:40]))
    assert list(compared_sets(load_sets(large, digits, None, []), model, CPU)) == ["synthetic"]


def test_images_of_a_model_that_distorts_are_compared_with_distorted_ones(tmp_path: Path) -> None:
    """As it sees them: private images of any size are stretched to its own, none gets a frame."""
    drawn, real = np.full((2, 16, 16), 200, np.uint8), np.full((3, 12, 9), 200, np.uint8)
    paths = {}
    for name, images in {"made": drawn, "real": real, "mixed": real[:, :, :5]}.items():
        paths[name] = save(tmp_path / f"{name}.npz", ImageSet(images, None, ()))
    model = ImageSettings(size=16, channels=1, fit="resize")
    sets = load_sets(paths["made"], paths["real"], paths["mixed"], [paths["real"]], model)
    assert sets.train_real is not None
    for one in (sets.real, sets.train_real, *sets.public):
        assert one.images.shape[1:] == (16, 16)
        assert (one.images == 200).all()
    padded = load_sets(paths["made"], paths["real"], None, [], model.model_copy(update={"fit": "pad"}))
    assert (padded.real.images[:, 0] == 0).all()


@pytest.mark.parametrize("fit", ["resize", "pad"])
@pytest.mark.parametrize("size", [16, 29])
def test_images_of_several_sizes_are_brought_to_the_size_in_one_step(
    tmp_path: Path, size: int, fit: Literal["resize", "pad"]
) -> None:
    """Each as it would be in a set of its own."""
    rng = np.random.default_rng(0)
    shapes = ((12, 9), (7, 7), (10, 12), (11, 8))
    for number, shape in enumerate(shapes):
        pixels = rng.integers(0, 256, shape, np.uint8)
        for folder in ("all", f"set{number}"):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / folder / f"{number}.png")
    made = save(tmp_path / "made.npz", ImageSet(np.zeros((2, size, size), np.uint8), None, ()))
    model = ImageSettings(size=size, channels=1, fit=fit)
    mixed = load_sets(made, tmp_path / "all", None, [], model)
    alone = [load_sets(made, tmp_path / f"set{number}", None, [], model).real.images[0] for number in range(4)]
    assert np.array_equal(mixed.real.images, np.stack(alone))
    # what FID cuts off again is the frame of the largest
    assert mixed.real_size == 12


def test_floors_in_report_page_and_summary(tmp_path: Path) -> None:
    """Real images of the same distribution are much nearer than images without the dark class."""
    made = bright_and_dark(30, 0)
    made = replace(made, images=np.maximum(made.images, 120))
    paths = {
        "made": save(tmp_path / "made.npz", made),
        "test": save(tmp_path / "test.npz", bright_and_dark(60, 1)),
        "train": save(tmp_path / "train.npz", bright_and_dark(90, 2)),
        "public": save(tmp_path / "public.npz", bright_and_dark(70, 3, ("low", "high"))),
    }
    out = tmp_path / "r.json"
    words = [
        "evaluate",
        "--synthetic",
        paths["made"],
        "--real",
        paths["test"],
        "--public",
        paths["public"],
        "--out",
        out,
    ]
    words += [
        "--train-real",
        paths["train"],
        "--open-data",
        "--classifiers",
        "none",
        "--epochs",
        "2",
        "--device",
        "cpu",
    ]
    done = tests_process.run(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["fidelity"]
    assert list(found["sets"]) == ["synthetic", "real", "public"]
    assert [found[name]["images"] for name in found["sets"]] == [30, 30, 30]
    assert found["real"]["frechet"] < found["synthetic"]["frechet"]
    assert found["real"]["frechet_by_class"].keys() == {"dark", "bright"}
    assert found["public"]["frechet_by_class"] is None
    assert "for comparison, the Frechet distance of real training images" in done.stdout
    page = out.with_suffix(".html").read_text()
    assert "<td>real training images</td>" in page
    assert "<td>public images</td>" in page
    assert "<th>real training images</th>" in page


def test_without_other_sets_there_are_no_floors(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{seed}.npz", bright_and_dark(20, seed)) for seed in range(2)]
    report = evaluate(Request(paths[0], paths[1], classifiers=(), epochs=1), CPU)
    assert list(report.content["fidelity"]["sets"]) == ["synthetic"]
    assert not any("for comparison" in line for line in report.summary())
