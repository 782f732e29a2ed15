"""A call of a layer as it was recorded, and running it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from rapid.dp.gradients.forms import in_full_precision
from rapid.dp.gradients.graph import Region, uses
from rapid.dp.gradients.registry import Registered, UnsupportedLayer


@dataclass(frozen=True)
class Layer:
    """A layer that owns trainable parameters.

    Attributes:
        module: the layer.
        name: its name in the network.
        owned: the trainable parameters that its forward pass uses itself, by their names in the layer.
        registered: its rule, if it has one.
    """

    module: nn.Module
    name: str
    owned: Mapping[str, nn.Parameter]
    registered: Registered | None

    def refuse(self, problem: str) -> UnsupportedLayer:
        """The exception that names this layer."""
        return UnsupportedLayer(f"layer '{self.name}' ({type(self.module).__name__}) {problem}")

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """Turn what goes wrong when the layer is run again into a refusal, and leave its attributes as they were."""
        attributes = {module: dict(vars(module)) for module in self.module.modules()}
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            problem = "cannot be run again, one example at a time; freeze it, or register a rule"
            raise self.refuse(problem) from error
        finally:
            for module, before in attributes.items():
                vars(module).clear()
                vars(module).update(before)


class Call:
    """One call of a layer: its arguments, detached, until the gradients of all its outputs are back.

    Args:
        layer: what was called.
        args: positional arguments.
        kwargs: keyword arguments.
        outputs: the tensors that it returned and that require gradients, by number.
        rows: N * K: tensors with a first dimension of this size are taken to have one row an example and draw.

    Raises:
        UnsupportedLayer: no positional argument, or no output, has one row an example and draw; or the layer's rule
            does not know calls of this form.
    """

    def __init__(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Mapping[int, Tensor], rows: int
    ) -> None:
        self.layer = layer
        self.rows = rows
        values, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._check(args, kwargs, outputs)
        self.inputs = [_detached(value) for value in args]
        self._values = [_detached(value) for value in values]
        self._versions = [value._version if isinstance(value, Tensor) else 0 for value in self._values]
        self._pending = set(outputs)
        self._received: set[int] = set()
        self._uses: list[set[tuple[str, int, int]]] | None = None
        self.region: Region | None = None
        if not self._single_use:
            self.region = Region((value for value in values if isinstance(value, Tensor)), outputs.values())

    def check_unchanged(self) -> None:
        """Refuse an argument that was changed in place since.

        Raises:
            UnsupportedLayer: there is one.
        """
        for value, version in zip(self._values, self._versions, strict=True):
            if isinstance(value, Tensor) and value._version != version:
                raise self.layer.refuse("had an input changed in place after it had read it")

    def receive(self, output: int) -> None:
        """Note that the losses depend on an output, and in how many places that uses each parameter."""
        self._received.add(output)
        if self._uses is None:
            self._uses = [{(name, 0, 0) for name in self.layer.owned}] if self._single_use else self._found_uses()

    def release(self, output: int) -> None:
        """Let go of the arguments if `output` is the last that was awaited."""
        self._pending.discard(output)
        if not self._pending:
            self.inputs, self._values, self._versions = [], [], []

    def expected_uses(self) -> Counter[nn.Parameter]:
        """How many places of the losses' graph use each parameter of the layer because of this call."""
        places: set[tuple[str, int, int]] = set()
        for output in self._received:
            places |= (self._uses or [])[output]
        return Counter(self.layer.owned[name] for name, _, _ in places)

    def by_row(self) -> list[Tensor]:
        """The arguments that have one row an example and draw, in full precision: (N * K, ...) each."""
        return [in_full_precision(value) for value in self._values if self._has_rows(value)]

    def run(self, parameters: Mapping[str, Tensor], by_row: Sequence[Tensor]) -> list[Tensor]:
        """The layer's forward pass, without its hooks, in full precision.

        Args:
            parameters: in place of the layer's own, by name; the others and all buffers are as they are.
            by_row: in place of what `by_row` returns; any number of rows.

        Returns:
            all tensors that it returns.
        """
        module = self.layer.module
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors = {name: in_full_precision(tensor.detach()) for name, tensor in state.items()} | dict(parameters)
        rows = iter(by_row)
        values = [
            next(rows) if self._has_rows(value) else in_full_precision(value) if isinstance(value, Tensor) else value
            for value in self._values
        ]
        args, kwargs = pytree.tree_unflatten(values, self._structure)
        state = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return tensors_of(torch.func.functional_call(_Forward(module), state, args, kwargs))

    def leaves(self) -> dict[str, Tensor]:
        """Copies of the layer's trainable parameters that require gradients, in full precision."""
        return {name: in_full_precision(p.detach()).clone().requires_grad_() for name, p in self.layer.owned.items()}

    @property
    def _single_use(self) -> bool:
        registered = self.layer.registered
        return registered is not None and registered.single_use

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Mapping[int, Tensor]) -> None:
        if not args:
            raise self.layer.refuse("was called with keyword arguments only")
        if self.layer.registered and (kwargs or set(outputs) != {0}):
            raise self.layer.refuse("has a rule, which is for positional arguments and one output")
        if not any(self._has_rows(value) for value in (args[:1] if self.layer.registered else args)):
            raise self.layer.refuse("was called with other than one row an example and draw")
        if not all(self._has_rows(output) for output in outputs.values()):
            raise self.layer.refuse("returned other than one row an example and draw")

    def _found_uses(self) -> list[set[tuple[str, int, int]]]:
        """By another forward pass: the places that use a parameter, for each output."""
        # copies of the parameters, so that tensors that were computed from them outside of this call do not count
        leaves = self.leaves()
        names = {leaf: name for name, leaf in leaves.items()}
        numbers: dict[Node, int] = {}
        with self.layer.running_again(), torch.enable_grad():
            found = [uses(output, numbers) for output in self.run(leaves, self.by_row())]
        return [{(names[use.leaf], use.node, use.position) for use in places if use.leaf in names} for places in found]

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == self.rows


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of what a layer returned, in order."""
    return [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]


class _Forward(nn.Module):
    """Calls the forward pass of a layer without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)
