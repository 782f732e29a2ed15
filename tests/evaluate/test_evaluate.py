"""Downstream utility on images where the answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rapid.data import ImageSet
from rapid.errors import InputError
from rapid.evaluate import report, train_and_test

CPU = torch.device("cpu")


def bright_and_dark(count: int, seed: int, classes: tuple[str, str] = ("dark", "bright")) -> ImageSet:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    images = rng.integers(0, 60, (count, 8, 8)) + 150 * (labels if classes[0] == "dark" else 1 - labels)[:, None, None]
    return ImageSet(images.astype(np.uint8), labels.astype(np.int64), classes, f"set{seed}.npz")


def test_separable_images_are_told_apart_and_noise_is_not() -> None:
    train, test = bright_and_dark(400, 0), bright_and_dark(200, 1)
    assert train_and_test(train, test, CPU) > 0.98
    shuffled = replace(train, labels=np.random.default_rng(2).permutation(train.labels))
    assert train_and_test(shuffled, test, CPU) < 0.9


def test_classes_are_matched_by_name() -> None:
    train, test = bright_and_dark(400, 0), bright_and_dark(200, 1, ("bright", "dark"))
    assert train_and_test(train, test, CPU) > 0.98
    with pytest.raises(InputError, match="has no class 'grey'"):
        train_and_test(train, replace(test, classes=("grey", "dark")), CPU)
    with pytest.raises(InputError, match="no labels"):
        train_and_test(train, replace(test, labels=None), CPU)


def test_report(tmp_path: Path) -> None:
    for name, images in (("a", bright_and_dark(100, 0)), ("b", bright_and_dark(50, 1))):
        np.savez(tmp_path / f"{name}.npz", images=images.images, labels=images.labels, classes=np.array(images.classes))
    found = report(tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "a.npz", CPU)
    assert found["utility"].keys() == {"synthetic", "real"}
    assert found["utility"]["synthetic"]["accuracy"] > 0.9
