"""The pretend device itself: it refuses what CUDA refuses, and counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from device import basics
from device.child import FailedThereError, on_device

from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings


def test_it_mixes_as_cuda_does() -> None:
    assert on_device(basics.mixed) == ([], [])


def test_it_counts_kernels_and_waits() -> None:
    assert on_device(basics.counts) == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 1), (1, 1), (1, 0)]


def test_it_computes_what_a_cpu_computes() -> None:
    for found, expected in zip(on_device(basics.computed), basics.computed(torch.device("cpu")), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_public_steps_in_bfloat16_are_near_those_in_float32(tiny_settings: RapidSettings) -> None:
    exact = basics.public_steps(torch.device("cpu"), tiny_settings, False)
    for found in (
        basics.public_steps(torch.device("cpu"), tiny_settings, True),
        on_device(basics.public_steps, tiny_settings, True),
    ):
        for name, (loss, norm) in found.items():
            assert (loss, norm) == pytest.approx(exact[name], rel=0.1), name


def test_principal_components_are_fitted_and_decoded_there(tmp_path: Path) -> None:
    changes = ["kind=linear", "patch=4", "latent_channels=3", "decoder_noise=0.2"]
    settings = apply_overrides({"method": "rapid"}, [f"autoencoder.{change}" for change in changes])
    assert isinstance(settings, RapidSettings)
    found = on_device(basics.linear_autoencoder, settings, tmp_path)
    expected = basics.linear_autoencoder(torch.device("cpu"), settings, tmp_path)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_what_fails_there_fails_here() -> None:
    with pytest.raises(FailedThereError, match="ZeroDivisionError"):
        on_device(basics.fails)
