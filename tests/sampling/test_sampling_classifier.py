"""Classifiers of one network: as many images at a time as their size allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import rapid.sampling.classifier
from rapid.bundle import Bundle
from rapid.sampling.classifier import NetworkClassifier


def test_large_images_are_fewer_at_a_time(private_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def network(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x.flatten(1)[:, :2]

    bundle = Bundle.open(private_bundle, "model")
    classifier = NetworkClassifier(bundle, ("a", "b"), torch.device("cpu"), network)
    images = np.random.default_rng(0).integers(0, 256, (7, *bundle.image_shape), dtype=np.uint8)
    whole = classifier.probabilities(images)
    assert seen == [7]
    for images_at_a_time, batches in ((3.5, [3, 3, 1]), (0.5, [1] * 7)):
        seen.clear()
        pixels = int(images_at_a_time * bundle.image_shape[0] * bundle.image_shape[1])
        monkeypatch.setattr(rapid.sampling.classifier, "PIXELS", pixels)
        np.testing.assert_array_equal(classifier.probabilities(images), whole)
        assert seen == batches
    assert classifier.probabilities(images[:0]).shape == (0, 2)
