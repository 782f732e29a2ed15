"""What the fixtures and the tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from prometheus_client.parser import text_string_to_metric_families
from tests_process import run
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rapid.bundle import Bundle
from rapid.bundle.networks import open_networks
from rapid.data import ImageSet
from rapid.recording import Work
from rapid.sampling.generator import Generator
from rapid.training.loss import Loss

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = [
    "autoencoder.channels=8",
    "autoencoder.multipliers=[1,1,1]",
    "autoencoder.training.steps=3",
    "autoencoder.training.batch_size=8",
    "denoiser.channels=8",
    "denoiser.heads=2",
    "denoiser.training.steps=3",
    "denoiser.training.batch_size=8",
    "encoder.channels=8",
    "encoder.features=8",
    "encoder.training.steps=2",
    "encoder.training.batch_size=8",
    "probe.channels=4",
    "probe.features=16",
    "probe.training.steps=2",
    "probe.training.batch_size=8",
    "private.probe.steps=3",
    "private.expected_batch=20",
    "private.steps=3",
    "private.physical_batch=8",
    "generation.attempts=2",
    "generation.steps=20",
]
"""Overrides of the preset `demo`: the smallest networks and a few steps."""


class Clock:
    """In the place of `time` in some modules; with `time.monotonic` itself, servers in other threads would hang.

    Args:
        ticks: seconds that go by with each look at it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, ticks: float = 0.0) -> None:
        self.now, self._ticks = 0.0, ticks
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        self.now += self._ticks
        return self.now - self._ticks


def module_of(file: Path) -> ModuleType:
    """A Python file that no package holds as a module, with what lies beside it within its reach."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look there
    sys.modules[file.stem] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        spec.loader.exec_module(module)
    return module


def whole(loss: Callable[[torch.Generator], Tensor]) -> Loss:
    """A public loss that is not in two parts: a function of the generator."""

    def draw(generator: torch.Generator) -> list[Tensor]:
        return [torch.tensor(generator.initial_seed())]

    return Loss(draw, lambda seed: loss(torch.Generator().manual_seed(int(seed))))


def traced(work: Work) -> Work:
    """Work that repeats the operations on tensors which `work` does now, whatever its Python would do then."""
    operations = make_fx(lambda: list(work()))()

    def replay() -> Sequence[Tensor]:
        with torch.no_grad():
            return operations()

    return replay


def assert_same_images(found: ArrayLike, expected: ArrayLike) -> None:
    """An image, or images, (..., H, W) or (..., H, W, 3), apart by rounding alone, as sums in another order leave it.

    Networks of the fixtures are as the noise of a few private steps left them, and now and then one turns a last bit
    into two levels at some pixel. An image of another seed, record or label is apart by tens of levels.
    """
    first, second = (np.asarray(images, np.float64) for images in (found, expected))
    assert first.shape == second.shape
    if first.size:
        apart = np.abs(first - second).reshape(-1, *first.shape[-3 if first.shape[-1] == 3 else -2 :])
        assert apart.mean(axis=tuple(range(1, apart.ndim))).max() < 0.1
        assert apart.max() <= 4


def export_networks(base: Path, out: Path, *more: str) -> Bundle:
    """The networks of a public bundle, exported as a user does."""
    card = out.parent / "card.md"
    card.write_text("# Letters\n", encoding="utf-8")
    done = run("--base", base, "--out", out, "--card", card, *more, script=SCRIPTS / "export_networks.py")
    assert done.returncode == 0, done.stderr
    return open_networks(out)


def bright_and_dark(
    count: int, seed: int, classes: tuple[str, str] = ("dark", "bright"), shape: tuple[int, ...] = (8, 8)
) -> ImageSet:
    """Noise around a low level for "dark" and a high one for "bright", whatever their numbers are."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    bright = np.array([name == "bright" for name in classes])[labels]
    images = rng.integers(0, 60, (count, *shape)) + 150 * bright.reshape(-1, *[1] * len(shape))
    return ImageSet(images.astype(np.uint8), labels.astype(np.int64), classes, f"set{seed}.npz")


def save(path: Path, images: ImageSet) -> Path:
    """Write a set as an `.npz`."""
    if images.labels is None:
        np.savez(path, images=images.images)
    else:
        np.savez(path, images=images.images, labels=images.labels, classes=np.array(images.classes))
    return path


def numbers(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics under its name and the values of its labels."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


class Fails:
    """A real generator whose `finish` raises while `failing` is set; it records the size of each decoded batch."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.failing = False
        self.decoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def finish(self, latents: Any) -> Any:
        if self.failing:
            raise RuntimeError("out of memory in /secret/path")
        self.decoded.append(len(latents))
        return self._generator.finish(latents)
