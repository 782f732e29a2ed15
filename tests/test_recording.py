"""Recordings on a CPU: what would be recorded is run again, on the same places; CUDA graphs need scripts/check-gpu."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests_support import traced
from torch import Tensor

from rapid.recording import MOST_DROPS, OFF, Recorder, Work, padded_rows, records

CPU = torch.device("cpu")


class Kernels:
    """Captures work as a graph of kernels would: the function is called once, and its operations are replayed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.captured = self.replayed = 0
        self._fails = fails

    def __call__(self, work: Work) -> Work:
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        operations = traced(work)

        def replay() -> Sequence[Tensor]:
            self.replayed += 1
            return operations()

        return replay


def doubled(x: Tensor, y: Tensor) -> list[Tensor]:
    return [2 * x + y, x.sum()]


def test_a_shape_is_recorded_when_it_comes_again_and_then_replayed() -> None:
    kernels = Kernels()
    recorder = Recorder(doubled, CPU, kernels)
    seen = []
    for rows in (3, 3, 5, 3, 5, 5):
        x, y = torch.randn(2, rows, 4)
        for found, wanted in zip(recorder(x, y), doubled(x, y), strict=True):
            assert torch.equal(found, wanted)
        seen.append((kernels.captured, kernels.replayed))
    assert seen == [(0, 0), (1, 1), (1, 1), (1, 2), (2, 3), (2, 4)]


def test_results_are_tensors_of_their_own() -> None:
    place = torch.zeros(2)

    def same_place(x: Tensor) -> list[Tensor]:
        return [place.copy_(x)]

    recorder = Recorder(same_place, CPU, Kernels())
    recorder(torch.ones(2))
    first, second = recorder(torch.ones(2))[0], recorder(torch.full((2,), 2.0))[0]
    assert first.tolist() == [1, 1]
    assert second.tolist() == [2, 2]


def test_dtypes_are_recorded_apart() -> None:
    kernels = Kernels()
    recorder = Recorder(lambda x: [x + 1], CPU, kernels)
    for dtype in (torch.float32, torch.int64, torch.float32, torch.int64):
        assert recorder(torch.ones(2, dtype=dtype))[0].dtype == dtype
    assert kernels.captured == 2


def test_what_cannot_be_recorded_is_called() -> None:
    recorder = Recorder(doubled, CPU, Kernels(fails=True))
    for step in range(4):
        x, y = torch.randn(2, 3, 4)
        with pytest.warns(UserWarning, match="not recorded.*capturing") if step == 1 else nullcontext():
            assert torch.equal(recorder(x, y)[0], 2 * x + y)
    assert recorder.recordings == 0


def test_sizes_of_private_batches_are_not_told() -> None:
    def full(work: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1234.00 MiB")

    recorder = Recorder(doubled, CPU, full)
    x, y = torch.randn(2, 3, 4)
    recorder(x, y)
    with pytest.warns(UserWarning, match="too little memory on the device$"):
        assert torch.equal(recorder(x, y)[0], 2 * x + y)


def test_recordings_make_room() -> None:
    """A batch of a new size, for which there is too little memory beside them, is tried again without them."""
    full = True

    def hungry(x: Tensor) -> list[Tensor]:
        if len(x) == 5 and full and recorder.recordings:
            raise torch.OutOfMemoryError("out of memory")
        return [x + 1]

    kernels = Kernels()
    recorder = Recorder(hungry, CPU, kernels)
    for _ in range(8):
        for rows in (3, 3, 3, 5, 5):
            assert torch.equal(recorder(torch.ones(rows))[0], torch.full((rows,), 2.0))
    # what comes in turn must not be recorded for ever
    assert kernels.captured <= 2 * MOST_DROPS + 2
    with pytest.raises(torch.OutOfMemoryError):
        Recorder(too_large, CPU, Kernels())(torch.ones(1))


def too_large(x: Tensor) -> list[Tensor]:
    raise torch.OutOfMemoryError("out of memory")


def test_numbers_of_the_host_stay_as_they_were() -> None:
    """That is how recordings are: what they are made of must not depend on such numbers."""
    factor = 2.0
    recorder = Recorder(lambda x: [factor * x], CPU, Kernels())
    for _ in range(2):
        recorder(torch.ones(1))
    factor = 3.0
    assert recorder(torch.ones(1))[0].tolist() == [2]


def test_an_error_of_the_function_is_not_hidden() -> None:
    def refuses(x: Tensor) -> list[Tensor]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Recorder(refuses, CPU, Kernels())(torch.ones(1))


def test_nothing_is_recorded_elsewhere() -> None:
    kernels = Kernels()
    recorder = Recorder(doubled, torch.device("meta"), kernels)
    for _ in range(3):
        recorder(torch.ones(2), torch.ones(2))
    assert kernels.captured == 0


def test_only_cuda_devices_record_unless_the_environment_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFF, raising=False)
    assert records(torch.device("cuda"))
    assert not records(CPU)
    monkeypatch.setenv(OFF, "0")
    assert not records(torch.device("cuda"))


@given(st.integers(1, 5000))
def test_few_sizes_and_little_padding(count: int) -> None:
    padded = padded_rows(count)
    assert count <= padded <= max(count, 1.25 * count)
    assert padded_rows(padded) == padded


def test_the_sizes_are_few() -> None:
    assert len({padded_rows(count) for count in range(1, 1025)}) <= 4 * 10 + 1
