"""Training that is killed at any moment: it always ends, spends what it said, and reads nothing half-written."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch

from rapid.bundle import Bundle
from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget
from rapid.dp.ledger import Entry, Ledger
from rapid.dp.spending import balances
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.private import train_private_bundle

KILLS, STEPS = 24, 16
CPU = torch.device("cpu")


def settings_for(tiny: RapidSettings) -> RapidSettings:
    """Many short steps, each saved, so that a kill often comes while something is written."""
    overrides = [f"private.steps={STEPS}", f"private.probe.steps={STEPS}", "private.checkpoint_seconds=0"]
    settings = apply_overrides(tiny.model_dump(mode="json"), overrides)
    assert isinstance(settings, RapidSettings)
    return settings


def train(base: Path, private: Path, out: Path, settings: RapidSettings, ledger: Path) -> Bundle:
    bundle = train_private_bundle(
        base, private, out, settings, epsilon=2.0, delta=1e-4, device=CPU, resume=out.exists(), ledger=ledger
    )
    assert bundle is not None
    return bundle


def train_in_child(*arguments: object, until: tuple[str, ...] = ()) -> int:
    """The process that trains; forked, because importing torch takes longer than the training.

    `until`: file and function, and the name of the file that it writes if that matters; the process kills itself when
    the function is called.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            if until:
                sys.settrace(partial(kill_myself, until))
            train(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def kill_myself(until: tuple[str, ...], frame: FrameType, event: str, _: object) -> None:
    file, function, *names = until
    code = frame.f_code
    called = code.co_name == function and code.co_filename.endswith(file)
    if called and names in ([], [getattr(frame.f_locals.get("path"), "name", None)]):
        os.kill(os.getpid(), signal.SIGKILL)


def half_written(out: Path) -> bool:
    return any(path.is_dir() for folder in (out, out / "checkpoints") for path in folder.glob(".*.*"))


def kill(child: int, out: Path, seconds: float, in_a_write: bool) -> None:
    """SIGKILL after `seconds`; or at the first moment from then on at which it has something half-written."""
    time.sleep(seconds)
    latest = time.monotonic() + 20
    while (
        in_a_write
        and time.monotonic() < latest
        and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    ):
        # while it stands still it cannot end what it writes
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if half_written(out):
            break
        os.kill(child, signal.SIGCONT)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)


def steps_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["step"]) if checkpoint.exists() else 0


def budget_of(out: Path) -> Budget:
    return Budget.model_validate(json.loads((out / "checkpoints" / "manifest.json").read_text())["budget"])


def charged(ledger: Path) -> list[Entry]:
    """What a killed run leaves: charged in full before the first step, once, and at most settled after the last."""
    entries = Ledger(ledger).entries()
    assert [entry.kind for entry in entries] in ([], ["reserve"], ["reserve", "settle"])
    assert not entries or entries[0].releases == entries[-1].releases
    return entries


def same_as(bundle: Bundle, ledger: Path, quiet: Bundle, quiet_ledger: Path) -> None:
    """The bundle, its statement, its budget and what it cost are those of a run that nobody killed."""
    assert bundle.privacy is not None
    assert quiet.privacy is not None
    timeless = [
        {name: value for name, value in one.items() if name != "created"} for one in (bundle.privacy, quiet.privacy)
    ]
    assert timeless[0] == timeless[1]
    assert budget_of(bundle.path) == budget_of(quiet.path)
    assert bundle.config.components.keys() == quiet.config.components.keys()
    private = {"probe", "denoiser"}
    for name in quiet.config.components.keys() - private:
        assert bundle.config.components[name] == quiet.config.components[name]
    for name in private:
        files = [
            [(path.name, path.stat().st_size) for path in sorted((one.path / name).iterdir())]
            for one in (bundle, quiet)
        ]
        assert files[0] == files[1]
    spent, expected = (balances(Ledger(path).entries()) for path in (ledger, quiet_ledger))
    assert [found.epsilon for found in spent] == [found.epsilon for found in expected]
    assert spent[0].epsilon == pytest.approx(quiet.privacy["epsilon"], abs=1e-5)
    # nothing of the killed runs is left, such as weights from steps that were taken again
    names = {path.name for path in (bundle.path / "checkpoints").iterdir()}
    assert names == {"manifest.json", "run.json", "lock"}
    assert not list(bundle.path.glob(".*"))


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
        train(public_bundle, digits, folder / "first", settings, folder / "first.jsonl")
        begin = time.monotonic()
        bundle = train(public_bundle, digits, folder / "out", settings, folder / "ledger.jsonl")
    return bundle, folder / "ledger.jsonl", time.monotonic() - begin


@pytest.mark.filterwarnings("ignore:This process", "ignore:at this epsilon")
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
        child = train_in_child(public_bundle, digits, out, settings, ledger)
        # at first before much is done, later everywhere
        seconds = moments.uniform(0, duration * (0.3 if kills < KILLS // 3 else 0.9))
        if kills < KILLS:
            kill(child, out, seconds, in_a_write=kills % 3 == 0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            same_as(Bundle.open(out, ""), ledger, expected, expected_ledger)
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
            cost = prv_epsilon([release.dp_event for release in entries[-1].releases], budget.delta)
            assert cost >= prv_epsilon(budget.events(progress), budget.delta)
    assert in_writes > 0


@pytest.mark.filterwarnings("ignore:This process", "ignore:at this epsilon")
@pytest.mark.parametrize(
    "until",
    [
        pytest.param(("ledger.py", "add"), id="nothing-charged"),
        pytest.param(("access.py", "count"), id="nothing-released"),
        pytest.param(("access.py", "train"), id="overlap-counted"),
        pytest.param(("stages/private.py", "_write"), id="all-released"),
        pytest.param(("files.py", "write_json", "config.json"), id="components-written"),
        pytest.param(("spending.py", "settle"), id="bundle-finished"),
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
    child = train_in_child(public_bundle, digits, out, settings, ledger, until=until)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = charged(ledger)
    bundle = train(public_bundle, digits, out, settings, ledger)
    same_as(bundle, ledger, *quiet[:2])
    after = charged(ledger)
    assert after[: len(before)] == before
    if before and before[-1].kind == "settle":
        assert after == before
