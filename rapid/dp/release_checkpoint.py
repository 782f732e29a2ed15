"""The state of one release on disk, saved before the ledger's charge for its steps is used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rapid.dp.attempts import Attempt
from rapid.dp.entry import Saved
from rapid.dp.releases import Release
from rapid.errors import InputError
from rapid.files import content_hash
from rapid.training import Checkpoint, RunFolder


class ReleaseCheckpoint(Checkpoint):
    """The state of one release, stored with the numbers of the release.

    A save is due when the interval is over, and when the steps that the ledger was charged for are taken. Steps are
    charged ahead for about one interval, at the rate that was measured since the last save. The interval grows where
    saves take long (see `rapid.training.checkpoint.pause_seconds`), and what is charged ahead grows with it.

    Args:
        folder: of the run.
        release: whose state it is.
        interval: seconds between two saves, at least.
        attempt: that is charged for the steps.
    """

    def __init__(
        self, folder: RunFolder, release: Release, interval: float = 60.0, attempt: Attempt | None = None
    ) -> None:
        super().__init__(folder.checkpoint(release.name), interval)
        self._numbers = release.model_dump(mode="json")
        self._name, self._steps, self._attempt = release.name, release.spec.steps, attempt
        self._round_end = release.spec.round_end
        self._steps_saved = 0 if attempt is None else attempt.begun(release.name)

    def save(self, state: dict[str, Any]) -> None:
        """Save, and note step and hash for the next line of the ledger, which is written now if this was the last step.

        Raises:
            PrivacyRefused, TamperedLedger: see `Attempt.note`.
        """
        super().save(state | {"release": self._numbers})
        if self._attempt is not None:
            self._attempt.saved(Saved(self._name, state["step"], content_hash(self.path)))
            self._steps_saved = state["step"]
            if state["step"] == self._steps:
                # before anything depends on the result, which can take long
                self._attempt.note()

    def save_if_due(self, state: Callable[[], dict[str, Any]]) -> None:
        """Save if it is due, and charge the next steps ahead; see the class."""
        attempt = self._attempt
        if attempt is None:
            super().save_if_due(state)
            return
        seconds = self.seconds_since_save
        if not attempt.used_up(self._name) and seconds <= self.pause:
            return
        done = attempt.begun(self._name)
        taken = done - self._steps_saved
        self.save_timed(state)
        if done < self._steps:
            # the pause that begins now: this save may have told that it must be longer
            attempt.allow(self._name, done + max(1, int(taken * self.pause / max(seconds, 1e-6))))

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None if there is none.

        Raises:
            InputError: it belongs to another release.
            PrivacyRefused: it was exchanged since the attempt began.
        """
        saved = super().load()
        if saved is not None and saved.pop("release", None) != self._numbers:
            raise InputError("resume", f"{self.path} was made with another plan; use the same epsilon, delta and data")
        if self._attempt is not None:
            self._attempt.check_loaded(self._name, 0 if saved is None else saved["step"])
        return saved

    def found(self) -> Saved:
        """What is on the disk.

        Raises:
            InputError: it is no checkpoint of this release.
        """
        state = self.load()
        if state is None:
            return Saved(self._name, 0, "")
        step: Any = state.get("step")
        counted = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= self._steps
        if not counted or self._round_end(step) != step:
            raise InputError("resume", f"{self.path} is no checkpoint of this run; remove it to take its steps again")
        return Saved(self._name, step, content_hash(self.path))
