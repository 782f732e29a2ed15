"""A stop that is asked for at any point of a step: the step is finished and saved whole, and what was begun is charged.

A tracer raises SIGTERM before a line of Python that one step runs, those of torch included; and so for each line.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tests_children import take_an_endless_step
from tests_process import start, wait_for
from tests_support import whole
from torch import Tensor, nn

from rapid.config.sections import Training
from rapid.data import ImageSet
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.entry import Limit, Spent
from rapid.dp.ledger import Ledger
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.releases import DpSgdSpec, Release
from rapid.dp.spending import Charge, balance
from rapid.errors import LostRank, PrivacyRefused, Stopped
from rapid.stopping import check_stop, request_stop, stop_on_signal
from rapid.training import Checkpoint, RunFolder, Trainer
from rapid.training.optimizers import noisy_schedule
from rapid.training.public import train

STEPS, INTO = 5, 2
"""Steps of a training, and the one at whose every point a stop is asked for."""
CHOSEN = Training(steps=STEPS, batch_size=2, warmup_steps=1, learning_rate=0.1, ema_decay=0.9)
AROUND = {"run", "train"}
"""Functions that have begun before the step and go on after it."""


class SignalAt:
    """A trace function that raises SIGTERM before the n-th line that runs from the beginning of step INTO on to the
    beginning of the next.

    Attributes:
        lines: how many there were.
        first: the numbers of those lines that had not run before in the step.
        gradients: how many gradients of the private mechanism were begun.
    """

    def __init__(self, nth: int | None) -> None:
        self._nth = nth
        self._steps = 0
        self._seen: set[tuple[CodeType, int]] = set()
        self.lines = 0
        self.first: list[int] = []
        self.gradients = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call":
            return self._called(frame.f_code)
        if event == "line" and self._steps == INTO:
            self.lines += 1
            if self._nth is None and (frame.f_code, frame.f_lineno) not in self._seen:
                self._seen.add((frame.f_code, frame.f_lineno))
                self.first.append(self.lines)
            if self.lines == self._nth:
                signal.raise_signal(signal.SIGTERM)
        return self

    def _called(self, code: CodeType) -> Any:
        self._steps += code is Trainer.step.__code__
        self.gradients += code is PrivateMechanism.gradient.__code__
        counting = self._nth is None or self.lines < self._nth
        return self if counting and (self._steps == INTO or code.co_name in AROUND) else None


def traced(nth: int | None, work: Callable[[], None]) -> SignalAt:
    """Run `work`, which a signal stops if `nth` says so."""
    found = SignalAt(nth)
    with stop_on_signal():
        sys.settrace(found)
        try:
            work()
        except Stopped:
            pass
        else:
            assert nth is None
        finally:
            sys.settrace(None)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit by bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def check_whole(state: dict[str, Any]) -> None:
    """Network, optimiser, learning rate and average have all seen the same number of steps."""
    moments = state["optimizer"]["state"]
    assert len(moments) == 2
    for moment in moments.values():
        assert moment["step"] == state["step"]
        assert moment["exp_avg"].abs().sum() > 0
        assert moment["exp_avg_sq"].abs().sum() > 0
    assert state["scheduler"]["last_epoch"] == state["step"]
    assert state["average"]["n_averaged"] == state["step"]


def train_publicly(path: Path, stop_after: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    network, calls = nn.Linear(2, 1), 0

    def loss(generator: torch.Generator) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            request_stop()
        return network(torch.randn(2, 2, generator=generator)).square().mean()

    train("test", network, whole(loss), CHOSEN, Checkpoint(path))
    return network


@pytest.mark.filterwarnings("error")
def test_a_public_step_is_saved_whole_wherever_it_is_stopped(tmp_path: Path) -> None:
    whole = train_publicly(tmp_path / "whole.pt").state_dict()
    expected = {}
    for steps in (INTO, INTO + 1):
        with stop_on_signal(), pytest.raises(Stopped):
            train_publicly(tmp_path / f"{steps}.pt", stop_after=steps)
        expected[steps] = torch.load(tmp_path / f"{steps}.pt")
        check_whole(expected[steps])
    lines = traced(None, lambda: train_publicly(tmp_path / "all.pt")).lines
    assert lines > 300
    seen = set()
    for nth in range(1, lines + 1):
        path = tmp_path / "stopped.pt"
        path.unlink(missing_ok=True)
        # asked anyway after the step: a library's clock or cache may make this run a line shorter
        traced(nth, lambda path=path: train_publicly(path, stop_after=INTO + 1))
        state = torch.load(path)
        # the state of a training that was asked to stop between two steps; from that, all goes on the same
        assert same(state, expected[state["step"]]), nth
        if nth % 50 == 0 or state["step"] not in seen:
            assert same(train_publicly(path).state_dict(), whole)
        seen.add(state["step"])
    assert INTO in seen


class Repeated:
    """The same bytes in every run."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, count: int) -> bytes:
        self._calls += 1
        return np.random.default_rng(self._calls).bytes(count)


class PrivateTask:
    """DP-SGD of a tiny network behind the door to private images, charged to a ledger.

    Of so many steps that the epsilon beside the progress bar is not computed in step INTO.
    """

    STEPS = 20 * (INTO + 1)

    def __init__(self, folder: Path, *, charged: bool = True) -> None:
        spec = DpSgdSpec(name="denoiser", dataset_size=6, expected_batch=3, steps=self.STEPS, clip_norm=1.0)
        release = Release(spec=spec, noise_multiplier=1.0)
        self.budget = Budget(epsilon=50.0, delta=1e-3, dataset_size=6, releases=(release,))
        self.folder = RunFolder(folder / "out")
        (folder / "out" / "checkpoints").mkdir(parents=True)
        self.charge = Charge(Ledger(folder / "ledger.jsonl"), "data set", "run", Limit(50.0, 1e-3)) if charged else None
        images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2)
        self.images = ImageSet(images, None, (), "test")

    def train(self, between_steps: Callable[[int], None] | None = None) -> None:
        torch.manual_seed(0)
        network = nn.Linear(4, 1)
        access = PrivateAccess(
            self.images, PublicFacts.of(self.images), self.budget, self.folder, device=torch.device("cpu")
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
        with access.charged(self.charge):
            access.train(
                "denoiser",
                Trainer(network, optimizer, noisy_schedule(optimizer, self.STEPS), ema_decay=0.9),
                lambda images: network(images.float().flatten(1) / 255).square().sum(1),
                [access.images],
                between_steps=between_steps,
            )

    def check(self, steps: int) -> dict[str, Any]:
        """So many steps are recorded, and charged if anything is; returns the checkpoint."""
        state = torch.load(self.folder.checkpoint("denoiser"))
        assert state["step"] == steps
        if self.charge is None:
            return state
        entries = self.charge.ledger.entries()
        assert entries[-1].kind == "settle"
        settled = [release for entry in entries if entry.kind == "settle" for release in entry.releases]
        # each attempt for its own steps
        assert sum(sum(release.steps.values()) for release in settled) == steps
        return state


def test_a_private_step_is_saved_whole_and_charged_wherever_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rapid.dp.randomness.SystemStream", Repeated)
    expected = {}
    for steps in (INTO, INTO + 1):
        task = PrivateTask(tmp_path / str(steps))
        with stop_on_signal(), pytest.raises(Stopped):
            task.train(stop_after(steps))
        expected[steps] = task.check(steps)
        check_whole(expected[steps])
    # a line within a loop once, and of these every third: two thousand points would take minutes
    points = traced(None, partial(PrivateTask(tmp_path / "all").train, stop_after(INTO + 1))).first
    assert len(points) > 600
    points = sorted({*points[::3], points[-1]})
    for number, nth in enumerate(points):
        # a charge takes longer than a step
        charged = number % 5 == 0 or nth == points[-1]
        task = PrivateTask(tmp_path / f"at{nth}", charged=charged)
        # what was begun is what is recorded, and charged
        gradients = traced(nth, partial(task.train, stop_after(INTO + 1))).gradients
        assert same(task.check(gradients), expected[gradients]), nth
        if nth < points[-1]:
            shutil.rmtree(tmp_path / f"at{nth}")
    # and the last one goes on
    with stop_on_signal(), pytest.raises(Stopped):
        task.train(stop_after(INTO + 3))
    check_whole(task.check(INTO + 3))


def stop_after(steps: int) -> Callable[[int], None]:
    """For `between_steps`: ask for a stop when so many steps are done."""

    def look(done: int) -> None:
        if done == steps:
            request_stop()

    return look


@pytest.mark.parametrize("error", [Stopped, LostRank, PrivacyRefused])
def test_a_private_training_that_ends_between_steps_is_charged_for_all_that_were_begun(
    tmp_path: Path, error: type[Exception]
) -> None:
    """Such as a generator's step that looks whether to stop: the gradient before it was released."""
    task = PrivateTask(tmp_path)

    def end(done: int) -> None:
        if done == 3:
            raise error("ended")

    with pytest.raises(error, match="ended"):
        task.train(end)
    check_whole(task.check(3))


def test_a_crash_stays_charged_in_full(tmp_path: Path) -> None:
    task = PrivateTask(tmp_path)

    def crash(done: int) -> None:
        if done == 3:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        task.train(crash)
    assert task.charge is not None
    (entry,) = balance(task.charge.ledger.entries(), "data set").runs
    assert entry.kind == "reserve"
    assert entry.releases == tuple(Spent.of("denoiser", event) for event in task.budget.events())


def test_a_second_signal_ends_the_process_at_once_and_saves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with stop_on_signal(), pytest.raises(Stopped):
        train_publicly(path, stop_after=2)
    before = path.read_bytes(), path.stat().st_mtime_ns
    begun = tmp_path / "begun"
    child = start(take_an_endless_step, path, CHOSEN, begun)
    assert child.pid is not None
    wait_for(begun)
    os.kill(child.pid, signal.SIGTERM)
    # the first one waits for the step to end
    child.join(0.3)
    assert child.is_alive()
    asked = time.monotonic()
    os.kill(child.pid, signal.SIGINT)
    child.join(60)
    assert child.exitcode == Stopped.exit_code == 130
    assert time.monotonic() - asked < 10
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert {found.name for found in tmp_path.iterdir()} == {"state.pt", "begun"}


def test_handlers_are_those_from_before_when_the_work_is_done() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signal():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped):
            check_stop()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    check_stop()


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As a shell starts jobs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signal():
            signal.raise_signal(signal.SIGINT)
            check_stop()
    finally:
        signal.signal(signal.SIGINT, before)
