"""The built-in rules: short functions from what a layer saw and what came back to per-example gradients.

A rule is given rows: K consecutive rows belong to one example, K = 1 unless several draws of an example are averaged.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp.gradients.convolution import ConvolutionGhost
from rapid.dp.gradients.forms import (
    Direct,
    Gradient,
    MatrixGhost,
    RowsGhost,
    ghost_is_cheaper,
    in_full_precision,
)
from rapid.dp.gradients.registry import register


@register(nn.Linear, single_use=True)
def _linear(layer: nn.Linear, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    a, g = x.reshape(count, -1, layer.in_features), grad.reshape(count, -1, layer.out_features)
    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        ghost = MatrixGhost(a, g)
        width = layer.in_features + layer.out_features
        cheaper = ghost_is_cheaper(a.shape[1], width, layer.weight.numel(), cpu=x.device.type == "cpu")
        result["weight"] = ghost if cheaper else ghost.instantiate()
    if _trains_bias(layer):
        result["bias"] = Direct(in_full_precision(g).sum(1))
    return result


@register(nn.Conv2d, single_use=True)
def _conv2d(layer: nn.Conv2d, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        ghost = ConvolutionGhost(layer, x, grad, count)
        positions = grad[0, 0].numel() * len(grad) // count
        width, sums = x.shape[1] + grad.shape[1], sum(layer.kernel_size) if layer.weight[0, 0].numel() > 1 else 1
        cheaper = ghost_is_cheaper(positions, width, layer.weight.numel(), sums, cpu=x.device.type == "cpu")
        result["weight"] = ghost if cheaper else ghost.instantiate()
    if _trains_bias(layer):
        result["bias"] = Direct(_by_example(in_full_precision(grad).sum((2, 3)), count))
    return result


@register(nn.GroupNorm, single_use=True)
def _group_norm(layer: nn.GroupNorm, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    normalised = F.group_norm(in_full_precision(x), layer.num_groups, eps=layer.eps)
    return _affine(layer, normalised, grad, count, (1,))


@register(nn.LayerNorm, single_use=True)
def _layer_norm(layer: nn.LayerNorm, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    shape = list(layer.normalized_shape)
    normalised = F.layer_norm(in_full_precision(x), shape, eps=layer.eps)
    return _affine(layer, normalised, grad, count, tuple(range(-len(shape), 0)))


def _affine(
    layer: nn.GroupNorm | nn.LayerNorm, normalised: Tensor, grad: Tensor, count: int, kept: tuple[int, ...]
) -> dict[str, Gradient]:
    """Scale and shift after a normalisation: sums over all dimensions but the batch and the parameter's."""
    grad = in_full_precision(grad)
    keep = {0} | {dim % grad.ndim for dim in kept}
    dims = [dim for dim in range(grad.ndim) if dim not in keep]

    def reduce(rows: Tensor) -> Direct:
        return Direct(_by_example(rows.sum(dims) if dims else rows, count))

    result: dict[str, Gradient] = {}
    if layer.weight.requires_grad:
        result["weight"] = reduce(normalised.mul_(grad))
    if _trains_bias(layer):
        # a copy where nothing is summed, because the form must own its tensor
        result["bias"] = reduce(grad if dims else grad.clone())
    return result


@register(nn.Embedding, single_use=True)
def _embedding(layer: nn.Embedding, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
    indices, g = x.reshape(count, -1), grad.reshape(count, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        g = g.masked_fill((indices == layer.padding_idx)[..., None], 0)
    return {"weight": RowsGhost(indices, g, layer.num_embeddings)}


def _trains_bias(layer: nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm) -> bool:
    return layer.bias is not None and layer.bias.requires_grad


def _by_example(rows: Tensor, count: int) -> Tensor:
    """(N * K, ...) -> (N, ...), the sum over an example's rows."""
    return rows if len(rows) == count else rows.unflatten(0, (count, -1)).sum(1)
