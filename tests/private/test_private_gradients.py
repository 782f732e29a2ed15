"""BookKeeper against a loop over single examples, on single layers and on the real U-Nets."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from diffusers import UNet2DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.gradients import clipped_sum
from torch import Tensor, nn

from rapid.config import load_settings
from rapid.models import Denoiser
from rapid.private.gradients import BookKeeper, UnsupportedLayer
from rapid.private.gradients.forms import NORM_MARGIN

NETWORKS = {
    "demo": [],
    "two levels": ["denoiser.channels=16", "denoiser.multipliers=[1,2]", "denoiser.attention=[true,true]"],
    "cross-attention": [
        "denoiser.channels=16",
        "denoiser.multipliers=[1,2]",
        "denoiser.attention=[true,true]",
        "denoiser.conditioning=cross-attention",
    ],
}


def compare(
    network: nn.Module, losses: Callable[[slice], Tensor], count: int, clip_norm: float, tolerance: float
) -> None:
    """Every parameter's clipped sum and every example's norm, within a relative tolerance."""
    keeper = BookKeeper(network)
    sums, norms = keeper.clipped_sum(lambda: losses(slice(None)), count, clip_norm)
    expected, expected_norms = clipped_sum(keeper.parameters, losses, count, clip_norm)
    torch.testing.assert_close(norms.double(), expected_norms, rtol=tolerance, atol=1e-7)
    # some gradients are zero in exact arithmetic (attention key biases, biases before a normalisation): what floats
    # make of them is measured against the whole gradient
    whole = torch.sqrt(sum((e.square().sum() for e in expected), torch.zeros((), dtype=torch.float64)))
    for found, wanted in zip(sums, expected, strict=True):
        error = (found.double() - wanted).norm()
        assert error <= tolerance * wanted.norm() + 1e-2 * tolerance * whole + 1e-9


def unet_case(name: str, count: int, dtype: torch.dtype) -> tuple[Denoiser, Callable[[slice], Tensor]]:
    torch.manual_seed(0)
    chosen = load_settings("demo", NETWORKS[name])
    denoiser = Denoiser.build(chosen, 10).to(dtype)
    x = torch.randn(count, *chosen.latent_shape, dtype=dtype)
    eps = torch.randn_like(x)
    t, labels = torch.randint(1, 1001, (count,)), torch.randint(0, 11, (count,))

    def losses(rows: slice) -> Tensor:
        return (denoiser(x[rows], t[rows], labels[rows]) - eps[rows]).square().flatten(1).mean(1)

    return denoiser, losses


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_real_unets(name: str, count: int) -> None:
    denoiser, losses = unet_case(name, count, torch.float32)
    compare(denoiser, losses, count, 0.5, 1e-4)


def test_real_unet_in_double_precision() -> None:
    denoiser, losses = unet_case("two levels", 3, torch.float64)
    # clipping so loose that the margin of the norms has no part in it
    compare(denoiser, losses, 3, 1e6, 1e-10)


class Squared(nn.Module):
    """Sums a fixed random projection of a layer's output: a loss an example with a gradient everywhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def losses(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return (out * torch.linspace(-1, 1, out[0].numel()).view(out.shape[1:]) + 0.5 * out**2).flatten(1).sum(1)


def compare_layer(layer: nn.Module, x: Tensor, tolerance: float = 1e-4) -> None:
    model = Squared(layer)
    compare(model, lambda rows: model.losses(x[rows]), len(x), 0.7, tolerance)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2]),
    channels=st.sampled_from([2, 4]),
    outputs=st.sampled_from([2, 6]),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.sampled_from([1, 2]),
    dilation=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1, 2]),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=st.booleans(),
    channels_last=st.booleans(),
    count=st.sampled_from([0, 1, 4]),
    size=st.sampled_from([(5, 6), (7, 5), (12, 12)]),
)
def test_conv2d(
    groups: int, channels: int, outputs: int, kernel: int, stride: int, dilation: int, padding: int, mode: str,
    bias: bool, channels_last: bool, count: int, size: tuple[int, int],
) -> None:  # fmt: skip
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups=groups, bias=bias, padding_mode=mode)
    x = torch.randn(count, channels, *size)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    compare_layer(layer, x)


def test_conv2d_with_same_padding_and_strided_input() -> None:
    compare_layer(nn.Conv2d(3, 4, (1, 3), padding="same", dilation=2), torch.randn(3, 6, 8, 8)[:, ::2, :, 1:])


@settings(max_examples=25, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=0, max_size=2), bias=st.booleans(), count=st.integers(0, 4))
def test_linear(shape: list[int], bias: bool, count: int) -> None:
    compare_layer(nn.Linear(5, 3, bias=bias), torch.randn(count, *shape, 5))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_norms(count: int) -> None:
    compare_layer(nn.GroupNorm(2, 4), torch.randn(count, 4, 3, 5))
    compare_layer(nn.GroupNorm(2, 4), torch.randn(count, 4))
    compare_layer(nn.LayerNorm(6), torch.randn(count, 3, 6))
    compare_layer(nn.LayerNorm((3, 6)), torch.randn(count, 3, 6))


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_embedding_with_repeated_indices(padding_idx: int | None) -> None:
    layer = nn.Embedding(5, 3, padding_idx=padding_idx)
    for x in (torch.tensor([[0, 1, 1], [4, 4, 4]]), torch.tensor([2, 0, 2])):
        compare_layer(layer, x)


def test_a_layer_that_is_called_twice() -> None:
    for layer, x in ((nn.Linear(4, 4), torch.randn(3, 4)), (nn.Conv2d(2, 2, 3, padding=1), torch.randn(3, 2, 9, 9))):
        compare_layer(nn.Sequential(layer, nn.Tanh(), layer), x)
    norm = nn.GroupNorm(1, 4)
    compare_layer(nn.Sequential(norm, nn.Tanh(), norm), torch.randn(3, 4, 2))


def test_in_place_operations_after_a_layer() -> None:
    compare_layer(nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 2)), torch.randn(3, 4))


def test_an_input_that_is_changed_after_it_was_read_is_refused() -> None:
    layer, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)

    def losses() -> Tensor:
        hidden = layer(x) * 1.0
        out = second(hidden)
        hidden += 1
        return (out + hidden).sum(1)

    with pytest.raises(UnsupportedLayer, match="changed in place"):
        BookKeeper(nn.ModuleList([layer, second])).clipped_sum(losses, 3, 1.0)


def test_frozen_parameters_have_no_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    compare_layer(model, torch.randn(3, 4))
    assert BookKeeper(model).parameters == [model[1].weight]


def test_a_layer_that_is_not_reached_gets_zeros() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    x = torch.randn(3, 2)
    sums, _ = BookKeeper(model).clipped_sum(lambda: model[0](x).square().sum(1), 3, 1.0)
    assert all(not part.any() for part in sums[2:])
    assert sums[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_non_finite_examples_count_as_zero(bad: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 2))
    x = torch.randn(4, 1, 7, 7)
    keeper = BookKeeper(model)
    good, _ = keeper.clipped_sum(lambda: model(x[:3]).square().sum(1), 3, 0.5)
    x[3, 0, 2, 2] = bad
    found, norms = keeper.clipped_sum(lambda: model(x).square().sum(1), 4, 0.5)
    assert not torch.isfinite(norms[3])
    torch.testing.assert_close(found, good, rtol=1e-5, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(-6, 6), clip_norm=st.floats(1e-3, 1e3))
def test_one_example_never_adds_more_than_clip_norm(scale: float, clip_norm: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(1, 8) * 10**scale
    sums, _ = BookKeeper(model).clipped_sum(lambda: model(x).square().sum(1), 1, clip_norm)
    norm = torch.cat([part.double().flatten() for part in sums]).norm().item()
    assert norm <= clip_norm
    assert norm == 0 or norm < 1.1 * clip_norm / (1 + NORM_MARGIN)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(2),
        nn.ModuleList([nn.BatchNorm2d(2, affine=False), nn.Linear(2, 2)]),
        nn.Conv1d(2, 2, 1),
        nn.MultiheadAttention(2, 1),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1)),
        type("Special", (nn.Linear,), {})(2, 2),
        nn.ParameterList([nn.Parameter(torch.zeros(2))]),
    ],
    ids=[
        "BatchNorm2d",
        "BatchNorm2d without weights",
        "Conv1d",
        "MultiheadAttention",
        "weight_norm",
        "subclass",
        "bare parameter",
    ],
)
def test_unknown_layers_are_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedLayer, match="odd"):
        BookKeeper(nn.ModuleDict({"odd": layer}))


def test_shared_parameters_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    with pytest.raises(UnsupportedLayer, match="'a' and 'b' share"):
        BookKeeper(model)


def test_nothing_trainable_is_refused() -> None:
    with pytest.raises(ValueError, match="trainable"):
        BookKeeper(nn.Linear(2, 2).requires_grad_(False))


def test_the_network_is_left_as_it_was_when_losses_fail() -> None:
    model = nn.Linear(2, 2)
    keeper = BookKeeper(model)

    def losses() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keeper.clipped_sum(losses, 1, 1.0)
    assert all(p.requires_grad for p in model.parameters())
    assert not model._forward_hooks


def test_losses_of_another_shape_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="shape"):
        BookKeeper(model).clipped_sum(lambda: model(torch.zeros(3, 2)).mean(), 3, 1.0)


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
            torch.testing.assert_close(mine, truth[name], rtol=1e-3, atol=1e-3 * truth[name].abs().max().item())
