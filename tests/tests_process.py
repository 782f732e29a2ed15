"""The command line in processes that start at once: forked from one that has imported everything.

Each is a process of its own, with its environment, signals, pipes and exit code. Only the imports are shared, which
take five seconds a process. Tests of the imports themselves start `python -m rapid`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import TracebackType
from typing import Any, Self

COMMANDS = ("audit", "build", "demo", "evaluate", "generate", "info", "ledger", "release", "serve", "train", "tune")
PARTS = ("generator", "knowledge_base", "private_stage", "public_stage")
HEAVY = [
    *(f"rapid.cli.{name}" for name in COMMANDS),
    *(f"rapid.methods.rapid.{name}" for name in PARTS),
    "rapid_server.run",
    # which torch imports when an optimiser is first used
    "torch._dynamo",
]
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload([__name__, "tests_children", *HEAVY])


class Program:
    """`rapid` with arguments, as a process.

    Args:
        arguments: of the command line.
        env: the environment; that of this process by default. Of the interpreter's own variables, PYTHONPATH and
            PYTHONWARNINGS=error have an effect.
        script: a Python file that runs instead of `python -m rapid`.

    Attributes:
        stdout: its standard output.
        stderr: its standard error.
        pid: its number.
    """

    def __init__(self, *arguments: object, env: Mapping[str, str] | None = None, script: Path | None = None) -> None:
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        self.arguments = [str(argument) for argument in arguments]
        self._process = _FORK_SERVER.Process(
            target=_run,
            args=(self.arguments, dict(os.environ if env is None else env), str(Path.cwd()), script and str(script),
                  DupFd(theirs_out), DupFd(theirs_err)),
        )  # fmt: skip
        self._process.start()
        os.close(theirs_out)
        os.close(theirs_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that killed it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self.arguments, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Read the rest of its output and wait for its end; kills it after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            with ThreadPoolExecutor(2) as pool:
                found = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
                try:
                    self.wait(timeout)
                    # what it has started may still write
                    texts = [one.result(max(1.0, deadline - time.monotonic())) for one in found]
                except BaseException:
                    self.kill()
                    raise
        finally:
            self.close()
        return texts[0], texts[1]

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._process.join()
        self.close()


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Call a function of `tests_children` in a process."""
    process = _FORK_SERVER.Process(target=function, args=arguments)
    process.start()
    return process


def wait_for(path: Path, seconds: float = 60) -> None:
    """Wait until a process has created a file or folder."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def run(
    *arguments: object, env: Mapping[str, str] | None = None, script: Path | None = None, timeout: float = 120
) -> CompletedProcess[str]:
    """Run `rapid` with arguments to its end."""
    program = Program(*arguments, env=env, script=script)
    stdout, stderr = program.communicate(timeout)
    assert program.returncode is not None
    return CompletedProcess(program.arguments, program.returncode, stdout, stderr)


def _run(arguments: list[str], env: dict[str, str], folder: str, script: str | None, out: Any, err: Any) -> None:
    """What the forked process does."""
    for number, received in ((1, out), (2, err)):
        descriptor = received.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    # a shell starts background jobs with SIGINT ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:0] = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part not in sys.path]
    if env.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    sys.argv = ["rapid", *arguments]
    if script is None:
        runpy.run_module("rapid", run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = script
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
