"""Trained parameters, optimiser and learning rate of a private training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rapid.config.sections import DpSgdSettings, RateSchedule
from rapid.errors import InputError
from rapid.training.loop import warmup_cosine

MOMENTUM = 0.9
LONGEST_WARMUP = 10
FINAL_SHARE = 0.1
"""Share of the highest learning rate in the last step: small steps at the end average the noise."""


def select_trainable(network: nn.Module, patterns: Sequence[str]) -> None:
    """Make only those parameters trainable whose names match a pattern (as for file names: `*attentions*`).

    Raises:
        InputError: a pattern matches nothing.
    """
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            problem = f"no parameter matches '{pattern}'; names are like '{names[0]}'"
            raise InputError("private.trainable", problem)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


def trained_count(build: Callable[[], nn.Module], patterns: Sequence[str]) -> int:
    """Number of parameters that would be trained.

    Args:
        build: makes the network; called without memory for its weights.
        patterns: see `select_trainable`.

    Raises:
        InputError: a pattern matches nothing.
    """
    with torch.device("meta"):
        network = build()
    select_trainable(network, patterns)
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def build_optimizer(network: nn.Module, settings: DpSgdSettings) -> torch.optim.Optimizer:
    """The optimiser of the parameters that require gradients."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    if settings.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, momentum=MOMENTUM)
    return torch.optim.Adam(parameters, lr=settings.learning_rate, fused=on_gpu(parameters))


def on_gpu(parameters: Sequence[Tensor]) -> bool | None:
    """Whether torch's fused optimisers are worth it: on GPUs, where they take one kernel; None leaves it to torch."""
    return True if parameters[0].device.type == "cuda" else None


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Put gradients into `.grad`, in the layout of the parameters in memory, which fused optimisers need."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def noisy_schedule(optimizer: torch.optim.Optimizer, steps: int, name: RateSchedule = "cosine") -> LambdaLR:
    """Learning rate for noisy gradients: constant, or a short linear warm-up and half a cosine down to a tenth."""
    if name == "constant":
        return LambdaLR(optimizer, lambda _: 1.0)
    warmup = max(1, min(LONGEST_WARMUP, steps // 10))
    return warmup_cosine(optimizer, steps, warmup_steps=warmup, final_share=FINAL_SHARE)
