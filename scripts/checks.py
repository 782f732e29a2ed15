"""Checks that have a name, a verdict and a line: what scripts/check_gpu.py runs."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]
"""Ready for JSON."""


class Failed(Exception):
    """A check found something wrong."""


class Skipped(Exception):
    """A check cannot run here."""


@dataclass(frozen=True)
class Setup:
    """What every check gets.

    Attributes:
        device: to be checked.
        folder: for files; checks find there what earlier ones made.
        smallest: the smallest sizes, for a test of the checks themselves.
    """

    device: torch.device
    folder: Path
    smallest: bool

    @property
    def name(self) -> str:
        """The device as `--device` takes it."""
        return self.device.type

    def made(self, name: str) -> Path:
        """A file or folder that an earlier check makes.

        Raises:
            Skipped: it is not there.
        """
        path = self.folder / name
        if not path.exists():
            raise Skipped(f"needs {name}, which an earlier check makes")
        return path


Outcome = tuple[str, Figures]
"""A line, and figures."""
Check = Callable[[Setup], Outcome]


@dataclass
class Found:
    """The result of a check.

    Attributes:
        name: of the check.
        verdict: PASS, FAIL or SKIP.
        line: what it found.
        seconds: that it took.
        figures: measured, ready for JSON.
        trace: where an unexpected error arose.
    """

    name: str
    verdict: str
    line: str
    seconds: float
    figures: Figures = field(default_factory=dict)
    trace: str = ""

    def content(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "trace" or value}


def require(holds: bool, line: str) -> None:
    """Fail with a line unless something holds.

    Raises:
        Failed: it does not.
    """
    if not holds:
        raise Failed(line)


def run(name: str, check: Check, setup: Setup) -> Found:
    """Run a check; whatever it raises is its result."""
    begin = time.monotonic()
    verdict, figures, trace = "PASS", {}, ""
    try:
        line, figures = check(setup)
    except Skipped as reason:
        verdict, line = "SKIP", str(reason)
    except Failed as reason:
        verdict, line = "FAIL", str(reason)
    except (Exception, SystemExit) as error:
        words = str(error).strip().splitlines()
        verdict, line = "FAIL", f"{type(error).__name__}: {words[0] if words else ''}"
        trace = traceback.format_exc()
    return Found(name, verdict, line, round(time.monotonic() - begin, 2), figures, trace)
