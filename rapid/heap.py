"""The C library's heap, where a CPU keeps tensors. Without glibc these functions do nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_TOP_PAD = 1 << 30
"""Bytes by which the heap grows at a time, at least."""
_HUGE_BYTES = 8 << 30
"""How much of the heap has huge pages; more than that is as without them. Only what is used becomes memory, but where
the system promises no more memory than it has (vm.overcommit_memory=2), all of it is promised."""


def prepare_heap() -> None:
    """Make memory cheap for work that allocates the same large blocks in every step, as training on a CPU does."""
    _keep_freed_memory()
    _use_huge_pages()


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system.

    By default glibc maps fresh memory for each large block, and the kernel must zero it; that takes longer than the
    arithmetic. Setting MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ in the environment has the same
    effect; if MALLOC_MMAP_MAX_ is set, the environment decides.
    """
    library = _glibc()
    if library is None or "MALLOC_MMAP_MAX_" in os.environ:
        return
    library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, -1)
    library.mallopt(_M_TOP_PAD, _TOP_PAD)
    # one arena: threads reuse each other's freed blocks
    library.mallopt(_M_ARENA_MAX, 1)


def _use_huge_pages() -> None:
    """Ask the kernel for huge pages (2 MiB, not 4 KiB) in the heap.

    A virtual machine translates addresses twice, so with small pages a step can take twice as long. Setting
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment has the same effect; if it names hugetlb, the environment
    decides. A kernel without transparent huge pages, or one that never uses them, ignores it. Without room for
    _HUGE_BYTES of addresses, as with `ulimit -v`, nothing is asked.
    """
    library = _glibc()
    if library is None or "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        # after a malloc that fails, glibc no longer keeps freed memory; it asks for _TOP_PAD more
        mmap.mmap(-1, _HUGE_BYTES + 2 * _TOP_PAD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # glibc extends the heap for the block, and keeps the extension when the block is freed
    block = library.malloc(_HUGE_BYTES)
    if block is None:
        return
    start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    library.madvise(start, block + _HUGE_BYTES - start, mmap.MADV_HUGEPAGE)
    library.free(block)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None
