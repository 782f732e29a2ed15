"""The probe's private training, its share of the budget, and what the generator makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from rapid.bundle.format import Bundle
from rapid.config.presets import apply_overrides
from rapid.config.sections import GenerationSettings, PrivateSettings, Settings
from rapid.data import fit_images, load_images, sample_path, to_unit_range
from rapid.dp import Ranks
from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget, allot
from rapid.dp.training import learning_rate
from rapid.errors import InputError
from rapid.methods.rapid.generator import Generator
from rapid.probe.features import probe_features
from rapid.probe.head import train_probe
from rapid.probe.network import Probe
from rapid.stages import build_public_bundle, train_private_bundle

CPU = torch.device("cpu")


def test_an_earlier_budget_is_taken_over_unless_it_was_altered() -> None:
    budget = allot(PrivateSettings(expected_batch=50, steps=20), 500, 2.0, 1e-4, probed=True)
    record = json.loads(json.dumps(budget.record()))
    assert Budget.from_record(record, 2.0) == budget
    # another machine may have solved for another last digit
    other = record | {"plan": record["plan"] | {"noise_multiplier": record["plan"]["noise_multiplier"] * (1 - 1e-9)}}
    assert Budget.from_record(other, 2.0).denoiser.noise_multiplier < budget.denoiser.noise_multiplier
    for altered in (
        record | {"plan": record["plan"] | {"noise_multiplier": 0.9 * record["plan"]["noise_multiplier"]}},
        record | {"plan": record["plan"] | {"others": []}},
        record | {"probe": None},
        record | {"overlap": [1.0]},
        {"plan": record["plan"]},
    ):
        with pytest.raises(InputError, match=r"plan\.json was altered"):
            Budget.from_record(altered, 2.0)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_probe_and_denoiser_together_spend_the_budget(epsilon: float) -> None:
    settings = PrivateSettings(expected_batch=1000, steps=100)
    budget = allot(settings, 60_000, epsilon, 1e-6, probed=True)
    assert budget.probe is not None
    releases = [*budget.probe.releases(), *budget.denoiser.releases()]
    # those of the probe are among the denoiser's already, as is that of the overlap check
    assert len(releases) == 4
    spent = prv_epsilon(releases[1:], 1e-6)
    assert 0.97 * epsilon <= spent == budget.denoiser.epsilon() <= epsilon
    assert budget.probe.epsilon() <= settings.probe.share * epsilon
    assert budget.probe.sample_rate == 1
    alone = allot(settings, 60_000, epsilon, 1e-6, probed=False)
    assert alone.probe is None
    assert alone.denoiser.noise_multiplier < budget.denoiser.noise_multiplier < 1.2 * alone.denoiser.noise_multiplier


def test_a_share_of_nothing_is_no_probe() -> None:
    settings = apply_overrides({}, ["private.probe.share=0"]).private
    assert allot(settings, 10_000, 1.0, 1e-6, probed=True) == allot(settings, 10_000, 1.0, 1e-6, probed=False)


def test_it_learns_what_logistic_regression_learns(public_bundle: Path, tmp_path: Path) -> None:
    """With next to no noise, gradient descent comes near scikit-learn's solution on the same features."""
    images = fit_images(load_images(sample_path("digits"), "digits"), Bundle.open(public_bundle, "").settings.image, "")
    public = Probe.load(public_bundle / "probe")
    settings = apply_overrides({}, ["private.probe.steps=150"]).private
    plan = allot(settings, len(images), 1000.0, 1e-6, probed=True).probe
    assert plan is not None
    probe = train_probe(public, images, plan, settings, CPU, tmp_path / "state.pt", Ranks())
    features = probe_features(public, images.images, CPU).numpy()
    assert images.labels is not None
    other = LogisticRegression(C=100, max_iter=1000).fit(features, images.labels)
    found = probe_features(probe, images.images, CPU) @ probe.head.weight.T
    accuracy = (found.argmax(1).numpy() == images.labels).mean()
    assert accuracy > 0.3
    assert accuracy > other.score(features, images.labels) - 0.05


@pytest.mark.parametrize("weight_noise", [0.5, 2.0])
def test_the_learning_rate_fits_the_noise(public_bundle: Path, tmp_path: Path, weight_noise: float) -> None:
    """Where the noise is all that counts, the weights spread as asked for, less what the falling rate takes away."""
    images = fit_images(load_images(sample_path("digits"), "digits"), Bundle.open(public_bundle, "").settings.image, "")
    overrides = ["private.probe.steps=200", f"private.probe.weight_noise={weight_noise}"]
    settings = apply_overrides({}, overrides).private
    plan = allot(settings, len(images), 0.01, 1e-6, probed=True).probe
    assert plan is not None
    public = Probe.load(public_bundle / "probe")
    probe = train_probe(public, images, plan, settings, CPU, tmp_path / "state.pt", Ranks())
    # the root mean square of 0.55 + 0.45 cos is 0.636; momentum and average lag a little behind
    assert 0.45 < probe.head.weight.std().item() / weight_noise < 0.75


def test_the_statement_names_the_probe(private: Bundle) -> None:
    assert private.privacy is not None
    probe = private.privacy["probe"]
    assert probe["sample_rate"] == 1
    assert probe["noise_multiplier"] > 0
    assert private.privacy["epsilon"] <= 10
    assert "| probe | noise_multiplier" in (private.path / "README.md").read_text()
    loaded = private.probe()
    assert loaded is not None
    assert loaded.num_classes == 10
    # all but the linear layer is public
    public = json.loads((private.path / "probe" / "config.json").read_text())
    assert public["num_classes"] == 10


def test_without_labels_there_is_no_probe(tmp_path: Path, digits: Path, letters: Path, tiny_settings: Settings) -> None:
    content = np.load(letters)
    np.savez(tmp_path / "letters.npz", images=content["images"])
    settings = tiny_settings.model_copy(deep=True)
    public = build_public_bundle([tmp_path / "letters.npz"], tmp_path / "public", settings, CPU, resume=False)
    assert public.probe() is None
    private = train_private_bundle(
        public.path, digits, tmp_path / "private", settings, epsilon=10.0, delta=None, device=CPU, resume=False
    )
    assert private is not None
    assert private.probe() is None
    assert private.privacy is not None
    assert "probe" not in private.privacy
    assert Generator(private, CPU).generate(3, [1, 2, 3], seed=1).images.shape == (3, 32, 32)


def test_images_are_what_the_probe_says(private: Bundle) -> None:
    def make(attempts: int, batch_size: int = 256) -> Generator:
        changes = {"attempts": attempts, "batch_size": batch_size}
        settings = GenerationSettings.model_validate(private.settings.generation.model_dump() | changes)
        return Generator(private, CPU, settings)

    probe = private.probe()
    assert probe is not None
    # classes that the tiny probe sees at all
    some = make(1).generate(60, seed=3).images
    seen = probe.probabilities(to_unit_range(some)).argmax(1).bincount(minlength=10)
    labels = [int(label) for label in seen.argsort(descending=True)[:2]] * 10
    selected = make(8).generate(20, labels, seed=3)
    # the candidates, drawn for the places in turn; those for a class that is full do not count
    candidates = make(1).generate(160, labels * 8, seed=3).images
    found = probe.probabilities(to_unit_range(candidates)).argmax(1).tolist()
    left = {label: [place for place, wanted in enumerate(labels) if wanted == label] for label in set(labels)}
    for number, other in enumerate(found):
        if left[labels[number % 20]] and left.get(other):
            placed = selected.images[left[other].pop(0)].astype(int)
            assert abs(placed - candidates[number]).max() <= 1
    again = make(8, batch_size=7).generate(20, labels, seed=3)
    assert abs(again.images.astype(int) - selected.images).max() <= 1


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(2.0, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == pytest.approx(2.0, rel=0.03)
    assert np.argmax(rates) == 9
    assert 0.2 <= rates[-1] < 0.21
    assert learning_rate(1.0, 0, 1) == pytest.approx(1.0)
