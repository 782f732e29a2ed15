"""ChaCha20 by tensor operations, against RFC 8439 and the library."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.dp.cipher import BLOCKS, KERNEL, LEAST_SHARE, KeyStream, key_stream_blocks

CPU = torch.device("cpu")
VECTORS = (
    (bytes(32), 0, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"),
    (bytes(32), 1, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"),
    (bytes(31) + b"\x01", 1, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"),
    (b"\x00\xff" + bytes(30), 2, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"),
)
"""Key, counter and the beginning of the key stream: test vectors 1 to 4 of RFC 8439, appendix A.1."""


def library(key: bytes, first: int, blocks: int) -> bytes:
    """Blocks of the key stream by `cryptography`, from the first on."""
    cipher = Cipher(algorithms.ChaCha20(key, first.to_bytes(4, "little") + bytes(12)), None).encryptor()
    return cipher.update(bytes(64 * blocks))


def by_tensors(key: bytes, first: int, blocks: int) -> bytes:
    """The same by `key_stream_blocks`."""
    return key_stream_blocks(key, first, blocks, CPU).numpy().astype("<i4").tobytes()


@pytest.mark.parametrize(("key", "counter", "expected"), VECTORS)
def test_vectors_of_the_rfc(key: bytes, counter: int, expected: str) -> None:
    assert by_tensors(key, counter, 1)[:32].hex() == expected
    assert KeyStream(key).words(8 * counter, 4).numpy().tobytes().hex() == expected


@settings(max_examples=30, deadline=None)
@given(
    st.binary(min_size=32, max_size=32),
    st.one_of(st.integers(0, 1000), st.integers((1 << 31) - 40, 1 << 31), st.just(BLOCKS - 40)),
    st.integers(1, 40),
)
def test_tensors_and_library_give_the_same_bits(key: bytes, first: int, blocks: int) -> None:
    """Also where the counter is beyond the largest int32."""
    expected = library(key, first, blocks)
    assert by_tensors(key, first, blocks) == expected
    assert KeyStream(key).words(8 * first, 8 * blocks).numpy().tobytes() == expected
    assert bytes(KeyStream(key).read(first, 64 * blocks)) == expected


def test_a_stream_in_parts_is_the_stream() -> None:
    stream = KeyStream(bytes(range(32)))
    whole = stream.words(0, 1003)
    assert torch.equal(torch.cat([stream.words(0, 400), stream.words(400, 603)]), whole)
    assert stream.words(16, 0).shape == (0,)
    assert len(whole.unique()) == 1003


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("count", [2 * LEAST_SHARE, 4 * LEAST_SHARE + 77])
def test_threads_share_a_long_stream(threads: int, count: int) -> None:
    stream, before = KeyStream(bytes(range(32))), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        shared = stream.read(5, count)
        torch.set_num_threads(1)
        assert shared == stream.read(5, count)
    finally:
        torch.set_num_threads(before)


def test_what_is_no_part_of_a_stream_is_refused() -> None:
    for first, count in ((3, 8), (8 * BLOCKS, 1), (8 * (BLOCKS - 1), 9)):
        with pytest.raises(ValueError, match="no words"):
            KeyStream(bytes(32)).words(first, count)
    with pytest.raises(ValueError, match="32 bytes"):
        KeyStream(bytes(31))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel of GPUs, compiled for this processor."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(
        f"#include <cstdio>\n#include <cstdlib>\n{KERNEL}\n"
        "int main(int, char** given) {\n"
        "    long long a[5], w[8];\n"
        "    for (int i = 0; i < 5; ++i) a[i] = strtoll(given[i + 1], nullptr, 10);\n"
        "    key_stream<long long>(a[0], a[1], a[2], a[3], a[4], w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);\n"
        '    for (long long word : w) printf("%lld\\n", word);\n'
        "}\n"
    )
    run = [compiler, "-std=c++17", "-Wall", "-Werror", "-o", "kernel", "kernel.cpp"]
    subprocess.run(run, cwd=folder, check=True, timeout=60)
    return folder / "kernel"


@pytest.mark.parametrize("block", [0, 1, 12_345, (1 << 31) - 1, 1 << 31, BLOCKS - 1])
def test_the_kernel_of_gpus_has_the_bits_of_the_library(kernel: Path, block: int) -> None:
    for _ in range(5):
        key = os.urandom(32)
        words = [str(word) for word in struct.unpack("<4q", key)]
        told = subprocess.run([kernel, str(block), *words], capture_output=True, text=True, check=True, timeout=60)
        expected = np.frombuffer(KeyStream(key).read(block, 64), np.int64)
        assert [int(line) for line in told.stdout.split()] == expected.tolist()
