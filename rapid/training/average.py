"""The exponential moving average (EMA) of a network's weights, as torch's `AveragedModel`, in one call a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class WeightAverage(AveragedModel):
    """An average whose decay rises to `decay`: min(decay, (1 + n) / (10 + n)) at update n; the first update copies.

    Without this rise, the weights of the first step would still count with factor decay^n after n updates. Buffers are
    copied, not averaged. The state is that of `AveragedModel`; the number of updates stays on the CPU, so that a device
    is not waited for, and all tensors are updated by one call.

    Args:
        network: whose weights are averaged.
        decay: the largest.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__(network)
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average by the current weights of a network of the same kind, on the same device."""
        updates = int(self.n_averaged)
        averaged, current = _tensors(self.module.parameters()), _tensors(model.parameters())
        if updates == 0:
            torch._foreach_copy_(averaged, current)
        else:
            count = updates + 1
            torch._foreach_lerp_(averaged, current, 1 - min(self._decay, (1 + count) / (10 + count)))
        if copied := _tensors(self.module.buffers()):
            torch._foreach_copy_(copied, _tensors(model.buffers()))
        self.n_averaged += 1


def _tensors(held: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in held]
