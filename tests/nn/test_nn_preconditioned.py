"""The preconditioned denoiser: clipped sums on the real network, storage, guidance, and what reaches its output."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracles.bookkeeper import compare
from torch import Tensor

from rapid.config.sections import DenoiserSettings
from rapid.diffusion.preconditioning import CONFIGURATIONS, Configuration
from rapid.errors import InputError
from rapid.nn.denoiser import guided
from rapid.nn.preconditioned import PreconditionedDenoiser

SMALL = DenoiserSettings(channels=8, multipliers=(1, 2), attention=(False, True), heads=2)
SIGMA = torch.tensor([0.01, 0.4, 2.0, 50.0])


def build(configuration: Configuration = "edm", patch: int = 1, classes: int = 3) -> PreconditionedDenoiser:
    torch.manual_seed(0)
    shape = SimpleNamespace(denoiser=SMALL, latent_shape=(patch**2, 8 // patch, 8 // patch))
    return PreconditionedDenoiser.build(shape, classes, configuration, patch=patch).eval()


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_clipped_sums_equal_the_loop(name: Configuration, patch: int) -> None:
    denoiser = build(name, patch)
    x0, labels = torch.rand(4, 1, 8, 8) * 2 - 1, torch.tensor([0, 2, 3, 1])
    noisy = x0 + SIGMA.view(-1, 1, 1, 1) * torch.randn_like(x0)

    def losses(rows: slice) -> Tensor:
        found = denoiser(noisy[rows], SIGMA[rows], labels[rows])
        return denoiser.preconditioning.losses(found, x0[rows], SIGMA[rows])

    compare(denoiser, losses, 2, 0.5, 1e-4, draws=2)


def test_it_is_stored_with_its_configuration(tmp_path: Path) -> None:
    denoiser = build("v", 2)
    denoiser.save(tmp_path / "denoiser")
    again = PreconditionedDenoiser.load(tmp_path / "denoiser")
    assert (again.preconditioning, again.patch, again.num_classes) == (denoiser.preconditioning, 2, 3)
    assert type(again.preconditioning) is CONFIGURATIONS["v"]
    x, labels = torch.randn(4, 1, 8, 8), torch.arange(4)
    with torch.no_grad():
        torch.testing.assert_close(again(x, SIGMA, labels), denoiser(x, SIGMA, labels))
    (tmp_path / "denoiser" / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        PreconditionedDenoiser.load(tmp_path / "denoiser")


@pytest.mark.parametrize("name", CONFIGURATIONS)
@torch.no_grad()
def test_level_and_class_reach_the_network_and_examples_do_not_mix(name: Configuration) -> None:
    denoiser = build(name, 2)
    x = torch.randn(4, 1, 8, 8)
    together = denoiser(x, SIGMA, torch.arange(4))
    alone = torch.cat([denoiser(x[i : i + 1], SIGMA[i : i + 1], torch.tensor([i])) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    same = x[:1].expand(4, 1, 8, 8)
    times: list[Tensor] = []
    handle = denoiser.unet.register_forward_pre_hook(lambda _, inputs: times.append(inputs[1]))
    by_class = denoiser(same, SIGMA[1].expand(4), torch.arange(4))
    denoiser(same, SIGMA, torch.zeros(4, dtype=torch.int64))
    handle.remove()
    assert torch.pdist(by_class.flatten(1)).min() > 1e-5
    torch.testing.assert_close(times[1], denoiser.preconditioning.time(SIGMA) + 1)
    scaled = denoiser.preconditioning.scale(SIGMA).view(-1, 1, 1, 1) * same
    folded = torch.nn.functional.pixel_unshuffle(scaled, 2)
    outputs = [denoiser.unet(folded[:1], time, torch.zeros(1, dtype=torch.int64)) for time in times[1].split(1)]
    assert torch.pdist(torch.cat(outputs).flatten(1)).min() > 1e-5


@torch.no_grad()
def test_guidance() -> None:
    """(1 + w) of the class minus w of none, in one call; w = 0, which is scale 1, is conditional."""
    denoiser = build()
    x, labels = torch.randn(4, 1, 8, 8), torch.arange(4) % 3
    conditional, null = denoiser(x, SIGMA, labels), denoiser(x, SIGMA, denoiser.null_labels(4))
    torch.testing.assert_close(guided(denoiser, x, SIGMA, labels, 1), conditional)
    torch.testing.assert_close(
        guided(denoiser, x, SIGMA, labels, 1.5), conditional + 0.5 * (conditional - null), rtol=1e-4, atol=1e-4
    )


def test_without_classes_there_is_the_null_class() -> None:
    denoiser = build(classes=0)
    assert denoiser.null_labels(2).tolist() == [0, 0]
    assert denoiser(torch.randn(2, 1, 8, 8), SIGMA[:2], denoiser.null_labels(2)).shape == (2, 1, 8, 8)
