"""Training that is killed at any moment: it always ends, spends what it said, and reads nothing half-written."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from tests_charges import budget_of, charged, same_as, steps_charged, steps_in
from tests_children import train_privately, train_until
from tests_process import start

from rapid.bundle import Bundle
from rapid.dp.accounting import prv_epsilon
from rapid.dp.spending import balances
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings

KILLS, STEPS = 24, 16
ROUNDING = 1e-9
"""The order in which releases are composed changes the last digits of epsilon."""


def settings_for(tiny: RapidSettings) -> RapidSettings:
    """Many short steps, each saved, so that a kill often comes while something is written."""
    overrides = [f"private.steps={STEPS}", f"private.probe.steps={STEPS}", "private.checkpoint_seconds=0"]
    settings = apply_overrides(tiny.model_dump(mode="json"), overrides)
    assert isinstance(settings, RapidSettings)
    return settings


def half_written(out: Path) -> bool:
    return any(path.is_dir() for folder in (out, out / "checkpoints") for path in folder.glob(".*.*"))


def is_stopped(child: BaseProcess) -> bool:
    """Whether the process stands still, or has ended."""
    try:
        return Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TtZX"
    except OSError:
        return True


def kill(child: BaseProcess, out: Path, seconds: float, in_a_write: bool) -> None:
    """SIGKILL after `seconds`; or at the first moment from then on at which it has something half-written."""
    assert child.pid is not None
    time.sleep(seconds)
    latest = time.monotonic() + 20
    # it may end at any point of this loop
    with suppress(ProcessLookupError):
        while in_a_write and time.monotonic() < latest:
            # while it stands still it cannot end what it writes
            os.kill(child.pid, signal.SIGSTOP)
            while not is_stopped(child):
                time.sleep(0.0001)
            if half_written(out):
                break
            os.kill(child.pid, signal.SIGCONT)
            time.sleep(0.0005)
    child.kill()


@pytest.fixture(scope="module")
def quiet(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Path, float]:
    """The bundle of a run that nobody killed, its ledger, and the seconds that it took."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("quiet")
    settings = settings_for(tiny_settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # once more than is needed, because the first run of a process takes three times as long
        train_privately(public_bundle, digits, folder / "first", settings, folder / "first.jsonl")
        begin = time.monotonic()
        bundle = train_privately(public_bundle, digits, folder / "out", settings, folder / "ledger.jsonl")
    elapsed = time.monotonic() - begin
    assert steps_charged(folder / "ledger.jsonl") == {"overlap": 1, "probe": STEPS, "denoiser": STEPS}
    return bundle, folder / "ledger.jsonl", elapsed


@pytest.mark.filterwarnings("ignore:at this epsilon")
def test_a_killed_training_always_ends_and_costs_the_same(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, quiet: tuple[Bundle, Path, float]
) -> None:
    settings = settings_for(tiny_settings)
    expected, expected_ledger, duration = quiet
    out, ledger = tmp_path / "killed", tmp_path / "killed.jsonl"
    moments = random.Random(7)
    kills, progress = 0, dict.fromkeys(("overlap", "probe", "denoiser"), 0)
    in_writes = 0
    while True:
        child = start(train_until, (), public_bundle, digits, out, settings, ledger)
        # at first before much is done, later everywhere
        seconds = moments.uniform(0, duration * (0.3 if kills < KILLS // 3 else 0.9))
        if kills < KILLS:
            kill(child, out, seconds, in_a_write=kills % 3 == 0)
        child.join()
        if child.exitcode != -signal.SIGKILL:
            assert child.exitcode == 0
            same_as(Bundle.open(out, ""), ledger, expected, expected_ledger, kills)
            if kills < KILLS:
                # it ended before it could be killed: from the start again, in another folder
                out, ledger = tmp_path / f"killed{kills}", tmp_path / f"killed{kills}.jsonl"
                progress = dict.fromkeys(progress, 0)
                continue
            break
        kills += 1
        in_writes += half_written(out)
        # whatever is at its own name can be read, and no step is lost that was saved
        finished = (out / "config.json").exists()
        for name, before in progress.items():
            now = steps_in(out / "checkpoints" / f"{name}.pt")
            assert now >= before or finished
            assert now <= (1 if name == "overlap" else STEPS)
            progress[name] = now
        entries = charged(ledger)
        assert entries or not any(progress.values())
        if entries:
            # never less than what the checkpoints show, all releases together
            budget = budget_of(out)
            cost = balances(entries)[0].epsilon_prv
            assert cost >= prv_epsilon(budget.events(progress), budget.delta) * (1 - ROUNDING)
            assert all(steps_charged(ledger)[name] >= steps for name, steps in progress.items())
    assert in_writes > 0


@pytest.mark.filterwarnings("ignore:at this epsilon")
@pytest.mark.parametrize(
    "until",
    [
        pytest.param(("ledger.py", "charge"), id="nothing-charged"),
        pytest.param(("access.py", "count"), id="nothing-released"),
        pytest.param(("access.py", "train"), id="overlap-counted"),
        pytest.param(("stages/private.py", "write_model"), id="all-released"),
        pytest.param(("files.py", "write_json", "config.json"), id="components-written"),
        pytest.param(("attempts.py", "settle"), id="bundle-finished"),
        pytest.param(("run_folder.py", "leave"), id="settled"),
    ],
)
def test_a_kill_at_a_turning_point_costs_nothing_more(
    tmp_path: Path,
    public_bundle: Path,
    digits: Path,
    tiny_settings: RapidSettings,
    quiet: tuple[Bundle, Path, float],
    until: tuple[str, ...],
) -> None:
    settings = settings_for(tiny_settings)
    out, ledger = tmp_path / "out", tmp_path / "ledger.jsonl"
    child = start(train_until, until, public_bundle, digits, out, settings, ledger)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    before = charged(ledger)
    bundle = train_privately(public_bundle, digits, out, settings, ledger)
    same_as(bundle, ledger, *quiet[:2], kills=0)
    after = charged(ledger)
    assert after[: len(before)] == before
    if before and before[-1].kind == "settle":
        assert after == before
