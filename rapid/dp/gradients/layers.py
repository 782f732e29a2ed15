"""One short rule a layer type: from what a layer saw and what came back to the per-example gradients of its parameters.

A rule is given rows: K consecutive rows belong to one example, K = 1 unless several draws of an example are averaged.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp.gradients.forms import (
    ConvolutionGhost,
    Direct,
    Gradient,
    MatrixGhost,
    RowsGhost,
    ghost_is_cheaper,
    in_full_precision,
)


class UnsupportedLayer(TypeError):
    """A layer whose per-example gradients are not known here, or one that is used in a way that the rules exclude."""


Rule = Callable[[nn.Module, Tensor, Tensor, int], dict[str, Gradient]]
"""(layer, its input (N * K, ...), d(losses) / d(output) (N * K, ...), N) -> gradients of its parameters by name."""


def _linear(layer: nn.Module, x: Tensor, grad: Tensor, count: int) -> dict[str, Gradient]:
    assert isinstance(layer, nn.Linear)
    a, g = x.reshape(count, -1, layer.in_features), grad.reshape(count, -1, layer.out_features)
    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        ghost = MatrixGhost(a, g)
        cheaper = ghost_is_cheaper(a.shape[1], layer.in_features + layer.out_features, layer.weight.numel())
        result["weight"] = ghost if cheaper else ghost.instantiate()
    if _trains_bias(layer):
        result["bias"] = Direct(in_full_precision(g).sum(1))
    return result


def _conv2d(layer: nn.Module, x: Tensor, grad: Tensor, count: int) -> dict[str, Gradient]:
    assert isinstance(layer, nn.Conv2d)
    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        ghost = ConvolutionGhost(layer, x, grad, count)
        positions = grad[0, 0].numel() * len(grad) // count
        kernel = layer.weight[0, 0].numel()
        cheaper = ghost_is_cheaper(positions, x.shape[1] + grad.shape[1], layer.weight.numel(), kernel)
        result["weight"] = ghost if cheaper else ghost.instantiate()
    if _trains_bias(layer):
        result["bias"] = Direct(_by_example(in_full_precision(grad).sum((2, 3)), count))
    return result


def _group_norm(layer: nn.Module, x: Tensor, grad: Tensor, count: int) -> dict[str, Gradient]:
    assert isinstance(layer, nn.GroupNorm)
    normalised = F.group_norm(in_full_precision(x), layer.num_groups, eps=layer.eps)
    return _affine(layer, normalised, grad, count, (1,))


def _layer_norm(layer: nn.Module, x: Tensor, grad: Tensor, count: int) -> dict[str, Gradient]:
    assert isinstance(layer, nn.LayerNorm)
    shape = list(layer.normalized_shape)
    return _affine(
        layer, F.layer_norm(in_full_precision(x), shape, eps=layer.eps), grad, count, tuple(range(-len(shape), 0))
    )


def _affine(
    layer: nn.GroupNorm | nn.LayerNorm, normalised: Tensor, grad: Tensor, count: int, kept: tuple[int, ...]
) -> dict[str, Gradient]:
    """Scale and shift after a normalisation: all dimensions but the batch and those of the parameter are summed."""
    grad = in_full_precision(grad)
    keep = {0} | {dim % grad.ndim for dim in kept}
    dims = [dim for dim in range(grad.ndim) if dim not in keep]

    def reduce(rows: Tensor) -> Direct:
        return Direct(_by_example(rows.sum(dims) if dims else rows, count))

    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        result["weight"] = reduce(normalised.mul_(grad))
    if _trains_bias(layer):
        # a copy where nothing is summed: what the form holds must be its own
        result["bias"] = reduce(grad if dims else grad.clone())
    return result


def _embedding(layer: nn.Module, x: Tensor, grad: Tensor, count: int) -> dict[str, Gradient]:
    assert isinstance(layer, nn.Embedding)
    indices, g = x.reshape(count, -1), grad.reshape(count, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        g = g.masked_fill((indices == layer.padding_idx)[..., None], 0)
    return {"weight": RowsGhost(indices, g, layer.num_embeddings)}


def _trains_bias(layer: nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm) -> bool:
    return layer.bias is not None and layer.bias.requires_grad


def _by_example(rows: Tensor, count: int) -> Tensor:
    """(N * K, ...) -> (N, ...), the sum over an example's rows."""
    return rows if len(rows) == count else rows.unflatten(0, (count, -1)).sum(1)


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
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise UnsupportedLayer(f"layer '{name}': an Embedding with max_norm or scale_grad_by_freq mixes examples")
    rule = RULES.get(type(layer))
    if rule is None:
        known = ", ".join(kind.__name__ for kind in RULES)
        raise UnsupportedLayer(
            f"layer '{name}' ({type(layer).__name__}) has trainable parameters and no per-example rule; "
            f"freeze it or use one of {known}"
        )
    return rule
