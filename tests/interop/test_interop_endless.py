"""Endless images for PyTorch: each other, the same by seed, with and without workers."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests_process
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rapid.data import to_unit_range
from rapid.errors import InputError
from rapid.interop.endless import EndlessImages
from rapid.sampling.generate import generate

# from noise: images that start from the same record of a small knowledge base can be the same
OVERRIDES = ["generation.attempts=1", "generation.retrieval=none", "generation.steps=10"]


def endless(path: Path, **changes: object) -> EndlessImages:
    return EndlessImages(path, **({"seed": 1, "batch_size": 4, "device": "cpu", "overrides": OVERRIDES} | changes))  # type: ignore[arg-type]


def take(images: EndlessImages, count: int) -> tuple[Tensor, list[int]]:
    found = list(itertools.islice(images, count))
    return torch.stack([image for image, _ in found]), [label for _, label in found]


def test_images_and_their_classes(private_bundle: Path) -> None:
    images = endless(private_bundle)
    pixels, labels = take(images, 14)
    assert (pixels.shape, pixels.dtype) == ((14, 1, 32, 32), torch.float32)
    assert -1 <= pixels.min() < pixels.max() <= 1
    # all classes in turn, also over the end of a batch
    assert labels == [*range(10), 0, 1, 2, 3]
    assert len({image.numpy().tobytes() for image in pixels}) == 14
    assert (images.classes, images.image_shape) == (tuple("0123456789"), (32, 32))
    # an image of the dataset is one of the generator
    seed = images._seed_of(0)
    expected = to_unit_range(generate(images.generator, 4, [0, 1, 2, 3], seed).images)
    assert torch.equal(pixels[:4], expected)


@pytest.mark.parametrize("attempts", [1, 2])
def test_soft_labels_are_the_probabilities_of_the_probe(private_bundle: Path, attempts: int) -> None:
    """Of images as drawn, too: none is refused."""
    images = endless(private_bundle, overrides=[f"generation.attempts={attempts}"], soft_labels=True)
    found = list(itertools.islice(images, 6))
    for start, batch in ((0, [0, 1, 2, 3]), (4, [4, 5, 6, 7])):
        made = generate(images.generator, 4, batch, images._seed_of(start // 4)).images
        expected = images.generator.label(made)
        assert expected is not None
        for (pixels, row), image, chances in zip(found[start:], made, expected, strict=False):
            assert torch.equal(pixels, to_unit_range(image[None])[0])
            np.testing.assert_allclose(row, chances, atol=1e-5)


def test_images_for_training(private_bundle: Path) -> None:
    settings = [*OVERRIDES, "generation.epsilon_scale=1.2"]
    same = endless(private_bundle, overrides=settings, soft_labels=True)
    # without attempts
    own = endless(private_bundle, overrides=OVERRIDES[1:], for_training=True)
    for one, other in itertools.islice(zip(own, same, strict=True), 6):
        assert all(map(torch.equal, one, other))


def with_settings(bundle: Path, copy: Path, section: Callable[[dict[str, Any]], dict[str, Any]], **values: Any) -> Path:
    """A copy of a bundle whose configuration has other values in one section of the settings."""
    shutil.copytree(bundle, copy)
    config = json.loads((copy / "config.json").read_text())
    section(config["settings"]).update(values)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_images_for_training_are_as_varied_as_the_others(private_bundle: Path, tmp_path: Path) -> None:
    """Where the bundle's own scale is larger, it stays."""
    varied = with_settings(private_bundle, tmp_path / "varied", lambda tree: tree["generation"], epsilon_scale=1.5)
    assert EndlessImages(varied, device="cpu", for_training=True).generator.settings.epsilon_scale == 1.5


@pytest.mark.parametrize(("candidates", "scale"), [(20, 1.35), (0, 1.2)])
def test_images_for_training_are_more_varied_where_guidance_was_trained_in(
    private_bundle: Path, tmp_path: Path, candidates: int, scale: float
) -> None:
    """It is trained in by distillation, of which there is none without candidates."""
    changed = with_settings(
        private_bundle, tmp_path / "changed", lambda tree: tree["private"]["distillation"],
        candidates=candidates, rounds=1, guidance=1.5,
    )  # fmt: skip
    assert EndlessImages(changed, device="cpu", for_training=True).generator.settings.epsilon_scale == scale


def test_a_model_without_a_probe_makes_no_images_for_training(public_bundle: Path) -> None:
    with pytest.raises(InputError, match="no probe that tells soft labels") as caught:
        EndlessImages(public_bundle, for_training=True)
    assert caught.value.field == "for_training"


def test_seeds_and_epochs(private_bundle: Path) -> None:
    first, _ = take(endless(private_bundle), 8)
    again, _ = take(endless(private_bundle), 8)
    assert torch.equal(first, again)
    images = endless(private_bundle)
    images.set_epoch(1)
    later, _ = take(images, 8)
    # neighbouring seeds share no batch, at no place
    other, _ = take(endless(private_bundle, seed=2), 8)
    fresh, _ = take(endless(private_bundle, seed=None), 4)
    every = [image.numpy().tobytes() for group in (first, later, other, fresh) for image in group]
    assert len(set(every)) == len(every)


def test_labels(private_bundle: Path) -> None:
    assert take(endless(private_bundle, labels=["7", "7", 2]), 7)[1] == [7, 7, 2, 7, 7, 2, 7]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_make_other_images_in_the_same_order(private_bundle: Path) -> None:
    """Forked from the fork server: this process has threads."""
    images = endless(private_bundle)
    # opened here, but not to be sent to the workers
    assert images.generator.classes
    loader = DataLoader(images, batch_size=4, num_workers=2, multiprocessing_context=tests_process._FORK_SERVER)
    found = list(itertools.islice(loader, 4))
    pixels, labels = take(images, 16)
    assert torch.cat([label for _, label in found]).tolist() == labels
    # rounding may differ by 1 of 255 between processes
    assert (torch.cat([image for image, _ in found]) - pixels).abs().max() <= 2.01 / 255


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size 0: must be at least 1"),
        ({"batch_size": 1.5}, "batch_size 1.5: must be a whole number"),
        ({"seed": -1}, "seed -1: must lie in 0"),
        ({"device": "tpu"}, "device tpu: choose auto"),
        ({"overrides": ["generation.stepz=5"]}, "generation.stepz"),
        ({"labels": []}, "labels: names no classes"),
        ({"labels": ["cat"]}, "labels cat: unknown"),
    ],
)
def test_bad_arguments(private_bundle: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        endless(private_bundle, **changes)
    assert words in str(caught.value)


def test_what_cannot_make_such_images_is_told_at_once(classifier_bundle: Path, public_bundle: Path) -> None:
    """Not by a worker of a loader, later."""
    with pytest.raises(InputError, match="dp-classifier, which makes no images; use rapid predict"):
        EndlessImages(classifier_bundle)
    with pytest.raises(InputError, match=r"soft_labels .*has no probe"):
        EndlessImages(public_bundle, soft_labels=True)


def test_epochs_are_whole_numbers(private_bundle: Path) -> None:
    images = endless(private_bundle)
    for epoch, words in ((-1, "epoch -1: must be at least 0"), (1.5, "epoch 1.5: must be a whole number")):
        with pytest.raises(InputError, match=words):
            images.set_epoch(epoch)  # type: ignore[arg-type]


def test_one_class_and_one_setting_need_no_list(private_bundle: Path) -> None:
    one, same = endless(private_bundle, labels="1"), endless(private_bundle, labels=[1])
    assert take(one, 3)[1] == take(same, 3)[1] == [1, 1, 1]
    EndlessImages(private_bundle, overrides="generation.steps=5")  # type: ignore[arg-type]


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model "):
        endless(tmp_path)
