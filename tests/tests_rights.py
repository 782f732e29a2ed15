"""Files that may not be read: root is let in everywhere, unless the kernel is told otherwise."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VERSION = 0x20080522
"""Of the two structures, in Linux since 2.6.26."""
PASS_BY = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which permissions do not count."""


@contextmanager
def as_anyone() -> Iterator[None]:
    """Permissions count within the block, for this thread and for threads and processes that it starts."""
    if not sys.platform.startswith("linux"):
        pytest.skip("capabilities are those of Linux")
    header, before, within = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, before) == 0
    # effective, permitted, inheritable of the first 32, then of the others
    within[:] = [before[0] & ~PASS_BY, *before[1:]]
    assert libc.capset(header, within) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def locked(path: Path) -> Path:
    """Take all rights to a file or folder away, also from its owner."""
    path.chmod(0)
    with as_anyone():
        assert not os.access(path, os.R_OK, effective_ids=True)
    return path
