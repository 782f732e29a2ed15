"""What the fixtures and the tests share."""

from __future__ import annotations

TINY = [
    "autoencoder.channels=8",
    "autoencoder.multipliers=[1,1,1]",
    "autoencoder.training.steps=3",
    "autoencoder.training.batch_size=8",
    "denoiser.channels=8",
    "denoiser.heads=2",
    "denoiser.training.steps=3",
    "denoiser.training.batch_size=8",
    "encoder.channels=8",
    "encoder.features=8",
    "encoder.training.steps=2",
    "encoder.training.batch_size=8",
    "private.expected_batch=20",
    "private.steps=3",
    "private.physical_batch=8",
]
"""Overrides of the preset `demo`: the smallest networks and a few steps."""
