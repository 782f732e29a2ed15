"""Several ranks: as processes that are started as torchrun does it, by torchrun itself, and as threads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from subprocess import CompletedProcess
from typing import Any, TypeVar

import torch
from tests_process import Program
from torch import Tensor

from rapid.ranks import Ranks

Result = TypeVar("Result")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def two_ranks(*arguments: object) -> list[Program]:
    """Two processes of `rapid` that are started as torchrun does it; for tests that do not need its launcher."""
    place = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [Program(*arguments, env=place | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def ends_of(programs: list[Program]) -> list[CompletedProcess[str]]:
    """Wait for their ends."""
    told = [program.communicate(300) for program in programs]
    return [
        CompletedProcess(program.arguments, program.wait(), *texts)
        for program, texts in zip(programs, told, strict=True)
    ]


def torchrun(*arguments: object) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    return subprocess.Popen(
        [*launcher, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of one process and exchange values through a list."""

    table: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def all_gather(self, value: Result) -> list[Result]:
        self.table[self.rank] = value
        self.barrier.wait(60)
        found = list(self.table)
        self.barrier.wait(60)
        return found

    def gather(self, value: Result) -> list[Result]:
        found = self.all_gather(value)
        return found if self.first else []

    def broadcast(self, value: Result) -> Result:
        return self.all_gather(value)[0]

    def all_reduce(self, values: Tensor) -> None:
        values.copy_(torch.stack(self.all_gather(values.clone())).sum(0))


def on_threads(count: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """What `work` returns on each of `count` ranks."""
    table: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(rank: int) -> Result:
        try:
            return work(ThreadRanks(rank, count, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
