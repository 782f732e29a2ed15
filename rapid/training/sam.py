"""Sharpness-aware minimisation (SAM): the gradient is taken where the loss is highest nearby.

Source: Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization
(ICLR 2021), Eq. 2 and Algorithm 1, with the l2 norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rapid.training.optimizers import set_gradients

TINY = 1e-12
"""Added to the norm, so that a gradient of zero moves nothing."""


Gradient = Callable[[], tuple[Tensor, Sequence[Tensor | None]]]
"""Value of a loss at the weights as they are, and its gradients; None where a parameter is not used."""
Reduce = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Value and gradients of one process -> value of all; replaces the gradients by those of all, in place."""


def backward_sharp(
    parameters: Sequence[Tensor], gradient: Gradient, rho: float, reduce: Reduce | None = None
) -> Tensor:
    """Put the gradient at w + rho * g / ||g|| into `.grad`, where g is the gradient at w; w stays as it is.

    The optimiser's step that follows is SAM with this optimiser as its base. It costs two forward and backward passes;
    with rho 0 it is one plain one.

    Args:
        parameters: w, leaves that require gradients.
        gradient: of a loss; called twice, and must be the same function of w both times, with the same batch and draws.
        rho: radius, at least 0.
        reduce: adds up over several processes, such as `GradientSum`.

    Returns:
        The loss at w, a scalar without a graph.
    """
    value, gradients = gradient()
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    total = value if reduce is None else reduce(value, [g for _, g in pairs])
    if rho:
        before = [p.detach().clone() for p, _ in pairs]
        norm = torch.stack([torch.linalg.vector_norm(g) for _, g in pairs]).norm()
        with torch.no_grad():
            for parameter, own in pairs:
                parameter.add_(own * (rho / (norm + TINY)))
        again, gradients = gradient()
        if reduce is not None:
            reduce(again, [g for g in gradients if g is not None])
        with torch.no_grad():
            # copies, because subtracting what was added would leave rounding errors
            for (parameter, _), old in zip(pairs, before, strict=True):
                parameter.copy_(old)
    set_gradients(parameters, gradients)
    return total
