"""Votes of private images for clusters of candidates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from rapid.bundle import Bundle
from rapid.data import ImageSet
from rapid.data.private import PrivateImages
from rapid.dp import PrivateAccess, PublicFacts, calibrate
from rapid.dp.queries import clipped_rows
from rapid.methods import apply_overrides
from rapid.methods.rapid.candidates import Candidates, draw_candidates
from rapid.methods.rapid.distillation import chosen_latents
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.votes import (
    Clusters,
    Votes,
    cluster_candidates,
    likely_votes,
    release_votes,
    votes_spec,
)
from rapid.probe.features import probe_features
from rapid.probe.network import Probe
from rapid.stages.private import train_private_bundle
from rapid.training import Checkpoint, RunFolder

CPU = torch.device("cpu")
CLASSES = ("a", "b")


@pytest.fixture(scope="module")
def probe(private: Bundle) -> Probe:
    """Features that were trained on public digits."""
    return private.component("probe", Probe)


def images(zeros: int, ones: int) -> np.ndarray:
    """Of two kinds, whose features differ much: a bar across, and a bar down."""
    made = np.zeros((zeros + ones, 32, 32), np.uint8)
    made[:zeros, 14:18, 4:28] = 255
    made[zeros:, 4:28, 14:18] = 255
    noise = np.random.default_rng(zeros).integers(0, 20, made.shape, dtype=np.uint8)
    return np.maximum(made, noise)


def candidates(count: int) -> Candidates:
    """Of both classes equally many of both kinds."""
    drawn = np.concatenate([images(count, count)] * 2)
    wanted = np.repeat([0, 1], 2 * count)
    return Candidates(drawn, np.eye(2, dtype=np.float32)[wanted], wanted)


def voted(tmp_path: Path, probe: Probe, private: np.ndarray, labels: np.ndarray, epsilon: float) -> Votes:
    facts = PublicFacts(len(private), CLASSES, (32, 32))
    spec = votes_spec(0.5, len(private)).model_copy(update={"share": None})
    access = PrivateAccess(
        ImageSet(private, labels, CLASSES, ""),
        facts,
        calibrate([spec], epsilon=epsilon, delta=1e-5),
        RunFolder(tmp_path),
        device=CPU,
    )
    return release_votes(access, probe, candidates(40), Checkpoint(tmp_path / "clusters"))


def test_weights_are_the_ratio_of_the_densities(tmp_path: Path, probe: Probe) -> None:
    """Class a has 90 bars across and 30 down, class b 20 and 60: candidates have equally many."""
    private = np.concatenate([images(90, 30), images(20, 60)])
    labels = np.repeat([0, 1], [120, 80]).astype(np.int64)
    votes = voted(tmp_path, probe, private, labels, 1e6)
    drawn = candidates(40)
    weights = votes.weights(probe_features(probe, drawn.images, CPU), drawn.wanted).reshape(4, 40).mean(1)
    # even at this epsilon the sums have some noise
    assert weights == pytest.approx(np.array([90, 30, 20, 60]) / 40, rel=0.1)


@pytest.mark.parametrize(("votes", "noise"), [(600.0, 0.0), (600.0, 10.0), (60.0, 10.0), (6.0, 10.0)])
@pytest.mark.parametrize("alike", [True, False])
def test_votes_are_nearer_than_those_above_the_noise(votes: float, noise: float, alike: bool) -> None:
    """A class of few images, whose votes noise hides, keeps the proportions of its candidates; 300 draws of noise."""
    generator = torch.Generator().manual_seed(5)
    drawn = 20 + 200 * torch.rand(16, dtype=torch.float64, generator=generator)
    densities = drawn if alike else drawn * torch.rand(16, dtype=torch.float64, generator=generator).exp()
    true = densities / densities.sum()
    # the class has 16 clusters of 20
    wide, there = torch.cat([drawn, torch.zeros(4)])[None], torch.tensor([16])
    errors = []
    for _ in range(300):
        noisy = torch.cat([votes * true, torch.zeros(4)]) + noise * torch.randn(
            20, dtype=torch.float64, generator=generator
        )
        (found,) = likely_votes(noisy[None], wide, there, noise)
        assert found.min() >= 0
        assert (found[16:] == 0).all()
        above = torch.where(noisy > noise, noisy, 0.0)
        errors.append([(row[:16] / row[:16].sum().clamp_min(1) - true).abs().sum() for row in (found, above)])
    likely, plain = np.mean(errors, 0)
    assert likely < (0.75 * plain if noise else 1e-6)


def test_where_noise_is_larger_than_the_votes_of_a_cluster_there_are_fewer_clusters(
    tmp_path: Path, probe: Probe
) -> None:
    private, labels = images(100, 100), np.arange(200) % 2
    few, many = (voted(tmp_path / str(epsilon), probe, private, labels, epsilon) for epsilon in (0.1, 1e6))
    assert few.clusters.centres.shape[:2] == (2, 1)
    assert many.clusters.centres.shape[:2] == (2, 10)
    # each class has 100 votes; the noise is greater than those of any of ten clusters would be
    assert few.noise > 10
    assert ((few.counts - 100).abs() < 6 * few.noise).all()
    assert many.counts.view(2, 10).sum(1).tolist() == pytest.approx([100, 100], abs=3)


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.floats(0.01, 100), st.integers(0, 99))
def test_a_vote_is_shared_like_the_posterior_of_a_mixture(
    rows: int, classes: int, count: int, variance: float, seed: int
) -> None:
    """Against Bayes' rule with the density of each Gaussian, whose variance is spread evenly over 4 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    features, centres = torch.randn(rows, 4, generator=generator), torch.randn(classes, count, 4, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    sizes = torch.randint(count + 1, (classes,), generator=generator)
    clusters = Clusters(centres, sizes, torch.full((classes,), variance, dtype=torch.float64))
    found = clusters.shares(features, labels).view(rows, classes, count)
    assert (found >= 0).all()
    for row, label, shares in zip(features, labels.tolist(), found, strict=True):
        known = max(1, int(sizes[label]))
        gaussians = MultivariateNormal(centres[label, :known].double(), torch.eye(4).double() * variance / 4)
        densities = gaussians.log_prob(row.double())
        assert shares[label, :known].numpy() == pytest.approx(
            (densities - densities.logsumexp(0)).exp().numpy(), abs=1e-6
        )
        shares[label, :known] = 0
        assert not shares.any()


def test_leaving_out_one_image_hardly_moves_the_votes_of_others(probe: Probe) -> None:
    """All others have another place in their batch then, so the last bits of their features may differ."""
    private, labels = images(700, 503), torch.arange(1203) % 2
    clusters = cluster_candidates(probe, candidates(40), 10, CPU)
    sums = [
        clipped_rows(clusters.shares(probe_features(probe, private[first:], CPU), labels[first:]), 1.0).sum(0)
        for first in (0, 1)
    ]
    assert (sums[0] - sums[1]).norm() <= 1


def test_a_class_without_accepted_candidates_has_no_clusters(probe: Probe) -> None:
    drawn = candidates(20)
    none = replace(drawn, probabilities=np.tile(np.float32([1, 0]), (80, 1)))
    clusters = cluster_candidates(probe, none, 3, CPU)
    assert clusters.sizes.tolist() == [3, 0]
    assert clusters.centres.shape[:2] == (2, 3)
    shares = clusters.shares(probe_features(probe, drawn.images, CPU), torch.from_numpy(drawn.wanted))
    assert shares.sum(1).numpy() == pytest.approx(np.ones(80))


def test_candidates_that_are_all_alike_share_votes(probe: Probe) -> None:
    one = np.repeat(images(1, 0), 40, 0)
    clusters = cluster_candidates(probe, Candidates(one, np.ones((40, 1), np.float32), np.zeros(40, np.int64)), 3, CPU)
    shares = clusters.shares(probe_features(probe, images(2, 2), CPU), torch.zeros(4, dtype=torch.int64))
    assert shares.sum(1).numpy() == pytest.approx(np.ones(4))


OVERRIDES = [
    "private.distillation.candidates=40",
    "private.distillation.keep=1",
    "private.distillation.votes_share=0.2",
    "private.distillation.sampling={attempts: 1, steps: 10, batch_size: 16, retrieval: class}",
    "private.distillation.training={steps: 2, batch_size: 16, warmup_steps: 1}",
]


def test_votes_are_a_release_of_the_budget(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), OVERRIDES)
    bundle = train_private_bundle(
        public_bundle,
        PrivateImages(digits),
        tmp_path / "out",
        settings,
        epsilon=10.0,
        delta=None,
        device=CPU,
        resume=False,
    )
    statement = json.loads((bundle.path / "privacy.json").read_text())
    (release,) = [one for one in statement["releases"] if one["name"] == "votes"]
    assert release["noise_multiplier"] > 0.5
    assert statement["epsilon"] <= 10
    assert "votes of the images for clusters" in " ".join((bundle.path / "README.md").read_text().split())


def test_images_without_votes_are_not_trained_on(private: Bundle, tiny_settings: RapidSettings) -> None:
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), OVERRIDES)
    assert isinstance(settings, RapidSettings)
    parts = replace(Parts.of(private), settings=settings)
    assert parts.probe is not None
    drawn = draw_candidates(parts, CPU)
    clusters = cluster_candidates(parts.probe, drawn, 2, CPU)
    counts = torch.zeros(clusters.centres.shape[:2], dtype=torch.float64)
    counts[:, 0] = 5
    votes = Votes(clusters, counts.flatten(), 0.0)
    _, labels, weights = chosen_latents(parts, drawn, votes, CPU, 0)
    _, _, equal = chosen_latents(parts, drawn, None, CPU, 0)
    assert len(weights) == len(equal)
    features = probe_features(parts.probe, drawn.images[drawn.accepted], CPU)
    taken = votes.weights(features, drawn.wanted[drawn.accepted]) > 0
    assert sorted(weights[: taken.size] > 0) == sorted(taken)
    assert np.bincount(labels, weights) == pytest.approx(np.bincount(labels, equal))
