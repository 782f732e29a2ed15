"""The pretend device itself: it refuses what CUDA refuses, and counts."""

from __future__ import annotations

import pytest
import torch
from device import basics
from device.child import FailedThereError, on_device


def test_it_mixes_as_cuda_does() -> None:
    assert on_device(basics.mixed) == ([], [])


def test_it_counts_kernels_and_waits() -> None:
    assert on_device(basics.counts) == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 1), (1, 1), (1, 0)]


def test_it_computes_what_a_cpu_computes() -> None:
    for found, expected in zip(on_device(basics.computed), basics.computed(torch.device("cpu")), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


def test_what_fails_there_fails_here() -> None:
    with pytest.raises(FailedThereError, match="ZeroDivisionError"):
        on_device(basics.fails)
