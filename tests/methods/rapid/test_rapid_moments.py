"""Moments of private latents: what an image contributes, and the estimates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from rapid.data import ImageSet
from rapid.dp import PrivateAccess, PublicFacts, calibrate
from rapid.dp.rows import PrivateTensor
from rapid.methods.rapid import moments
from rapid.methods.rapid.ball import Ball
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.moments import (
    Covariance,
    class_shares,
    estimate,
    image_row,
    moments_specs,
    release_moments,
    scaled_like,
)
from rapid.methods.rapid.settings import MomentsSettings
from rapid.methods.rapid.subspace import Subspace
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
    *specs, last = moments_specs(MomentsSettings(share=0.5), count)
    budget = calibrate([*specs, last.model_copy(update={"share": None})], epsilon=epsilon, delta=1e-5)
    access = PrivateAccess(
        ImageSet(pixels, labels.numpy(), CLASSES, ""), facts, budget, RunFolder(tmp_path), device=CPU
    )
    return release_moments(access, PrivateTensor(x), subspace(), covariance)[0]


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
@given(
    scale=st.floats(0, 1e6),
    classes=st.integers(1, 4),
    seed=st.integers(0, 99),
    shared=st.booleans(),
    away=st.floats(0, 100),
    part=st.floats(1e-3, 1),
)
def test_an_image_contributes_at_most_norm_one(
    scale: float, classes: int, seed: int, shared: bool, away: float, part: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, *SHAPE, generator=generator) * scale
    labels = torch.randint(classes, (5,), generator=generator)
    own = 1 if shared else classes
    public = Ball.public(subspace())
    ball = replace(public, centre=torch.randn(D, generator=generator) * away, radius=public.radius * part)
    whole = image_row(rows, labels, ball, classes, own)
    assert whole.shape == (5, classes * D + classes + 2 + own * D * (D + 1) // 2)
    assert (whole.double().norm(dim=1) <= 1 + 1e-5).all()
    # nothing of another image in a row
    assert torch.allclose(whole[2:3], image_row(rows[2:3], labels[2:3], ball, classes, own), atol=1e-5)


@pytest.mark.parametrize("covariance", ["shared", "class"])
def test_without_noise_the_moments_are_those_of_numpy(tmp_path: Path, covariance: Covariance) -> None:
    found = released(tmp_path, 3000, 1e5, covariance)
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


def test_rows_of_many_classes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has a block of numbers for each class, all but one of which are 0."""
    monkeypatch.setattr(moments, "LARGEST_ROW", 3 * D * (D + 1) // 2)
    assert len(released(tmp_path / "a", 3000, 1e5, "auto").factors) == 3
    monkeypatch.setattr(moments, "LARGEST_ROW", 3 * D * (D + 1) // 2 - 1)
    assert len(released(tmp_path / "b", 3000, 1e5, "auto").factors) == 1
    assert len(released(tmp_path / "c", 3000, 1e5, "class").factors) == 3


@pytest.mark.parametrize(("epsilon", "covariances"), [(1e5, 3), (100, 3), (0.5, 1)])
def test_by_itself_each_class_has_a_covariance_where_the_noise_is_small(
    tmp_path: Path, epsilon: float, covariances: int
) -> None:
    assert len(released(tmp_path, 3000, epsilon, "auto").factors) == covariances


def symmetric_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Of deviation 1 on the diagonal, as that of a release is: what lies beside it is released once, times sqrt(2)."""
    raw = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return (raw + raw.mT) / 2


def distance(first: Tensor, second: Tensor) -> float:
    """Squared Wasserstein distance between centred Gaussians with these covariances (Dowson and Landau 1982)."""
    roots = []
    for covariance in (first, second):
        values, vectors = np.linalg.eigh(covariance.numpy())
        roots.append(vectors * np.sqrt(values.clip(0)))
    cross = np.linalg.svd(roots[0].T @ roots[1], compute_uv=False).sum()
    return float(first.trace() + second.trace() - 2 * cross)


def found_covariances(second: Tensor, shares: Tensor, noise: float, variances: Tensor) -> Tensor:
    """By `estimate`, of classes whose means are 0."""
    means = torch.zeros(len(shares), len(variances), dtype=torch.float64)
    factors = estimate(means, shares, second, noise, variances)["factors"]
    return factors @ factors.mT


def test_noise_is_shrunk_away() -> None:
    """Where there is nothing but noise, classes have the same mean, and the covariance is that of public images."""
    generator = torch.Generator().manual_seed(5)
    d, classes, noise = 40, 5, 0.01
    variances = torch.linspace(2, 0.1, d, dtype=torch.float64) / 100
    second = torch.diag(variances) + noise * symmetric_noise((d, d), generator) / 0.55**0.5
    means = noise / 0.35**0.5 * torch.randn(classes, d, dtype=torch.float64, generator=generator)
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64)
    found = estimate(means, shares, second[None], noise, variances)
    raw_error = (5 * means - means.sum(0)).norm()
    assert (found["means"] - means.sum(0)).norm() < 0.4 * raw_error
    (covariance,) = found_covariances(second[None], shares, noise, variances)
    assert (covariance - torch.diag(variances)).norm() < 0.4 * (second - torch.diag(variances)).norm()


@pytest.mark.parametrize("doubt", [0.0, 0.3, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("off", [0.0, 1.0, 10.0])
def test_the_mean_of_all_is_known_from_the_centre_as_well(doubt: float, off: float) -> None:
    """The posterior mean by the true deviation is the best; `estimate` is told that of the centre's noise alone.

    The unit is the noise of the sum. `off` is how far the centre is from the mean of what the ball holds beside that.
    """
    generator = torch.Generator().manual_seed(3)
    d, classes, trials = 40, 10, 40
    noise = 0.35**0.5 / classes**0.5
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64)
    told = 0.3 if math.isinf(doubt) else doubt
    true_deviation = math.hypot(told, off)
    errors = torch.zeros(3, dtype=torch.float64)
    for _ in range(trials):
        true = true_deviation * torch.randn(d, dtype=torch.float64, generator=generator)
        means = true / classes + torch.randn(classes, d, dtype=torch.float64, generator=generator) / classes**0.5
        second = 1e4 * torch.eye(d, dtype=torch.float64)[None]
        variances = torch.ones(d, dtype=torch.float64)
        found = shares @ estimate(means, shares, second, noise, variances, doubt)["means"]
        raw = means.sum(0)
        best = raw * true_deviation**2 / (true_deviation**2 + 1)
        errors += torch.stack([(one - true).square().sum() for one in (found, best, raw)])
    found_error, best_error, raw_error = errors.tolist()
    if math.isinf(doubt):
        assert found_error == pytest.approx(raw_error)
    else:
        # 40 directions tell the deviation to a tenth
        assert found_error < 1.02 * raw_error
        assert found_error < 1.2 * best_error + 0.1 * raw_error


@pytest.mark.parametrize("noise", [1e-5, 1e-4, 3e-4, 1e-3])
@pytest.mark.parametrize("like_public", [True, False])
def test_means_of_rare_classes_have_less_noise(noise: float, like_public: bool) -> None:
    """The posterior mean with the true prior is the best; where images vary as public ones do, `estimate` is close."""
    generator = torch.Generator().manual_seed(10)
    d, spread = 30, 0.5
    deviations = torch.logspace(0, -2, d, dtype=torch.float64) / d**0.5
    turn = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))[0]
    turn = torch.eye(d, dtype=torch.float64) if like_public else turn
    shares = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.05, 0.05], dtype=torch.float64)
    errors = torch.zeros(3, dtype=torch.float64)
    for _ in range(20):
        true = spread**0.5 * torch.randn(6, d, dtype=torch.float64, generator=generator) * deviations @ turn.T
        true -= shares @ true
        second = (
            turn @ torch.diag(deviations.square()) @ turn.T + noise * symmetric_noise((d, d), generator) / 0.55**0.5
        )
        means = shares[:, None] * true + noise / 0.35**0.5 * torch.randn(6, d, dtype=torch.float64, generator=generator)
        raw = means / shares[:, None]
        found = estimate(means, shares, second[None], noise, deviations.square())["means"]
        prior = spread * deviations.square()
        of_means = (noise / 0.35**0.5 / shares[:, None]) ** 2
        best = (prior / (prior + of_means) * (raw @ turn)) @ turn.T
        errors += torch.stack([(one - true)[-2:].square().sum() for one in (found, best, raw)])
    found_error, best_error, raw_error = errors.tolist()
    assert found_error < 1.01 * raw_error
    if like_public:
        assert found_error < 1.25 * best_error


@pytest.mark.parametrize("noise", [1e-4, 1.0, 1e4, 1e5])
@pytest.mark.parametrize("covariances", [1, 6])
def test_moments_are_finite_where_there_is_nothing_but_noise(noise: float, covariances: int) -> None:
    """The noise of 50 images at epsilon 0.001: the trace is as often below 0 as above, and squares are large."""
    d = 24
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        means = noise * torch.randn(6, d, dtype=torch.float64, generator=generator)
        counts = torch.full((6,), 1 / 6) + noise * torch.randn(6, generator=generator)
        second = noise * symmetric_noise((covariances, d, d), generator)
        found = estimate(means, counts.double(), second, noise, torch.linspace(1, 0.1, d, dtype=torch.float64))
        assert torch.isfinite(found["means"]).all()
        assert torch.isfinite(found["factors"]).all()


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    d=st.integers(1, 12),
    classes=st.integers(1, 3),
    noise=st.sampled_from([0.0, 1e-12, 1e-4, 1.0]),
    scale=st.sampled_from([0.0, 1e-6, 1.0]),
    seed=st.integers(0, 99),
)
def test_covariances_are_finite_and_without_noise_exact(
    d: int, classes: int, noise: float, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixing = scale * torch.randn(classes, d, d, dtype=torch.float64, generator=generator)
    true = mixing @ mixing.mT
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64)
    second = shares[:, None, None] * true + noise * symmetric_noise((classes, d, d), generator)
    found = found_covariances(second, shares, noise, torch.linspace(1, 0.1, d, dtype=torch.float64))
    assert torch.isfinite(found).all()
    assert torch.linalg.eigvalsh(found).min() > -1e-9 * max(1.0, float(found.abs().max()))
    if noise <= 1e-12 and scale in (0.0, 1.0):
        assert found.numpy() == pytest.approx(true.numpy(), abs=1e-6)


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 3e-2])
def test_entries_are_almost_as_near_as_the_best_that_knows_the_prior(noise: float) -> None:
    """Wiener's filter for each entry, with the true deviations of the prior, is the best linear estimate."""
    generator = torch.Generator().manual_seed(8)
    d, share = 48, 0.2
    own = torch.logspace(0, -2, d, dtype=torch.float64)
    prior = share * (own[:, None] * own).sqrt()
    raw = torch.randn(d, d, dtype=torch.float64, generator=generator).triu(1)
    true = torch.diag(own) + prior * own.min() ** 0.5 * (raw + raw.T)
    spread = noise / 0.55**0.5
    second = true + spread * symmetric_noise((d, d), generator)
    rows, columns = torch.triu_indices(d, d, offset=1)
    (found,) = found_covariances(second[None], torch.ones(1, dtype=torch.float64), noise, own)
    variance = (prior[rows, columns] * own.min() ** 0.5).square()
    best = second[rows, columns] * variance / (variance + spread**2 / 2)
    error = (found - true)[rows, columns].square().sum()
    assert error < 1.25 * (best - true[rows, columns]).square().sum()


@pytest.mark.parametrize("noise", [2e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("like_public", [True, False])
def test_covariances_are_nearer_than_those_of_public_images_and_than_the_noisy_ones(
    noise: float, like_public: bool
) -> None:
    generator = torch.Generator().manual_seed(9)
    d = 32
    public = torch.logspace(0, -2, d, dtype=torch.float64) / d
    scale = public if like_public else public.flip(0)
    turn, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator) * 0.1 + torch.eye(d))
    true = turn @ torch.diag(scale) @ turn.T
    second = true + noise * symmetric_noise((d, d), generator) / 0.55**0.5
    (found,) = found_covariances(second[None], torch.ones(1, dtype=torch.float64), noise, public)
    values, vectors = torch.linalg.eigh(second)
    noisy = (vectors * values.clamp_min(0)) @ vectors.T
    assert distance(found, true) < 1.05 * distance(noisy, true)
    # where noise drowns even the trace, no estimate need be better than a guess
    assert noise > 1e-3 or distance(found, true) < 0.8 * distance(torch.diag(public), true)


@given(st.integers(1, 12), st.sampled_from([0.0, 1e-6, 0.1, 10.0]), st.integers(0, 2**31))
def test_variances_like_public_ones(count: int, noise: float, seed: int) -> None:
    """None is negative or moved by more than two deviations; without noise, or with one channel, none is moved."""
    generator = torch.Generator().manual_seed(seed)
    true, public = torch.rand(2, count, dtype=torch.float64, generator=generator)
    noisy = true + noise * torch.randn(count, dtype=torch.float64, generator=generator)
    found = scaled_like(noisy, noise, public)
    assert float(found.min()) >= 0
    assert bool(((found - noisy.clamp_min(0)).abs() <= 2 * noise + 1e-12).all())
    if noise == 0 or (count == 1 and float(public) > 0):
        torch.testing.assert_close(found, noisy.clamp_min(0))


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("alike", [0.0, 0.3])
def test_variances_are_nearer_than_the_noisy_ones(noise: float, alike: float) -> None:
    """In the Wasserstein distance, the sum of squared differences of deviations, over 200 draws of noise."""
    generator = torch.Generator().manual_seed(9)
    public = torch.logspace(0, -1.5, 12, dtype=torch.float64)
    true = 0.3 * public * (alike * torch.randn(12, dtype=torch.float64, generator=generator)).exp()
    noisy = true + noise * torch.randn(200, 12, dtype=torch.float64, generator=generator)
    found = torch.stack([scaled_like(row, noise, public) for row in noisy])
    errors = [(some.sqrt() - true.sqrt()).square().sum(1).mean() for some in (found, noisy.clamp_min(0))]
    assert errors[0] < 0.8 * errors[1]


def test_shares_of_classes_are_as_unequal_as_noise_allows() -> None:
    true = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    assert class_shares(true, 0.0).numpy() == pytest.approx(true.numpy())
    assert class_shares(true, 1.0).numpy() == pytest.approx(np.full(4, 0.25))
    generator = torch.Generator().manual_seed(11)
    for noise in (0.002, 0.02, 0.1):
        noisy = true + noise / 0.05**0.5 * torch.randn(200, 4, dtype=torch.float64, generator=generator)
        found = torch.stack([class_shares(row, noise) for row in noisy])
        assert (found.sum(1) - 1).abs().max() < 1e-12
        assert found.min() > 0.01
        assert (found - true).square().sum(1).mean() < 1.02 * (noisy - true).square().sum(1).mean()
    assert class_shares(torch.ones(1, dtype=torch.float64), 0.1).tolist() == [1]


def test_a_class_of_which_noise_tells_nothing_varies_like_the_others() -> None:
    generator = torch.Generator().manual_seed(10)
    d, classes, noise = 16, 4, 1e-3
    mixing = torch.randn(d, d, dtype=torch.float64, generator=generator) / d
    true = mixing @ mixing.T + 0.01 * torch.eye(d)
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64)
    second = true / classes + noise * symmetric_noise((classes, d, d), generator) / 0.55**0.5
    found = found_covariances(second, shares, noise, true.diag())
    alone = torch.stack([found_covariances(one[None] * 4, shares[:1] * 4, 4 * noise, true.diag())[0] for one in second])
    assert (found - true).square().sum() < 0.6 * (alone - true).square().sum()


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
        # as it is released: the mean over all numbers of a channel, though the subspace has some of them
        deviation = outside.square().mean((0, 2, 3)).sqrt()
        assert deviation.numpy() == pytest.approx(made.rest.numpy(), rel=0.1)
    assert torch.equal(made.sample(None, noise), made.sample(torch.zeros(20_000, dtype=torch.int64), noise))
