"""The randomness that privacy rests on: a stream cipher keyed by the operating system.

ChaCha20 (from `cryptography`) under a key of 32 bytes from `os.urandom` gives uniform 64-bit words. Gaussians come from
them by the Box-Muller transform in float64, rounded to float32. With 53-bit uniforms the largest value is 8.6; the tail
beyond has mass 1e-17. The key is never stored, so no noise can be drawn twice, not even by resuming a run.

`DeviceRandomness` is faster on a GPU; its docstring describes the trade-off.
"""

from __future__ import annotations

import math
import os
from typing import Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

NOISE_SOURCES = {
    "chacha20": "ChaCha20 keyed by the operating system (os.urandom), Gaussian by Box-Muller in float64",
    "device": "generator of the device (torch.randn), not cryptographic, seeded by the operating system (os.urandom)",
}
"""The choices of `private.noise_source`, in the words of the privacy statement."""
CHUNK = 1 << 18
"""Numbers generated at a time, so that intermediate results stay in the cache."""


class ByteStream(Protocol):
    """An endless stream of random bytes."""

    def __call__(self, count: int) -> bytes | bytearray:
        """Take the next `count` bytes."""


class SystemStream:
    """Cryptographic random bytes; a new key from the operating system for every call, so that no fork repeats them."""

    def __call__(self, count: int) -> bytearray:
        """Take `count` bytes, at most 256 GiB (the counter of ChaCha20)."""
        nonce = bytes(16)
        cipher = Cipher(algorithms.ChaCha20(os.urandom(32), nonce), None).encryptor()
        taken = bytearray(count)
        cipher.update_into(taken, taken)
        return taken


class Randomness:
    """Uniform and Gaussian numbers from a byte stream.

    Args:
        stream: source of bytes; anything but the default is for tests only.
    """

    source = "chacha20"

    def __init__(self, stream: ByteStream | None = None) -> None:
        self._stream = stream or SystemStream()

    def uniform(self, count: int) -> Tensor:
        """float64 (count,), multiples of 2^-53 in (0, 1]."""
        if count == 0:
            return torch.zeros(0, dtype=torch.float64)
        words = torch.frombuffer(bytearray(self._stream(8 * count)), dtype=torch.int64)
        bits = (words >> 11).bitwise_and_((1 << 53) - 1)
        return bits.double().add_(1).mul_(2.0**-53)

    def add_normal(self, target: Tensor, scale: float) -> None:
        """Add independent Gaussians of mean 0 and standard deviation `scale` to float32 (n,), in place."""
        for part in target.split(CHUNK):
            part.add_(self.normal(len(part)).to(part.device), alpha=scale)

    def normal(self, count: int) -> Tensor:
        """float32 (count,), standard normal, on the CPU."""
        half = (count + 1) // 2
        u = self.uniform(2 * half)
        radius = u[:half].log_().mul_(-2).sqrt_()
        angle = u[half:].mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), angle.sin_().mul_(radius)])[:count].float()


class DeviceRandomness(Randomness):
    """Gaussians from torch's own generator on the device of the target.

    For GPUs: their generator is Philox, seeded with 64 bits from `os.urandom`. It is not a cipher: an adversary who
    knows all images but one and sees every step might in principle recover its state. Privacy statements name the
    source. The CPU's generator keeps only 32 bits of its seed, which is too few. Poisson batches and the draws of
    losses still come from the stream cipher.
    """

    source = "device"

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def add_normal(self, target: Tensor, scale: float) -> None:
        """See `Randomness`."""
        generator = self._generators.get(target.device)
        if generator is None:
            generator = torch.Generator(target.device)
            generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
            self._generators[target.device] = generator
        target.add_(torch.randn(target.shape, generator=generator, device=target.device), alpha=scale)


def randomness_for(source: str) -> Randomness:
    """A new source by its name in `NOISE_SOURCES`."""
    return DeviceRandomness() if source == DeviceRandomness.source else Randomness()
