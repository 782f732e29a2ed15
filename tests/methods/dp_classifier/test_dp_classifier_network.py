"""The wide residual network and the rule of its convolutions, against loops, closed forms and published sizes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.bookkeeper import compare, compare_layer
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.config.sections import ImageSettings
from rapid.dp.gradients import BookKeeper
from rapid.methods.dp_classifier.settings import NetworkSettings
from rapid.methods.dp_classifier.standardised import pulled_back
from rapid.nn.wide_resnet import StandardisedConv2d, WideResNet, standardised

NAMES = tuple("abcde")


def small(dtype: torch.dtype = torch.float32, **changes: int) -> WideResNet:
    torch.manual_seed(0)
    own = NetworkSettings(**({"depth": 10, "width": 1, "groups": 4, "stride": 2} | changes))
    return WideResNet.build(ImageSettings(), own, NAMES).to(dtype)


@pytest.mark.parametrize(("depth", "millions"), [(16, 2.74), (40, 8.94)])
def test_sizes_are_those_of_the_paper(depth: int, millions: float) -> None:
    """Table 6: WRN-16-4 has 2.74 million parameters, WRN-40-4 8.94."""
    with torch.device("meta"):
        network = WideResNet.build(
            ImageSettings(channels=3), NetworkSettings(depth=depth, width=4, stride=1), "0123456789"
        )
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.011)


def test_standardised_filters_have_mean_zero_and_variance_one_over_fan_in() -> None:
    found = standardised(3 + 2 * torch.randn(6, 4, 3, 3, dtype=torch.float64)).flatten(1)
    torch.testing.assert_close(found.mean(1), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(
        found.var(1, correction=0), torch.full((6,), 1 / 36, dtype=torch.float64), rtol=1e-4, atol=0
    )


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(1, 3))
def test_the_pull_back_is_that_of_autograd(seed: int, count: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    gradients = torch.randn(count, 4, 3, 2, 2, dtype=torch.float64)
    expected = [torch.autograd.grad(standardised(weight), weight, one)[0] for one in gradients]
    torch.testing.assert_close(pulled_back(weight.detach(), gradients.clone()), torch.stack(expected))


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        StandardisedConv2d(3, 8, 3, 2, 1, bias=False),
        StandardisedConv2d(3, 6, 1, 2),
        StandardisedConv2d(4, 8, 3, 1, 1, groups=2),
    ],
)
def test_the_rule_is_that_of_a_loop(layer: StandardisedConv2d, draws: int) -> None:
    torch.manual_seed(1)
    compare_layer(layer, torch.randn(2 * draws, layer.in_channels, 7, 7), draws=draws)


def test_a_frozen_weight_leaves_the_bias() -> None:
    layer = StandardisedConv2d(3, 4, 3)
    layer.weight.requires_grad_(False)
    compare_layer(layer, torch.randn(3, 3, 5, 5))


def network_losses(network: WideResNet, count: int) -> tuple[Tensor, Tensor]:
    dtype = network.head.weight.dtype
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, 12, 12, generator=generator, dtype=dtype) * 2 - 1
    return x, torch.randint(len(NAMES), (count,), generator=generator)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("count", "draws"), [(1, 1), (4, 1), (2, 3)])
def test_the_real_network_is_clipped_as_by_a_loop(count: int, draws: int, layout: torch.memory_format) -> None:
    network = small().to(memory_format=layout)
    x, y = network_losses(network, count * draws)
    x = x.contiguous(memory_format=layout)

    def losses(rows: slice) -> Tensor:
        return F.cross_entropy(network(x[rows]), y[rows], reduction="none")

    with warnings.catch_warnings():
        # such as that a layer has no rule
        warnings.simplefilter("error")
        compare(network, losses, count, 0.5, 1e-4, draws)


def test_the_real_network_in_double_precision() -> None:
    network = small(torch.float64, depth=16, stride=1)
    x, y = network_losses(network, 2)
    compare(network, lambda rows: F.cross_entropy(network(x[rows]), y[rows], reduction="none"), 2, 1e6, 1e-9)


def test_no_clipped_gradient_is_longer_than_the_clip_norm() -> None:
    network = small()
    x, y = network_losses(network, 1)
    sums, norms = BookKeeper(network).clipped_sum(
        lambda: 1e4 * F.cross_entropy(network(x), y, reduction="none"), 1, 0.01
    )
    assert norms.item() > 0.01
    assert torch.stack([part.norm() for part in sums]).norm() <= 0.01


def test_rows_do_not_depend_on_each_other() -> None:
    network = small(torch.float64)
    x, _ = network_losses(network, 4)
    torch.testing.assert_close(network(x)[2:3], network(x[2:3]))


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    network = small()
    other = network.with_classes(["c", "new", "a"])
    assert other.classes == ("c", "new", "a")
    torch.testing.assert_close(other.head.weight[0], network.head.weight[2])
    assert not other.head.weight[1].any()
    assert not other.head.bias[1].any()
    torch.testing.assert_close(other.head.weight[2], network.head.weight[0])
    x, _ = network_losses(network, 2)
    torch.testing.assert_close(other(x)[:, [0, 2]], network(x)[:, [2, 0]])
    other.save(tmp_path / "stored")
    again = WideResNet.load(tmp_path / "stored")
    assert again.classes == other.classes
    assert torch.equal(again(x), other(x))
    assert isinstance(again.head, nn.Linear)
