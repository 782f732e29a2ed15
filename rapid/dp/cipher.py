"""The key stream of ChaCha20 (RFC 8439), from any of its blocks on.

On the CPU it is that of `cryptography`; on other devices the same bits come from a kernel of our own or, where that
cannot be compiled, from integer operations on tensors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

KEY_BYTES = 32
BLOCK_BYTES = 64
WORDS = BLOCK_BYTES // 8
"""64-bit words in a block of the key stream."""
LEAST_SHARE = 1 << 20
"""Bytes that are worth a thread."""
BLOCKS = 1 << 32
"""Blocks that the counter can tell apart."""
_CPU = torch.device("cpu")


class KeyStream:
    """The key stream of one key, with a nonce of zeros, as 64-bit words.

    Args:
        key: 32 secret bytes, for this stream alone.
    """

    def __init__(self, key: bytes | bytearray) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = bytes(key)

    def words(self, first: int, count: int, device: torch.device = _CPU) -> Tensor:
        """The same words whatever the device.

        Args:
            first: number of the first word, a multiple of `WORDS`.
            count: of words.
            device: where they are computed.

        Returns:
            int64 (count,).

        Raises:
            ValueError: a word within a block, or behind the last block.
        """
        begin, blocks = first // WORDS, -(-count // WORDS)
        if first % WORDS or begin + blocks > BLOCKS:
            raise ValueError(f"the key stream has no words {first} to {first + count}, from the beginning of a block")
        if count == 0:
            return torch.zeros(0, dtype=torch.int64, device=device)
        if device.type != "cpu":
            kernel = compiled_kernel(device)
            found = (
                key_stream_blocks(self._key, begin, blocks, device)
                if kernel is None
                else _compiled_blocks(kernel, self._key, begin, blocks, device)
            )
            return found.view(torch.int64).flatten()[:count]
        return torch.frombuffer(self.read(begin, 8 * count), dtype=torch.int64)

    def read(self, block: int, count: int) -> bytearray:
        """The stream from the beginning of a block on, at most up to the last block, by all cores if it is long.

        Args:
            block: number of the block.
            count: of bytes.
        """
        taken = bytearray(count)
        threads = min(torch.get_num_threads(), count // LEAST_SHARE)
        if threads <= 1:
            self._fill(block, taken)
            return taken
        share = -(-count // (BLOCK_BYTES * threads))
        whole = memoryview(taken)
        starts = range(0, -(-count // BLOCK_BYTES), share)
        parts = [whole[start * BLOCK_BYTES : (start + share) * BLOCK_BYTES] for start in starts]
        # the library releases the interpreter's lock
        with ThreadPoolExecutor(threads, "cipher") as pool:
            list(pool.map(self._fill, (block + start for start in starts), parts))
        return taken

    def _fill(self, block: int, zeros: bytearray | memoryview) -> None:
        nonce = struct.pack("<4I", block, 0, 0, 0)
        Cipher(algorithms.ChaCha20(self._key, nonce), None).encryptor().update_into(zeros, zeros)


KERNEL = """
template <typename T> T turned(T x, int bits) { return (x << bits) | (x >> (32 - bits)); }

template <typename T> void quarter(T& a, T& b, T& c, T& d) {
    a += b; d = turned(d ^ a, 16);
    c += d; b = turned(b ^ c, 12);
    a += b; d = turned(d ^ a, 8);
    c += d; b = turned(b ^ c, 7);
}

template <typename T> void key_stream(T counter, T k0, T k1, T k2, T k3,
                                      T& w0, T& w1, T& w2, T& w3, T& w4, T& w5, T& w6, T& w7) {
    unsigned int start[16] = {
        0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u,
        (unsigned int)k0, (unsigned int)(k0 >> 32), (unsigned int)k1, (unsigned int)(k1 >> 32),
        (unsigned int)k2, (unsigned int)(k2 >> 32), (unsigned int)k3, (unsigned int)(k3 >> 32),
        (unsigned int)counter, 0u, 0u, 0u};
    unsigned int x[16];
    for (int i = 0; i < 16; ++i) x[i] = start[i];
    for (int i = 0; i < 10; ++i) {
        quarter(x[0], x[4], x[8], x[12]);
        quarter(x[1], x[5], x[9], x[13]);
        quarter(x[2], x[6], x[10], x[14]);
        quarter(x[3], x[7], x[11], x[15]);
        quarter(x[0], x[5], x[10], x[15]);
        quarter(x[1], x[6], x[11], x[12]);
        quarter(x[2], x[7], x[8], x[13]);
        quarter(x[3], x[4], x[9], x[14]);
    }
    for (int i = 0; i < 16; ++i) x[i] += start[i];
    T* words[8] = {&w0, &w1, &w2, &w3, &w4, &w5, &w6, &w7};
    for (int i = 0; i < 8; ++i)
        *words[i] = (T)((unsigned long long)x[2 * i] | ((unsigned long long)x[2 * i + 1] << 32));
}
"""
"""A block of ChaCha20 (RFC 8439, section 2.3) as 64-bit words, for torch's jiterator, which compiles it by NVRTC."""


@cache
def compiled_kernel(device: torch.device) -> Callable[..., tuple[Tensor, ...]] | None:
    """The compiled kernel; None on devices that are not CUDA, or where it cannot be compiled or gives other bits."""
    if device.type != "cuda":
        return None
    try:
        kernel: Callable[..., tuple[Tensor, ...]] = torch.cuda.jiterator._create_multi_output_jit_fn(
            KERNEL, num_outputs=WORDS, k0=0, k1=0, k2=0, k3=0
        )
        key = os.urandom(KEY_BYTES)
        same = all(
            torch.equal(_compiled_blocks(kernel, key, first, 3, device), key_stream_blocks(key, first, 3, device))
            for first in (0, BLOCKS - 3)
        )
        return kernel if same else None
    except (RuntimeError, AttributeError, TypeError):
        return None


def _compiled_blocks(
    kernel: Callable[..., tuple[Tensor, ...]], key: bytes, first: int, count: int, device: torch.device
) -> Tensor:
    """As `key_stream_blocks`, by the kernel."""
    counters = torch.arange(first, first + count, dtype=torch.int64, device=device)
    words = dict(zip(("k0", "k1", "k2", "k3"), struct.unpack("<4q", key), strict=True))
    return torch.stack(kernel(counters, **words), 1).view(torch.int32)


def key_stream_blocks(key: bytes, first: int, count: int, device: torch.device) -> Tensor:
    """Blocks of ChaCha20's key stream, with a nonce of zeros, by integer operations on tensors (RFC 8439, section 2.3).

    The four quarter rounds of a column or diagonal round are one operation on four rows of the state.

    Args:
        key: 32 bytes.
        first: counter of the first block.
        count: of blocks.
        device: of the result.

    Returns:
        int32 (count, 16).
    """
    constants = torch.tensor(struct.unpack("<12i", b"expand 32-byte k" + key), dtype=torch.int32, device=device)
    start = torch.zeros(16, count, dtype=torch.int32, device=device)
    start[:12] = constants[:, None]
    start[12] = torch.arange(first, first + count, dtype=torch.int64, device=device)
    a, b, c, d = start.clone().view(4, 4, count).unbind()
    for _ in range(10):
        a, b, c, d = _round(a, b, c, d)
        # the second round is of diagonals: each row moves by its number, and back
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _round(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(start).T.contiguous()


def _round(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four quarter rounds, one a column, of int32 (4, n) each; the arguments are changed."""
    a += b
    d = _rotated(d.bitwise_xor_(a), 16)
    c += d
    b = _rotated(b.bitwise_xor_(c), 12)
    a += b
    d = _rotated(d.bitwise_xor_(a), 8)
    c += d
    b = _rotated(b.bitwise_xor_(c), 7)
    return a, b, c, d


def _rotated(x: Tensor, bits: int) -> Tensor:
    """int32 rotated to the left."""
    # the shift to the right repeats the sign; the lower part has no bit in common with x * 2^bits, so a sum is an "or"
    low = (x >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    return low.add_(x, alpha=1 << bits)
