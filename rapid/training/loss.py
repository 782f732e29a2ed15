"""A public loss in two parts: batches are drawn on the host, and the rest is recorded on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rapid.recording import Capture, Recorder
from rapid.runtime import autocast


@dataclass(frozen=True)
class Loss:
    """A loss on random batches.

    With several ranks, each draws the same batch and computes its share of the loss: the shares add up to the loss, and
    their gradients to its gradients. If the loss is a mean over examples, its share is the mean over
    `batch[ranks.rows]`, times `ranks.weight(len(batch))`.

    Attributes:
        draw: by a CPU generator, this rank's rows of a batch: tensors on the device, with all draws of the loss.
        value: the loss of such tensors, a scalar. By their shapes it always does the same, and all of it on the device;
            see `rapid.recording.Recorder`.
        exchanges: whether `value` waits for other ranks; it is not recorded then.
    """

    draw: Callable[[torch.Generator], Sequence[Tensor]]
    value: Callable[..., Tensor]
    exchanges: bool = False


class LossGradient:
    """Value and gradients of a loss at the weights as they are.

    Args:
        loss: see `Loss`.
        parameters: that require gradients.
        precision: see `rapid.runtime.autocast`.
        capture: how it is recorded, for tests; see `Recorder`.
    """

    def __init__(
        self, loss: Loss, parameters: Sequence[Tensor], precision: str, capture: Capture | None = None
    ) -> None:
        device = parameters[0].device
        # by the shapes of a batch; what is replayed does not tell
        self._used = used = dict[tuple[object, ...], list[bool]]()

        # not a method: it would keep this object and its recordings alive
        def computed(*batch: Tensor) -> list[Tensor]:
            with autocast(precision, device):
                value = loss.value(*batch)
            gradients = torch.autograd.grad(value, list(parameters), allow_unused=True)
            used[_key(batch)] = [gradient is not None for gradient in gradients]
            return [value.detach(), *(gradient for gradient in gradients if gradient is not None)]

        self._gradients: Callable[..., Sequence[Tensor]] = computed
        if not loss.exchanges:
            self._gradients = Recorder(computed, device, capture)

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss of a batch, a scalar without a graph, and a gradient for each parameter; None if it is not used."""
        value, *found = self._gradients(*batch)
        gradients = iter(found)
        return value, [next(gradients) if used else None for used in self._used[_key(batch)]]


def _key(batch: Sequence[Tensor]) -> tuple[object, ...]:
    """What a recording is for."""
    return tuple((tensor.shape, tensor.dtype) for tensor in batch)
