"""BookKeeper against a loop over single examples, on the real U-Nets."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from diffusers import UNet2DModel
from oracles.bookkeeper import compare
from torch import Tensor

from rapid.dp.gradients import BookKeeper
from rapid.methods import load_settings
from rapid.methods.rapid.networks import build_denoiser
from rapid.nn import Denoiser
from rapid.runtime import place

PIXELS = [
    "autoencoder.kind=none",
    "denoiser.channels=16",
    "denoiser.multipliers=[1,2]",
    "denoiser.attention=[false,true]",
]
NETWORKS = {
    "demo": [],
    "velocity": ["denoiser.prediction=velocity"],
    "two levels": ["denoiser.channels=16", "denoiser.multipliers=[1,2]", "denoiser.attention=[true,true]"],
    "cross-attention": [
        "denoiser.channels=16",
        "denoiser.multipliers=[1,2]",
        "denoiser.attention=[true,true]",
        "denoiser.conditioning=cross-attention",
    ],
}


def unet_case(name: str, count: int, dtype: torch.dtype) -> tuple[Denoiser, Callable[[slice], Tensor]]:
    torch.manual_seed(0)
    chosen = load_settings("demo", PIXELS if name == "pixels" else NETWORKS[name])
    denoiser = build_denoiser(chosen, 10).to(dtype)
    x = torch.randn(count, *chosen.latent_shape, dtype=dtype)
    eps = torch.randn_like(x)
    t, labels = torch.randint(1, 1001, (count,)), torch.randint(0, 11, (count,))

    def losses(rows: slice) -> Tensor:
        return (denoiser(x[rows], t[rows], labels[rows]) - eps[rows]).square().flatten(1).mean(1)

    return denoiser, losses


@pytest.mark.parametrize(("count", "draws"), [(0, 1), (1, 1), (5, 1), (2, 3)])
@pytest.mark.parametrize("name", NETWORKS)
def test_real_unets(name: str, count: int, draws: int) -> None:
    denoiser, losses = unet_case(name, count * draws, torch.float32)
    # norms have a bound on their rounding in them
    compare(denoiser, losses, count, 0.5, 2e-4, draws)


def test_a_real_unet_on_pixels() -> None:
    denoiser, losses = unet_case("pixels", 3, torch.float32)
    compare(denoiser, losses, 3, 0.5, 1e-4)


def test_real_unet_in_double_precision() -> None:
    denoiser, losses = unet_case("two levels", 3, torch.float64)
    # clipping so loose that the margin of the norms has no part in it
    compare(denoiser, losses, 3, 1e6, 1e-10)


@pytest.mark.parametrize("name", [*NETWORKS, "pixels"])
def test_a_real_unet_in_channels_last_layout(name: str) -> None:
    """Sampling leaves a network in this layout, in which per-example gradients by Opacus are wrong."""
    denoiser, losses = unet_case(name, 4, torch.float64)
    expected, norms = BookKeeper(denoiser).clipped_sum(lambda: losses(slice(0, 4)), 4, 0.5)
    place(denoiser, torch.device("cpu"))
    strides = [p.stride(1) for p in denoiser.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert strides
    assert set(strides) == {1}
    compare(denoiser, losses, 2, 0.5, 1e-10, draws=2)
    found, again = BookKeeper(denoiser).clipped_sum(lambda: losses(slice(0, 4)), 4, 0.5)
    torch.testing.assert_close(again, norms)
    torch.testing.assert_close(found, expected)


def test_draws_that_are_cut_into_parts_give_the_same_gradient() -> None:
    denoiser, losses = unet_case("two levels", 7, torch.float32)
    keeper = BookKeeper(denoiser)
    whole, norms = keeper.clipped_sum(lambda: losses(slice(0, 7)), 1, 0.3, multiplicity=7)
    total = keeper.zeros()
    pieces = [(lambda: losses(slice(0, 3)), 3), (lambda: losses(slice(3, 4)), 1), (lambda: losses(slice(4, 7)), 3)]
    norm = keeper.clipped_one(pieces, 0.3, multiplicity=7, into=lambda: total)
    torch.testing.assert_close(norm, norms, rtol=1e-4, atol=0)
    torch.testing.assert_close(total, whole, rtol=1e-3, atol=1e-6)


def test_low_precision_elsewhere_does_not_reach_the_sums() -> None:
    denoiser, losses = unet_case("two levels", 3, torch.float32)
    keeper = BookKeeper(denoiser)
    torch.set_float32_matmul_precision("medium")
    try:
        sums, _ = keeper.clipped_sum(lambda: losses(slice(0, 1)), 1, 1e-3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.cat([part.double().flatten() for part in sums]).norm() <= 1e-3


def test_opacus_gradients_are_wrong_here_and_ours_are_not() -> None:
    """Opacus' convolutions misread channels-last inputs. When this fails Opacus is mended: take the warning out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import GradSampleModule

        torch.manual_seed(0)
        unet = UNet2DModel(
            sample_size=8, in_channels=3, out_channels=3, block_out_channels=(32, 32), layers_per_block=1,
            down_block_types=("AttnDownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "AttnUpBlock2D"),
        )  # fmt: skip
        x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 700])
        unet(x, t).sample.square().sum().backward()
        truth = {name: p.grad.clone() for name, p in unet.named_parameters()}
        ours, _ = BookKeeper(unet).clipped_sum(lambda: unet(x, t).sample.square().flatten(1).sum(1), 2, 1e9)
        unet.zero_grad()
        sampled = GradSampleModule(unet)
        sampled(x, t).sample.square().sum().backward()
    names = [name for name, p in unet.named_parameters() if p.ndim == 4]
    opacus = {name: p.grad_sample.sum(0) for name, p in unet.named_parameters()}
    wrong = [n for n in names if (opacus[n] - truth[n]).norm() > 0.1 * truth[n].norm()]
    assert len(wrong) >= len(names) // 2
    for (name, _), mine in zip(unet.named_parameters(), ours, strict=True):
        if name in names:
            torch.testing.assert_close(mine.float(), truth[name], rtol=1e-3, atol=1e-3 * truth[name].abs().max().item())
