"""The key stream of ChaCha20 (RFC 8439), from any of its blocks on.

On the CPU it is that of `cryptography`; on other devices the same bits come from integer operations on tensors.
"""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

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
            return key_stream_blocks(self._key, begin, blocks, device).view(torch.int64).flatten()[:count]
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
