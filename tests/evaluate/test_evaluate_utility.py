"""Downstream utility on images where the answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from tests_support import bright_and_dark

from rapid.data import ImageSet
from rapid.errors import InputError
from rapid.evaluate import training
from rapid.evaluate.networks import CLASSIFIERS, PROTOCOL, build
from rapid.evaluate.sets import match_classes
from rapid.evaluate.training import TEMPERATURE, predict, soften, train_classifier
from rapid.evaluate.utility import judge_selection, measure_utility, standard_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (1, 4), (3, 13)])
def test_shapes_and_a_gradient_to_every_parameter(name: str, channels: int, size: int) -> None:
    network = build(name, channels, size, 7, CPU, seed=0)
    x = torch.randn(3, channels, size, size)
    features = network.features(x)
    logits = network(x)
    assert features.ndim == 2
    assert features.shape[1] == network.head.in_features
    assert logits.shape == (3, 7)
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        # ReLU units that are dead on three tiny images get none
        assert size < 28 or parameter.grad.abs().sum() > 0, parameter_name


def test_networks_are_what_their_names_say() -> None:
    networks = {name: build(name, 1, 32, 10, CPU, seed=0) for name in CLASSIFIERS}
    convolutions = {
        name: [m for m in network.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
        for name, network in networks.items()
    }
    assert len(convolutions["resnet"]) == 19  # and one linear layer: 20
    assert {m.groups for m in convolutions["resnext"]} == {1, 4}
    assert max(m.out_channels for m in convolutions["wideresnet"]) > max(m.out_channels for m in convolutions["resnet"])
    assert set(PROTOCOL) == set(CLASSIFIERS) - {"small"}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_seed_fixes_the_result(name: str) -> None:
    images = bright_and_dark(40, 0)
    first, second = (train_classifier(name, images, CPU, "test", 1) for _ in range(2))
    for a, b in zip(first.network.state_dict().values(), second.network.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert 1 <= first.epoch <= 1
    assert first.held_out_accuracy == second.held_out_accuracy


def test_separable_images_are_told_apart_and_noise_is_not() -> None:
    train, test = bright_and_dark(600, 0), bright_and_dark(100, 1)
    found = measure_utility(train, test, CPU, "synthetic", epochs=8)
    assert found["mean"] > 0.98
    assert found["mean"] == np.mean([found["networks"][name]["accuracy"] for name in PROTOCOL])
    assert found["networks"]["small"]["accuracy"] > 0.98
    shuffled = replace(train, labels=np.random.default_rng(2).permutation(train.labels))
    assert measure_utility(shuffled, test, CPU, "noise", ["small"], 4)["networks"]["small"]["accuracy"] < 0.9


def test_soft_labels_are_learnt_in_place_of_the_labels() -> None:
    """Labels are swapped in three of ten images; soft labels know better."""
    train, test = bright_and_dark(600, 0), bright_and_dark(100, 1)
    assert train.labels is not None
    wrong = np.where(np.random.default_rng(0).random(600) < 0.3, 1 - train.labels, train.labels)
    sure = np.where(np.arange(2) == train.labels[:, None], 0.9, 0.1).astype(np.float32)
    taught = measure_utility(
        replace(train, labels=wrong, soft_labels=sure), test, CPU, "soft", ["small"], 4
    )["networks"]["small"]  # fmt: skip
    assert taught["accuracy"] > 0.98
    # held-out images are counted by their labels
    assert taught["held_out_accuracy"] < 0.9


@given(
    logits=st.lists(st.lists(st.floats(-20, 20), min_size=3, max_size=3), min_size=1, max_size=5),
)
def test_softening_divides_logits_by_the_temperature(logits: list[list[float]]) -> None:
    values = torch.tensor(logits, dtype=torch.float64)
    expected = (values / TEMPERATURE).softmax(1)
    torch.testing.assert_close(soften(values.softmax(1)).double(), expected, atol=1e-6, rtol=1e-4)


def test_a_probability_of_zero_stays_zero() -> None:
    assert soften(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).tolist() == [[0, 1], [0.5, 0.5]]


def test_classes_are_matched_by_name() -> None:
    train, test = bright_and_dark(300, 0), bright_and_dark(100, 1, ("bright", "dark"))
    found = measure_utility(train, test, CPU, "synthetic", ["small"], 4)
    assert found["mean"] is None
    network = found["networks"]["small"]
    assert network["accuracy"] > 0.98
    # rows are true classes in the order of the test set, columns predicted ones in the order of the training set
    assert found["test_classes"] == ["bright", "dark"]
    assert np.trace(np.fliplr(network["confusion"])) == round(100 * network["accuracy"])
    shares = network["accuracy_by_class"]
    assert np.mean([shares["bright"], shares["dark"]]) == pytest.approx(network["accuracy"])
    with pytest.raises(InputError, match="has the class 'grey'"):
        measure_utility(train, replace(test, classes=("grey", "dark")), CPU, "synthetic")
    with pytest.raises(InputError, match="no labels"):
        measure_utility(train, replace(test, labels=None), CPU, "synthetic")
    with pytest.raises(InputError, match="no labels"):
        measure_utility(replace(train, labels=None), test, CPU, "synthetic")


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_matched_labels_name_the_same_class(data: st.DataObject) -> None:
    train_classes = data.draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    test_classes = tuple(data.draw(st.permutations(["z", *train_classes])))
    known = [number for number, name in enumerate(test_classes) if name != "z"]
    labels = np.array(data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=9)), np.int64)
    pixels = np.zeros((len(labels), 4, 4), np.uint8)
    test = ImageSet(pixels, labels, test_classes, "test")
    train = ImageSet(pixels, np.zeros(len(labels), np.int64), tuple(train_classes), "train")
    matched = match_classes(train, test)
    assert [train_classes[label] for label in matched] == [test_classes[label] for label in labels]


def test_tiny_sets_and_a_single_class() -> None:
    one_class = ImageSet(np.zeros((3, 5, 5, 3), np.uint8), np.zeros(3, np.int64), ("only",), "tiny")
    for name in CLASSIFIERS:
        trained = train_classifier(name, one_class, CPU, "tiny", 1)
        assert predict(trained.network, one_class.images, CPU).tolist() == [0, 0, 0]
    with pytest.raises(InputError, match="at least 3"):
        train_classifier("small", replace(one_class, images=one_class.images[:2], labels=one_class.labels[:2]), CPU, "")


def test_a_last_batch_of_one_image_is_avoided() -> None:
    # 129 images are trained on: two batches, not 128 and 1, which batch normalisation could not take at 1x1
    images = bright_and_dark(143, 0, shape=(4, 4))
    assert train_classifier("resnet", images, CPU, "odd", 1).epoch == 1


def normalisations(network: torch.nn.Module) -> list[torch.nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]


@pytest.mark.parametrize("name", PROTOCOL)
def test_a_short_training_normalises_by_its_own_images(name: str) -> None:
    """Eight steps: running statistics still hold initial values, with which two of these networks guess."""
    train, test = bright_and_dark(100, 0), bright_and_dark(100, 1)
    assert train.labels is not None
    assert test.labels is not None
    trained = train_classifier(name, train, CPU, "few", 8)
    assert trained.held_out_accuracy > 0.95
    assert (predict(trained.network, test.images, CPU) == test.labels).mean() > 0.95
    held_out = trained.held_out
    right = predict(trained.network, train.images[held_out], CPU) == train.labels[held_out]
    assert right.mean() == trained.held_out_accuracy
    assert {one.momentum for one in normalisations(trained.network)} == {0.1}


@pytest.mark.parametrize("epochs", [1, 5])
def test_statistics_of_a_short_training_are_those_of_the_nine_tenths(epochs: int) -> None:
    train = bright_and_dark(100, 0)
    trained = train_classifier("resnet", train, CPU, "few", epochs)
    kept = np.setdiff1d(np.arange(100), trained.held_out)
    pixels = torch.from_numpy(train.images[kept])[:, None].float() / 127.5 - 1
    convolution, first = trained.network.features[0], trained.network.features[1]
    assert isinstance(first, torch.nn.BatchNorm2d)
    assert first.running_mean is not None
    assert first.running_var is not None
    with torch.no_grad():
        variance, mean = torch.var_mean(convolution(pixels), (0, 2, 3))
    torch.testing.assert_close(first.running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.running_var, variance, rtol=1e-4, atol=1e-5)


def test_a_long_training_keeps_its_running_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    # two batches an epoch
    images = bright_and_dark(143, 0, shape=(4, 4))
    monkeypatch.setattr(training, "FEW_STEPS", 6)
    long = train_classifier("resnet", images, CPU, "long", 3)
    assert {int(one.num_batches_tracked or 0) for one in normalisations(long.network)} == {2 * long.epoch}
    # an epoch has the same weights whether statistics were computed anew before it or not
    monkeypatch.setattr(training, "FEW_STEPS", 7)
    monkeypatch.setattr(training, "predict", lambda network, *_: np.zeros(14, np.int64))
    short = train_classifier("resnet", images, CPU, "short", 3)
    assert {int(one.num_batches_tracked or 0) for one in normalisations(short.network)} == {2}
    monkeypatch.setattr(training, "FEW_STEPS", 6)
    long = train_classifier("resnet", images, CPU, "long", 3)
    # all epochs are as good: the last one was kept
    assert short.epoch == long.epoch == 3
    for (key, a), b in zip(long.network.named_parameters(), short.network.parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_generators_of_torch_are_left_as_they_were(name: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    network = build(name, 1, 8, 2, CPU, seed=3)
    train_classifier(name, bright_and_dark(40, 0), CPU, "test", 1, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    # weights of a seed are what they always were
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        expected = CLASSIFIERS[name](1, 8, 2)
    for a, b in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_ensemble_is_the_mean_of_its_members_and_the_best_is_selected_without_the_test_set() -> None:
    """Against a loop of single trainings; the noisier labels make members disagree."""
    train, test = bright_and_dark(200, 0), bright_and_dark(60, 1)
    assert train.labels is not None
    assert test.labels is not None
    flipped = np.where(np.random.default_rng(2).random(200) < 0.35, 1 - train.labels, train.labels)
    train = replace(train, labels=flipped)
    found = measure_utility(train, test, CPU, "synthetic", ["small", "resnet"], 1, ensemble=3)
    for name in ("small", "resnet"):
        members = [train_classifier(name, train, CPU, "alone", 1, seed) for seed in range(3)]
        with torch.no_grad():
            pixels = torch.from_numpy(test.images)[:, None].float() / 127.5 - 1
            logits = [one.network(pixels) for one in members]
        votes = sum(one.softmax(1) for one in logits).argmax(1).numpy()
        told = found["networks"][name]["ensemble"]
        assert told["accuracy"] == pytest.approx((votes == test.labels).mean())
        alone = [(one.argmax(1).numpy() == test.labels).mean() for one in logits]
        assert told["accuracies"] == pytest.approx(alone)
        assert found["networks"][name]["accuracy"] == pytest.approx(alone[0])
        # all members leave out the same tenth
        assert len({one.held_out.tobytes() for one in members}) == 1
        assert len(members[0].held_out) == 20
    best = max(("small", "resnet"), key=lambda name: found["networks"][name]["ensemble"]["held_out_accuracy"])
    assert found["selected"]["name"] == best
    assert found["selected"]["accuracy"] == found["networks"][best]["ensemble"]["accuracy"]
    assert found["selected"]["members"] == 3
    real = {name: found["networks"][name]["ensemble"]["accuracy"] for name in ("small", "resnet")}
    assert found["best"]["accuracy"] == real[found["best"]["name"]] == max(real.values())
    assert found["regret"] == max(real.values()) - real[best]
    assert found["rank_correlation"] is None
    once = measure_utility(train, test, CPU, "synthetic", ["small"], 1)
    assert "ensemble" not in once["networks"]["small"]
    assert once["networks"]["small"]["accuracy"] == found["networks"]["small"]["accuracy"]


def judged(held_out: Sequence[float], real: Sequence[float]) -> dict[str, Any]:
    return judge_selection({
        f"n{number}": {"network": f"network {number}", "held_out_accuracy": first, "accuracy": second}
        for number, (first, second) in enumerate(zip(held_out, real, strict=True))
    })  # fmt: skip


@given(st.permutations(range(6)))
@settings(max_examples=50, deadline=None)
def test_rank_correlation_of_a_permutation(order: list[int]) -> None:
    """Without ties: 1 - 6 sum of d^2 / (n (n^2 - 1)); the values themselves do not matter."""
    found = judged([0.1 * 2**rank for rank in range(6)], [0.5 + 0.05 * rank for rank in order])
    distance = sum((first - second) ** 2 for first, second in enumerate(order))
    assert found["rank_correlation"] == pytest.approx(1 - 6 * distance / 210)
    assert found["selected"]["name"] == "n5"
    assert found["best"]["name"] == f"n{order.index(5)}"
    assert found["regret"] == pytest.approx(0.05 * (5 - order[5]))


def test_the_regret_of_a_choice_by_hand() -> None:
    found = judged([0.9, 0.95, 0.8, 0.7], [0.6, 0.5, 0.7, 0.4])
    assert found["selected"] == {
        "name": "n1", "network": "network 1", "members": 1, "held_out_accuracy": 0.95, "accuracy": 0.5,
    }  # fmt: skip
    assert (found["best"]["name"], found["regret"]) == ("n2", pytest.approx(0.2))
    # ranks 3, 4, 2, 1 and 3, 2, 4, 1: the squares of their differences add up to 8
    assert found["rank_correlation"] == pytest.approx(1 - 6 * 8 / 60)
    # ranks 1.5, 1.5, 3 and 1, 2, 3: a covariance of 1.5 and variances of 1.5 and 2, all sums
    assert judged([0.5, 0.5, 0.6], [0.1, 0.2, 0.3])["rank_correlation"] == pytest.approx(1.5 / 3**0.5)


@pytest.mark.parametrize(
    ("held_out", "real"),
    [([0.5], [0.6]), ([0.5, 0.6], [0.6, 0.5]), ([0.5] * 3, [0.1, 0.2, 0.3]), ([0.1, 0.2, 0.3], [0.5] * 3)],
)
def test_without_ranks_there_is_no_rank_correlation(held_out: list[float], real: list[float]) -> None:
    found = judged(held_out, real)
    assert found["rank_correlation"] is None
    assert found["regret"] >= 0


def test_ensembles_are_chosen_from_where_there_are_some() -> None:
    ensemble = {"members": 3, "held_out_accuracy": 0.9, "accuracy": 0.4}
    found = judge_selection({
        "a": {"network": "A", "held_out_accuracy": 0.1, "accuracy": 0.9, "ensemble": ensemble},
        "b": {"network": "B", "held_out_accuracy": 0.8, "accuracy": 0.1, "ensemble": ensemble | {"accuracy": 0.5}},
    })  # fmt: skip
    assert found["selected"] == {"name": "a", "network": "A"} | ensemble
    assert (found["best"]["name"], found["regret"]) == ("b", pytest.approx(0.1))


@pytest.mark.parametrize("count", [30, 200, 3000])
@pytest.mark.parametrize("accuracy", [0.02, 0.3, 0.7, 0.95, 0.99, 0.999])
def test_two_standard_errors_hold_the_accuracy_as_often_as_they_should(count: int, accuracy: float) -> None:
    """By the exact binomial distribution. The usual formula holds .999 of 30 images in 3 % of all cases."""
    right = np.arange(count + 1)
    held = [abs((n + 2) / (count + 4) - accuracy) <= 2 * standard_error(int(n), count) for n in right]
    assert binom.pmf(right, count, accuracy)[held].sum() > 0.93


def test_the_standard_error_of_one_image_is_a_number_and_of_many_the_usual_one() -> None:
    assert 0.2 < standard_error(1, 1) < 0.4
    assert standard_error(900, 1000) == pytest.approx((0.9 * 0.1 / 1000) ** 0.5, rel=0.01)
