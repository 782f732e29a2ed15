"""The probe's private training, its share of the budget, and what the generator makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from rapid.bundle import Bundle
from rapid.data import ImageSet, fit_images, load_images, sample_path, to_unit_range
from rapid.data.private import PrivateImages
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget, calibrate
from rapid.dp.releases import DpSgdSpec, Release
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.methods.rapid.generator import RapidGenerator
from rapid.methods.rapid.private_stage import releases
from rapid.methods.rapid.settings import RapidSettings
from rapid.probe.features import probe_features
from rapid.probe.head import NAME, probe_spec, train_head
from rapid.probe.network import Probe
from rapid.rounding import rounded_down
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle
from rapid.training import RunFolder
from rapid.training.optimizers import noisy_schedule

CPU = torch.device("cpu")
CLASSES = tuple("0123456789")


def settings_with(*overrides: str) -> RapidSettings:
    chosen = apply_overrides({}, overrides)
    assert isinstance(chosen, RapidSettings)
    return chosen


def allot(settings: RapidSettings, size: int, epsilon: float, delta: float, *, labelled: bool = True) -> Budget:
    """The budget of the whole private stage."""
    facts = PublicFacts(size, CLASSES if labelled else (), (28, 28))
    return calibrate(releases(settings, facts, None), epsilon=epsilon, delta=delta)


def test_one_class_has_no_probe_and_leaves_its_share_to_the_denoiser() -> None:
    """A layer with one output learns nothing."""
    settings = settings_with("private.probe.share=0.4", "private.distillation={candidates: 9, votes_share: 0.1}")
    found = {}
    for classes in ((), ("a",), ("a", "b")):
        specs = releases(settings, PublicFacts(5000, classes, (28, 28)), None)
        found[len(classes)] = {spec.name for spec in specs}
    assert found[0] == found[1]
    assert found[2] - found[1] == {NAME, "votes"}


def train(public: Probe, images: ImageSet, settings: RapidSettings, budget: Budget, folder: Path) -> Probe:
    """The linear layer alone."""
    with RunFolder.enter(folder, "test", {}, resume=False) as run_folder:
        access = PrivateAccess(images, PublicFacts.of(images), budget, run_folder, device=CPU)
        return train_head(access, public, settings.private.probe)


def digit_images(base: Path) -> ImageSet:
    settings = Bundle.open(base, "base").settings_as(RapidSettings)
    return fit_images(load_images(sample_path("digits"), "digits"), settings.image, "digits")


def test_an_earlier_budget_is_taken_over_unless_it_was_altered() -> None:
    budget = allot(settings_with("private.expected_batch=50", "private.steps=20"), 500, 2.0, 1e-4)
    record = json.loads(json.dumps(budget.model_dump(mode="json")))
    assert Budget.from_record(record, 2.0, 1e-4) == budget
    overlap, probe, denoiser = record["releases"]
    less_noise, half_the_noise = (
        {**denoiser, "noise_multiplier": denoiser["noise_multiplier"] * factor} for factor in (1 - 1e-9, 0.9)
    )
    # another machine may have solved for another last digit
    other = Budget.from_record(record | {"releases": [overlap, probe, less_noise]}, 2.0, 1e-4)
    assert other.release("denoiser").noise_multiplier < budget.release("denoiser").noise_multiplier
    for altered in (
        record | {"releases": [overlap, probe, half_the_noise]},
        record | {"releases": [overlap, {**probe, "noise_multiplier": None}, denoiser]},
        record | {"releases": [overlap, {**probe, "noise_multiplier": 0.5 * probe["noise_multiplier"]}, denoiser]},
        record | {"releases": [overlap, denoiser, denoiser]},
        record | {"releases": [[1.0], probe, denoiser]},
        record | {"epsilon": 3.0},
        {"releases": record["releases"]},
    ):
        with pytest.raises(InputError, match=r"manifest\.json was altered"):
            Budget.from_record(altered, 2.0, 1e-4)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_probe_and_denoiser_together_spend_the_budget(epsilon: float) -> None:
    settings = settings_with("private.expected_batch=1000", "private.steps=100")
    budget = allot(settings, 60_000, epsilon, 1e-6)
    assert budget.names == ("overlap", "probe", "denoiser")
    assert 0.97 * epsilon <= budget.spent == prv_epsilon(budget.events(), 1e-6) <= epsilon
    probe = budget.release(NAME)
    assert prv_epsilon([probe.event()], 1e-6) <= settings.private.probe.share * epsilon
    assert probe.spec.sample_rate == 1
    alone = allot(settings, 60_000, epsilon, 1e-6, labelled=False)
    assert alone.names == ("overlap", "denoiser")
    noise, without = (one.release("denoiser").noise_multiplier for one in (budget, alone))
    assert without < noise < 1.2 * without


def test_a_share_of_nothing_is_no_probe() -> None:
    settings = settings_with("private.probe.share=0")
    assert allot(settings, 10_000, 1.0, 1e-6) == allot(settings, 10_000, 1.0, 1e-6, labelled=False)


def test_it_learns_what_logistic_regression_learns(public_bundle: Path, tmp_path: Path) -> None:
    """With next to no noise, gradient descent comes near scikit-learn's solution on the same features."""
    images = digit_images(public_bundle)
    public = Probe.load(public_bundle / "probe")
    settings = settings_with("private.probe.steps=150")
    probe = train(public, images, settings, allot(settings, len(images), 1000.0, 1e-6), tmp_path / "run")
    features = probe_features(public, images.images, CPU).numpy()
    assert images.labels is not None
    other = LogisticRegression(C=100, max_iter=1000).fit(features, images.labels)
    found = probe_features(probe, images.images, CPU) @ probe.head.weight.T
    accuracy = (found.argmax(1).numpy() == images.labels).mean()
    assert accuracy > 0.3
    assert accuracy > other.score(features, images.labels) - 0.05
    # all but the linear layer is public, and stays
    for name, tensor in public.state_dict().items():
        assert torch.equal(probe.state_dict()[name], tensor)


@pytest.mark.parametrize("weight_noise", [0.5, 2.0])
def test_the_learning_rate_fits_the_noise(public_bundle: Path, tmp_path: Path, weight_noise: float) -> None:
    """Where the noise is all that counts, the weights spread as asked for, less what the falling rate takes away."""
    settings = settings_with("private.probe.steps=200", f"private.probe.weight_noise={weight_noise}")
    public, every = Probe.load(public_bundle / "probe"), digit_images(public_bundle)
    assert every.labels is not None
    images = replace(every, images=every.images[:10], labels=every.labels[:10])
    spec = probe_spec(len(images), settings.private.probe).model_copy(update={"share": None})
    released = Release(spec=spec, noise_multiplier=1e3)
    budget = Budget(epsilon=1.0, delta=1e-6, dataset_size=len(images), releases=(released,))
    probe = train(public, images, settings, budget, tmp_path / "run")
    # the root mean square of 0.55 + 0.45 cos is 0.636; momentum and average lag a little behind
    assert 0.45 < probe.head.weight.std().item() / weight_noise < 0.75


def test_a_finished_probe_is_not_trained_again(public_bundle: Path, tmp_path: Path) -> None:
    """The release is recorded: another training of it would be another release."""
    settings = settings_with("private.probe.steps=5")
    images, public = digit_images(public_bundle), Probe.load(public_bundle / "probe")
    budget = allot(settings, len(images), 1.0, 1e-6)
    weights = []
    for resume in (False, True):
        with RunFolder.enter(tmp_path / "run", "test", {}, resume=resume) as run_folder:
            access = PrivateAccess(images, PublicFacts.of(images), budget, run_folder, device=CPU)
            weights.append(train_head(access, public, settings.private.probe).head.weight)
            assert access.steps_taken() == {"overlap": 0, "probe": 5, "denoiser": 0}
    assert torch.equal(*weights)


def test_the_spec_of_the_probe() -> None:
    """Every image takes part in every step, and the share of epsilon is the probe's own."""
    spec = probe_spec(700, settings_with("private.probe.share=0.3", "private.probe.clip_norm=0.2").private.probe)
    assert isinstance(spec, DpSgdSpec)
    assert (spec.expected_batch, spec.sample_rate, spec.share, spec.sensitivity) == (700, 1.0, 0.3, 0.2)


def test_the_statement_names_the_probe(private: Bundle) -> None:
    assert private.privacy is not None
    (probe,) = (release for release in private.privacy["releases"] if release["name"] == NAME)
    assert probe["sample_rate"] == 1
    assert probe["noise_multiplier"] > 0
    assert private.privacy["epsilon"] <= 10
    row = next(line for line in (private.path / "README.md").read_text().splitlines() if line.startswith("| probe |"))
    assert f"noise_multiplier {rounded_down(probe['noise_multiplier'], 4)}, sample_rate 1, " in row
    assert private.component(NAME, Probe).num_classes == 10
    # all but the linear layer is public
    public = json.loads((private.path / "probe" / "config.json").read_text())
    assert public["num_classes"] == 10


def test_without_labels_there_is_no_probe(
    tmp_path: Path, digits: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    content = np.load(letters)
    np.savez(tmp_path / "letters.npz", images=content["images"])
    public = build_public_bundle([tmp_path / "letters.npz"], tmp_path / "public", tiny_settings, CPU, resume=False)
    assert not public.has(NAME)
    private = train_private_bundle(
        public.path,
        PrivateImages(digits),
        tmp_path / "private",
        tiny_settings,
        epsilon=10.0,
        delta=None,
        device=CPU,
        resume=False,
    )
    assert private is not None
    assert not private.has(NAME)
    assert private.privacy is not None
    assert [release["name"] for release in private.privacy["releases"]] == ["overlap", "denoiser"]
    generator = RapidGenerator(private, CPU, tiny_settings.generation)
    assert generate(generator, 3, [1, 2, 3], seed=1).images.shape == (3, 32, 32)


def test_images_are_what_the_probe_says(private: Bundle) -> None:
    def make(attempts: int, batch_size: int = 256) -> RapidGenerator:
        changes = {"attempts": attempts, "batch_size": batch_size}
        generation = private.settings_as(RapidSettings).generation
        return RapidGenerator(private, CPU, GenerationSettings.model_validate(generation.model_dump() | changes))

    probe = private.component(NAME, Probe)
    # classes that the tiny probe sees at all
    some = generate(make(1), 60, seed=3).images
    seen = probe.probabilities(to_unit_range(some)).argmax(1).bincount(minlength=10)
    labels = [int(label) for label in seen.argsort(descending=True)[:2]] * 10
    accepted = generate(make(8), 20, labels, seed=3)
    # the candidates, drawn for the places in turn; those for a class that is full do not count
    candidates = generate(make(1), 160, labels * 8, seed=3).images
    found = probe.probabilities(to_unit_range(candidates)).argmax(1).tolist()
    left = {label: [place for place, wanted in enumerate(labels) if wanted == label] for label in set(labels)}
    for number, other in enumerate(found):
        if left[labels[number % 20]] and left.get(other):
            placed = accepted.images[left[other].pop(0)].astype(int)
            assert abs(placed - candidates[number]).max() <= 1
    again = generate(make(8, batch_size=7), 20, labels, seed=3)
    assert abs(again.images.astype(int) - accepted.images).max() <= 1


def test_the_learning_rate_rises_and_falls() -> None:
    def rates(highest: float, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=highest)
        schedule, found = noisy_schedule(optimizer, steps), []
        for _ in range(steps):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    found = rates(2.0, 100)
    assert found[0] == pytest.approx(0.2)
    assert max(found) == pytest.approx(2.0, rel=0.03)
    assert np.argmax(found) == 9
    assert 0.2 <= found[-1] < 0.21
    assert rates(1.0, 1)[0] == pytest.approx(1.0)
