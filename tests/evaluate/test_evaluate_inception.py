"""The Inception network from random weights in the layout of the published ones, which are not at hand in tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import entropy
from tests_support import bright_and_dark, save
from torch import Tensor, nn

from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images
from rapid.errors import InputError
from rapid.evaluate import Request, evaluate, write_report
from rapid.evaluate.distances import cropped, measure_fid
from rapid.evaluate.inception import (
    FEATURES,
    inception_class,
    inception_features,
    inception_score,
    load_inception,
)
from rapid.evaluate.sets import load_sets

CPU = torch.device("cpu")
ORACLE = Path(__file__).parent / "pytorch_fid.json"
"""Of pytorch-fid 0.3.0 with the weights below: every 256th feature of each image, and scipy's Inception Score."""


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of torch-fidelity's network, whose constructor cannot do without a file."""
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    library = inception_class()
    built: list[nn.Module] = []

    class Unloaded(library):
        def load_state_dict(self, state: object) -> None:
            built.append(self)

    torch.save({}, path)
    Unloaded("inception-v3-compat", [str(FEATURES)], str(path))
    state = built[0].state_dict()
    rng = np.random.default_rng(0)
    for name in sorted(state):
        shape = tuple(state[name].shape)
        if name.endswith("conv.weight") or name == "fc.weight":
            # else the signal dies on the way, and all images look alike
            scale = (2 / np.prod(shape[1:])) ** 0.5
            state[name] = torch.from_numpy((scale * rng.standard_normal(shape, np.float32)).astype(np.float32))
        elif name == "fc.bias":
            state[name] = torch.from_numpy(rng.standard_normal(shape, np.float32))
        elif name.endswith(("running_mean", "bn.bias")):
            state[name] = torch.zeros(shape)
        elif not name.endswith("num_batches_tracked"):
            state[name] = torch.ones(shape)
    torch.save(state, path)
    return path


def test_features_and_score_are_those_of_pytorch_fid(weights: Path) -> None:
    network = load_inception(weights, CPU)
    rng = np.random.default_rng(7)
    colour = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    grey = rng.integers(0, 256, (2, 12, 12), dtype=np.uint8)
    expected = json.loads(ORACLE.read_text())
    found = {
        "colour": inception_features(network, colour, CPU, "test"),
        "grey": inception_features(network, grey, CPU, "test"),
    }
    for name, features in found.items():
        assert features.shape[1] == FEATURES
        assert features[:, ::256] == pytest.approx(np.array(expected[name]), rel=2e-3, abs=1e-5)
        assert features.mean(1) == pytest.approx(np.array(expected[f"{name} mean"]), rel=1e-3)
    score = inception_score(network, np.concatenate(list(found.values())), CPU)
    assert score - 1 == pytest.approx(expected["is"] - 1, rel=0.02)


class Projection(nn.Module):
    """Features of the same form as Inception's, fixed and random, in no time."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.register_buffer("matrix", torch.randn(3 * pixels, FEATURES, generator=draws) / pixels**0.5)
        self.fc = nn.Linear(FEATURES, 1008)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).float().div(255) @ self.matrix


def test_inception_score_in_closed_form() -> None:
    network = Projection(4)
    nn.init.zeros_(network.fc.weight)
    alike = np.ones((5, FEATURES), np.float32)
    assert inception_score(network, alike, CPU) == pytest.approx(1)
    # image n is surely of class n, all equally often: as many as classes
    with torch.no_grad():
        network.fc.weight[:7, :7] = 200 * torch.eye(7)
    sure = np.tile(np.eye(7, FEATURES, dtype=np.float32), (300, 1))
    assert inception_score(network, sure, CPU) == pytest.approx(7)


def by_definition(features: NDArray[np.float64], manifold: NDArray[np.float64], neighbours: int) -> float:
    """The share of vectors within the ball of another set; its radius is to a neighbour, the centre counted as one."""
    inside = 0
    own = np.linalg.norm(manifold[:, None] - manifold[None], axis=-1)
    for vector in features:
        away = np.linalg.norm(manifold - vector, axis=1)
        inside += any(away[n] < np.sort(own[n])[neighbours - 1] for n in range(len(manifold)))
    return inside / len(features)


@pytest.mark.parametrize("against_training", [True, False])
def test_fid_precision_and_recall_against_their_definitions(tmp_path: Path, against_training: bool) -> None:
    made, test, train = bright_and_dark(30, 0), bright_and_dark(12, 1), bright_and_dark(25, 2)
    # the synthetic images are framed, as those of a model of 12x12 pixels
    framed = np.pad(made.images, ((0, 0), (2, 2), (2, 2)))
    paths = [save(tmp_path / f"{name}.npz", images) for name, images in (("b", test), ("c", train), ("d", test))]
    np.savez(tmp_path / "a.npz", images=framed, labels=made.labels, classes=np.array(made.classes))
    sets = load_sets(tmp_path / "a.npz", paths[0], paths[1] if against_training else None, [paths[2]])
    network, file = Projection(64), tmp_path / "weights"
    file.write_bytes(b"w")
    found = measure_fid(network, file, sets, None, CPU)
    assert found["size"] == 8
    real = train if against_training else test
    assert found["reference"] == ("real training images" if against_training else "real test images")
    assert found["reference_images"] == len(real)
    assert list(found["sets"]) == (["synthetic", "real", "public"] if against_training else ["synthetic", "public"])

    def vectors(images: NDArray[np.uint8]) -> NDArray[np.float64]:
        planes = torch.from_numpy(images[:, None].repeat(3, axis=1))
        return network(planes).double().numpy()

    for name, images in (("synthetic", made), ("public", test), ("real", test)):
        if name not in found["sets"]:
            continue
        first, second = vectors(images.images), vectors(real.images)
        # the roots of the eigenvalues of the product of the covariances, which A B' B A' shares
        a, b = ((x - x.mean(0)) / np.sqrt(len(x) - 1) for x in (first, second))
        roots = np.sqrt(np.linalg.eigvalsh(a @ b.T @ b @ a.T).clip(min=0))
        offset = first.mean(0) - second.mean(0)
        expected = offset @ offset + np.square(a).sum() + np.square(b).sum() - 2 * roots.sum()
        own = found[name]
        assert own["fid"] == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert own["images"] == own["fid_images"] == len(images)
        if images is not real:
            assert own["precision"] == pytest.approx(by_definition(first, second, 4))
            assert own["recall"] == pytest.approx(by_definition(second, first, 4))
        with torch.no_grad():
            chances = network.fc(torch.from_numpy(first).float()).double().softmax(1).numpy()
        score = np.exp(np.mean([entropy(row, chances.mean(0)) for row in chances]))
        assert own["inception_score"] == pytest.approx(score, rel=1e-4)


def test_fid_of_so_many_images_as_dpimagebench_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid.evaluate.distances.FID_IMAGES", 20)
    paths = [save(tmp_path / f"{seed}.npz", bright_and_dark(30, seed)) for seed in range(2)]
    file = tmp_path / "weights"
    file.write_bytes(b"w")
    found = measure_fid(Projection(64), file, load_sets(paths[0], paths[1], None, []), None, CPU)["synthetic"]
    assert (found["fid_images"], found["images"]) == (20, 30)


def test_a_frame_is_cut_off_as_it_was_put_on() -> None:
    for side in (7, 8):
        images = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
        frame = fit_images(ImageSet(images, None, ()), ImageSettings(size=12, channels=3), "real").images
        assert np.array_equal(cropped(frame, side), images)


def test_fid_in_the_report(weights: Path, tmp_path: Path) -> None:
    made, real = bright_and_dark(6, 0), bright_and_dark(6, 1)
    request = Request(
        save(tmp_path / "a.npz", made), save(tmp_path / "b.npz", real), inception=weights, classifiers=(), epochs=1
    )
    report = evaluate(request, CPU)
    assert report.content["fid"]["synthetic"]["fid"] > 0.1
    assert report.content["fid"]["reference"] == "real test images"
    assert any(line.startswith("FID ") for line in report.summary())
    write_report(report, tmp_path / "r.json")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<h3>FID</h3>" in page
    assert "so they cannot be compared" in page


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a file"):
        load_inception(tmp_path / "none.pth", CPU)
    other = tmp_path / "other.pth"
    torch.save({"fc.weight": torch.zeros(2, 2)}, other)
    with pytest.raises(InputError, match="does not contain the weights"):
        load_inception(other, CPU)
    text = tmp_path / "text.pth"
    text.write_text("no weights")
    with pytest.raises(InputError, match="does not contain the weights"):
        load_inception(text, CPU)
    # a pickle that would run code is not run
    ran = tmp_path / "ran"
    evil = tmp_path / "evil.pth"
    torch.save(_Evil(ran), evil)
    with pytest.raises(InputError, match="does not contain the weights"):
        load_inception(evil, CPU)
    assert not ran.exists()


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)
