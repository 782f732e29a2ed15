"""Upper bounds for what a step asks of a device: a step that needs more kernels or waits has become slower on GPUs.

They are what a step takes today. Lower one when you make a step faster.
"""

from __future__ import annotations

from pathlib import Path

from device import counted
from device.child import on_device

from rapid.methods.rapid.settings import RapidSettings


def within(found: counted.PerStep, *, kernels: int, waits: int) -> None:
    assert found.kernels <= kernels, found.told
    assert found.waits <= waits, found.told


def test_a_public_step(tiny_settings: RapidSettings) -> None:
    within(on_device(counted.public, tiny_settings), kernels=529, waits=4)


def test_a_private_step(public_bundle: Path, digits: Path, tiny_settings: RapidSettings) -> None:
    within(on_device(counted.private, public_bundle, digits, tiny_settings), kernels=1074, waits=11)


def test_a_sampling_step(private_bundle: Path) -> None:
    """Many rows take few kernels more than one, and no more waits."""
    few, many = (on_device(counted.sampling, private_bundle, rows) for rows in (1, 16))
    # diffusers 0.35 takes two kernels more than 0.42
    within(few, kernels=163, waits=2)
    within(many, kernels=187, waits=2)
