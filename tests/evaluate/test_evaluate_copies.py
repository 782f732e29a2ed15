"""Nearest images against a plain loop, planted copies, and the images of a knowledge base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.data import ImageSet
from rapid.errors import InputError
from rapid.evaluate import neighbours
from rapid.evaluate.copies import PAIRS, closest_picture, compare_with, decode_records
from rapid.evaluate.neighbours import nearest_images
from rapid.methods import open_generator

CPU = torch.device("cpu")


def noise(count: int, seed: int, shape: tuple[int, ...] = (6, 6)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@given(
    queries=st.integers(1, 20), references=st.integers(2, 20), seed=st.integers(0, 999), colour=st.booleans(),
    chunk=st.sampled_from([1, 3, 4096]), same=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_nearest_is_that_of_a_loop(
    queries: int, references: int, seed: int, colour: bool, chunk: int, same: bool
) -> None:
    shape = (5, 3, 3) if colour else (5, 3)
    b = noise(references, seed + 1, shape)
    a = b if same else noise(queries, seed, shape)
    gaps = [[np.sqrt(np.square(x / 255 - y / 255).sum()) for y in b] for x in a]
    expected = np.array(gaps) + (np.diag(np.full(len(b), np.inf)) if same else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "MOST_ROWS", chunk)
        found = nearest_images(a, b, same=same)
        patch.setattr(neighbours, "BLOCK", 1)
        again = nearest_images(a, b, same=same)
    assert np.array_equal(again.indices, found.indices)
    assert found.distances == pytest.approx(expected.min(1))
    assert expected[np.arange(len(a)), found.indices] == pytest.approx(expected.min(1))


def test_identical_images_are_found_among_nearly_identical_ones() -> None:
    """Bright images with one pixel that differs by a step: in float32 rounding is larger than that."""
    images = np.full((200, 64, 64, 3), 250, np.uint8)
    images.reshape(200, -1)[np.arange(200), np.arange(200)] += 1
    found = nearest_images(images, images)
    assert np.array_equal(found.indices, np.arange(200))
    assert not found.distances.any()


def test_nothing_to_compare_with_is_refused() -> None:
    with pytest.raises(InputError, match="give more images"):
        nearest_images(noise(3, 0), noise(0, 1))
    with pytest.raises(InputError, match="give more images"):
        nearest_images(noise(1, 0), noise(1, 0), same=True)


def test_copies_are_found() -> None:
    reference, real, synthetic = noise(300, 0), noise(200, 1), noise(100, 2)
    synthetic[7] = reference[33]
    synthetic[9] = reference[44] ^ 1
    made = ImageSet(synthetic, None, ())
    report, closest = compare_with("public images", made, reference, real, CPU)
    assert report["identical"] == 1
    assert report["closest"][0] == {"synthetic": 7, "reference": 33, "distance": 0.0}
    assert report["closest"][1] == {"synthetic": 9, "reference": 44, "distance": pytest.approx(6 / 255)}
    assert len(report["closest"]) == PAIRS
    assert 0.02 <= report["nearer_than_real"] < 0.1
    assert report["synthetic"]["nearest"] == 0 < report["real"]["nearest"]
    assert (closest.synthetic[0] == closest.references[0]).all()
    assert (np.diff(closest.distances) >= 0).all()
    # of every class the closest comes first
    labels = np.arange(100) // 25
    labelled, pairs = compare_with(
        "public images", replace(made, labels=labels, classes=tuple("abcd")), reference, real, CPU
    )
    shown = [pair["synthetic"] for pair in labelled["closest"]]
    assert shown[:2] == [7, 9]
    assert len(shown) == PAIRS == len(set(shown))
    assert set(labels[shown]) == {0, 1, 2, 3}
    assert (np.diff(pairs.distances) >= 0).all()
    picture = closest_picture([closest, pairs])
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    everything = compare_with("copied", ImageSet(reference[:50], None, ()), reference, real, CPU)[0]
    assert everything["identical"] == 50
    assert everything["nearer_than_real"] == 1
    few = compare_with("copied", ImageSet(reference[:50], None, ()), reference, real[:99], CPU)[0]
    assert (few["identical"], few["nearer_than_real"]) == (50, None)


def test_copies_are_nearer_where_real_images_have_copies_too() -> None:
    """Two pairs of equal real images make the distance of the nearest 1 % of them 0."""
    real = noise(100, 0)
    real[1], real[3] = real[0], real[2]
    copied = ImageSet(real[:50], None, ())
    report, _ = compare_with("real", copied, real, real, CPU, reference_is_real=True)
    assert report["identical"] == 50
    assert report["nearer_than_real"] == 1


def test_real_images_are_not_their_own_neighbours() -> None:
    real = noise(50, 0)
    report, _ = compare_with("real", ImageSet(noise(20, 1), None, ()), real, real, CPU, reference_is_real=True)
    assert report["real"]["nearest"] > 0


def test_all_records_of_a_knowledge_base_are_decoded(private_bundle: Path) -> None:
    model = open_generator(private_bundle, "cpu", ["generation.batch_size=7"])
    decoded = decode_records(model)
    assert decoded.shape == (model.records, 32, 32)
    alone = model.record_images(np.array([model.records - 1]))[0]
    assert np.abs(decoded[-1].astype(int) - alone).max() <= 1
