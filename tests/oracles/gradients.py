"""Per-example gradients by a loop over single examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rapid.dp.gradients.forms import ROUNDING_MARGIN


def clipped_sum(
    parameters: list[nn.Parameter], loss_of: Callable[[slice], Tensor], count: int, clip_norm: float
) -> tuple[list[Tensor], Tensor]:
    """Sum of clipped gradients and the norms, (count,) float64; `loss_of(slice)` gives the losses of these examples."""
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    norms = []
    for number in range(count):
        loss = loss_of(slice(number, number + 1)).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradient = [
            torch.zeros_like(p, dtype=torch.float64) if g is None else g.double()
            for p, g in zip(parameters, found, strict=True)
        ]
        norm = torch.sqrt(sum((g.square().sum() for g in gradient), torch.zeros((), dtype=torch.float64)))
        norms.append(norm)
        for total, g in zip(sums, gradient, strict=True):
            total += g * min(1.0, clip_norm / (1 + ROUNDING_MARGIN) / max(norm.item(), 1e-300))
    return sums, torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
