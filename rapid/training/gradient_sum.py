"""The sum of gradients over several processes, each of which has those of its rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rapid.errors import Stopped
from rapid.ranks import Ranks
from rapid.stopping import check_stop, stop_requested


class GradientSum:
    """Adds up gradients over all ranks, and lets all ranks stop after the same step.

    A rank that stopped on its own would leave the others waiting in their next step. So the sum carries one more
    number: whether a stop was requested anywhere.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._stop = False

    def __call__(self, value: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """Replace the gradients by their sums over all ranks, in place; bit-identical on all ranks.

        Args:
            value: this rank's share of the loss, a scalar.
            gradients: of this share, in the same order on all ranks.

        Returns:
            The loss, a scalar without a graph: the sum of all shares.

        Raises:
            LostRank: another rank is gone.
        """
        value = value.detach()
        if self._ranks.count == 1:
            return value
        told = torch.stack([value.float(), value.new_tensor(stop_requested(), dtype=torch.float32)])
        flat = torch.cat([told, *(gradient.flatten() for gradient in gradients)])
        self._ranks.all_reduce(flat)
        total: Tensor
        total, stops, *sums = flat.split([1, 1, *(gradient.numel() for gradient in gradients)])
        for gradient, one in zip(gradients, sums, strict=True):
            gradient.copy_(one.view_as(gradient))
        self._stop = bool(stops > 0)
        return total.view(())

    def check_stop(self) -> None:
        """As `rapid.stopping.check_stop`, for a stop that all ranks know of.

        Raises:
            Stopped: a stop was requested on any rank before the last sum.
        """
        if self._ranks.count == 1:
            check_stop()
        if self._stop:
            raise Stopped("stopped")
