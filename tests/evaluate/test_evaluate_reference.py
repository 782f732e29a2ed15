"""The reference network: its file, what it refuses, and label agreement where the answer is known."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tests_process
import torch
from safetensors.torch import load_file, save_file
from tests_support import bright_and_dark, save

from rapid.errors import InputError
from rapid.evaluate import Request, evaluate
from rapid.evaluate.agreement import SURE, agreement
from rapid.evaluate.reference import Reference, load_reference, train_reference
from rapid.evaluate.training import train_classifier

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    return {
        "train": save(folder / "train.npz", bright_and_dark(400, 0)),
        "test": save(folder / "test.npz", bright_and_dark(60, 1)),
        "made": save(folder / "made.npz", bright_and_dark(40, 2)),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, sets: dict[str, Path]) -> Path:
    """A network that tells bright from dark images of 8x8."""
    path = tmp_path_factory.mktemp("features") / "net.safetensors"
    train_reference(path, sets["train"], sets["test"], CPU, open_data=True, epochs=8)
    return path


def test_the_command_trains_it_once_and_every_report_names_it(sets: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "own.safetensors"
    words = ["evaluate", "--train-real", sets["train"], "--real", sets["test"], "--device", "cpu", "--epochs", "8"]
    refused = tests_process.run(*words, "--save-features", target)
    assert refused.returncode == 2
    assert "--open-data" in refused.stderr
    assert not target.exists()
    done = tests_process.run(*words, "--open-data", "--save-features", target)
    assert done.returncode == 0, done.stderr
    assert "Not private" in done.stdout
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert digest in done.stdout

    out = tmp_path / "report.json"
    words = ["evaluate", "--synthetic", sets["made"], "--real", sets["test"], "--features", target, "--out", out]
    done = tests_process.run(*words, "--classifiers", "none", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    network = report["fidelity"]["network"]
    assert network["sha256"] == digest
    assert network["test_accuracy"] > 0.95
    assert network["train_source"] == "train.npz"
    assert (network["size"], network["train_images"], network["test_images"]) == (16, 400, 60)
    assert "taken for their label by the network of own.safetensors: 100.00% of the synthetic images" in done.stdout
    assert "<h2>Label agreement</h2>" in out.with_suffix(".html").read_text()


def test_a_file_holds_the_network_that_was_trained(file: Path, sets: dict[str, Path]) -> None:
    found = load_reference(file, CPU)
    padded = replace(bright_and_dark(400, 0), images=np.pad(bright_and_dark(400, 0).images, ((0, 0), (4, 4), (4, 4))))
    again = train_classifier("small", padded, CPU, "again", 8).network
    weights = found.space.network.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in again.state_dict().items())
    assert "real training images (train.npz, 400 images, open data)" in found.space.words
    test = bright_and_dark(60, 1)
    pixels = torch.from_numpy(test.images)[:, None].float() / 127.5 - 1
    framed = torch.nn.functional.pad(pixels, (4, 4, 4, 4), value=-1.0)
    with torch.no_grad():
        logits = again(framed)
    assert found.space.probabilities(test.images) == pytest.approx(logits.double().softmax(1).numpy())
    assert found.facts.test_accuracy == pytest.approx((logits.argmax(1).numpy() == test.labels).mean())


def test_the_training_images_decide_the_size(tmp_path: Path) -> None:
    """A test set that is larger, or of several sizes, is scaled as all that the network will judge."""
    shapes = {"train": (20, 20), "test": (40, 40)}
    paths = {}
    for number, (name, shape) in enumerate(shapes.items()):
        images = bright_and_dark(200, number)
        scaled = images.images.repeat(shape[0] // 4, 1)[:, : shape[0]].repeat(shape[1] // 4, 2)[:, :, : shape[1]]
        paths[name] = save(tmp_path / f"{name}.npz", replace(images, images=scaled))
    facts = train_reference(tmp_path / "net.safetensors", paths["train"], paths["test"], CPU, open_data=True, epochs=4)
    assert facts.size == 32
    assert facts.test_accuracy > 0.95


def test_agreement_counts_what_is_taken_for_its_label() -> None:
    probabilities = np.array([[0.95, 0.05], [0.6, 0.4], [0.3, 0.7], [0.02, 0.98], [0.99, 0.01]])
    labels = np.array([0, 0, 0, 1, 1])
    found = agreement(probabilities, labels, ("dark", "bright", "never"))
    assert SURE == 0.9
    assert (found["images"], found["agreed"], found["sure"]) == (5, 3 / 5, 2 / 5)
    assert found["by_class"] == {
        "dark": {"images": 3, "agreed": 2 / 3, "sure": 1 / 3},
        "bright": {"images": 2, "agreed": 0.5, "sure": 0.5},
    }


def test_agreement_in_a_report_is_by_name_with_a_quarter_mislabelled(
    file: Path, sets: dict[str, Path], tmp_path: Path
) -> None:
    # the classes in another order, and every fourth image under the other name
    made = bright_and_dark(80, 3, ("bright", "dark"))
    assert made.labels is not None
    labels = made.labels.copy()
    labels[::4] = 1 - labels[::4]
    path = save(tmp_path / "made.npz", replace(made, labels=labels))
    found = evaluate(Request(path, sets["test"], features=file, classifiers=()), CPU).content
    assert found["agreement"]["synthetic"]["agreed"] == pytest.approx(0.75)
    assert found["agreement"]["real"]["agreed"] == found["fidelity"]["network"]["test_accuracy"]
    # images 0, 4, ... are of "bright": half of those that are called "dark" beside them were moved
    wrong = {name: (labels[made.labels != labels] == number).sum() for number, name in enumerate(("bright", "dark"))}
    for name, number in (("bright", 0), ("dark", 1)):
        share = 1 - wrong[name] / (labels == number).sum()
        assert found["agreement"]["synthetic"]["by_class"][name]["agreed"] == pytest.approx(share)


def test_without_labels_there_is_no_agreement_and_without_a_file_none(
    file: Path, sets: dict[str, Path], tmp_path: Path
) -> None:
    made = replace(bright_and_dark(20, 0), labels=None, classes=())
    path = save(tmp_path / "made.npz", made)
    real = save(tmp_path / "real.npz", replace(bright_and_dark(20, 1), labels=None, classes=()))
    found = evaluate(Request(path, real, features=file, classifiers=()), CPU).content
    assert found["agreement"] is None
    assert found["fidelity"]["network"]["file"] == file.name
    found = evaluate(Request(sets["made"], sets["test"], classifiers=(), epochs=1), CPU).content
    assert found["agreement"] is None
    assert found["fidelity"]["network"] is None


def test_what_does_not_fit_is_refused(file: Path, sets: dict[str, Path], tmp_path: Path) -> None:
    def refused(words: str, **changes: object) -> None:
        request = replace(Request(sets["made"], sets["test"], features=file, classifiers=()), **changes)
        with pytest.raises(InputError, match=words) as error:
            evaluate(request, CPU)
        assert "\n" not in str(error.value)

    colour = save(tmp_path / "colour.npz", bright_and_dark(20, 0, shape=(8, 8, 3)))
    refused("takes grey images, and these are RGB", synthetic=colour)
    large = save(tmp_path / "large.npz", bright_and_dark(20, 0, shape=(20, 20)))
    refused("at most 16x16, and these are 20x20", synthetic=large)
    other = save(tmp_path / "other.npz", bright_and_dark(20, 0, ("dark", "grey")))
    refused("has the class 'grey', which the network", synthetic=other)
    refused("is missing, damaged or not a file", features=tmp_path / "none.safetensors")
    refused("is missing, damaged or not a file", features=sets["made"])
    weights = load_file(file)
    foreign = tmp_path / "foreign.safetensors"
    save_file(weights, foreign)
    refused("is missing, damaged or not a file", features=foreign)
    facts = load_reference(file, CPU).facts
    for changed in (facts.model_copy(update={"size": 24}), facts.model_copy(update={"kind": "vgg"})):
        save_file(weights, foreign, {"rapid": changed.model_dump_json()})
        refused("is missing, damaged or not a file", features=foreign)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--save-features", "a.safetensors", "--open-data"), "--train-real: give the real training images"),
        (("--save-features", "a.npz", "--train-real", "x", "--open-data"), "--save-features a.npz: give a name that"),
        (("--save-features", "a.safetensors", "--train-real", "x", "--synthetic", "y"), "--synthetic: leave it out"),
        (("--save-features", "a.safetensors", "--train-real", "x", "--open-data", "--classifiers", "small,resnet"),
         "--classifiers small,resnet: with --save-features name one of"),
        (("--synthetic", "y"), "--out: say where to write the report"),
    ],
)  # fmt: skip
def test_usage(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = tests_process.run("evaluate", "--real", tmp_path / "none.npz", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_other_kinds_are_kept_with_their_statistics(sets: dict[str, Path], tmp_path: Path) -> None:
    """Batch normalisation has buffers, one of which has no dimensions."""
    path = tmp_path / "resnet.safetensors"
    facts = train_reference(path, sets["train"], sets["test"], CPU, open_data=True, kind="resnet", epochs=2)
    found: Reference = load_reference(path, CPU)
    right = found.space.probabilities(bright_and_dark(60, 1).images).argmax(1) == bright_and_dark(60, 1).labels
    assert facts.test_accuracy == pytest.approx(right.mean())


def test_images_that_cannot_be_trained_on_are_those_of_an_argument(sets: dict[str, Path], tmp_path: Path) -> None:
    some = bright_and_dark(20, 0)
    assert some.labels is not None
    for images, words in (
        (replace(some, images=some.images[:2], labels=some.labels[:2]), "2 images are too few"),
        (replace(some, labels=None, classes=()), "has no labels, which classifiers need"),
    ):
        path = save(tmp_path / "few.npz", images)
        with pytest.raises(InputError, match=words) as caught:
            train_reference(tmp_path / "a.safetensors", path, sets["test"], CPU, open_data=True, kind="small", epochs=1)
        assert caught.value.field == "train_real"
    assert not (tmp_path / "a.safetensors").exists()
