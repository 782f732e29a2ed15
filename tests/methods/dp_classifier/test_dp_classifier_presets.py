"""The presets: what the paper states, written out, and what it leaves open."""

from __future__ import annotations

import pytest

from rapid.config.presets import preset_names
from rapid.methods import load_settings
from rapid.methods.dp_classifier.private_stage import trained_parameters
from rapid.methods.dp_classifier.settings import DpClassifierSettings

# Classes; the side of the Cutout, which is not in the paper
PAPER = [("classifier-cifar10", 10, 16), ("classifier-cifar100", 100, 8)]


def test_the_defaults_are_the_preset() -> None:
    assert load_settings("classifier-small") == DpClassifierSettings()


def test_every_preset_has_a_row() -> None:
    names = [name for name in preset_names() if load_settings(name).method == "dp-classifier"]
    assert sorted(names) == sorted([*(row[0] for row in PAPER), "classifier-small"])


@pytest.mark.parametrize(("preset", "classes", "cutout"), PAPER)
def test_presets_of_the_paper(preset: str, classes: int, cutout: int) -> None:
    """What it states: WRN-16-4, 16 views, clip norm 1, pad and crop, flip, Cutout and SAM."""
    found = load_settings(preset)
    assert isinstance(found, DpClassifierSettings)
    assert (found.image.size, found.image.channels) == (32, 3)
    assert (found.network.depth, found.network.width) == (16, 4)
    # the last layer of CIFAR-10 has 256 + 1 parameters a class
    assert trained_parameters(found, classes) / 1e6 == pytest.approx(2.74 + (classes - 10) * 257e-6, abs=0.011)
    assert (found.private.multiplicity, found.private.clip_norm) == (16, 1)
    assert found.private.public_share == 0
    for views in (found.warmup.views, found.private.views):
        # 4 pixels of padding are ours, as usual for CIFAR
        assert (views.shift, views.flip, views.border) == (4, True, "reflect")
        assert (views.rotate, views.size, views.scale) == (0, 1, 0)
    assert (found.warmup.views.cutout, found.private.views.cutout) == (cutout, 0)
    # SAM's radius is ours
    assert found.warmup.rho == 0.05
