"""What a process needs before it computes: device, threads, memory allocator, signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import torch

from rapid.errors import InputError

Network = TypeVar("Network", bound=torch.nn.Module)
# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system; does nothing elsewhere.

    Training on the CPU allocates the same large blocks in every step. With glibc's defaults each is fresh memory that
    the kernel must clear, which costs more than the arithmetic. The same as MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_
    and MALLOC_TOP_PAD_ in the environment, which take precedence because they were read at start.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_MAX_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_TOP_PAD, 1 << 30)
        # blocks freed by one thread then serve the others
        mallopt(_M_ARENA_MAX, 1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM meanwhile: for the short work of saving what was done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def process_rank() -> int:
    """The rank that torchrun gave to this process; 0 if it was started by itself."""
    return int(os.environ.get("RANK", "0"))


def choose_device(name: str) -> torch.device:
    """The device for `--device auto|cpu|cuda`; of several GPUs the one that torchrun gave to this process.

    Raises:
        InputError: cuda was asked for and there is none, or an unknown name.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine or this build of torch has no CUDA; use --device cpu")
    if name == "cpu":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(f"--device cuda: {torch.cuda.device_count()} GPUs here; start as many processes or fewer")
    return torch.device(name, local)


def place(network: Network, device: torch.device) -> Network:
    """Move a network to a device, channels last: convolutions then take half the time.

    Never for private training: Opacus' gradients of single examples are wrong in this layout.
    """
    placed: Network = network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return placed


class Interruption:
    """Turns Ctrl-C and SIGTERM into KeyboardInterrupt, and remembers it.

    Extension modules sometimes put another exception in the place of a KeyboardInterrupt that was raised within them
    (safetensors: ValueError), so what kind of exception ends a command does not tell whether it was stopped.
    """

    def __init__(self) -> None:
        self.happened = False
        signal.signal(signal.SIGTERM, self._interrupt)
        # a shell starts background jobs with SIGINT ignored, and that is to stay
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        raise KeyboardInterrupt
