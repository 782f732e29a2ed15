"""The judge's features against numpy, and what its linear layer says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.data import load_images, sample_path, to_unit_range
from rapid.models import Denoiser, Judge
from rapid.models.judge import CONSTANT, FLOOR

CONFIG = {
    "image_channels": 1, "image_size": 16, "channels": 4, "features": 6, "public_classes": 3, "num_classes": 0,
}  # fmt: skip


def random_judge(**changes: int) -> Judge:
    torch.manual_seed(0)
    judge = Judge(CONFIG | changes).eval()
    outputs = torch.randn(50, judge.trunk_width, dtype=torch.float64) * torch.rand(judge.trunk_width)
    judge.fit_projection(outputs.mean(0), torch.cov(outputs.T))
    return judge


@given(size=st.integers(4, 40), channels=st.sampled_from([1, 3]), count=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_features_are_unit_vectors_and_a_constant_and_examples_never_mix(size: int, channels: int, count: int) -> None:
    judge = random_judge(image_size=size, image_channels=channels)
    images = torch.rand(count, channels, size, size) * 2 - 1
    features = judge.features(images)
    torch.testing.assert_close(features[:, :-1].norm(dim=1), torch.ones(count))
    assert (features[:, -1] == CONSTANT).all()
    alone = torch.cat([judge.features(image[None]) for image in images])
    torch.testing.assert_close(features, alone, rtol=1e-4, atol=1e-5)


def test_the_projection_is_that_of_numpys_singular_vectors() -> None:
    rng = np.random.default_rng(0)
    judge = Judge(CONFIG)
    outputs = rng.normal(size=(400, judge.trunk_width)) * np.linspace(0.1, 3, judge.trunk_width)
    centred = outputs - outputs.mean(0)
    judge.fit_projection(torch.from_numpy(outputs.mean(0)), torch.from_numpy(centred.T @ centred / len(outputs)))
    _, singular, vectors = np.linalg.svd(centred, full_matrices=False)
    variance = singular[:6] ** 2 / len(outputs)
    expected = centred @ vectors[:6].T * (variance + FLOOR * variance[0]) ** -0.25
    found = centred @ judge.projection.numpy()
    # the sign of a principal component is free
    np.testing.assert_allclose(np.abs(found), np.abs(expected), rtol=1e-3, atol=1e-3)


def test_new_classes_are_equally_likely_and_the_features_stay(tmp_path: Path) -> None:
    judge = random_judge()
    images = torch.rand(4, 1, 16, 16)
    private = judge.with_classes(5)
    torch.testing.assert_close(private.probabilities(images), torch.full((4, 5), 0.2))
    torch.testing.assert_close(private.features(images), judge.features(images))
    torch.nn.init.normal_(private.head.weight)
    private.save(tmp_path / "judge")
    torch.testing.assert_close(Judge.load(tmp_path / "judge").probabilities(images), private.probabilities(images))


def test_resemblance_is_the_likelihood_of_the_prototypes() -> None:
    judge = random_judge().with_classes(2)
    judge.prototypes[:, :3] = torch.eye(3)
    judge.prototypes[:, -1] = CONSTANT
    judge.head.weight.data = torch.tensor([[3.0, 0, 1, 0, 0, 0, 0], [0, 3.0, 1, 0, 0, 0, 0]])
    found = judge.resemblance()
    likely = 1 / (1 + np.exp(-3))
    expected = np.array([[likely, 1 - likely, 0.5], [1 - likely, likely, 0.5]]) / 1.5
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    # a public class without images
    judge.prototypes[2] = 0
    np.testing.assert_allclose(judge.resemblance()[:, 2], 0)
    np.testing.assert_allclose(judge.resemblance().sum(1), 1, rtol=1e-5)


def test_classes_are_blended_from_public_ones(private_bundle: Path) -> None:
    denoiser = Denoiser.load(private_bundle / "public_denoiser")
    new = denoiser.with_classes(2)
    null = new.class_table.weight[-1].clone()
    weights = torch.zeros(2, denoiser.num_classes)
    weights[0, 3], weights[1, 0], weights[1, 1] = 1, 0.25, 0.75
    new.blend_classes(denoiser, weights)
    table = denoiser.class_table.weight
    torch.testing.assert_close(new.class_table.weight[0], table[3])
    torch.testing.assert_close(new.class_table.weight[1], 0.25 * table[0] + 0.75 * table[1])
    torch.testing.assert_close(new.class_table.weight[2], null)


def test_the_public_judge_tells_what_its_classes_look_like(public_bundle: Path) -> None:
    judge = Judge.load(public_bundle / "judge")
    assert judge.num_classes == 0
    images = load_images(sample_path("letters"), "letters")
    features = judge.features(to_unit_range(images.images[:20]))
    assert features.shape == (20, judge.prototypes.shape[1])
    # prototypes are means of such vectors
    assert (judge.prototypes.norm(dim=1) <= features.norm(dim=1).max() + 1e-5).all()
    constants = judge.prototypes[:, -1]
    torch.testing.assert_close(constants[constants > 0], torch.full_like(constants[constants > 0], CONSTANT))
