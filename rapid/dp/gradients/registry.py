"""Which rule computes the per-example gradients of which type of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import nn

from rapid.dp.gradients.forms import Gradient

Rule = Callable[..., dict[str, Gradient]]
"""rule(layer, grad, count, *inputs) -> gradients of the layer's trainable parameters by name; see `register`."""
AnyRule = TypeVar("AnyRule", bound=Rule)


class UnsupportedLayer(TypeError):
    """A layer whose per-example gradients cannot be computed, or a use of one that the rules exclude."""


class Registered(NamedTuple):
    """A rule and what is known of the layers that it is for."""

    rule: Rule
    single_use: bool
    """Whether one forward pass of the layer uses each of its parameters once."""


RULES: dict[type[nn.Module], Registered] = {}


def register(layer_type: type[nn.Module], *, single_use: bool = False) -> Callable[[AnyRule], AnyRule]:
    """Add the rule of a layer type, or replace it; use it as a decorator.

    Layers without a rule get exact gradients too, but slowly: their forward pass is run again for each example. A rule
    is faster. It is called once for each call of such a layer that the losses depend on, without autograd, as
    `rule(layer, grad, count, *inputs)`:

        layer   the layer
        grad    gradient of the losses by the layer's output, float (N * K, ...)
        count   N, the number of examples; each has K consecutive rows, K = 1 unless draws are averaged
        inputs  the positional arguments of the call; tensors are detached

    and returns, for every parameter of the layer that requires gradients, by its name, the N gradients summed over
    an example's rows: a `Direct` tensor (N, *shape) of its own, or one of the ghost forms. They must be exact: norms
    are computed from them, so a wrong rule breaks the privacy guarantee. Test it against a loop over single examples.

    The type must match exactly, because a subclass may compute something else.

    Example: a convolution whose weight is standardised, by the rule of the convolution and the chain rule.

        class StandardisedConv2d(nn.Conv2d):
            def forward(self, x):
                return self._conv_forward(x, standardise(self.weight), self.bias)

        def standardise(weight):
            variance, mean = torch.var_mean(weight, (1, 2, 3), keepdim=True)
            return (weight - mean) * torch.rsqrt(variance + 1e-5)

        @register(StandardisedConv2d)
        def standardised_conv2d(layer, grad, count, x):
            gradients = rule_of(nn.Conv2d)(layer, grad, count, x)
            _, pull_back = torch.func.vjp(standardise, layer.weight.detach())
            by_example = gradients["weight"].instantiate().gradients
            gradients["weight"] = Direct(torch.func.vmap(lambda g: pull_back(g)[0])(by_example))
            return gradients

    Args:
        layer_type: a class of layers that take positional arguments only and return one tensor.
        single_use: one forward pass of the layer uses each of its parameters once, as `x @ weight` does. Without it
            each call costs another forward pass, which counts the uses: a use outside of the layer would be missed by
            the rule. Where it is set wrongly the layer is refused.

    Returns:
        A decorator that leaves the rule as it is.
    """

    def add(rule: AnyRule) -> AnyRule:
        RULES[layer_type] = Registered(rule, single_use)
        return rule

    return add


def rule_of(layer_type: type[nn.Module]) -> Rule:
    """The rule of a layer type, to build other rules from.

    Raises:
        UnsupportedLayer: it has none.
    """
    if layer_type not in RULES:
        raise UnsupportedLayer(f"{layer_type.__name__} has no rule; see rapid.dp.gradients.register")
    return RULES[layer_type].rule
