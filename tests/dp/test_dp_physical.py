"""The physical batch that fits into memory: by measurements on black images, and without any private row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rapid.config.sections import DpSgdSettings
from rapid.dp import DpSgdSpec, Execution, PrivateTensor
from rapid.dp.physical import (
    LARGEST_ON_CPU,
    SHARE,
    available_bytes,
    fitting_batch,
    measured_physical_batch,
    peak_bytes,
)

CPU = torch.device("cpu")


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(0, 10**8), st.integers(1, 64), st.integers(1, 5000))
def test_the_largest_power_of_two_that_fits(fixed: int, each: int, free: int, draws: int, largest: int) -> None:
    found = fitting_batch(lambda examples: fixed + examples * each, free, draws, largest)
    assert found.bit_count() == 1
    assert found <= largest

    def left(size: int) -> float:
        return SHARE * free - fixed - size / draws * each

    assert found == 1 or left(found) >= -1e-3
    assert 2 * found > largest or left(2 * found) <= 1e-3


def test_a_measurement_that_makes_no_sense_gives_something() -> None:
    """As when the second one takes less than the first."""
    assert fitting_batch(lambda examples: 1000 // examples, 10**6, 1, 64) == 64


def test_peak_memory_is_that_of_the_tensors() -> None:
    mebi = 1 << 20

    def run() -> None:
        held = torch.zeros(3 * mebi, dtype=torch.uint8)
        torch.zeros(5 * mebi, dtype=torch.uint8)
        held += torch.zeros(2 * mebi, dtype=torch.uint8)[:1]

    assert 8 * mebi <= peak_bytes(run, CPU) < 8.1 * mebi


def test_there_is_memory() -> None:
    assert available_bytes(CPU) > 1 << 26


def test_only_black_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is large enough that little memory holds few examples."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 1))
    data = PrivateTensor(torch.full((20, 8, 8), 255, dtype=torch.uint8))
    seen: list[Tensor] = []

    def losses(rows: Tensor) -> Tensor:
        seen.append(rows)
        return network(rows.float()).flatten()

    spec = DpSgdSpec(name="n", dataset_size=20, expected_batch=20, steps=1, clip_norm=1.0, multiplicity=2)
    assert measured_physical_batch(network, losses, [data], spec) == LARGEST_ON_CPU
    assert [len(rows) for rows in seen] == [2, 2, 8]
    assert not any(rows.any() for rows in seen)
    assert all(parameter.grad is None for parameter in network.parameters())
    monkeypatch.setattr("rapid.dp.physical.available_bytes", lambda device: 1 << 22)
    assert 1 <= measured_physical_batch(network, losses, [data], spec) < 64


def test_auto_is_a_setting() -> None:
    chosen = DpSgdSettings.model_validate({"physical_batch": "auto"})
    assert Execution.of(chosen).physical_batch is None
    assert Execution.of(DpSgdSettings(physical_batch=7)).physical_batch == 7
    assert (chosen.draws_at_a_time, DpSgdSettings(physical_batch=7).draws_at_a_time) == (256, 7)
    for wrong in (0, -1, "many", 1.5):
        with pytest.raises(ValueError, match="physical_batch"):
            DpSgdSettings.model_validate({"physical_batch": wrong})
