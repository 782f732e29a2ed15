"""The randomness that privacy rests on: a stream cipher keyed by the operating system.

ChaCha20 (from `cryptography`) under a key of 32 bytes from `os.urandom` gives uniform 64-bit words, from which
`rapid.dp.noise` makes noise. The key is never stored, so no noise can be drawn twice, not even by resuming a run.

`DeviceRandomness` is faster on a GPU; its docstring describes the trade-off.
"""

from __future__ import annotations

import math
import os
from typing import Protocol

import torch
from torch import Tensor

from rapid.dp.cipher import KEY_BYTES, KeyStream
from rapid.dp.noise import add_noise, round_to_grid

NOISE_SOURCES = {
    "chacha20": "ChaCha20 keyed by the operating system (os.urandom), sums with noise rounded exactly to a public grid",
    "device": "generator of the device (torch.randn), not cryptographic, seeded by the operating system (os.urandom); "
    "sums with noise are rounded to a public grid",
}
"""The choices of `private.noise_source`, in the words of the privacy statement."""


class ByteStream(Protocol):
    """An endless stream of random bytes."""

    def __call__(self, count: int) -> bytes | bytearray:
        """Take the next `count` bytes."""


class SystemStream:
    """Cryptographic random bytes; a new key from the operating system for every call, so that no fork repeats them."""

    def __call__(self, count: int) -> bytearray:
        """Take `count` bytes, at most 256 GiB (the counter of ChaCha20)."""
        return KeyStream(os.urandom(KEY_BYTES)).read(0, count)


class Randomness:
    """Uniform and Gaussian numbers, and noise, from a byte stream.

    Args:
        stream: source of bytes; anything but the default is for tests only.
    """

    source = "chacha20"

    def __init__(self, stream: ByteStream | None = None) -> None:
        self._stream = stream or SystemStream()

    def words(self, count: int) -> Tensor:
        """int64 (count,), all bits uniform."""
        if count == 0:
            return torch.zeros(0, dtype=torch.int64)
        return torch.frombuffer(bytearray(self._stream(8 * count)), dtype=torch.int64)

    def uniform(self, count: int) -> Tensor:
        """float64 (count,), multiples of 2^-53 in (0, 1]."""
        bits = (self.words(count) >> 11).bitwise_and_((1 << 53) - 1)
        return bits.double().add_(1).mul_(2.0**-53)

    def add_noise(self, total: Tensor, stddev: float) -> None:
        """Add Gaussian noise to float64 (n,), in place, and round to the grid; see `rapid.dp.noise.add_noise`.

        The byte stream gives the key of a stream cipher, of which any part can be computed at once, on any device.
        """
        add_noise(total, stddev, KeyStream(self._stream(KEY_BYTES)), self.words)

    def normal(self, count: int) -> Tensor:
        """float32 (count,), standard normal, on the CPU: for draws within losses, not for noise."""
        half = (count + 1) // 2
        u = self.uniform(2 * half)
        radius = u[:half].log_().mul_(-2).sqrt_()
        angle = u[half:].mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), angle.sin_().mul_(radius)])[:count].float()


class DeviceRandomness(Randomness):
    """Noise from torch's own generator on the device of the sum.

    For GPUs: their generator is Philox, seeded with 64 bits from `os.urandom`. It is not a cipher: an adversary who
    knows all images but one and sees every step might in principle recover its state. Its Gaussians are float64 with
    gaps of their own; the grid hides most of them, not provably all. Privacy statements name the source. The CPU's
    generator keeps only 32 bits of its seed, which is too few. Poisson batches and the draws of losses still come from
    the stream cipher.
    """

    source = "device"

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def add_noise(self, total: Tensor, stddev: float) -> None:
        """See `Randomness`."""
        generator = self._generators.get(total.device)
        if generator is None:
            generator = torch.Generator(total.device)
            generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
            self._generators[total.device] = generator
        noise = torch.randn(total.shape, dtype=total.dtype, generator=generator, device=total.device)
        round_to_grid(total.add_(noise, alpha=stddev), stddev)


def randomness_for(source: str) -> Randomness:
    """A new source by its name in `NOISE_SOURCES`."""
    return DeviceRandomness() if source == DeviceRandomness.source else Randomness()
