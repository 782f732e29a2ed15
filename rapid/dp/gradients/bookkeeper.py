"""Sums of clipped per-example gradients of any module whose layers have a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from rapid.dp.gradients.forms import Direct, Factors, Gradient, in_full_precision
from rapid.dp.gradients.layers import Rule, UnsupportedLayer, rule_for

SMALL = 1 << 12
"""Elements of a parameter up to which its gradients are handled together with others."""
Losses = Callable[[], Tensor]
"""Runs the network and returns one loss a row, float (rows,), each a function of its own example alone."""
Sums = Callable[[], list[Tensor]]
"""The sums to add to, one tensor for each parameter; called after the backward pass, when memory is free again."""


class BookKeeper:
    """Clipped sums for the trainable parameters of `network` (those that require gradients now).

    One forward pass and one backward pass for the activations: each layer's gradients are formed, or noted as a ghost,
    when the backward pass comes by; when all norms are known the weighted sums are taken from what was noted.

    Formal guarantee: if loss i depends on example i alone, and row i of what every trained layer is given and returns
    belongs to loss i (a network that permutes its rows breaks this, unseen), the result changes by at most `clip_norm`
    in l2 norm when one example is added or removed. Float32 limits it: gradients whose squares underflow (norms of
    about 1e-19 times the norm of their factors) are taken for zero.

    | case                                    | what happens                                    |
    |-----------------------------------------|-------------------------------------------------|
    | gradient of norm 0                      | adds 0                                          |
    | norm <= clip_norm                       | added as it is, but for margins of rounding     |
    | any element or the norm not finite      | the example counts as zero                      |
    | no examples                             | zeros; the network is not called                |
    | a layer without a rule                  | UnsupportedLayer, before anything is computed   |
    | batch normalisation, even frozen        | UnsupportedLayer, before anything is computed   |
    | running statistics, changed buffers     | UnsupportedLayer, nothing is returned           |
    | a parameter that two layers share       | UnsupportedLayer, before anything is computed   |
    | a parameter used outside its layer      | UnsupportedLayer, nothing is returned           |
    | losses that depend on other tensors     | UnsupportedLayer, before any gradient           |
    | which require gradients                 |                                                 |

    Raises:
        UnsupportedLayer: see the table.
        ValueError: nothing is trainable, or losses of a wrong shape or without gradients.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter is trainable")
        self._layers = _trainable_layers(network)

    def zeros(self) -> list[Tensor]:
        """Zeros for sums, one tensor for each of `self.parameters`, at least float32."""
        return [torch.zeros_like(in_full_precision(p.detach())) for p in self.parameters]

    def clipped_sum(
        self, losses: Losses, count: int, clip_norm: float, *, multiplicity: int = 1, into: Sums | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Sum over examples of gradient * min(1, clip_norm / norm).

        Args:
            losses: called once, if N > 0; K consecutive losses belong to one example, which counts with their mean.
            count: N.
            clip_norm: C.
            multiplicity: K.
            into: sums to add to; new ones by default.

        Returns:
            The sums, and the norms before clipping, float (N,), which are private: they must not leave the mechanism.
        """
        into = into or self.zeros
        if count == 0:
            return into(), in_full_precision(self.parameters[0].detach()).new_zeros(0)
        gradients = self._gradients(losses, count, multiplicity, multiplicity)
        total = into()
        parts = dict(zip(self.parameters, total, strict=True))
        with _exact():
            held = _joined(gradients)
            norms = torch.stack([gradient.norms_squared() for gradient in held.values()]).sum(0).sqrt()
            factors = Factors(norms, clip_norm)
            while held:
                # one by one, so that what a layer has noted is freed once it is used
                parameters, gradient = held.popitem()
                pieces = gradient.weighted_sum(factors).flatten().split([p.numel() for p in parameters])
                for parameter, piece in zip(parameters, pieces, strict=True):
                    parts[parameter].add_(piece.view_as(parameter))
        return total, norms

    def clipped_one(
        self, parts: Iterable[tuple[Losses, int]], clip_norm: float, *, multiplicity: int, into: Sums
    ) -> Tensor:
        """Add the clipped gradient of a single example whose K draws are too many to be in memory at a time.

        Args:
            parts: losses of some of the draws, and how many they are; K in all.
            clip_norm: C.
            multiplicity: K.
            into: sums to add to.

        Returns:
            The norm before clipping, float (1,), private.
        """
        mean = self.zeros()
        for losses, draws in parts:
            gradients = self._gradients(losses, 1, draws, multiplicity)
            with _exact():
                for parameter, part in zip(self.parameters, mean, strict=True):
                    if (gradient := gradients.pop(parameter, None)) is not None:
                        part.add_(gradient.weighted_sum(Factors.ones(part)))
        norm: Tensor = torch.stack([torch.linalg.vector_norm(part) for part in mean]).square().sum(0, True).sqrt()
        factors = Factors(norm, clip_norm)
        for part, own in zip(into(), mean, strict=True):
            part.add_(factors.combine(own[None]))
        return norm

    def _gradients(self, losses: Losses, count: int, draws: int, divisor: int) -> dict[nn.Parameter, Gradient]:
        """Per-example gradients, of sum of losses / divisor, of all parameters that the losses reach."""
        book = _Book(self._layers, count, count * draws)
        # before the hooks of others, which may change the output
        hooks = [layer.register_forward_hook(book.record, prepend=True) for layer in self._layers]
        versions = [(buffer, buffer._version) for buffer in self.network.buffers()]
        try:
            values = losses()
        finally:
            for hook in hooks:
                hook.remove()
        if any(buffer._version != version for buffer, version in versions):
            raise UnsupportedLayer("the network changed one of its buffers: that keeps what it saw, without noise")
        if values.shape != (count * draws,):
            raise ValueError(f"losses must have shape ({count * draws},), not {tuple(values.shape)}")
        if not values.requires_grad:
            raise ValueError("the losses depend on no trained parameter")
        leaves = _leaves(values)
        if not leaves.keys() <= set(self.parameters):
            raise UnsupportedLayer("the losses depend on a tensor that requires gradients and is not trained here")
        if book.roots:
            torch.autograd.grad(values.sum() / divisor, book.roots, allow_unused=True)
        book.check(leaves)
        return book.gradients


class _Book:
    """What is noted during one forward and one backward pass."""

    def __init__(self, layers: dict[nn.Module, tuple[str, Rule]], count: int, rows: int) -> None:
        self.roots: list[GradientEdge] = []
        self.gradients: dict[nn.Parameter, Gradient] = {}
        self._layers = layers
        self._count = count
        self._rows = rows
        self._calls: Counter[nn.Module] = Counter()
        self._received: Counter[nn.Module] = Counter()

    def record(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Forward hook of a layer."""
        name = self._layers[layer][0]
        if not output.requires_grad:
            return
        if not args:
            raise UnsupportedLayer(f"layer '{name}' was called with keyword arguments only")
        if len(args[0]) != self._rows:
            raise UnsupportedLayer(f"layer '{name}' was called with other than one row an example and draw")
        self._calls[layer] += 1
        # fires for the output as it is now, even if later code works in place on it
        output.register_hook(partial(self._receive, layer, [args[0].detach()], args[0]._version))
        if not args[0].requires_grad:
            self.roots.append(get_gradient_edge(output))

    def check(self, uses: Mapping[nn.Parameter, int]) -> None:
        """Compare how often the graph uses each parameter with the calls that were seen.

        Raises:
            UnsupportedLayer: a parameter has other uses than the calls of its layer.
        """
        for layer, (name, _) in self._layers.items():
            for parameter in layer.parameters(recurse=False):
                if uses.get(parameter, 0) > self._received[layer]:
                    raise UnsupportedLayer(f"a parameter of layer '{name}' is used outside of the layer's forward")

    def _receive(self, layer: nn.Module, seen: list[Tensor], version: int, grad: Tensor) -> None:
        """Hook on the output of a call: the rule of the layer turns input and gradient into per-example gradients."""
        name, rule = self._layers[layer]
        # the hook lives as long as the graph, but the input is held no longer than needed
        x = seen.pop()
        self._received[layer] += 1
        if x._version != version:
            raise UnsupportedLayer(f"the input of layer '{name}' was changed in place after the layer had read it")
        with _exact():
            found = rule(layer, x, grad, self._count)
            for parameter_name, gradient in found.items():
                parameter = layer.get_parameter(parameter_name)
                earlier = self.gradients.get(parameter)
                if self._calls[layer] == 1:
                    self.gradients[parameter] = gradient
                elif isinstance(earlier, Direct):
                    earlier.add(gradient)
                else:
                    self.gradients[parameter] = gradient.instantiate()


def _joined(gradients: dict[nn.Parameter, Gradient]) -> dict[tuple[nn.Parameter, ...], Gradient]:
    """The gradients, taken over, by their parameters: many small ones as one, because calls cost more than sums."""
    small = {p: g.gradients for p, g in gradients.items() if isinstance(g, Direct) and p.numel() <= SMALL}
    result: dict[tuple[nn.Parameter, ...], Gradient] = {(p,): g for p, g in gradients.items() if p not in small}
    if small:
        result[tuple(small)] = Direct(torch.cat([g.flatten(1) for g in small.values()], 1))
    gradients.clear()
    return result


def _leaves(losses: Tensor) -> Counter[nn.Parameter]:
    """The tensors at which the graph of the losses ends, with the number of places that use each."""
    found: Counter[nn.Parameter] = Counter()
    start = losses.grad_fn
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        assert node is not None
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                found[following.variable] += 1
            elif following not in seen:
                seen.add(following)
                pending.append(following)
    return found


@contextmanager
def _exact() -> Iterator[None]:
    """No autograd; convolutions and matrix products in float32, not in the ten bits of TF32 or fewer."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _trainable_layers(network: nn.Module) -> dict[nn.Module, tuple[str, Rule]]:
    layers: dict[nn.Module, tuple[str, Rule]] = {}
    owner: dict[nn.Parameter, str] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm):
            raise UnsupportedLayer(f"layer '{name}' ({type(layer).__name__}) mixes examples; use group normalisation")
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            raise UnsupportedLayer(f"layer '{name}' ({type(layer).__name__}) keeps statistics of what it saw")
        trained = {own_name: p for own_name, p in layer.named_parameters(recurse=False) if p.requires_grad}
        own = list(trained.values())
        for parameter in own:
            if parameter in owner:
                raise UnsupportedLayer(f"layers '{owner[parameter]}' and '{name}' share a parameter")
            owner[parameter] = name
        if own:
            layers[layer] = (name, rule_for(layer, name))
            if other := trained.keys() - {"weight", "bias"}:
                raise UnsupportedLayer(f"layer '{name}' has an unusual parameter '{min(other)}'; freeze it")
    return layers
