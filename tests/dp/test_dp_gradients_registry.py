"""Rules that users register."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.bookkeeper import compare_layer
from torch import Tensor, nn

from rapid.dp.gradients import BookKeeper, Direct, Gradient, UnsupportedLayer, register, rule_of
from rapid.dp.gradients.registry import RULES


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose weight is standardised."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardised(self.weight), self.bias)


def standardised(weight: Tensor) -> Tensor:
    variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + 1e-5)


@pytest.fixture(scope="module")
def standardised_rule() -> Iterator[None]:
    """The example of `register`."""

    @register(StandardisedConv2d)
    def rule(layer: StandardisedConv2d, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
        gradients = rule_of(nn.Conv2d)(layer, grad, count, x)
        _, pull_back, *_ = torch.func.vjp(standardised, layer.weight.detach())
        by_example = gradients["weight"].instantiate().gradients
        gradients["weight"] = Direct(torch.func.vmap(lambda g: pull_back(g)[0])(by_example))
        return gradients

    yield
    del RULES[StandardisedConv2d]


@pytest.mark.usefixtures("standardised_rule")
@settings(max_examples=30, deadline=None)
@given(
    count=st.sampled_from([0, 1, 4]), draws=st.sampled_from([1, 2]), groups=st.sampled_from([1, 2]),
    stride=st.integers(1, 2), size=st.sampled_from([(3, 3), (4, 5), (7, 3)]), twice=st.booleans(),
)  # fmt: skip
def test_a_registered_rule(
    count: int, draws: int, groups: int, stride: int, size: tuple[int, int], twice: bool
) -> None:
    layer = StandardisedConv2d(2, 2, 3, stride, padding=1, groups=groups)
    model = nn.Sequential(layer, nn.SiLU(), *([layer] if twice else []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_layer(model, torch.randn(count * draws, 2, *size), draws=draws)


@pytest.mark.usefixtures("standardised_rule")
def test_other_uses_of_the_parameters_of_a_registered_layer_are_refused() -> None:
    layer = StandardisedConv2d(2, 2, 3)
    x = torch.randn(3, 2, 4, 4)
    with pytest.raises(UnsupportedLayer, match="'weight', that is used outside"):
        BookKeeper(layer).clipped_sum(lambda: layer(x).flatten(1).sum(1) + layer.weight.sum(), 3, 1.0)


@pytest.mark.usefixtures("standardised_rule")
def test_a_subclass_does_not_inherit_a_rule() -> None:
    layer = type("Other", (StandardisedConv2d,), {})(2, 2, 3)
    with pytest.warns(UserWarning, match="Other.*register"):
        compare_layer(layer, torch.randn(4, 2, 4, 4), draws=2)


def test_a_rule_that_promises_single_use_wrongly_is_refused() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x.cos())

    layer, x = Twice(4, 4), torch.randn(3, 4)
    register(Twice, single_use=True)(rule_of(nn.Linear))
    with pytest.raises(UnsupportedLayer, match="used outside"):
        BookKeeper(layer).clipped_sum(lambda: layer(x).sum(1), 3, 1.0)


def test_registering_again_replaces_a_rule() -> None:
    class Plain(nn.Linear):
        pass

    def wrong(layer: nn.Linear, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
        return {}

    layer, x = Plain(4, 4), torch.randn(3, 4)
    assert register(Plain)(wrong) is wrong
    with pytest.raises(UnsupportedLayer, match="rule that is not for these trainable parameters: bias, weight"):
        BookKeeper(layer).clipped_sum(lambda: layer(x).sum(1), 3, 1.0)
    register(Plain)(rule_of(nn.Linear))
    compare_layer(layer, x)


def test_a_rule_is_for_positional_arguments_and_one_output() -> None:
    layer, x = nn.Conv2d(2, 2, 1), torch.randn(3, 2, 4, 4)
    layer.forward = lambda x, *, scale=1.0: nn.functional.conv2d(x * scale, layer.weight, layer.bias)
    BookKeeper(layer).clipped_sum(lambda: layer(x).flatten(1).sum(1), 3, 1.0)
    with pytest.raises(UnsupportedLayer, match="positional arguments and one output"):
        BookKeeper(layer).clipped_sum(lambda: layer(x, scale=2.0).flatten(1).sum(1), 3, 1.0)


def test_types_without_a_rule_have_none_to_build_from() -> None:
    with pytest.raises(UnsupportedLayer, match="Conv1d has no rule"):
        rule_of(nn.Conv1d)
