"""Training state on disk, saved atomically at intervals and when training stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from rapid.errors import RapidError
from rapid.files import replacing

INTERVAL_SECONDS = 60.0
SHARE = 0.02
"""Largest share of the time that saves at intervals take."""
LONGEST_SECONDS = 1800.0
"""What a crash may cost at most because saves are slow."""


def pause_seconds(interval: float, cost: float) -> float:
    """Seconds between two saves: `interval`, or more where saves take more than `SHARE` of the time.

    Args:
        interval: as it was asked for; 0 or less: a save after every step, whatever it takes.
        cost: seconds that the last save took.
    """
    if interval <= 0:
        return interval
    return max(interval, min(cost / SHARE, LONGEST_SECONDS))


class _Written:
    """A file as torch writes to it, which keeps the error that torch hides behind one of its own.

    Args:
        stream: the file.

    Attributes:
        error: of the first write that failed.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        try:
            return self._stream.write(content)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._stream.flush()


class Checkpoint:
    """One file that holds the state of one training.

    Args:
        path: the file.
        interval: seconds between two saves of `save_if_due`, at least; see `pause_seconds`.
    """

    def __init__(self, path: Path, interval: float = INTERVAL_SECONDS) -> None:
        self.path = path
        self._interval = interval
        self._saved = time.monotonic()
        self._cost = 0.0

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None if there is none.

        Raises:
            RapidError: the file is damaged.
        """
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        except (OSError, MemoryError):
            raise
        except Exception as error:
            # torch raises many kinds of errors for damaged files, with messages of many lines
            raise RapidError(f"{self.path}: the checkpoint is damaged; remove it to start again") from error
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Save `state`: tensors, numbers, strings, and dicts and lists of these.

        Raises:
            OSError: it cannot be written, for example because the disk is full.
        """
        with replacing(self.path) as target, target.open("wb") as stream:
            file = _Written(stream)
            try:
                torch.save(state, cast(IO[bytes], file))
            except RuntimeError:
                if file.error is not None:
                    raise file.error from None
                raise
        self._saved = time.monotonic()

    def save_if_due(self, state: Callable[[], dict[str, Any]]) -> None:
        """Save if the last save was `pause` ago; `state` is called only then."""
        if self.seconds_since_save > self.pause:
            self.save_timed(state)

    def save_timed(self, state: Callable[[], dict[str, Any]]) -> None:
        """Save, and note how long that takes, for the next `pause`."""
        begin = time.monotonic()
        self.save(state())
        self._cost = time.monotonic() - begin

    @property
    def pause(self) -> float:
        """Seconds from the last save until the next one is due."""
        return pause_seconds(self._interval, self._cost)

    @property
    def seconds_since_save(self) -> float:
        """Seconds since the last save, or since this object was made."""
        return time.monotonic() - self._saved

    def remove(self) -> None:
        """Remove the file: the training is done and its result is stored."""
        self.path.unlink(missing_ok=True)
