"""The output folder of a long command: begun once, resumed with the same plan, never mixed with something else."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rapid.config.sections import Settings
from rapid.errors import InputError
from rapid.files import write_json

PLAN, RUN, LOCK = "plan.json", "run.json", "lock"


class RunFolder:
    """A folder in which a bundle grows; `checkpoints/` holds what is needed to resume and is not part of the bundle.

    Attributes:
        out: the folder.
        new: whether it was begun now.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.new = False
        self._checkpoints = out / "checkpoints"

    @classmethod
    @contextmanager
    def enter(cls, out: Path, command: str, plan: dict[str, Any], *, resume: bool) -> Iterator[RunFolder]:
        """Begin in a new or empty folder, or with `resume` go on in one with the same command and plan.

        No other process can enter meanwhile. The plan must hold public facts only: it is written to disk. A setting
        that is newer than an earlier run counts as its default there.

        Raises:
            InputError: the folder holds something else, or another plan, or an unfinished run without `resume`, or
                another process works in it.
        """
        run_folder = cls(out)
        written = {"command": command, **plan}
        file = run_folder._checkpoints / PLAN
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: is a file; give a new folder")
        if run_folder._begun() and not file.is_file():
            raise InputError(f"--out {out}: holds something else; give a new folder")
        with run_folder._locked():
            if not file.is_file():
                run_folder.new = True
                write_json(file, written)
            elif not resume:
                raise InputError(f"--out {out}: holds an earlier run; go on with --resume or give a new folder")
            # what was written went through JSON, so what it is compared with must too
            difference = _first_difference(run_folder._earlier_of(written), json.loads(json.dumps(written)))
            if difference is not None:
                raise InputError(
                    f"--out {out}: the earlier run differs in '{difference}'; use the same, or a new folder"
                )
            run_folder._sweep()
            yield run_folder

    def _begun(self) -> bool:
        """Whether there is anything but what a run leaves that was killed before it wrote its plan."""
        if not self.out.exists():
            return False
        if any(path != self._checkpoints for path in self.out.iterdir()):
            return True
        inside = self._checkpoints.iterdir() if self._checkpoints.is_dir() else ()
        return any(path.name != LOCK and not path.name.startswith(f".{PLAN}.") for path in inside)

    def run_name(self) -> str:
        """A random name for the run in this folder, the same when it is resumed here.

        A copy of the folder is another run: what both make known is charged twice.
        """
        file, place = self._checkpoints / RUN, self.out.resolve().stat()
        # only to be compared: the folder may be handed on, and where it lay is nobody's business
        where = f"{self.out.resolve()} {place.st_dev} {place.st_ino}"
        folder = hashlib.sha256(where.encode()).hexdigest()
        try:
            written = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            written = {}
        if written.get("folder") != folder:
            written = {"run": secrets.token_hex(8), "folder": folder}
            write_json(file, written)
        return str(written["run"])

    def earlier(self) -> dict[str, Any] | None:
        """The plan of an earlier run in this folder; None if there is none that can be read."""
        try:
            plan: dict[str, Any] = json.loads((self._checkpoints / PLAN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return _with_defaults(plan)

    def _earlier_of(self, written: dict[str, Any]) -> dict[str, Any] | None:
        """The earlier plan without the sections of settings that this one does not depend on."""
        earlier = self.earlier()
        if earlier is None or "settings" not in earlier or "settings" not in written:
            return earlier
        sections = {name: part for name, part in earlier["settings"].items() if name in written["settings"]}
        return earlier | {"settings": sections}

    def checkpoint(self, name: str) -> Path:
        """File for the training state of `name`."""
        return self._checkpoints / f"{name}.pt"

    def discard(self) -> None:
        """Remove the folder, if this run began it: nothing was done, and the same command may be given again."""
        if self.new:
            shutil.rmtree(self.out)

    def leave(self) -> None:
        """Remove training states: the bundle is finished. The plan stays, so that a repeated command is recognised."""
        self._sweep()
        for path in self._checkpoints.iterdir():
            if path.name not in (PLAN, RUN, LOCK):
                path.unlink()

    def _sweep(self) -> None:
        """Remove what killed runs left half-written.

        A training state among it belongs to steps that are taken again: it must not be seen beside their result.
        """
        for folder in (self.out, self._checkpoints):
            for path in folder.glob(".*.*"):
                if path.is_dir():
                    shutil.rmtree(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclusive among processes; the system gives the lock back when a process ends, however it ends."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._checkpoints / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"--out {self.out}: another process works in it; wait for it, or stop it") from None
            yield
        finally:
            os.close(handle)


def _with_defaults(plan: dict[str, Any]) -> dict[str, Any]:
    try:
        settings = Settings.model_validate(plan["settings"])
        return plan | {"settings": settings.model_dump(mode="json", include=set(plan["settings"]))}
    except (KeyError, ValidationError):
        return plan


def _first_difference(first: Any, second: Any, name: str = "") -> str | None:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted(first.keys() | second.keys()):
            inner = f"{name}.{key}" if name else key
            if (found := _first_difference(first.get(key), second.get(key), inner)) is not None:
                return found
        return None
    return None if first == second else name
