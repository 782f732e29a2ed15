"""Moments of private latents: what an image contributes, the estimates, and images that begin from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests_support import assert_same_images
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import ImageSet
from rapid.data.private import PrivateImages
from rapid.dp import PrivateAccess, PublicFacts, calibrate
from rapid.dp.rows import PrivateTensor
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.generator import RapidGenerator
from rapid.methods.rapid.moments import ClassMoments, Covariance, estimate, image_row, moments_spec, release_moments
from rapid.methods.rapid.settings import GenerationSettings, MomentsSettings, RapidSettings
from rapid.methods.rapid.subspace import Subspace
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle
from rapid.training import RunFolder

CPU = torch.device("cpu")
SHAPE, CLASSES, D = (2, 4, 4), ("a", "b", "c"), 6


def subspace(seed: int = 0) -> Subspace:
    """Of latents whose first numbers vary most."""
    made = Subspace({"shape": list(SHAPE), "dimensions": D})
    scale = torch.linspace(3, 0.2, 32).view(SHAPE)
    made.fit(torch.randn(4000, *SHAPE, generator=torch.Generator().manual_seed(seed)) * scale)
    return made


def latents(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Of three classes with other means and one covariance, in other directions than those of the subspace."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    mixing = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.4, 0.1, 32)
    centres = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    return (centres[labels] + torch.randn(count, 32, generator=generator) @ mixing.T).view(-1, *SHAPE), labels


def released(tmp_path: Path, count: int, epsilon: float, covariance: Covariance) -> ClassMoments:
    x, labels = latents(count)
    facts = PublicFacts(count, CLASSES, (4, 4))
    pixels = np.zeros((count, 4, 4), np.uint8)
    spec = moments_spec(MomentsSettings(share=0.5), count).model_copy(update={"share": None})
    budget = calibrate([spec], epsilon=epsilon, delta=1e-5)
    access = PrivateAccess(
        ImageSet(pixels, labels.numpy(), CLASSES, ""), facts, budget, RunFolder(tmp_path), device=CPU
    )
    return release_moments(access, PrivateTensor(x), subspace(), covariance)


def test_the_subspace_is_that_of_the_singular_vectors() -> None:
    made = subspace()
    rows = torch.randn(4000, *SHAPE, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.2, 32).view(
        SHAPE
    )
    _, values, vectors = np.linalg.svd(rows.flatten(1).numpy(), full_matrices=False)
    agreement = np.abs(made.basis.numpy() @ vectors[:D].T)
    assert agreement == pytest.approx(np.eye(D), abs=0.02)
    assert made.variances.numpy() == pytest.approx(values[:D] ** 2 / 4000, rel=1e-3)
    outside = made.outside(rows)
    assert made.coordinates(outside).abs().max() < 1e-4
    total = float(rows.square().sum(dim=(1, 2, 3)).mean())
    assert float(made.variances.sum() + 16 * made.rest.sum()) == pytest.approx(total, rel=1e-4)


@hypothesis_settings(max_examples=40)
@given(scale=st.floats(0, 1e6), classes=st.integers(1, 4), seed=st.integers(0, 99), shared=st.booleans())
def test_an_image_contributes_at_most_norm_one(scale: float, classes: int, seed: int, shared: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, *SHAPE, generator=generator) * scale
    labels = torch.randint(classes, (5,), generator=generator)
    own = 1 if shared else classes
    whole = image_row(rows, labels, subspace(), classes, own)
    assert whole.shape == (5, classes * D + classes + 2 + own * D * (D + 1) // 2)
    assert (whole.double().norm(dim=1) <= 1 + 1e-5).all()
    # nothing of another image in a row
    assert torch.allclose(whole[2:3], image_row(rows[2:3], labels[2:3], subspace(), classes, own), atol=1e-5)


@pytest.mark.parametrize("covariance", ["shared", "class"])
def test_without_noise_the_moments_are_those_of_numpy(tmp_path: Path, covariance: Covariance) -> None:
    found = released(tmp_path, 3000, 1e9, covariance)
    x, labels = latents(3000)
    own = subspace().coordinates(x).double().numpy()
    y = labels.numpy()
    centres = np.stack([own[y == c].mean(0) for c in range(3)])
    assert found.means.numpy() == pytest.approx(centres, abs=0.02)
    within = [np.cov(own[y == c].T, bias=True) for c in range(3)]
    expected = np.stack(within) if covariance == "class" else np.mean(within, 0)[None]
    factors = found.factors.double().numpy()
    assert factors @ factors.transpose(0, 2, 1) == pytest.approx(expected, abs=0.05)
    rest = subspace().outside(x).square().mean((0, 2, 3)).sqrt().numpy()
    assert found.rest.numpy() == pytest.approx(rest, rel=0.02)


@pytest.mark.parametrize(("epsilon", "covariances"), [(1e9, 3), (100, 3), (0.5, 1)])
def test_by_itself_each_class_has_a_covariance_where_the_noise_is_small(
    tmp_path: Path, epsilon: float, covariances: int
) -> None:
    assert len(released(tmp_path, 3000, epsilon, "auto").factors) == covariances


def test_noise_is_shrunk_away() -> None:
    """Where there is nothing but noise, classes have the same mean, and the covariance is that of public images."""
    generator = torch.Generator().manual_seed(5)
    d, classes, noise = 40, 5, 0.01
    variances = torch.linspace(2, 0.1, d, dtype=torch.float64) / 100
    raw = noise * torch.randn(d, d, dtype=torch.float64, generator=generator)
    second = torch.diag(variances) + (raw + raw.T) / 2 / 0.55**0.5
    means = noise / 0.35**0.5 * torch.randn(classes, d, dtype=torch.float64, generator=generator)
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64)
    found = estimate(means, shares, second[None], noise, variances)
    raw_error = (5 * means - means.sum(0)).norm()
    assert (found["means"] - means.sum(0)).norm() < 0.4 * raw_error
    (factor,) = found["factors"]
    covariance = factor @ factor.T
    between = means.sum(0)[:, None] * means.sum(0)
    assert (covariance + between - torch.diag(variances)).norm() < 0.7 * (second - torch.diag(variances)).norm()
    assert torch.linalg.eigvalsh(covariance).min() > -1e-12


def test_sampled_latents_have_the_moments() -> None:
    made = ClassMoments({"shape": list(SHAPE), "dimensions": D, "classes": 2, "covariances": 2})
    made.basis.copy_(subspace().basis)
    generator = torch.Generator().manual_seed(6)
    made.means.normal_(generator=generator)
    made.factors.normal_(generator=generator)
    made.rest.copy_(torch.tensor([0.5, 2.0]))
    noise = torch.randn(20_000, *SHAPE, generator=generator)
    for label in (0, 1):
        x = made.sample(torch.full((20_000,), label), noise)
        own = x.flatten(1) @ made.basis.T
        assert own.mean(0).numpy() == pytest.approx(made.means[label].numpy(), abs=0.1)
        expected = (made.factors[label] @ made.factors[label].T).numpy()
        assert np.cov(own.T.numpy()) == pytest.approx(expected, abs=0.05 * float(np.abs(expected).max()))
        outside = x - (own @ made.basis).view(-1, *SHAPE)
        share = 1 - made.basis.square().view(D, 2, 16).sum((0, 2)) / 16
        deviation = outside.square().mean((0, 2, 3)) / share
        assert 0.2 < float(deviation[0]) < float(deviation[1]) < 4.4
    assert torch.equal(made.sample(None, noise), made.sample(torch.zeros(20_000, dtype=torch.int64), noise))


@pytest.fixture(scope="module")
def with_moments(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A private bundle whose images begin from moments."""
    out = tmp_path_factory.mktemp("moments") / "private"
    return train_private_bundle(
        public_bundle,
        PrivateImages(digits),
        out,
        own_settings(tiny_settings),
        epsilon=5.0,
        delta=None,
        device=CPU,
        resume=False,
    )


def own_settings(tiny: RapidSettings) -> RapidSettings:
    overrides = [
        "private.objective=late",
        "private.start=700",
        "private.moments.share=0.3",
        "private.moments.warmup.steps=3",
        "private.moments.warmup.batch_size=8",
        "generation.retrieval=moments",
        "generation.start=500",
    ]
    made = apply_overrides(tiny.model_dump(mode="json"), overrides)
    assert isinstance(made, RapidSettings)
    return made


def test_images_begin_from_the_released_moments(with_moments: Bundle) -> None:
    releases = json.loads((with_moments.path / "privacy.json").read_text())["releases"]
    assert [one["name"] for one in releases] == ["overlap", "probe", "moments", "denoiser"]
    settings = with_moments.settings_as(RapidSettings).generation
    generator = RapidGenerator(with_moments, CPU, settings.model_copy(update={"attempts": 1}))
    assert generator.calls() == 50
    assert generator.start == 500
    labels = [0, 3, 3, 9]
    whole = generate(generator, 4, seed=1, labels=labels)
    single = generate(generator, 1, seed=1, labels=labels[:1])
    assert_same_images(single.images, whole.images[:1])


def test_moments_that_are_not_there_are_refused(
    private: Bundle, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    settings = GenerationSettings.model_validate({"retrieval": "moments"})
    with pytest.raises(InputError, match="has no moments"):
        RapidGenerator(private, CPU, settings)
    base = tmp_path / "base"
    base.mkdir()
    for path in public_bundle.iterdir():
        if path.name != "subspace":
            (base / path.name).symlink_to(path)
    (base / "config.json").unlink()
    config = json.loads((public_bundle / "config.json").read_text())
    del config["components"]["subspace"]
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="without the subspace"):
        train_private_bundle(
            base,
            PrivateImages(digits),
            tmp_path / "out",
            own_settings(tiny_settings),
            epsilon=5.0,
            delta=None,
            device=CPU,
            resume=False,
        )
    assert not (tmp_path / "out").exists()
