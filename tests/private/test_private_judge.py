"""The judge's private training, its share of the budget, and what the generator makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from rapid.bundle import Bundle
from rapid.config import GenerationSettings, PrivateSettings, Settings
from rapid.data import fit_images, load_images, sample_path, to_unit_range
from rapid.errors import InputError
from rapid.generate import Generator
from rapid.models import Judge
from rapid.overrides import apply_overrides
from rapid.private import Ranks, train_private_bundle
from rapid.private.accountant import prv_epsilon
from rapid.private.budget import Budget, allot
from rapid.private.judge import train_judge
from rapid.private.training import learning_rate
from rapid.public import build_public_bundle
from rapid.public.judge import judge_features

CPU = torch.device("cpu")


def test_an_earlier_budget_is_taken_over_unless_it_was_altered() -> None:
    budget = allot(PrivateSettings(expected_batch=50, steps=20), 500, 2.0, 1e-4, judged=True)
    record = json.loads(json.dumps(budget.record()))
    assert Budget.from_record(record, 2.0) == budget
    # another machine may have solved for another last digit
    other = record | {"plan": record["plan"] | {"noise_multiplier": record["plan"]["noise_multiplier"] * (1 - 1e-9)}}
    assert Budget.from_record(other, 2.0).denoiser.noise_multiplier < budget.denoiser.noise_multiplier
    for altered in (
        record | {"plan": record["plan"] | {"noise_multiplier": 0.9 * record["plan"]["noise_multiplier"]}},
        record | {"plan": record["plan"] | {"others": []}},
        record | {"judge": None},
        record | {"overlap": [1.0]},
        {"plan": record["plan"]},
    ):
        with pytest.raises(InputError, match=r"plan\.json was altered"):
            Budget.from_record(altered, 2.0)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_judge_and_denoiser_together_spend_the_budget(epsilon: float) -> None:
    settings = PrivateSettings(expected_batch=1000, steps=100)
    budget = allot(settings, 60_000, epsilon, 1e-6, judged=True)
    assert budget.judge is not None
    releases = [*budget.judge.releases(), *budget.denoiser.releases()]
    # those of the judge are among the denoiser's already, as is that of the overlap check
    assert len(releases) == 4
    spent = prv_epsilon(releases[1:], 1e-6)
    assert 0.97 * epsilon <= spent == budget.denoiser.epsilon() <= epsilon
    assert budget.judge.epsilon() <= settings.judge.share * epsilon
    assert budget.judge.sample_rate == 1
    alone = allot(settings, 60_000, epsilon, 1e-6, judged=False)
    assert alone.judge is None
    assert alone.denoiser.noise_multiplier < budget.denoiser.noise_multiplier < 1.2 * alone.denoiser.noise_multiplier


def test_a_share_of_nothing_is_no_judge() -> None:
    settings = apply_overrides({}, ["private.judge.share=0"]).private
    assert allot(settings, 10_000, 1.0, 1e-6, judged=True) == allot(settings, 10_000, 1.0, 1e-6, judged=False)


def test_it_learns_what_logistic_regression_learns(public_bundle: Path, tmp_path: Path) -> None:
    """With next to no noise, gradient descent comes near scikit-learn's solution on the same features."""
    images = fit_images(load_images(sample_path("digits"), "digits"), Bundle.open(public_bundle, "").settings.image, "")
    public = Judge.load(public_bundle / "judge")
    settings = apply_overrides({}, ["private.judge.steps=150"]).private
    plan = allot(settings, len(images), 1000.0, 1e-6, judged=True).judge
    assert plan is not None
    judge = train_judge(public, images, plan, settings, CPU, tmp_path / "state.pt", Ranks())
    features = judge_features(public, images.images, CPU).numpy()
    assert images.labels is not None
    other = LogisticRegression(C=100, max_iter=1000).fit(features, images.labels)
    found = judge_features(judge, images.images, CPU) @ judge.head.weight.T
    accuracy = (found.argmax(1).numpy() == images.labels).mean()
    assert accuracy > 0.3
    assert accuracy > other.score(features, images.labels) - 0.05


@pytest.mark.parametrize("weight_noise", [0.5, 2.0])
def test_the_learning_rate_fits_the_noise(public_bundle: Path, tmp_path: Path, weight_noise: float) -> None:
    """Where the noise is all that counts, the weights spread as asked for, less what the falling rate takes away."""
    images = fit_images(load_images(sample_path("digits"), "digits"), Bundle.open(public_bundle, "").settings.image, "")
    overrides = ["private.judge.steps=200", f"private.judge.weight_noise={weight_noise}"]
    settings = apply_overrides({}, overrides).private
    plan = allot(settings, len(images), 0.01, 1e-6, judged=True).judge
    assert plan is not None
    public = Judge.load(public_bundle / "judge")
    judge = train_judge(public, images, plan, settings, CPU, tmp_path / "state.pt", Ranks())
    # the root mean square of 0.55 + 0.45 cos is 0.636; momentum and average lag a little behind
    assert 0.45 < judge.head.weight.std().item() / weight_noise < 0.75


def test_the_statement_names_the_judge(private: Bundle) -> None:
    assert private.privacy is not None
    judge = private.privacy["judge"]
    assert judge["sample_rate"] == 1
    assert judge["noise_multiplier"] > 0
    assert private.privacy["epsilon"] <= 10
    assert "| judge | noise_multiplier" in (private.path / "README.md").read_text()
    loaded = private.judge()
    assert loaded is not None
    assert loaded.num_classes == 10
    # all but the linear layer is public
    public = json.loads((private.path / "judge" / "config.json").read_text())
    assert public["num_classes"] == 10


def test_without_labels_there_is_no_judge(tmp_path: Path, digits: Path, letters: Path, tiny_settings: Settings) -> None:
    content = np.load(letters)
    np.savez(tmp_path / "letters.npz", images=content["images"])
    settings = tiny_settings.model_copy(deep=True)
    public = build_public_bundle([tmp_path / "letters.npz"], tmp_path / "public", settings, CPU, resume=False)
    assert public.judge() is None
    private = train_private_bundle(
        public.path, digits, tmp_path / "private", settings, epsilon=10.0, delta=None, device=CPU, resume=False
    )
    assert private is not None
    assert private.judge() is None
    assert private.privacy is not None
    assert "judge" not in private.privacy
    assert Generator(private, CPU).generate(3, [1, 2, 3], seed=1).images.shape == (3, 32, 32)


def test_images_are_what_the_judge_says(private: Bundle) -> None:
    def make(attempts: int, batch_size: int = 256) -> Generator:
        changes = {"attempts": attempts, "batch_size": batch_size}
        settings = GenerationSettings.model_validate(private.settings.generation.model_dump() | changes)
        return Generator(private, CPU, settings)

    judge = private.judge()
    assert judge is not None
    # classes that the tiny judge sees at all
    some = make(1).generate(60, seed=3).images
    seen = judge.probabilities(to_unit_range(some)).argmax(1).bincount(minlength=10)
    labels = [int(label) for label in seen.argsort(descending=True)[:2]] * 10
    selected = make(8).generate(20, labels, seed=3)
    # the candidates, drawn for the places in turn; those for a class that is full do not count
    candidates = make(1).generate(160, labels * 8, seed=3).images
    found = judge.probabilities(to_unit_range(candidates)).argmax(1).tolist()
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
