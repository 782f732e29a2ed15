"""The Inception network from random weights in the layout of the published ones, which are not at hand in tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rapid.errors import InputError
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
    assert found.std() > 0
    grey = colour[..., 0]
    repeated = np.repeat(grey[..., None], 3, axis=-1)
    assert inception_features(network, grey, CPU, "test") == pytest.approx(
        inception_features(network, repeated, CPU, "test")
    )


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no file"):
        load_inception(tmp_path / "none.pth", CPU)
    other = tmp_path / "other.pth"
    torch.save({"fc.weight": torch.zeros(2, 2)}, other)
    with pytest.raises(InputError, match="does not hold the weights"):
        load_inception(other, CPU)
    text = tmp_path / "text.pth"
    text.write_text("no weights")
    with pytest.raises(InputError, match="does not hold the weights"):
        load_inception(text, CPU)
    # a pickle that would run code is not run
    ran = tmp_path / "ran"
    evil = tmp_path / "evil.pth"
    torch.save(_Evil(ran), evil)
    with pytest.raises(InputError, match="does not hold the weights"):
        load_inception(evil, CPU)
    assert not ran.exists()


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)
