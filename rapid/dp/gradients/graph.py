"""What the graph of autograd tells of a layer: where its parameters are used, and who uses what it computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node


class Use(NamedTuple):
    """A place in a graph that uses a leaf tensor."""

    leaf: Tensor
    node: int
    position: int


def uses(output: Tensor, numbers: dict[Node, int] | None = None) -> set[Use]:
    """All places below `output` that use a leaf tensor which requires gradients.

    Args:
        output: the upper end of the graph.
        numbers: of the nodes, extended here; shared between outputs, it makes their places comparable.
    """
    numbers = {} if numbers is None else numbers
    found: set[Use] = set()
    for node, position, following in _edges([output], set()):
        number = numbers.setdefault(node, len(numbers))
        if hasattr(following, "variable"):
            found.add(Use(following.variable, number, position))
    return found


class Region:
    """The nodes of one call of a layer, from its inputs to its outputs.

    Args:
        inputs: all tensors that the call was given.
        outputs: all tensors that it returned and that require gradients.
    """

    def __init__(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        outputs = list(outputs)
        below = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
        self._nodes = {node for node, _, _ in _edges(outputs, below)}
        self._tops = {output.grad_fn for output in outputs}

    def is_entered(self, losses: Tensor) -> bool:
        """Whether the losses use what the call computed in other ways than by its outputs."""
        return any(
            following in self._nodes and following not in self._tops and node not in self._nodes
            for node, _, following in _edges([losses], set())
        )


def _edges(outputs: Iterable[Tensor], stop: set[Node]) -> Iterator[tuple[Node, int, Node]]:
    """All edges (node, position, following node) below the outputs, down to leaves and the nodes of `stop`."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None and output.grad_fn not in stop]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for position, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            yield node, position, following
            if following not in seen and following not in stop and not hasattr(following, "variable"):
                seen.add(following)
                pending.append(following)
