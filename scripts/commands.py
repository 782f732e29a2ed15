"""Commands of rapid as processes of their own, and what scripts that run them have in common."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rapid.errors import InputError, RapidError
from rapid.files import check_folder, replacing, write_json

Number = TypeVar("Number", int, float)

ARGUMENTS = "arguments.json"


@contextmanager
def told(program: str) -> Iterator[None]:
    """End the process with one line and its exit code for what rapid can explain, as the command `rapid` does."""
    try:
        yield
    except InputError as error:
        name = f"--{error.field.replace('_', '-')}" if error.field else ""
        print(f"{program}: {error.describe(name)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RapidError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"{program}: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def at_least(least: Number) -> Callable[[str], Number]:
    """A type of `argparse`: finite numbers of the type of `least`, from it on."""

    def number(text: str) -> Number:
        value = type(least)(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least}, and finite: {text}")
        return value

    # for what argparse says of other words
    number.__name__ = type(least).__name__
    return number


def check_file(out: Path) -> None:
    """Refuse a file that cannot be written, before any work is done.

    Raises:
        InputError: it is a folder, or lies where nothing can be written.
    """
    if out.is_dir():
        raise InputError("out", "is a folder; give the name of a file", out)
    check_folder(out.parent, "out", out)


def begin_with(out: Path, arguments: Mapping[str, Any]) -> None:
    """Note with which arguments a folder is begun; what is made later in it must have the same.

    Raises:
        InputError: it was begun with others: what is there would be reported under their names.
    """
    file, given = out / ARGUMENTS, json.loads(json.dumps(arguments, default=str))
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else given
    for name, value in given.items():
        if earlier.get(name) != value:
            problem = f"was begun with {name} {earlier.get(name)}, and now it is {value}; choose another folder"
            raise InputError("out", problem, out)
    write_json(file, given)


def run_rapid(
    arguments: Sequence[object],
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    said: Path | None = None,
) -> None:
    """Run `rapid ARGUMENTS`, and end this process with its exit code if that is not 0: it has said what is wrong.

    Args:
        arguments: words after `rapid`.
        launcher: words before `-m rapid`; empty for one process.
        environment: of the process; None for that of this one.
        said: file that holds a copy of its standard output afterwards.
    """
    command = [sys.executable, *launcher, "-m", "rapid", *map(str, arguments)]
    process = subprocess.Popen(command, env=environment, stdout=None if said is None else subprocess.PIPE, text=True)
    lines: list[str] = []
    while True:
        try:
            for line in process.stdout or ():
                lines.append(line)
                print(line, end="", flush=True)
            code = process.wait()
            break
        except KeyboardInterrupt:
            # Ctrl-C reached the command, too; subprocess.run would kill it while it saves its checkpoint
            continue
    if code:
        sys.exit(code if code > 0 else 128 - code)
    if said is not None:
        with replacing(said) as target:
            target.write_text("".join(lines), encoding="utf-8")


class Commands:
    """Commands in a folder, of which none is run twice.

    Args:
        out: the folder; `times.json` in it has the seconds of each step.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self._times = out / "times.json"

    @property
    def times(self) -> dict[str, float]:
        """Seconds of each step; what a stopped run took is counted, too."""
        found: dict[str, float] = json.loads(self._times.read_text()) if self._times.exists() else {}
        return found

    def run(
        self,
        step: str,
        done: Path,
        arguments: Sequence[object],
        *,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        said: Path | None = None,
    ) -> None:
        """Run a command of rapid, unless `done` is there; see `run_rapid`."""
        if done.exists():
            return
        print(f"== {step}: rapid", *arguments, flush=True)
        begin = time.monotonic()
        try:
            run_rapid(arguments, launcher, environment, said)
        finally:
            write_json(self._times, self.times | {step: self.times.get(step, 0.0) + time.monotonic() - begin})
