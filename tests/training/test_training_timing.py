"""The measured time of a step against steps whose time is known."""

from __future__ import annotations

import time

import pytest
import torch
from tests_support import whole
from torch import Tensor, nn

from rapid.config.sections import Training
from rapid.training import Checkpoint
from rapid.training.public import train
from rapid.training.timing import ENOUGH_SECONDS, LEAST_STEPS, seconds_per_step, seconds_per_training_step

CPU = torch.device("cpu")
SLEEP = 0.02


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_slow_first_step_does_not_count(first: float) -> None:
    taken = []

    def own(steps: int, checkpoint: Checkpoint) -> None:
        network = nn.Linear(1, 1)

        def loss(generator: torch.Generator) -> Tensor:
            time.sleep(SLEEP if taken else first)
            taken.append(generator.initial_seed())
            return network(torch.ones(2, 1)).sum()

        train("t", network, whole(loss), Training(steps=steps, batch_size=2, warmup_steps=0, ema_decay=0.9), checkpoint)

    found = seconds_per_training_step(own, CPU, least=0.1)
    # a busy machine may be slower, never faster
    assert SLEEP <= found < 10 * SLEEP
    assert LEAST_STEPS < len(taken) < 20


def test_a_program_that_disturbs_a_part_of_the_measurement_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 0.5 if now < 8 else 0.3

    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert seconds_per_step(step, CPU, least=20.0) == pytest.approx(0.3)
    assert 20 <= now < 22


def test_one_long_step_is_enough() -> None:
    taken = []

    def step() -> None:
        time.sleep(ENOUGH_SECONDS + 0.05 if taken else 0)
        taken.append(1)

    assert seconds_per_step(step, CPU) >= ENOUGH_SECONDS
    assert len(taken) == 2


def test_a_training_may_end_before_enough_is_measured() -> None:
    def own(steps: int, checkpoint: Checkpoint) -> None:
        network = nn.Linear(1, 1)
        settings = Training(steps=4, batch_size=2, warmup_steps=0, ema_decay=0.9)
        train("t", network, whole(lambda _: network(torch.ones(2, 1)).sum()), settings, checkpoint)
        checkpoint.remove()

    assert 0 < seconds_per_training_step(own, CPU, least=1000.0) < 1
