"""Attempts: what is charged when files of a run are removed, put back, exchanged or forged, and after crashes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests_attempts import BUDGET, COUNT, DATA, SELDOM, STEPS, TRAINING, Run, banded
from tests_support import Clock
from torch import Tensor

from rapid.dp import Execution, PrivateAccess
from rapid.dp.attempts import check_rise
from rapid.dp.entry import Entry, Limit, Saved, Spent
from rapid.dp.spending import Charge, balance, set_limit
from rapid.errors import InputError, PrivacyRefused, Stopped
from rapid.stopping import request_stop, stop_on_signal
from rapid.training import Checkpoint, checkpoint, timing


def test_a_run_that_is_left_alone_is_charged_once(run: Run) -> None:
    for step in (2, 3, 5):
        run.until(step)
        assert run.charged() == {"many": 1, "network": step}
    run.go()
    assert run.charged() == {"many": 1, "network": STEPS}


def test_a_band_is_charged_round_by_round(tmp_path: Path) -> None:
    """Each start goes on with a new round, so that all of them together are charged as one run: ceil(8 / 3) rounds."""
    run = banded(tmp_path)
    # within the first round, at the end of the second, and within it again: the stop is heeded between rounds only
    for stop, rounds in ((2, 1), (6, 2)):
        run.until(stop)
        assert run.charged() == {"many": 1, "network": rounds}
        assert torch.load(run.checkpoint())["step"] == 3 * rounds
    run.go()
    assert run.charged() == {"many": 1, "network": 3}
    assert [line.kind for line in run.ledger.entries()].count("settle") == 3


def test_a_stop_waits_for_the_end_of_the_round(tmp_path: Path) -> None:
    run, seen = banded(tmp_path), []

    def ask(done: int) -> None:
        seen.append(done)
        if done == 4:
            request_stop()

    with stop_on_signal(), pytest.raises(Stopped):
        run.go(ask)
    assert seen == [1, 2, 3, 4, 5, 6]
    state = torch.load(run.checkpoint())
    assert state["step"] == 6
    # no sum without noise, and no estimate either
    assert set(state) == {"step", "network", "optimizer", "scheduler", "release"}
    assert run.charged() == {"many": 1, "network": 2}


def test_a_crash_within_a_round_costs_that_round_twice(tmp_path: Path) -> None:
    run = banded(tmp_path)
    run.until(5, RuntimeError("crash"))
    assert torch.load(run.checkpoint())["step"] == 3
    # until it is resumed, all of it
    assert run.charged() == {"many": 1, "network": 3}
    run.go()
    assert run.charged() == {"many": 1, "network": 4}


def test_a_checkpoint_within_a_round_is_none_of_the_run(tmp_path: Path) -> None:
    run = banded(tmp_path)
    run.until(3)
    state = torch.load(run.checkpoint())
    torch.save(state | {"step": 4}, run.checkpoint())
    with pytest.raises(InputError, match="is no checkpoint of this run"):
        run.go()


def test_models_of_the_same_run_are_charged_one_by_one(run: Run) -> None:
    """The result is kept, and the run is taken again with what is left of its folder."""
    released = set()
    for _ in range(3):
        run.go()
        released.add(tuple(run.network.weight.flatten().tolist()))
    assert len(released) == 3
    assert run.charged() == {"many": 3, "network": 3 * STEPS}
    set_limit(run.ledger, DATA, Limit(balance(run.ledger.entries(), DATA).epsilon_prv * 1.1, 1e-3))
    with pytest.raises(PrivacyRefused, match="limit of this data set"):
        run.go()
    # with the limit from the beginning, the second model is refused
    second = Run(run.out.parent / "second")
    set_limit(second.ledger, DATA, Limit(BUDGET.spent, 1e-3))
    second.go()
    before = second.ledger.path.read_bytes()
    with pytest.raises(PrivacyRefused, match="limit of this data set"):
        second.go()
    assert second.ledger.path.read_bytes() == before


@pytest.mark.parametrize("step", [1, 4])
def test_a_crash_costs_at_most_the_steps_up_to_the_next_checkpoint(run: Run, step: int) -> None:
    run.until(step, RuntimeError("a bug"))
    # in full, until it goes on
    assert run.charged() == {"many": 1, "network": STEPS}
    run.go()
    assert run.charged() == {"many": 1, "network": STEPS + 1}
    assert balance(run.ledger.entries(), DATA).one_plan is False


def test_a_crash_before_the_first_step_costs_nothing(run: Run) -> None:
    def crash(*_: object) -> Tensor:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateAccess, "count", crash)
        run.go()
    assert run.charged() == {"many": 1, "network": STEPS}
    run.go()
    assert run.charged() == {"many": 1, "network": STEPS}
    assert balance(run.ledger.entries(), DATA).one_plan


def test_few_lines_are_written_and_few_checkpoints_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a training is charged alone; from its duration follows how many more are until a checkpoint."""
    spec = TRAINING.spec.model_copy(update={"steps": 300})
    longer = BUDGET.model_copy(update={"releases": (COUNT, TRAINING.model_copy(update={"spec": spec}))})
    saves, save = [], Checkpoint.save

    def counting(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        saves.append(checkpoint.path)
        save(checkpoint, state)

    monkeypatch.setattr(Checkpoint, "save", counting)
    run = Run(tmp_path, longer)
    run.go(execution=SELDOM)
    assert run.kinds() == ["reserve", "spend", "spend", "spend", "spend", "spend", "settle"]
    assert [sum(entry.releases[-1].steps.values()) for entry in run.ledger.entries()] == [300, 1, 1, 1, 300, 300, 300]
    assert [path.name for path in saves] == ["many.pt", "network.pt", "network.pt"]


def test_a_training_that_becomes_slower_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its first step many are charged ahead; later ones take longer than a checkpoint's interval."""
    spec = TRAINING.spec.model_copy(update={"steps": 300})
    longer = BUDGET.model_copy(update={"releases": (COUNT, TRAINING.model_copy(update={"spec": spec}))})
    clock = Clock(monkeypatch, checkpoint, timing)

    def slower(step: int) -> None:
        clock.now += 0.3 if step < 10 else 20.0 if step < 100 else 0.1

    run = Run(tmp_path, longer)
    run.go(after_step=slower, execution=Execution(checkpoint_seconds=60.0))
    assert run.charged() == {"many": 1, "network": 300}
    spends = [entry for entry in run.ledger.entries() if entry.kind == "spend"]
    ahead = [sum(entry.releases[-1].steps.values()) for entry in spends]
    assert ahead == sorted(ahead)


def test_an_attempt_that_was_superseded_takes_no_more_steps(run: Run) -> None:
    """Two processes in one folder, whose lock was removed."""
    charge = Charge(run.ledger, DATA, "run", Limit(4.0, 1e-3))
    first = charge.begin(BUDGET.releases)
    first.begin("network", 1)
    second = charge.begin(BUDGET.releases)
    with pytest.raises(PrivacyRefused, match="goes on in another process"):
        first.begin("network", 2)
    first.settle()
    second.begin("many", 1)
    second.settle()
    assert run.charged() == {"many": 1, "network": 1}
    with pytest.raises(PrivacyRefused, match="has ended"):
        second.begin("network", 1)


def test_within_an_attempt_charges_only_rise(run: Run) -> None:
    def line(kind: str, steps: int, step: int = 0) -> Entry:
        return Entry(
            number=0, time="", kind=kind, dataset=DATA, run="run", epsilon=1, delta=1e-3, attempt=1, mac="",
            releases=(Spent.of("network", TRAINING.event(steps)),), checkpoints=(Saved("network", step, "00"),),
        )  # fmt: skip

    def spent(steps: int) -> list[Spent]:
        return [Spent.of("network", TRAINING.event(steps))]

    own = [line("reserve", 5, 1), line("spend", 3, 2)]
    check_rise(own, "spend", spent(3))
    check_rise(own, "spend", spent(5))
    # a checkpoint of step 2, from step 1 on, proves one step
    check_rise(own, "settle", spent(1))
    for kind, steps in (("spend", 2), ("settle", 0)):
        with pytest.raises(PrivacyRefused, match="less would be charged"):
            check_rise(own, kind, spent(steps) if steps else [])
    for kind in ("spend", "settle"):
        with pytest.raises(PrivacyRefused, match="was not charged"):
            check_rise(own, kind, spent(6))
        with pytest.raises(PrivacyRefused, match="was not charged"):
            check_rise(own, kind, [Spent.of("other", TRAINING.event(3))])


def test_a_finished_run_that_could_not_settle_is_settled_by_the_next(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid.dp.attempts.Attempt.settle", interrupted)
        run.go()
    assert run.kinds()[-1] == "spend"
    last = run.ledger.entries()[-1]
    charge = Charge(run.ledger, DATA, last.run, Limit(4.0, 1e-3))
    # it does not ask the folder what was taken
    shutil.rmtree(run.out)
    for _ in range(2):
        charge.settle_finished()
        assert run.kinds().count("settle") == 1
    assert run.charged() == {"many": 1, "network": STEPS}


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_stop_at_any_line_after_the_last_step_loses_no_charge(tmp_path: Path) -> None:
    """From the end of the training until the training states are removed."""
    files = ("access.py", "attempts.py", "ledger.py", "run_folder.py", "test_dp_attempts.py")
    number, lines = 0, 1
    while number < lines:
        run = Run(tmp_path / str(number))
        seen = 0

        def traced(frame: FrameType, event: str, _: object, nth: int = number) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.endswith(files):
                return None
            if event == "line":
                if seen == nth:
                    request_stop()
                seen += 1
            return traced

        def last_step(done: int, traced: Any = traced) -> None:
            if done == STEPS:
                sys.settrace(traced)
                frame: FrameType | None = sys._getframe()
                while frame is not None:
                    frame.f_trace = traced
                    frame = frame.f_back

        with stop_on_signal():
            try:
                run.go(last_step, SELDOM)
            except Stopped:
                assert run.kinds()[-1] == "settle"
            finally:
                sys.settrace(None)
        assert run.charged() == {"many": 1, "network": STEPS}
        assert run.kinds()[-1] == "settle"
        lines = max(lines, seen)
        # the whole way takes a minute; every 17th line of it takes turns through all functions
        number += 17
    assert lines > 100
