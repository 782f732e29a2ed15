"""The Inception network from random weights in the layout of the published ones, which are not at hand in tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests_support import bright_and_dark, save
from torch import nn

from rapid.errors import InputError
from rapid.evaluate import Request, evaluate, write_report
from rapid.evaluate.inception import inception_class, inception_features, load_inception

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of torch-fidelity's network, whose constructor cannot do without a file."""
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    library = inception_class()
    built: list[nn.Module] = []

    class Unloaded(library):
        def load_state_dict(self, state: object) -> None:
            built.append(self)

    torch.manual_seed(0)
    torch.save({}, path)
    Unloaded("inception-v3-compat", ["2048"], str(path))
    for layer in built[0].modules():
        if isinstance(layer, nn.Conv2d):
            # else the signal dies on the way, and all images look alike
            nn.init.kaiming_normal_(layer.weight)
    torch.save(built[0].state_dict(), path)
    return path


def test_features_are_those_of_the_library(weights: Path) -> None:
    network = load_inception(weights, CPU)
    direct = inception_class()("inception-v3-compat", ["2048"], str(weights))
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (2, 12, 12, 3), dtype=np.uint8)
    found = inception_features(network, colour, CPU, "test")
    assert found.shape == (2, 2048)
    expected = direct(torch.from_numpy(colour.transpose(0, 3, 1, 2).copy()))[0]
    assert found == pytest.approx(expected.numpy())
    assert np.abs(found[0] - found[1]).mean() > 0.01
    grey = colour[..., 0]
    repeated = np.repeat(grey[..., None], 3, axis=-1)
    assert inception_features(network, grey, CPU, "test") == pytest.approx(
        inception_features(network, repeated, CPU, "test")
    )


def test_fid_in_the_report(weights: Path, tmp_path: Path) -> None:
    made, real = bright_and_dark(7, 0), bright_and_dark(6, 1)
    request = Request(
        save(tmp_path / "a.npz", made), save(tmp_path / "b.npz", real), inception=weights, classifiers=(), epochs=1
    )
    report = evaluate(request, CPU)
    direct = inception_class()("inception-v3-compat", ["2048"], str(weights))
    made_features, real_features = (
        direct(torch.from_numpy(images.images[:, None].repeat(3, axis=1)))[0].double().numpy()
        for images in (made, real)
    )
    # the roots of the eigenvalues of the product of the covariances, which A B' B A' shares
    a, b = ((x - x.mean(0)) / np.sqrt(len(x) - 1) for x in (made_features, real_features))
    roots = np.sqrt(np.linalg.eigvalsh(a @ b.T @ b @ a.T).clip(min=0))
    offset = made_features.mean(0) - real_features.mean(0)
    expected = offset @ offset + np.square(a).sum() + np.square(b).sum() - 2 * roots.sum()
    assert expected > 0.1
    assert report.content["fid"]["synthetic"]["fid"] == pytest.approx(expected, rel=1e-3)
    assert any(line.startswith("FID ") for line in report.summary())
    write_report(report, tmp_path / "r.json")
    assert "FID (Inception)" in (tmp_path / "r.html").read_text(encoding="utf-8")


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
