"""Kernels and waits of one step of each kind, on the pretend device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from device.pretend import counting

from rapid.bundle import Bundle
from rapid.data.private import PrivateImages
from rapid.methods import apply_overrides, generator_of
from rapid.methods.rapid.networks import DenoiserRecipe, train_denoiser
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.private import train_private_bundle
from rapid.training import Checkpoint

FEW, MANY = 2, 4


class PerStep(NamedTuple):
    """Of one step; `told` lists them."""

    kernels: float
    waits: float
    told: str


def public(device: torch.device, settings: RapidSettings) -> PerStep:
    """A step of the public denoiser."""
    latents = torch.zeros(16, *settings.latent_shape, device=device)
    labels = torch.zeros(16, dtype=torch.int64, device=device)

    def run(steps: int, folder: Path) -> None:
        changed = apply_overrides(settings.model_dump(mode="json"), [f"denoiser.training.steps={steps}"])
        assert isinstance(changed, RapidSettings)
        recipe = DenoiserRecipe(
            images="", views=1, augment=changed.augmentations.augment, schedule=changed.schedule,
            denoiser=changed.denoiser, latent_shape=changed.latent_shape,
        )  # fmt: skip
        train_denoiser(recipe, latents, labels, 2, Checkpoint(folder / "state.pt"))

    return _per_step(run)


def private(device: torch.device, base: Path, digits: Path, settings: RapidSettings) -> PerStep:
    """A step of DP-SGD, all of its batch in one piece."""

    def run(steps: int, folder: Path) -> None:
        overrides = ["overlap.share=0", "probe.share=0", "physical_batch=128", f"steps={steps}"]
        changed = apply_overrides(settings.model_dump(mode="json"), [f"private.{one}" for one in overrides])
        train_private_bundle(
            base, PrivateImages(digits), folder / "out", changed, epsilon=10.0, delta=None, device=device, resume=False,
            ledger=folder / "ledger.jsonl",
        )  # fmt: skip

    return _per_step(run)


def sampling(device: torch.device, path: Path, rows: int) -> PerStep:
    """A step within a phase, of so many rows."""
    trajectories = generator_of(Bundle.open(path, "model"), device).trajectories()
    begun = trajectories.begin(0, np.arange(rows), np.zeros(rows, np.int64))
    trajectories.advance(begun)
    with counting() as counts:
        trajectories.advance(begun)
    return PerStep(counts.kernels.total(), counts.waits.total(), str(counts))


def _per_step(run: Callable[[int, Path], None]) -> PerStep:
    """The difference between runs of FEW and of MANY steps."""
    found = []
    for steps in (FEW, MANY):
        with tempfile.TemporaryDirectory() as folder, counting() as counts:
            run(steps, Path(folder))
        found.append(counts)
    few, many = found
    more = MANY - FEW
    many.kernels.subtract(few.kernels)
    many.waits.subtract(few.waits)
    return PerStep(many.kernels.total() / more, many.waits.total() / more, str(many))
