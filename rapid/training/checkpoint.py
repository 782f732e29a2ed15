"""Training state on disk: written beside and renamed, saved at intervals and when training is stopped."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rapid.errors import RapidError
from rapid.files import replacing

INTERVAL_SECONDS = 60.0


class Checkpoint:
    """One file that holds the state of one training.

    Args:
        path: the file.
        state: returns what is to be saved: tensors, numbers, strings, and dicts and lists of these.
        interval: seconds between two times that `save_sometimes` saves.
    """

    def __init__(self, path: Path, state: Callable[[], dict[str, Any]], interval: float = INTERVAL_SECONDS) -> None:
        self.path = path
        self._state = state
        self._interval = interval
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None if there is none.

        Raises:
            RapidError: the file is damaged.
        """
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise RapidError(f"{self.path}: the checkpoint is damaged ({error}); remove it to start afresh") from error
        return state

    def save(self) -> None:
        """Save now."""
        with replacing(self.path) as target:
            torch.save(self._state(), target)
        self._saved = time.monotonic()

    def save_sometimes(self) -> None:
        """Save if the last time was `interval` ago."""
        if time.monotonic() - self._saved > self._interval:
            self.save()

    def remove(self) -> None:
        """Remove the file: the training is done and its result written."""
        self.path.unlink(missing_ok=True)
