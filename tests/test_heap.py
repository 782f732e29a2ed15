"""What the kernel says about the memory of tensors after `prepare_heap`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# smaps: flags of the mapping that holds the tensor (hg: huge pages are wanted), and the page faults of one more tensor
SCRIPT = """
import resource
import torch
from rapid.heap import prepare_heap

prepare_heap()
tensor = torch.ones(16 << 20)
inside = flags = None
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        start, end = (int(number, 16) for number in first.split("-"))
        inside = start <= tensor.data_ptr() + tensor.nbytes // 2 < end
    elif inside and first == "VmFlags:":
        flags = line.split()[1:]
# an aligned block does not fit where one like it was while small pieces beside it are kept for small blocks
for _ in range(20):
    del tensor
    tensor = torch.ones(16 << 20)
del tensor
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tensor = torch.ones(16 << 20)
print("hg" in flags, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def measured(script: str = SCRIPT, **env: str) -> tuple[bool, int]:
    """Whether huge pages are wanted for a tensor of 64 MiB, and page faults when it is freed and made again."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", script]
    made = subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    wanted, faults = made.stdout.split()
    return wanted == "True", int(faults)


@pytest.mark.parametrize("env", [{}, {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}])
def test_tensors_have_huge_pages_and_freed_memory_is_kept(env: dict[str, str]) -> None:
    """Whether the user's environment keeps freed memory or `prepare_heap` does: 64 MiB are 16,384 small pages."""
    wanted, faults = measured(**env)
    assert wanted
    assert faults < 100


def test_the_environment_decides() -> None:
    """Tunables of glibc and MALLOC_MMAP_MAX_ are left as they are."""
    wanted, faults = measured(GLIBC_TUNABLES="glibc.malloc.hugetlb=0", MALLOC_MMAP_MAX_="1000")
    assert not wanted
    assert faults > 10_000


@pytest.mark.parametrize("mebibytes", [6 << 10, 8400, 8700, 9300])
def test_without_room_nothing_happens(mebibytes: int) -> None:
    """With `ulimit -v` below the heap that would have huge pages, or a little above, commands work as without them."""
    limit = f"resource.setrlimit(resource.RLIMIT_AS, ({mebibytes} << 20, {mebibytes} << 20))\nprepare_heap()\n"
    wanted, faults = measured(SCRIPT.replace("prepare_heap()\n", limit))
    assert not wanted
    assert faults < 100
