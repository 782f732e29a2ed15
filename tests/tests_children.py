"""What tests run in processes of their own, forked from the fork server: never from a test's process, whose threads may
hold locks that nobody would ever release in the child."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests_support import whole
from torch import Tensor, nn

from rapid.bundle import Bundle
from rapid.config.sections import MethodSettings, Training
from rapid.data.private import PrivateImages
from rapid.stages.private import train_private_bundle
from rapid.stopping import stop_on_signal
from rapid.training import Checkpoint, RunFolder
from rapid.training.public import train


def train_privately(
    base: Path | None, private: Path, out: Path, settings: MethodSettings, ledger: Path, epsilon: float = 2.0
) -> Bundle:
    """Begin the run in `out`, or go on with it."""
    bundle = train_private_bundle(
        base, PrivateImages(private), out, settings, epsilon=epsilon, delta=1e-4, device=torch.device("cpu"),
        resume=out.exists(), ledger=ledger,
    )  # fmt: skip
    assert bundle is not None
    return bundle


def train_until(until: tuple[str | int, ...], *arguments: object) -> None:
    """`train_privately` in a process that kills itself at a function.

    `until`: file and function, and the name of the file that it writes, or the number of its call from 1, if that
    matters; or nothing.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if until:
        sys.settrace(partial(_kill_myself, until, Counter()))
    train_privately(*arguments)  # type: ignore[arg-type]


def _kill_myself(until: tuple[str | int, ...], calls: Counter[str], frame: FrameType, event: str, _: object) -> None:
    file, function, *more = until
    code = frame.f_code
    if code.co_name != function or not code.co_filename.endswith(str(file)):
        return
    names = [one for one in more if isinstance(one, str)]
    if names in ([], [getattr(frame.f_locals.get("path"), "name", None)]):
        calls[code.co_name] += 1
        if calls.total() == next((one for one in more if isinstance(one, int)), 1):
            os.kill(os.getpid(), signal.SIGKILL)


def take_an_endless_step(checkpoint: Path, chosen: Training, begun: Path) -> None:
    """A public training whose next step creates `begun` and does not end."""
    with stop_on_signal():
        network = nn.Linear(2, 1)

        def loss(_: torch.Generator) -> Tensor:
            begun.touch()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                time.sleep(0.01)
            return network(torch.ones(1, 2)).sum()

        train("test", network, whole(loss), chosen, Checkpoint(checkpoint, interval=0))


def stay_in(folder: Path, command: str, manifest: dict[str, Any], entered: Path) -> None:
    """Go on in a run folder, create `entered`, and stay."""
    with RunFolder.enter(folder, command, manifest, resume=True):
        entered.touch()
        time.sleep(60)
