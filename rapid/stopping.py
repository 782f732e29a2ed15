"""Stopping long work between two steps: a signal sets a flag, and the loops check it.

A signal handler that raises can interrupt an optimiser step half-way, and the half-changed state would be saved as if
the step were whole. So the first SIGINT or SIGTERM only sets a flag, and `check_stop` raises between two
steps, where the state is whole. A second signal ends the process at once and saves nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rapid.errors import Stopped

_requested = threading.Event()


def request_stop() -> None:
    """Ask the running work to stop at its next whole step."""
    _requested.set()


def stop_requested() -> bool:
    """Whether a stop was requested."""
    return _requested.is_set()


def check_stop() -> None:
    """Raise if a stop was requested; to be called between two steps, where the state is whole.

    Raises:
        Stopped: a stop was requested.
    """
    if _requested.is_set():
        raise Stopped("stopped")


@contextmanager
def stop_on_signal() -> Iterator[None]:
    """SIGINT (Ctrl-C) and SIGTERM request a stop within the block; a second signal exits with 130 at once.

    A shell starts background jobs with SIGINT ignored; it stays ignored.
    """
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    earlier = {number: signal.signal(number, _on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        _requested.clear()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _requested.is_set():
        os._exit(Stopped.exit_code)
    _requested.set()
    # os.write, because a buffered stream may be in use when the signal arrives
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nrapid: stopping after this step (again: at once)\n")


class Interruption:
    """Turns SIGINT (Ctrl-C) and SIGTERM into KeyboardInterrupt and remembers that one came.

    Extension modules may replace a KeyboardInterrupt raised inside them by another exception (safetensors: ValueError),
    so the exception alone does not tell whether the user stopped the command.

    Attributes:
        happened: whether a signal came.
    """

    def __init__(self) -> None:
        self.happened = False
        signal.signal(signal.SIGTERM, self._interrupt)
        # a shell starts background jobs with SIGINT ignored; keep that
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        raise KeyboardInterrupt
