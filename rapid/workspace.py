"""The output folder of a long command: begun once, resumed with the same plan, never mixed with something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rapid.config import Settings
from rapid.errors import InputError
from rapid.files import write_json

PLAN = "plan.json"


class Workspace:
    """A folder in which a bundle grows; `checkpoints/` holds what is needed to resume and is not part of the bundle."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._checkpoints = out / "checkpoints"

    @classmethod
    def enter(cls, out: Path, command: str, plan: dict[str, Any], *, resume: bool) -> Workspace:
        """Begin in a new or empty folder, or with `resume` go on in one with the same command and plan.

        The plan must hold public facts only: it is written to disk. A setting that is newer than an earlier run counts
        as its default there.

        Raises:
            InputError: the folder holds something else, or another plan, or an unfinished run without `resume`.
        """
        workspace = cls(out)
        written = {"command": command, **plan}
        file = workspace._checkpoints / PLAN
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out}: is a file; give a new folder")
        if not out.exists() or not any(out.iterdir()):
            write_json(file, written)
            return workspace
        if not file.is_file():
            raise InputError(f"--out {out}: holds something else; give a new folder")
        if not resume:
            raise InputError(f"--out {out}: holds an earlier run; go on with --resume or give a new folder")
        # what was written went through JSON, so what it is compared with must too
        difference = _first_difference(workspace.earlier(), json.loads(json.dumps(written)))
        if difference is not None:
            raise InputError(f"--out {out}: the earlier run differs in '{difference}'; use the same, or a new folder")
        return workspace

    def earlier(self) -> dict[str, Any] | None:
        """The plan of an earlier run in this folder; None if there is none that can be read."""
        try:
            plan: dict[str, Any] = json.loads((self._checkpoints / PLAN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return _with_defaults(plan)

    def checkpoint(self, name: str) -> Path:
        """File for the training state of `name`."""
        return self._checkpoints / f"{name}.pt"

    def leave(self) -> None:
        """Remove training states and what killed runs left half-written: the bundle is finished.

        The plan stays, so that a repeated command is recognised.
        """
        scratch = [path for path in self.out.glob(".*.*") if path.is_dir()]
        for path in (*scratch, *(path for path in self._checkpoints.iterdir() if path.name != PLAN)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


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
