"""Exact per-example gradients of a layer without a rule: its forward pass is run again for each example.

This works for any layer that treats examples separately and whose operations `torch.func.vmap` knows. What it needs is
checked: each example alone must give the output that the whole batch gave.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rapid.dp.gradients.calls import Call
from rapid.dp.gradients.forms import Direct, Gradient, in_full_precision
from rapid.precision import float32_error


class Recorded:
    """An output of a call, kept to be compared.

    Args:
        output: (N * K, ...).
    """

    def __init__(self, output: Tensor) -> None:
        self._output = in_full_precision(output.detach()).clone()
        # results of the same computation in different orders agree in at least half of their digits
        self._tolerance = math.sqrt(_resolution(output))

    def agrees(self, alone: Tensor) -> bool:
        """Whether each row, where it is finite, is what its example alone gives.

        Args:
            alone: (N * K, ...).
        """
        if alone.shape != self._output.shape:
            return False
        alone, output = alone.flatten(1), self._output.flatten(1)
        finite = alone.isfinite().all(1)
        alone, output = alone[finite], output[finite]
        if not output.numel():
            return True
        scale = alone.abs().amax(1, keepdim=True)
        return bool(((output - alone).abs() <= self._tolerance * scale).all())


def gradients_alone(call: Call, output: int, recorded: Recorded, grad: Tensor, count: int) -> dict[str, Gradient]:
    """Per-example gradients of the parameters of a call's layer.

    Args:
        call: the call.
        output: number of the output that the gradient belongs to.
        recorded: that output.
        grad: gradient of the losses by it, float (N * K, ...).
        count: N.

    Raises:
        UnsupportedLayer: the layer cannot be run for one example, or gives something else then.
    """

    def rows_alone(parameters: dict[str, Tensor], *rows: Tensor) -> Tensor:
        def row_alone(*row: Tensor) -> Tensor:
            found = call.run(parameters, [part[None] for part in row])[output]
            if len(found) != 1:
                raise ValueError("one row in, another number out")
            return found[0]

        alone: Tensor = torch.func.vmap(row_alone)(*rows)
        return alone

    def one_example(own_grad: Tensor, *rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found, pull_back, *_ = torch.func.vjp(lambda parameters: rows_alone(parameters, *rows), leaves)
        return found, pull_back(own_grad)[0]

    layer, leaves = call.layer, call.leaves()
    by_example = [rows.unflatten(0, (count, -1)) for rows in (in_full_precision(grad), *call.by_row())]
    # attention in single operations, which vmap knows; it loops over what it does not know, with a warning
    with layer.running_again(), warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        found, gradients = torch.func.vmap(one_example)(*by_example)
    if not recorded.agrees(found.flatten(0, 1)):
        raise layer.refuse("gives another output for one example alone: it mixes examples, or it is random")
    # the forms own their tensors, which vmap may have expanded or taken from the gradient
    return {name: Direct(gradient.clone(memory_format=torch.contiguous_format)) for name, gradient in gradients.items()}


def _resolution(output: Tensor) -> float:
    """The relative error of one operation of the kind that made `output`."""
    kind = output.device.type
    error = torch.finfo(output.dtype).eps
    if torch.is_autocast_enabled(kind):
        error = max(error, torch.finfo(torch.get_autocast_dtype(kind)).eps)
    if output.dtype == torch.float32:
        error = max(error, float32_error(output.device))
    return error
