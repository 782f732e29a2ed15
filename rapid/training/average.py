"""The exponential moving average (EMA) of a network's weights, by torch's `AveragedModel`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


def weight_average(network: nn.Module, decay: float) -> AveragedModel:
    """An average whose decay rises to `decay`: min(decay, (1 + n) / (10 + n)) at update n.

    Without this rise, the weights of the first step would still count with factor decay^n after n updates. Buffers are
    copied, not averaged.
    """

    @torch.no_grad()
    def update(averaged: Tensors, current: Tensors, _: Tensor | int) -> None:
        # the average's own number, which is on the CPU: a GPU would be waited for to read the argument
        count = int(average.n_averaged) + 1
        torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + count) / (10 + count)))

    average = AveragedModel(network, multi_avg_fn=update)
    return average
