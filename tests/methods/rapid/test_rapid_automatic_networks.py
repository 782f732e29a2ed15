"""Widths and steps that fill the time, against clocks of their own."""

from __future__ import annotations

import time

import pytest
import torch

from rapid.methods import apply_overrides
from rapid.methods.base import Resources, Tree
from rapid.methods.rapid import automatic_networks
from rapid.methods.rapid.automatic_networks import DENOISER, EXAMPLES_PER_SQUARE, MOST_STEPS, WIDTHS, choose_networks
from rapid.methods.rapid.settings import RapidSettings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_networks, "MEASURED_SECONDS", 0.3)


def small(labelled: bool = True, retrieves: bool = True) -> Tree:
    """Settings of 16x16 grey images with latents of 4x4x4."""
    without = {"private": {"objective": "late"}, "generation": {"retrieval": "none"}, "retrieval": {"enabled": False}}
    tree: Tree = {} if retrieves else without
    return tree | {
        "method": "rapid",
        "image": {"size": 16, "channels": 1},
        "autoencoder": {"kind": "linear", "patch": 4, "latent_channels": 4},
        "encoder": {"channels": 8, "features": 8},
        "probe": {"channels": 4, "features": 8, "enabled": labelled},
    }


def planned(minutes: float, labelled: bool = True, begun: float | None = None) -> tuple[RapidSettings, str]:
    tree = small(labelled)
    begun = time.monotonic() if begun is None else begun
    why = choose_networks(tree, 1000, 3, labelled, Resources(CPU, minutes, begun=begun))
    settings = apply_overrides(tree, [])
    assert isinstance(settings, RapidSettings)
    return settings, why


def test_more_time_is_wider_and_longer() -> None:
    few, _ = planned(0.3)
    many, why = planned(30)
    assert few.denoiser.channels <= many.denoiser.channels
    assert many.denoiser.channels in WIDTHS
    width, examples = many.denoiser.channels, many.denoiser.training.steps * DENOISER["cpu"][0]
    # the time of a step is measured again for the number of steps
    assert width == WIDTHS[0] or examples >= 0.75 * EXAMPLES_PER_SQUARE * width**2
    for name in ("denoiser", "probe", "encoder"):
        steps = getattr(many, name).training.steps
        assert 1 <= getattr(few, name).training.steps <= steps
        assert f"{steps:,} steps" in why
        assert steps <= MOST_STEPS.get(name, steps)


def test_time_that_others_leave_goes_to_the_denoiser() -> None:
    # probe and encoder reach their most steps in a small part of their shares; measured times vary by half
    hour, _ = planned(60)
    day, _ = planned(24 * 60)
    assert hour.encoder.training.steps == day.encoder.training.steps == MOST_STEPS["encoder"]
    assert day.denoiser.training.steps > 12 * hour.denoiser.training.steps or (
        day.denoiser.channels > hour.denoiser.channels
    )


@pytest.mark.alone
def test_processes_share_the_batch_of_a_step() -> None:
    """A step of all of them takes as long as the part of one; small parts take nearly as long as the whole batch.

    Both are measured, one after the other: what runs beside must not change in between.
    """
    tree, shared = small(), small()
    choose_networks(tree, 1000, 3, True, Resources(CPU, 1.0))
    choose_networks(shared, 1000, 3, True, Resources(CPU, 1.0, processes=16))
    one, sixteen = (part["denoiser"]["training"]["steps"] for part in (tree, shared))
    assert one < sixteen < 12 * one


def test_time_that_is_over_is_not_planned_again() -> None:
    late, _ = planned(1, begun=time.monotonic() - 60)
    for name in ("denoiser", "probe", "encoder"):
        assert getattr(late, name).training.steps == 1


def test_what_there_is_not_is_not_planned() -> None:
    for labelled, retrieves in ((True, False), (False, True)):
        tree = small(labelled, retrieves)
        why = choose_networks(tree, 1000, 3, labelled, Resources(CPU, 0.1))
        assert ("probe" in why, "encoder" in why) == (labelled, retrieves)
        assert ("training" in tree["probe"], "training" in tree["encoder"]) == (labelled, retrieves)


def test_an_autoencoder_that_is_trained_has_its_share_of_steps_and_views() -> None:
    steps, views = [], []
    for minutes in (0.2, 20):
        tree = small()
        tree |= {
            "image": {"size": 32, "channels": 1},
            "autoencoder": {"kind": "kl", "patch": 2, "latent_channels": 4, "channels": 8, "multipliers": [1, 2, 2]},
            "augmentations": {},
        }
        why = choose_networks(tree, 50_000, 3, True, Resources(CPU, minutes))
        settings = apply_overrides(tree, [])
        assert isinstance(settings, RapidSettings)
        steps.append(settings.autoencoder.training.steps)
        views.append(settings.augmentations.training)
        assert f"autoencoder {steps[-1]:,} steps" in why
        # latents of 4x4 are not halved
        assert settings.denoiser.multipliers == (1,)
    assert 1 <= steps[0] < steps[1] <= MOST_STEPS["autoencoder"]
    assert 0 < views[0] < views[1] <= 4 * 50_000


def test_passes_of_the_probe_over_all_images_are_planned_for() -> None:
    """With so many images they take all of the time, and none is left for the denoiser."""
    steps = {}
    for labelled in (True, False):
        tree = small(labelled)
        # no view is encoded but these
        tree["augmentations"] = {"training": 100}
        tree["split"] = {"reference": 0.001}
        tree["probe"] |= {"channels": 64}
        choose_networks(tree, 1_000_000, 3, labelled, Resources(CPU, 0.5))
        steps[labelled] = tree["denoiser"]["training"]["steps"]
    assert steps[True] == 1
    assert steps[False] > 20
