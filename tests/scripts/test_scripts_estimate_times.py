"""The estimate of times: which presets it has, and its counts against counts by hand and of a real private step."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests_support import module_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rapid.cli.parser import build_parser
from rapid.config.presets import preset_names
from rapid.dp.gradients import BookKeeper
from rapid.methods import load_settings
from rapid.methods.dp_gan.private_stage import build_discriminator
from rapid.methods.dp_gan.settings import DpGanSettings

ROOT = Path(__file__).parents[2]
OURS = {
    "demo", "letters-mnist", "scripts", "scripts-demo", "dpdm-small", "edm-small", "dp-gan-small", "dp-diffusion",
    "classifier-small",
}  # fmt: skip
"""Presets for CPUs, with sizes of our own."""


@pytest.fixture(scope="module")
def estimate() -> ModuleType:
    return module_of(ROOT / "scripts" / "estimate_times.py")


def test_every_preset_of_a_papers_size_is_listed(estimate: ModuleType) -> None:
    assert sorted(estimate.PRESETS) == sorted(set(preset_names()) - OURS)


def test_the_table_of_the_repository_is_that_of_the_script(estimate: ModuleType) -> None:
    assert (ROOT / "benchmarks" / "estimates" / "table.md").read_text() == estimate.table(0.4)


def test_commands_are_understood(estimate: ModuleType) -> None:
    for name in estimate.PRESETS:
        assert f"--preset {name} " in estimate.command(name)
        for one in estimate.command(name).split(" && "):
            program, *words = shlex.split(one)
            assert program == "rapid"
            # with what the heading of the last column adds
            further = estimate.BFLOAT16.split() if words[0] == "train-private" else []
            assert build_parser().parse_args([*words, *further]).out


def test_a_convolution_and_a_linear_layer_by_hand(estimate: ModuleType) -> None:
    """An output takes a multiplication and an addition for each weight that it sees."""
    with torch.device("meta"):
        convolution, linear = nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.Linear(7, 11)
        found = estimate.operations(convolution, torch.empty(2, 3, 16, 12))
        assert (found.convolutions, found.products) == (2 * (2 * 8 * 8 * 6) * (3 * 5 * 5), 0)
        found = estimate.operations(linear, torch.empty(4, 7))
        assert (found.convolutions, found.products) == (0, 2 * 4 * 7 * 11)


def test_hours_by_hand(estimate: ModuleType) -> None:
    """Half of a peak of 2 x 10^12 takes an hour for 3,600 x 10^12 operations."""
    count, peak = estimate.Count(1800e12, 7200e12), estimate.Count(2, 8)
    assert count.hours(peak, 0.5) == pytest.approx(0.5 + 0.5)
    # what is by example stays in float32
    work = estimate.Work(1, estimate.Count(), weights=estimate.Count(67e12 * 3600))
    assert work.private_hours("float32", 1) == work.private_hours("bfloat16", 1) == pytest.approx(1)


def test_the_work_of_a_preset_by_hand(estimate: ModuleType) -> None:
    """200,000 steps of 1,024 images, 200 of 16,384 with 128 draws; three passes' worth each."""
    work = estimate.work_of(load_settings("dp-diffusion-cifar10"), estimate.PRESETS["dp-diffusion-cifar10"])
    forward = work.forward.total
    assert work.public.total == pytest.approx(3 * 200_000 * 1024 * forward)
    assert work.passes.total + work.weights.total == pytest.approx(3 * 200 * 16384 * 128 * forward)
    # a network of 80.4 million weights that sees 32x32, 16x16, 8x8 and 4x4 positions
    assert 2 * 80.4e6 * 16 < forward < 2 * 80.4e6 * 1024


@pytest.mark.parametrize("count", [2, 8])
def test_a_real_private_step_takes_as_many(estimate: ModuleType, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch counts gradients of a convolution with groups as if each group saw all channels
    monkeypatch.setattr("rapid.dp.gradients.convolution._has_fast_kernels", lambda: False)
    settings = load_settings("dp-gan-mnist")
    assert isinstance(settings, DpGanSettings)
    network = build_discriminator(settings, 10)
    images, labels = torch.randn(count, 1, 28, 28), torch.arange(count)
    forward = estimate.operations(network, images, labels).total
    with FlopCounterMode(display=False) as counter:
        BookKeeper(network).clipped_sum(lambda: network(images, labels).square(), count, 1.0)
    expected = estimate.PASSES + estimate.WEIGHTS
    # ghosts take a little more; the first layer has no backward pass by activations
    assert counter.get_total_flops() / forward == pytest.approx(expected, rel=0.06)
