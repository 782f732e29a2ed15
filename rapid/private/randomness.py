"""The randomness that privacy rests on: a stream cipher keyed by the operating system.

ChaCha20 (from `cryptography`) under a key of 32 bytes from `os.urandom` gives uniform 64-bit words. Gaussians come from
them by the Box-Muller transform in float64, rounded to float32. With 53-bit uniforms the largest value is 8.6; the tail
beyond has mass 1e-17. The key is never stored, so no noise can be drawn twice, not even by resuming a run.
"""

from __future__ import annotations

import math
import os
from typing import Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

NOISE_SOURCE = "ChaCha20 keyed by the operating system (os.urandom), Gaussian by Box-Muller in float64"


class ByteStream(Protocol):
    """An endless stream of random bytes."""

    def __call__(self, count: int) -> bytes:
        """Take the next `count` bytes."""


class SystemStream:
    """Cryptographic random bytes; a new key from the operating system for every call."""

    def __call__(self, count: int) -> bytes:
        """Take `count` bytes, at most 256 GiB (the counter of ChaCha20)."""
        nonce = bytes(16)
        return Cipher(algorithms.ChaCha20(os.urandom(32), nonce), None).encryptor().update(bytes(count))


class Randomness:
    """Uniform and Gaussian numbers from a byte stream.

    Args:
        stream: source of bytes; anything but the default is for tests only.
    """

    def __init__(self, stream: ByteStream | None = None) -> None:
        self._stream = stream or SystemStream()

    def uniform(self, count: int) -> Tensor:
        """float64 (count,), multiples of 2^-53 in (0, 1]."""
        if count == 0:
            return torch.zeros(0, dtype=torch.float64)
        words = torch.frombuffer(bytearray(self._stream(8 * count)), dtype=torch.int64)
        bits = (words >> 11) & ((1 << 53) - 1)
        return (bits.double() + 1) * 2.0**-53

    def normal(self, count: int) -> Tensor:
        """float32 (count,), standard normal."""
        half = (count + 1) // 2
        u = self.uniform(2 * half)
        radius = u[:half].log_().mul_(-2).sqrt_()
        angle = u[half:].mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].float()
