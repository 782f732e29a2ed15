"""Sums of clipped per-example gradients of any network that treats examples separately."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from rapid.dp.gradients.calls import Call, Layer, tensors_of
from rapid.dp.gradients.fallback import Recorded, gradients_alone
from rapid.dp.gradients.forms import Direct, Factors, Gradient
from rapid.dp.gradients.graph import uses
from rapid.dp.gradients.registry import RULES, UnsupportedLayer
from rapid.precision import exact_float32

SMALL = 1 << 12
"""Elements of a parameter up to which its gradients are handled together with others."""
ParameterContainer = nn.ParameterList | nn.ParameterDict
CHANGED = "the network changed its buffers or parameters as it ran: they would keep what they saw, without noise"
Losses = Callable[[], Tensor]
"""Runs the network and returns one loss a row, float (rows,), each a function of its own example alone."""
Sums = Callable[[], list[Tensor]]
"""The sums to add to, one tensor for each parameter; called after the backward pass, when memory is free again."""


class BookKeeper:
    """Clipped sums for the trainable parameters of `network` (those that require gradients now).

    One forward pass and one backward pass for the activations. When the backward pass comes by a layer, the layer's
    rule forms the per-example gradients of its parameters, or notes what it needs to get their norms (a ghost). When
    all norms are known, the weighted sums are computed from these. A layer without a rule is run again for each
    example instead (see `rapid.dp.gradients.fallback`), which is slow: a UserWarning tells of it, once for each type.

    Formal guarantee: if loss i depends on example i alone, and row i of the inputs and outputs of every trained layer
    belongs to loss i (a network that permutes its rows breaks this, unseen), the result changes by at most `clip_norm`
    in l2 norm when one example is added or removed. The rules must be exact. Rounding is covered by
    `forms.ROUNDING_MARGIN`: sums are float64, products are float32, without shorter ones. Norms include a proven bound
    on the error of what float32 adds for them, however wide a layer is (see `forms.inner_products`). Losses that
    autocast to bfloat16 are covered only between sums of equally many examples.

    | case                                    | what happens                                         |
    |-----------------------------------------|------------------------------------------------------|
    | gradient of norm 0                      | adds 0                                               |
    | norm <= clip_norm / (1 + margin)        | added as it is                                       |
    | any element or the norm not finite      | the example counts as zero                           |
    | no examples                             | zeros; the network is not called                     |
    | batch normalisation, even frozen        | UnsupportedLayer, before anything is computed        |
    | running statistics                      | UnsupportedLayer, before anything is computed        |
    | a parameter that two layers share       | UnsupportedLayer, before anything is computed        |
    | a parameter of a module without forward | UnsupportedLayer, before anything is computed        |
    | a layer without a rule                  | the exact fallback, with a warning                   |
    | ... that mixes examples or is random    | UnsupportedLayer, nothing is returned                |
    | ... that `torch.func.vmap` cannot run   | UnsupportedLayer, nothing is returned                |
    | a parameter used outside its layer      | UnsupportedLayer, nothing is returned                |
    | what a layer computed but did not       | UnsupportedLayer, nothing is returned (layers        |
    | return, used elsewhere                  | without a rule, or with one that is not single_use)  |
    | buffers, or parameters, that the        | UnsupportedLayer, nothing is returned (not changes   |
    | network changes as it runs              | of `.data`: see `rapid.dp.rehearsal`)                |
    | losses that depend on other tensors     | UnsupportedLayer, before any gradient                |
    | which require gradients                 |                                                      |

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
        _warn_of_slow(self._layers.values())

    @property
    def recordable(self) -> bool:
        """Whether sums need no decision of the host: all layers have rules."""
        return all(layer.registered is not None for layer in self._layers.values())

    def empty_sum(self) -> Tensor:
        """Zeros for a sum, float64, all of `self.parameters` in one vector."""
        size, device = sum(p.numel() for p in self.parameters), self.parameters[0].device
        return torch.zeros(size, dtype=torch.float64, device=device)

    def split(self, total: Tensor) -> list[Tensor]:
        """Views of such a vector in the shapes of the parameters."""
        pieces = total.split([p.numel() for p in self.parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    def zeros(self) -> list[Tensor]:
        """Zeros for sums, one float64 tensor for each of `self.parameters`."""
        return [torch.zeros_like(p, dtype=torch.float64, requires_grad=False) for p in self.parameters]

    def clipped_sum(
        self,
        losses: Losses,
        count: int,
        clip_norm: float,
        *,
        multiplicity: int = 1,
        counted: Tensor | None = None,
        into: Sums | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Sum over examples of gradient * min(1, clip_norm / norm).

        Args:
            losses: called once, if N > 0; K consecutive losses belong to one example, which counts with their mean.
            count: N.
            clip_norm: C.
            multiplicity: K.
            counted: bool (N,), false for examples that are computed and add nothing; by default all count.
            into: sums to add to; new ones by default.

        Returns:
            The sums, float64, and the norms before clipping, float64 (N,), which are private: they must not leave the
            mechanism.
        """
        into = into or self.zeros
        if count == 0:
            return into(), self.parameters[0].detach().new_zeros(0, dtype=torch.float64)
        gradients = self._gradients(losses, count, multiplicity, multiplicity)
        total = into()
        parts = dict(zip(self.parameters, total, strict=True))
        with _exact(self.parameters[0].device):
            held = _joined(gradients)
            norms = torch.stack([gradient.norms_squared() for gradient in held.values()]).sum(0).sqrt()
            factors = Factors(norms, clip_norm, counted)
            while held:
                # one by one, so that what a layer has noted is freed once it is used
                parameters, gradient = held.popitem()
                pieces = gradient.weighted_sum(factors).flatten().split([p.numel() for p in parameters])
                for parameter, piece in zip(parameters, pieces, strict=True):
                    parts[parameter].add_(piece.view_as(parameter))
        return total, norms

    def clipped_one(
        self,
        parts: Iterable[tuple[Losses, int]],
        clip_norm: float,
        *,
        multiplicity: int,
        counted: Tensor | None = None,
        into: Sums,
    ) -> Tensor:
        """Add the clipped gradient of a single example whose K draws are too many to be in memory at a time.

        Args:
            parts: losses of some of the draws, and how many they are; K in all.
            clip_norm: C.
            multiplicity: K.
            counted: bool (1,), false if it adds nothing; by default it counts.
            into: sums to add to.

        Returns:
            The norm before clipping, float64 (1,), private.
        """
        mean = self.zeros()
        for losses, draws in parts:
            gradients = self._gradients(losses, 1, draws, multiplicity)
            with _exact(self.parameters[0].device):
                for parameter, part in zip(self.parameters, mean, strict=True):
                    if (gradient := gradients.pop(parameter, None)) is not None:
                        part.add_(gradient.weighted_sum(Factors.ones(part)))
        norm: Tensor = torch.stack([torch.linalg.vector_norm(part) for part in mean]).square().sum(0, True).sqrt()
        factors = Factors(norm, clip_norm, counted)
        for part, own in zip(into(), mean, strict=True):
            part.add_(factors.combine(own[None]))
        return norm

    def _state(self) -> dict[str, tuple[int, int]]:
        """Which tensor each buffer and parameter is, and its version, which counts changes in place."""
        found = [*self.network.named_buffers(), *self.network.named_parameters()]
        return {name: (id(tensor), tensor._version) for name, tensor in found}

    def _gradients(self, losses: Losses, count: int, draws: int, divisor: int) -> dict[nn.Parameter, Gradient]:
        """Per-example gradients, of sum of losses / divisor, of all parameters that the losses reach."""
        book = _Book(self._layers, count, count * draws)
        # before the hooks of others, which may change the output
        hooks = [m.register_forward_hook(book.record, prepend=True, with_kwargs=True) for m in self._layers]
        before = self._state()
        try:
            with _without_cast_cache(), exact_float32():
                values = losses()
        finally:
            for hook in hooks:
                hook.remove()
        if self._state() != before:
            raise UnsupportedLayer(CHANGED)
        if values.shape != (count * draws,):
            raise ValueError(f"losses must have shape ({count * draws},), not {tuple(values.shape)}")
        if not values.requires_grad:
            raise ValueError("the losses depend on no trained parameter")
        leaves = Counter(use.leaf for use in uses(values))
        if not leaves.keys() <= set(self.parameters):
            raise UnsupportedLayer("the losses depend on a tensor that requires gradients and is not trained here")
        if book.roots:
            with exact_float32():
                torch.autograd.grad(values.sum() / divisor, book.roots, allow_unused=True)
        book.check(values, leaves)
        return book.gradients


class _Book:
    """What is noted during one forward and one backward pass."""

    def __init__(self, layers: dict[nn.Module, Layer], count: int, rows: int) -> None:
        self.roots: list[GradientEdge] = []
        self.gradients: dict[nn.Parameter, Gradient] = {}
        self._layers = layers
        self._count = count
        self._rows = rows
        self._calls: list[Call] = []
        self._calls_of: Counter[nn.Module] = Counter()

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of a layer."""
        layer = self._layers[module]
        tensors = tensors_of(output)
        if sum(tensor.requires_grad for tensor in tensors) > 1:
            # an output may be computed from another one: what follows must use a copy, whose gradient is its own
            output = pytree.tree_map_only(Tensor, Tensor.clone, output)
            tensors = tensors_of(output)
        outputs = {number: tensor for number, tensor in enumerate(tensors) if tensor.requires_grad}
        if not outputs:
            return output
        call = Call(layer, args, kwargs, outputs, self._rows)
        self._calls.append(call)
        self._calls_of[module] += 1
        given = any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
        for number, tensor in outputs.items():
            recorded = None if layer.registered else Recorded(tensor)
            # fires for the output as it is now, even if later code works in place on it
            tensor.register_hook(partial(self._receive, call, number, recorded))
            if layer.registered is None or not given:
                self.roots.append(get_gradient_edge(tensor))
        return output

    def check(self, losses: Tensor, leaves: Mapping[Tensor, int]) -> None:
        """Compare how the graph of the losses uses the parameters with the calls that were seen.

        Raises:
            UnsupportedLayer: a parameter, or something that a layer computed from it, is used elsewhere.
        """
        expected: Counter[nn.Parameter] = Counter()
        for call in self._calls:
            expected += call.expected_uses()
            if call.region is not None and call.region.is_entered(losses):
                raise call.layer.refuse("computed something that is used elsewhere, though it was not returned")
        for layer in self._layers.values():
            for name, parameter in layer.owned.items():
                if leaves.get(parameter, 0) > expected[parameter]:
                    raise layer.refuse(f"has a parameter, '{name}', that is used outside of the layer's forward")

    def _receive(self, call: Call, output: int, recorded: Recorded | None, grad: Tensor) -> None:
        """Hook on an output of a call: from its inputs and this gradient to per-example gradients."""
        layer = call.layer
        with _exact(grad.device):
            call.check_unchanged()
            call.receive(output)
            if recorded is not None:
                found = gradients_alone(call, output, recorded, grad, self._count)
            else:
                assert layer.registered is not None
                found = layer.registered.rule(layer.module, grad, self._count, *call.inputs)
                if found.keys() != layer.owned.keys():
                    odd = ", ".join(sorted(found.keys() ^ layer.owned.keys()))
                    raise layer.refuse(f"has a rule that is not for these trainable parameters: {odd}; freeze them")
                for name, gradient in found.items():
                    self._check_form(layer, name, gradient)
            call.release(output)
            for name, gradient in found.items():
                self._add(layer.owned[name], gradient, once=self._calls_of[layer.module] == 1)

    def _check_form(self, layer: Layer, name: str, gradient: object) -> None:
        """Refuse what a rule returned if it is not one gradient an example; the message names no numbers of them."""
        wanted = (self._count, *layer.owned[name].shape)
        if not isinstance(gradient, Gradient) or (isinstance(gradient, Direct) and gradient.gradients.shape != wanted):
            problem = f"has a rule that returns other than one gradient of '{name}' an example, (count, *{name}.shape)"
            raise layer.refuse(problem)

    def _add(self, parameter: nn.Parameter, gradient: Gradient, *, once: bool) -> None:
        earlier = self.gradients.get(parameter)
        if isinstance(earlier, Direct):
            earlier.add(gradient)
        else:
            self.gradients[parameter] = gradient if once else gradient.instantiate()


def _joined(gradients: dict[nn.Parameter, Gradient]) -> dict[tuple[nn.Parameter, ...], Gradient]:
    """Empty `gradients` into a dictionary by parameters, small ones joined into one: calls cost more than sums."""
    small = {p: g.gradients for p, g in gradients.items() if isinstance(g, Direct) and p.numel() <= SMALL}
    result: dict[tuple[nn.Parameter, ...], Gradient] = {(p,): g for p, g in gradients.items() if p not in small}
    if small:
        result[tuple(small)] = Direct(torch.cat([g.reshape(len(g), -1) for g in small.values()], 1))
    gradients.clear()
    return result


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """No autograd; convolutions and matrix products in float32, not in the ten bits of TF32 or fewer."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), exact_float32():
        yield


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Autocast casts a parameter anew for each use, so that the graph shows all uses."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _trainable_layers(network: nn.Module) -> dict[nn.Module, Layer]:
    """The layers that own trainable parameters.

    Raises:
        UnsupportedLayer: a layer that mixes examples or keeps statistics of them, or a parameter that two layers share.
    """
    layers: dict[nn.Module, Layer] = {}
    owner: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()
    for name, module in network.named_modules():
        _refuse_mixing(module, name)
        if module in seen:
            continue
        owned: dict[str, nn.Parameter] = {}
        for prefix, part in _parts(module).items():
            seen.add(part)
            owned |= {prefix + own: p for own, p in part.named_parameters(recurse=False) if p.requires_grad}
        for parameter in owned.values():
            if parameter in owner:
                raise UnsupportedLayer(f"layers '{owner[parameter]}' and '{name}' share a parameter")
            owner[parameter] = name
        if owned:
            layers[module] = Layer(module, name, owned, RULES.get(type(module)))
            if type(module).forward is nn.Module.forward:
                raise layers[module].refuse(f"has a parameter, '{next(iter(owned))}', but no forward pass")
    return layers


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The layer and those below it whose parameters its forward pass uses without calling them, by prefix of names."""
    whole = isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module)
    return {
        f"{name}." if name else "": part
        for name, part in module.named_modules()
        if whole or part is module or (isinstance(part, ParameterContainer) and "." not in name)
    }


def _refuse_mixing(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        raise UnsupportedLayer(f"layer '{name}' ({kind}) mixes examples; use group normalisation")
    if isinstance(module, _NormBase) and module.track_running_stats:
        raise UnsupportedLayer(f"layer '{name}' ({kind}) keeps statistics of what it saw")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
        module.max_norm is not None or module.scale_grad_by_freq
    ):
        raise UnsupportedLayer(f"layer '{name}' ({kind}) with max_norm or scale_grad_by_freq mixes examples")


def _warn_of_slow(layers: Iterable[Layer]) -> None:
    """One warning for each type of layer without a rule."""
    slow = {type(layer.module): layer for layer in reversed(list(layers)) if layer.registered is None}
    for kind, layer in slow.items():
        warnings.warn(
            f"layer '{layer.name}' ({kind.__name__}) has no per-example rule: its gradients are exact but slow; "
            "rapid.dp.gradients.register adds a rule",
            UserWarning,
            stacklevel=3,
        )
