"""The entry point: parse the arguments, run the command, report errors, return the exit code."""

from __future__ import annotations

import argparse
import errno
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TextIO

from rapid.cli.parser import build_parser
from rapid.errors import InputError, LostRank, RapidError, Stopped, printable
from rapid.files import NO_ROOM, TOO_LONG
from rapid.stopping import Interruption, stop_on_signal

SHARED = ("build-kb", "generate", "train-private")
"""Commands that several processes can share."""
OUT_OF_MEMORY = re.compile(r"out of memory|(can't allocate|cannot allocate|not enough) memory|ALLOC_FAILED")
"""What torch, its allocator on CPUs and the libraries of CUDA say."""
LESS_MEMORY = {
    "train-private": "--set private.physical_batch=N, smaller than now or auto, with a new --out",
    "build-kb": "a smaller batch_size of the network that was trained, with --set, or a smaller network",
    "generate": "--set generation.batch_size=N, smaller than now",
    "serve": "--batch N, smaller than now",
}
"""What takes less memory, by command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: without the program's name; `sys.argv` by default.

    Returns:
        The exit code: 0 done, 1 failure, 2 bad input or usage, 3 refused for privacy, 130 stopped by the user.
    """
    options = build_parser().parse_args(arguments)
    # libgomp reads this when torch is loaded. By default its waiting threads spin 60 times as long, which makes large
    # batches two to ten times slower next to another busy process and gains little on an idle machine. A server has
    # the machine to itself, and its small batches would take three times as long.
    if "OMP_WAIT_POLICY" not in os.environ and options.command != "serve":
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    warnings.showwarning = _show_warning
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Import and run the command that `options.run` names as "module:function"; returns the exit code.

    Raises:
        Exception: a bug; errors that the user can act on are printed in one line instead.
    """
    # what trains stops between two steps, once it is imported; anything else, at once
    cooperative = "resume" in options or options.command == "demo"
    interruption = Interruption()
    try:
        from rapid.heap import prepare_heap

        prepare_heap()
        if options.command not in SHARED and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            words = f"rapid {options.command} runs as a single process; start only {', '.join(SHARED)} with torchrun"
            raise InputError("", words)
        command = pkgutil.resolve_name(options.run)
        with stop_on_signal() if cooperative else nullcontext():
            command(options)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt | Stopped) or interruption.happened
        if not stopped and isinstance(error, Exception):
            return _report(error, options)
        hint = "; rerun the command with --resume to continue" if "resume" in options else ""
        if options.command == "demo":
            hint = "; rerun it to continue"
        elif hint and options.out is not None and not options.out.exists():
            hint = "; nothing was begun"
        print(f"{_name()}: stopped{hint}", file=sys.stderr)
        return Stopped.exit_code
    return 0


def flag(field: str) -> str:
    """How the command line shows the field of an `InputError`.

    A dotted setting is given with --set, a positional argument is shown as it is, any other field is a flag.
    """
    if not field or field.isupper():
        return field
    return f"--set {field}" if "." in field else f"--{field.replace('_', '-')}"


def _report(error: Exception, options: argparse.Namespace) -> int:
    """Print an expected error in one line and return its exit code; raises any other one."""
    resumes = "resume" in options
    if isinstance(error, RapidError):
        if not error.reported:
            message = str(error)
            if isinstance(error, LostRank):
                message += f"; start all ranks again{' with --resume' if resumes else ''}"
            if isinstance(error, InputError):
                message = error.describe(flag(error.field), "=" if "." in error.field else " ")
            print(f"{_name()}: {printable(message)}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        # the reader of our output is gone; without this, flushing stdout at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, PermissionError) and error.filename is not None:
        told = "permission denied; give yourself the right to use it"
        print(f"{_name()}: {printable(str(error.filename))}: {told}", file=sys.stderr)
        return InputError.exit_code
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        print(f"{_name()}: {printable(str(error.filename))}: {TOO_LONG}", file=sys.stderr)
        return InputError.exit_code
    if isinstance(error, OSError):
        fix = ""
        if error.errno in NO_ROOM:
            begun = resumes and options.out is not None and options.out.exists()
            fix = f"; {NO_ROOM[error.errno]}, and rerun the command{' with --resume to continue' if begun else ''}"
        print(f"{_name()}: {printable(str(error))}{fix}", file=sys.stderr)
        return 1
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
        # without the sizes, which depend on what is private
        fix = LESS_MEMORY.get(options.command, "smaller batches, fewer images or a smaller network")
        print(f"{_name()}: out of memory; use {fix}", file=sys.stderr)
        return RapidError.exit_code
    raise error


def _name() -> str:
    """The name of this process in messages."""
    # as `process_rank`, whose module loads torch
    rank = int(os.environ.get("RANK", "0"))
    return f"rapid (rank {rank})" if rank else "rapid"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # our own warnings are UserWarnings; those of other categories come from libraries and address developers
    if category is UserWarning:
        print(f"rapid: warning: {message}", file=sys.stderr)
