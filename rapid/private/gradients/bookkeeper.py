"""Sums of clipped per-example gradients of any module whose layers have a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from rapid.private.gradients.layers import Call, Gradient, UnsupportedLayer, rule_for

NORM_MARGIN = 1e-5
"""Norms are taken this much (relatively) too large, so that float32 rounding cannot lift a clipped gradient over C."""


class Record(NamedTuple):
    """One call of a layer during the forward pass."""

    layer: nn.Module
    input: Tensor
    version: int
    output: GradientEdge


class BookKeeper:
    """Clipped sums for the trainable parameters of `network` (those that require gradients now).

    Formal guarantee: with losses that depend on their own example alone, the result changes by at most `clip_norm` in
    l2 norm when one example is added or removed.

    | case                                    | what happens                                    |
    |-----------------------------------------|-------------------------------------------------|
    | gradient of norm 0                      | adds 0                                          |
    | norm <= clip_norm                       | added as it is (but for NORM_MARGIN)            |
    | any element not finite                  | the example counts as zero                      |
    | no examples                             | zeros; the network is not called                |
    | a layer without a rule                  | UnsupportedLayer, before anything is computed   |
    | batch normalisation, even frozen        | UnsupportedLayer, before anything is computed   |
    | a parameter that two layers share       | UnsupportedLayer, before anything is computed   |

    Raises:
        UnsupportedLayer: see the table.
        ValueError: nothing is trainable.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter is trainable")
        self._layers = _trainable_layers(network)

    def clipped_sum(self, losses: Callable[[], Tensor], count: int, clip_norm: float) -> tuple[list[Tensor], Tensor]:
        """Sum over examples of gradient * min(1, clip_norm / norm).

        Args:
            losses: runs the network and returns one loss an example, float (N,); called once, if N > 0.
            count: N.
            clip_norm: C.

        Returns:
            The sums, one tensor for each of `self.parameters`, and the norms before clipping, float (N,), which are
            private: they must not leave the mechanism.
        """
        if count == 0:
            return [torch.zeros_like(p) for p in self.parameters], self.parameters[0].new_zeros(0)
        gradients = self._per_example(losses, count)
        squares = torch.stack([g.norms_squared() for g in gradients.values()]).sum(0)
        norms = squares.sqrt()
        factors = (clip_norm / (norms * (1 + NORM_MARGIN))).clamp(max=1)
        factors = torch.where(torch.isfinite(norms), factors, 0)
        sums = [gradients[p].weighted_sum(factors) if p in gradients else torch.zeros_like(p) for p in self.parameters]
        return sums, norms

    def _per_example(self, losses: Callable[[], Tensor], count: int) -> dict[nn.Parameter, Gradient]:
        """Per-example gradients of all parameters that the losses reach."""
        with self._recording() as records:
            values = losses()
            if values.shape != (count,):
                raise ValueError(f"losses must have shape ({count},), not {tuple(values.shape)}")
            edges = [record.output for record in records]
            grads = torch.autograd.grad(values.sum(), edges, allow_unused=True) if edges else ()
        calls: dict[nn.Module, list[Call]] = {}
        for record, grad in zip(records, grads, strict=True):
            if record.input._version != record.version:
                name = self._layers[record.layer][0]
                raise UnsupportedLayer(f"the input of layer '{name}' was changed in place after the layer had read it")
            if grad is not None:
                calls.setdefault(record.layer, []).append(Call(record.input, grad))
        records.clear()
        del edges, grads, values
        result: dict[nn.Parameter, Gradient] = {}
        with torch.no_grad():
            for layer, (name, rule) in self._layers.items():
                if layer not in calls:
                    continue
                own = calls.pop(layer)
                if any(len(call.input) != count for call in own):
                    raise UnsupportedLayer(f"layer '{name}' was called with other than one row an example")
                for parameter, gradient in rule(layer, own).items():
                    result[layer.get_parameter(parameter)] = gradient
        return result

    @contextmanager
    def _recording(self) -> Iterator[list[Record]]:
        """Record inputs and outputs of the layers; no parameter takes part in autograd meanwhile."""
        records: list[Record] = []

        def record(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not args:
                raise UnsupportedLayer(f"layer '{self._layers[layer][0]}' was called with keyword arguments only")
            starts = not output.requires_grad
            if starts:
                # with frozen parameters a layer near the input starts the graph itself
                output.requires_grad_()
            # an edge, not the tensor: it still means this output if later code works in place on it
            records.append(Record(layer, args[0].detach(), args[0]._version, get_gradient_edge(output)))
            return output.clone() if starts else output

        hooks = [layer.register_forward_hook(record) for layer in self._layers]
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        try:
            yield records
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_(True)
            for hook in hooks:
                hook.remove()


def _trainable_layers(network: nn.Module) -> dict[nn.Module, tuple[str, Callable[..., dict[str, Gradient]]]]:
    layers: dict[nn.Module, tuple[str, Callable[..., dict[str, Gradient]]]] = {}
    owner: dict[nn.Parameter, str] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm):
            raise UnsupportedLayer(f"layer '{name}' ({type(layer).__name__}) mixes examples; use group normalisation")
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        for parameter in own:
            if parameter in owner:
                raise UnsupportedLayer(f"layers '{owner[parameter]}' and '{name}' share a parameter")
            owner[parameter] = name
        if own:
            layers[layer] = (name, rule_for(layer, name))
    return layers
