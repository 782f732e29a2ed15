"""The probe's features against numpy, and what its linear layer says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.data import load_images, sample_path, to_unit_range
from rapid.nn import Denoiser
from rapid.probe.network import CONSTANT, FLOOR, Probe

CONFIG = {
    "image_channels": 1, "image_size": 16, "channels": 4, "features": 6, "public_classes": 3, "num_classes": 0,
}  # fmt: skip


def random_probe(**changes: int) -> Probe:
    torch.manual_seed(0)
    probe = Probe(CONFIG | changes).eval()
    outputs = [torch.randn(50, width, dtype=torch.float64) * torch.rand(width) for width in probe.widths]
    probe.fit_projection([(maps.mean(0), torch.cov(maps.T)) for maps in outputs])
    return probe


@given(
    size=st.integers(4, 40), channels=st.sampled_from([1, 3]), count=st.integers(1, 5), stages=st.integers(1, 9)
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_features_are_unit_vectors_and_a_constant_and_examples_never_mix(
    size: int, channels: int, count: int, stages: int
) -> None:
    probe = random_probe(image_size=size, image_channels=channels, stages=stages)
    images = torch.rand(count, channels, size, size) * 2 - 1
    features = probe.features(images)
    assert features.shape == (count, probe.prototypes.shape[1])
    torch.testing.assert_close(features[:, :-1].norm(dim=1), torch.ones(count))
    assert (features[:, -1] == CONSTANT).all()
    alone = torch.cat([probe.features(image[None]) for image in images])
    torch.testing.assert_close(features, alone, rtol=1e-4, atol=1e-5)


def test_the_projections_are_those_of_numpys_singular_vectors() -> None:
    rng = np.random.default_rng(0)
    probe = Probe(CONFIG | {"stages": 2})
    moments, expected, found = [], [], []
    for width in probe.widths:
        outputs = rng.normal(size=(400, width)) * np.linspace(0.1, 3, width)
        centred = outputs - outputs.mean(0)
        moments.append((torch.from_numpy(outputs.mean(0)), torch.from_numpy(centred.T @ centred / len(outputs))))
        _, singular, vectors = np.linalg.svd(centred, full_matrices=False)
        variance = singular[:6] ** 2 / len(outputs)
        expected.append(centred @ vectors[:6].T * (variance + FLOOR * variance[0]) ** -0.25)
        found.append(centred)
    probe.fit_projection(moments)
    projections = probe.projection.split(probe.widths)
    # the sign of a principal component is free
    for own, centred, projection in zip(expected, found, projections, strict=True):
        np.testing.assert_allclose(np.abs(centred @ projection.numpy()), np.abs(own), rtol=1e-3, atol=1e-3)


@given(size=st.integers(17, 40))
@settings(max_examples=20, deadline=None)
def test_maps_of_the_stage_before_the_last_are_means_over_windows(size: int) -> None:
    probe = random_probe(image_size=size, stages=2)
    images = torch.rand(2, 1, size, size) * 2 - 1
    pools = [number for number, layer in enumerate(probe.trunk) if isinstance(layer, torch.nn.MaxPool2d)]
    with torch.no_grad():
        last, before = probe.outputs(images)
        torch.testing.assert_close(last, probe.trunk(images))
        maps = probe.trunk[: pools[-2] + 1](images).numpy()
    step = int(np.ceil(maps.shape[-1] / 4))
    starts = range(0, maps.shape[-1], step)
    means = [[maps[:, :, i : i + step, j : j + step].mean((2, 3)) for j in starts] for i in starts]
    expected = np.stack([np.stack(row, 2) for row in means], 2)
    np.testing.assert_allclose(before, expected.reshape(2, -1), rtol=1e-4, atol=1e-5)


def test_a_probe_of_an_earlier_version_has_the_maps_of_the_last_stage_alone() -> None:
    old, new = random_probe(), random_probe(stages=1)
    assert "stages" not in old.config
    assert {name: tensor.shape for name, tensor in old.state_dict().items()} == {
        name: tensor.shape for name, tensor in new.state_dict().items()
    }
    images = torch.rand(3, 1, 16, 16)
    torch.testing.assert_close(old.features(images), new.features(images))


def test_new_classes_are_equally_likely_and_the_features_stay(tmp_path: Path) -> None:
    probe = random_probe()
    images = torch.rand(4, 1, 16, 16)
    private = probe.with_classes(5)
    torch.testing.assert_close(private.probabilities(images), torch.full((4, 5), 0.2))
    torch.testing.assert_close(private.features(images), probe.features(images))
    torch.nn.init.normal_(private.head.weight)
    private.save(tmp_path / "probe")
    torch.testing.assert_close(Probe.load(tmp_path / "probe").probabilities(images), private.probabilities(images))


def test_resemblance_is_the_likelihood_of_the_prototypes() -> None:
    probe = random_probe().with_classes(2)
    probe.prototypes[:, :3] = torch.eye(3)
    probe.prototypes[:, -1] = CONSTANT
    probe.head.weight.data = torch.tensor([[3.0, 0, 1, 0, 0, 0, 0], [0, 3.0, 1, 0, 0, 0, 0]])
    found = probe.resemblance()
    likely = 1 / (1 + np.exp(-3))
    expected = np.array([[likely, 1 - likely, 0.5], [1 - likely, likely, 0.5]]) / 1.5
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    # a public class without images
    probe.prototypes[2] = 0
    np.testing.assert_allclose(probe.resemblance()[:, 2], 0)
    np.testing.assert_allclose(probe.resemblance().sum(1), 1, rtol=1e-5)


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


def test_the_public_probe_tells_what_its_classes_look_like(public_bundle: Path) -> None:
    probe = Probe.load(public_bundle / "probe")
    assert probe.num_classes == 0
    images = load_images(sample_path("letters"), "letters")
    features = probe.features(to_unit_range(images.images[:20]))
    assert features.shape == (20, probe.prototypes.shape[1])
    # prototypes are means of such vectors
    assert (probe.prototypes.norm(dim=1) <= features.norm(dim=1).max() + 1e-5).all()
    constants = probe.prototypes[:, -1]
    torch.testing.assert_close(constants[constants > 0], torch.full_like(constants[constants > 0], CONSTANT))
