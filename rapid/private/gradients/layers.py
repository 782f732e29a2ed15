"""What each layer type needs for per-example gradients: its inputs and the gradients of its outputs.

Two forms cover every layer of our networks:

- `MatrixGradient`: example i's gradient is G_i^T A_i, with A_i (T, d) and G_i (T, p) for T positions (Linear, Conv2d).
  Its squared norm is <A_i A_i^T, G_i G_i^T> (the "ghost" norm), at T^2 (d + p) instead of T d p multiplications.
- `DirectGradient`: example i's gradient is small and simply kept (biases, normalisation weights, embeddings).

Source: Bu, Wang, Zha, Karypis: Differentially private optimization on large model at small cost (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UnsupportedLayer(TypeError):
    """A layer whose per-example gradients are not known here; nothing was computed."""


class Call(NamedTuple):
    """One call of a layer in a forward pass over N examples."""

    input: Tensor
    """What the layer was given, (N, ...)."""
    output_grad: Tensor
    """d(sum of losses) / d(output), (N, ...): row i belongs to example i because no layer mixes examples."""


class DirectGradient:
    """Per-example gradients kept as they are, (N, *shape of the parameter)."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def norms_squared(self) -> Tensor:
        """Float (N,)."""
        return self.gradients.flatten(1).square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_i weights_i gradient_i in the parameter's shape; rows of weight 0 count as zero, even if not finite."""
        rows = self.gradients.flatten(1)
        rows = torch.where(weights[:, None] > 0, rows, 0)
        return (weights @ rows).view(self.gradients.shape[1:])


class MatrixGradient:
    """Per-example gradients G_i^T A_i of R independent groups, not formed unless that is cheaper.

    Args:
        inputs: A, float (N, R, T, d).
        output_grads: G, float (N, R, T, p).
        shape: shape of the parameter; R * p * d elements in the order (R, p, d).
    """

    def __init__(self, inputs: Tensor, output_grads: Tensor, shape: torch.Size) -> None:
        self.inputs = inputs
        self.output_grads = output_grads
        self.shape = shape
        positions, d, p = inputs.shape[2], inputs.shape[3], output_grads.shape[3]
        # the factor 2 is the crossover of memory and time that Bu et al. give
        self.direct = None if 2 * positions**2 <= p * d else self._instantiate()

    def _instantiate(self) -> DirectGradient:
        gradients = (self.output_grads.transpose(2, 3) @ self.inputs).reshape(-1, *self.shape)
        return DirectGradient(gradients)

    def norms_squared(self) -> Tensor:
        """Float (N,)."""
        if self.direct is not None:
            return self.direct.norms_squared()
        if self.inputs.shape[2] == 1:
            squares = self.inputs.square().sum(-1) * self.output_grads.square().sum(-1)
        else:
            squares = (self.inputs @ self.inputs.transpose(2, 3)) * (
                self.output_grads @ self.output_grads.transpose(2, 3)
            )
        # a sum of squares, but float cancellation may leave it a little below zero
        return squares.flatten(1).sum(1).clamp(min=0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_i weights_i gradient_i in the parameter's shape; rows of weight 0 count as zero, even if not finite."""
        if self.direct is not None:
            return self.direct.weighted_sum(weights)
        factor = weights.view(-1, 1, 1, 1)
        keep = factor > 0
        inputs = torch.where(keep, self.inputs, 0)
        output_grads = torch.where(keep, self.output_grads * factor, 0)
        # (R, p, N T) @ (R, N T, d)
        left = output_grads.permute(1, 3, 0, 2).flatten(2)
        right = inputs.transpose(0, 1).flatten(1, 2)
        return (left @ right).reshape(self.shape)


Gradient = DirectGradient | MatrixGradient
Rule = Callable[[nn.Module, list[Call]], dict[str, Gradient]]
"""(layer, its calls in one forward pass) -> per-example gradients of its trainable parameters, by name."""


def _linear(layer: nn.Module, calls: list[Call]) -> dict[str, Gradient]:
    assert isinstance(layer, nn.Linear)
    inputs = [call.input.reshape(len(call.input), 1, -1, layer.in_features) for call in calls]
    grads = [call.output_grad.reshape(len(call.output_grad), 1, -1, layer.out_features) for call in calls]
    return _matrix(layer, inputs, grads)


def _conv2d(layer: nn.Module, calls: list[Call]) -> dict[str, Gradient]:
    assert isinstance(layer, nn.Conv2d)
    groups = layer.groups
    inputs = [_patches(layer, call.input) for call in calls]
    grads = [call.output_grad.unflatten(1, (groups, -1)).flatten(3).transpose(2, 3) for call in calls]
    return _matrix(layer, inputs, grads)


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The patches that a convolution multiplies by its kernel: (N, groups, positions, C / groups * kh * kw)."""
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=_PAD_MODES[layer.padding_mode])
    (kh, kw), (dh, dw) = layer.kernel_size, layer.dilation
    (sh, sw), groups = layer.stride, layer.groups
    if (kh, kw, sh, sw) == (1, 1, 1, 1):
        pointwise: Tensor = x.unflatten(1, (groups, -1)).flatten(3).transpose(2, 3)
        return pointwise
    x = x.contiguous()  # as_strided below is right only for the strides that it reads here
    n, channels, height, width = x.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    s0, s1, s2, s3 = x.stride()
    windows = x.as_strided(
        (n, groups, rows, columns, channels // groups, kh, kw),
        (s0, s1 * (channels // groups), s2 * sh, s3 * sw, s1, s2 * dh, s3 * dw),
    )
    return windows.reshape(n, groups, rows * columns, (channels // groups) * kh * kw)


_PAD_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _matrix(layer: nn.Linear | nn.Conv2d, inputs: list[Tensor], grads: list[Tensor]) -> dict[str, Gradient]:
    # calls of one layer add up: their positions simply stand one after the other
    g = torch.cat(grads, 2) if len(grads) > 1 else grads[0]
    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        a = torch.cat(inputs, 2) if len(inputs) > 1 else inputs[0]
        result["weight"] = MatrixGradient(a, g, layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        result["bias"] = DirectGradient(g.sum(2).flatten(1))
    return result


def _group_norm(layer: nn.Module, calls: list[Call]) -> dict[str, Gradient]:
    assert isinstance(layer, nn.GroupNorm)
    return _affine(layer, calls, lambda x: F.group_norm(x, layer.num_groups, eps=layer.eps), (1,))


def _layer_norm(layer: nn.Module, calls: list[Call]) -> dict[str, Gradient]:
    assert isinstance(layer, nn.LayerNorm)
    shape = list(layer.normalized_shape)
    kept = tuple(range(-len(shape), 0))
    return _affine(layer, calls, lambda x: F.layer_norm(x, shape, eps=layer.eps), kept)


def _affine(
    layer: nn.GroupNorm | nn.LayerNorm, calls: list[Call], normalise: Callable[[Tensor], Tensor], kept: tuple[int, ...]
) -> dict[str, Gradient]:
    """Scale and shift after a normalisation: all dimensions but the batch and those of the parameter are summed."""

    def reduce(x: Tensor) -> Tensor:
        keep = {0} | {dim % x.ndim for dim in kept}
        dims = [dim for dim in range(x.ndim) if dim not in keep]
        return x.sum(dims) if dims else x

    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        parts = [reduce(call.output_grad * normalise(call.input)) for call in calls]
        result["weight"] = DirectGradient(torch.stack(parts).sum(0))
    if layer.bias is not None and layer.bias.requires_grad:
        result["bias"] = DirectGradient(torch.stack([reduce(call.output_grad) for call in calls]).sum(0))
    return result


def _embedding(layer: nn.Module, calls: list[Call]) -> dict[str, Gradient]:
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise UnsupportedLayer("Embedding with max_norm or scale_grad_by_freq mixes examples")
    count = len(calls[0].input)
    gradients = calls[0].output_grad.new_zeros(count, *layer.weight.shape)
    for call in calls:
        indices = call.input.reshape(count, -1)
        grads = call.output_grad.reshape(count, indices.shape[1], -1)
        if layer.padding_idx is not None:
            grads = torch.where((indices == layer.padding_idx)[..., None], 0, grads)
        gradients.scatter_add_(1, indices[..., None].expand_as(grads), grads)
    return {"weight": DirectGradient(gradients)}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}


def rule_for(layer: nn.Module, name: str) -> Rule:
    """The rule of a layer that owns trainable parameters.

    The type must match exactly: a subclass may compute something else.

    Raises:
        UnsupportedLayer: no rule; the message names the layer.
    """
    rule = RULES.get(type(layer))
    if rule is None:
        known = ", ".join(kind.__name__ for kind in RULES)
        raise UnsupportedLayer(
            f"layer '{name}' ({type(layer).__name__}) has trainable parameters and no per-example rule; "
            f"freeze it or use one of {known}"
        )
    return rule
