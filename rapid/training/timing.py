"""Measured time of a training step, from which the number of steps that fit into some minutes follows."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rapid.progress import hidden
from rapid.training.checkpoint import Checkpoint

LEAST_SECONDS = 0.3
"""Time that a measurement takes at least, after its first, unmeasured step."""
LEAST_STEPS = 3
ENOUGH_SECONDS = 2.0
"""Time after which fewer steps are enough: long ones differ less from one another."""
PLANNED_STEPS = 1000
"""Of a training that is measured, which ends before."""


def seconds_per_step(step: Callable[[], object], device: torch.device, least: float = LEAST_SECONDS) -> float:
    """Median time of a step.

    Args:
        step: one whole step, such as forward and backward pass.
        device: on which it works; its queue is waited for.
        least: seconds to measure, after the first step, which is not measured. In more of them, a program that
            disturbs a part does not change the median.
    """
    step()
    _wait(device)
    times: list[float] = []
    while not _enough(times, least):
        begin = time.monotonic()
        step()
        _wait(device)
        times.append(time.monotonic() - begin)
    return statistics.median(times)


def seconds_per_training_step(
    train: Callable[[int, Checkpoint], None], device: torch.device, least: float = LEAST_SECONDS
) -> float:
    """Median time of a step of a whole training, with its draws, optimiser and average.

    Args:
        train: trains for so many steps by `Trainer.run` with this checkpoint; it is ended once enough is measured.
        device: on which it works; its queue is waited for.
        least: seconds to measure, after the first step, which is not measured.
    """
    clock = _Clock(device, least)
    with hidden(), contextlib.suppress(_Measured):
        train(PLANNED_STEPS, clock)
    return statistics.median(clock.times)


class _Measured(Exception):
    """Ends a training that is measured."""


class _Clock(Checkpoint):
    """Saves nothing: takes the time between two steps instead, and ends the training after `least` seconds."""

    def __init__(self, device: torch.device, least: float) -> None:
        super().__init__(Path())
        self.times: list[float] = []
        self._device = device
        self._least = least
        self._begin: float | None = None

    def load(self) -> None:
        return None

    def save(self, state: dict[str, Any]) -> None:
        pass

    def remove(self) -> None:
        pass

    def save_if_due(self, state: Callable[[], dict[str, Any]]) -> None:
        _wait(self._device)
        now = time.monotonic()
        if self._begin is not None:
            self.times.append(now - self._begin)
        self._begin = now
        if _enough(self.times, self._least):
            raise _Measured


def _enough(times: Sequence[float], least: float) -> bool:
    taken = sum(times)
    return taken >= least and (len(times) >= LEAST_STEPS or taken >= ENOUGH_SECONDS)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
