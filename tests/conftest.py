"""Fixtures that many tests share: tiny real bundles, made once a session by the real stages."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import register_random
from hypothesis import settings as hypothesis_settings
from methods.tiny import TINY as METHODS
from tests_support import TINY, export_networks

from rapid.bundle import Bundle
from rapid.data import load_images, sample_path
from rapid.data.private import PrivateImages
from rapid.methods import apply_overrides, load_settings
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")

# a busy machine must not fail a test of behaviour
hypothesis_settings.register_profile("rapid", deadline=None)
hypothesis_settings.load_profile("rapid")


class _TorchGenerator:
    """Torch's generator, which hypothesis sets for each example, so that one that fails fails again."""

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)


# hypothesis keeps a weak reference
TORCH_GENERATOR = _TorchGenerator()
register_random(TORCH_GENERATOR)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """A shell starts background jobs with SIGINT ignored, and every process that a test starts inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """`rapid serve` within a test's process logs to a stderr that pytest then closes; later tests must not."""
    before = set(logging.getLogger().handlers)
    yield
    for handler in set(logging.getLogger().handlers) - before:
        logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def own_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the processes that they start, never touch the user's ledger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAPID_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.jsonl"))
        yield


@pytest.fixture(scope="session")
def tiny_settings() -> RapidSettings:
    """The demo's settings with the smallest networks and a few steps."""
    return load_settings("demo", TINY)


def save_subset(source: Path, target: Path, count: int) -> Path:
    """The first `count` images of a sample as an `.npz`."""
    images = load_images(source, "source")
    assert images.labels is not None
    np.savez(target, images=images.images[:count], labels=images.labels[:count], classes=np.array(images.classes))
    return target


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 letters."""
    return save_subset(sample_path("letters"), tmp_path_factory.mktemp("letters") / "letters.npz", 60)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 digits of the classes 0 to 9."""
    return save_subset(sample_path("digits"), tmp_path_factory.mktemp("digits") / "digits.npz", 100)


@pytest.fixture(scope="session")
def public_bundle(tmp_path_factory: pytest.TempPathFactory, letters: Path, tiny_settings: RapidSettings) -> Path:
    """A finished tiny public bundle."""
    out = tmp_path_factory.mktemp("bundles") / "public"
    return build_public_bundle([letters], out, tiny_settings, CPU, resume=False).path


@pytest.fixture(scope="session")
def networks(public_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The networks of the tiny public bundle, without it."""
    return export_networks(public_bundle, tmp_path_factory.mktemp("networks") / "letters")


@pytest.fixture(scope="session")
def private_bundle(
    tmp_path_factory: pytest.TempPathFactory, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> Path:
    """A finished tiny private bundle with the classes 0 to 9."""
    out = tmp_path_factory.mktemp("bundles") / "private"
    return train_private_bundle(
        public_bundle, PrivateImages(digits), out, tiny_settings, epsilon=10.0, delta=None, device=CPU, resume=False
    ).path


@pytest.fixture(scope="session")
def classifier_bundle(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """A finished tiny private bundle of a classifier with the classes 0 to 9."""
    out = tmp_path_factory.mktemp("classifiers") / "classifier"
    chosen = apply_overrides(METHODS["dp-classifier"]["settings"] | {"method": "dp-classifier"}, [])
    return train_private_bundle(
        None, PrivateImages(digits), out, chosen, epsilon=8.0, delta=None, device=CPU, resume=False
    ).path


@pytest.fixture(scope="session")
def private(private_bundle: Path) -> Bundle:
    """The private bundle, opened."""
    return Bundle.open(private_bundle, "model", "private")
