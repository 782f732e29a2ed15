"""Measured time of a training step, from which the number of steps that fit into some minutes follows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

LEAST_SECONDS = 0.3
"""Time that a measurement takes at least, after its first, unmeasured step."""
LEAST_STEPS = 3


def seconds_per_step(step: Callable[[], object], device: torch.device) -> float:
    """Median time of a step.

    Args:
        step: one whole step, such as forward and backward pass.
        device: on which it works; its queue is waited for.
    """
    step()
    _wait(device)
    times: list[float] = []
    while len(times) < LEAST_STEPS or sum(times) < LEAST_SECONDS:
        begin = time.monotonic()
        step()
        _wait(device)
        times.append(time.monotonic() - begin)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
