"""The per-example rule of convolutions with standardised weights.

The weight that the convolution uses is s(w), so the gradient of an example with respect to w is that with respect to
s(w) pulled back through s. Norms are those of the gradients with respect to w, which are clipped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rapid.dp.gradients import Direct, Gradient, register, rule_of
from rapid.nn.wide_resnet import EPSILON, StandardisedConv2d


@register(StandardisedConv2d, single_use=True)
def _standardised_conv2d(layer: StandardisedConv2d, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    result = dict(rule_of(nn.Conv2d)(layer, grad, count, x))
    if "weight" in result:
        result["weight"] = Direct(pulled_back(layer.weight.detach(), result["weight"].instantiate().gradients))
    return result


def pulled_back(weight: Tensor, gradients: Tensor) -> Tensor:
    """Gradients by the weight, from those by the standardised weight.

    For a filter w of n numbers with u = (w - mean) / sqrt(variance + EPSILON) and s(w) = u / sqrt(n), and the gradient
    g by s(w), it is (g - mean(g) - u * mean(g * u)) / sqrt(n (variance + EPSILON)).

    Args:
        weight: w, float (out, in, h, w).
        gradients: g, float (N, out, in, h, w); overwritten.
    """
    w = weight.flatten(1).double()
    variance, mean = torch.var_mean(w, 1, keepdim=True, correction=0)
    deviation = (variance + EPSILON).sqrt()
    u = ((w - mean) / deviation).to(gradients.dtype)
    scale = (1 / (deviation * math.sqrt(w.shape[1]))).to(gradients.dtype)
    g = gradients.flatten(2)
    along = (g * u).mean(2, keepdim=True)
    g.sub_(g.mean(2, keepdim=True)).sub_(along * u).mul_(scale)
    return g.view(gradients.shape)
