"""Training that is killed at any moment: it always ends, spends what it said, and reads nothing half-written."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch

from rapid.bundle.format import Bundle
from rapid.config.sections import Settings
from rapid.dp.ledger import Ledger
from rapid.dp.spending import balances
from rapid.methods import apply_overrides
from rapid.stages import train_private_bundle

KILLS, STEPS = 24, 16
CPU = torch.device("cpu")


def settings_for(tiny: Settings) -> Settings:
    """Many short steps, each saved, so that a kill often comes while something is written."""
    overrides = [f"private.steps={STEPS}", f"private.probe.steps={STEPS}", "private.checkpoint_seconds=0"]
    return apply_overrides(tiny.model_dump(mode="json"), overrides)


def train(base: Path, private: Path, out: Path, settings: Settings, ledger: Path) -> Bundle:
    bundle = train_private_bundle(
        base, private, out, settings, epsilon=2.0, delta=1e-4, device=CPU, resume=out.exists(), ledger=ledger
    )
    assert bundle is not None
    return bundle


def train_in_child(*arguments: object) -> int:
    """The process that trains; forked, because importing torch takes longer than the training."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            train(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


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


@pytest.mark.filterwarnings("ignore:This process", "ignore:at this epsilon")
def test_a_killed_training_always_ends_and_costs_the_same(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: Settings
) -> None:
    torch.set_num_threads(1)
    settings = settings_for(tiny_settings)
    begin = time.monotonic()
    quiet = train(public_bundle, digits, tmp_path / "quiet", settings, tmp_path / "quiet.jsonl")
    duration = time.monotonic() - begin
    out, ledger = tmp_path / "killed", tmp_path / "killed.jsonl"
    moments = random.Random(7)
    kills, progress = 0, {"probe": 0, "private": 0}
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
            if kills < KILLS:
                # it ended before it could be killed: from the start again, in another folder
                assert Bundle.open(out, "").privacy["epsilon"] == quiet.privacy["epsilon"]
                out, ledger = tmp_path / f"killed{kills}", tmp_path / f"killed{kills}.jsonl"
                progress = dict.fromkeys(progress, 0)
                continue
            break
        kills += 1
        in_writes += half_written(out)
        # whatever is at its own name can be read, and no step is lost that was saved
        for name, before in progress.items():
            now = steps_in(out / "checkpoints" / f"{name}.pt")
            assert now >= before or (out / {"private": "denoiser"}.get(name, name)).is_dir()
            assert now <= STEPS
            progress[name] = now
        # reserved in full before the first step, once; a kill may also come after it was settled
        entries = Ledger(ledger).entries()
        kinds = [entry.kind for entry in entries]
        assert kinds[:1] in ([], ["reserve"])
        assert set(kinds[1:]) <= {"settle"}
        assert entries or not any(progress.values())
    bundle = Bundle.open(out, "")
    assert bundle.privacy is not None
    assert quiet.privacy is not None
    same = ("epsilon", "delta", "noise_multiplier", "sample_rate", "steps", "probe")
    assert {name: bundle.privacy[name] for name in same} == {name: quiet.privacy[name] for name in same}
    spent, expected = (balances(Ledger(path).entries()) for path in (ledger, tmp_path / "quiet.jsonl"))
    assert [found.epsilon for found in spent] == [found.epsilon for found in expected]
    assert spent[0].epsilon == pytest.approx(quiet.privacy["epsilon"], abs=1e-5)
    # nothing of the killed runs is left, such as weights from steps that were taken again
    names = {path.name for path in (out / "checkpoints").iterdir()}
    assert names == {"plan.json", "run.json", "lock"}
    assert not list(out.glob(".*"))
    assert in_writes > 0
    plan = json.loads((out / "checkpoints" / "plan.json").read_text())["plan"]
    assert plan["steps"] == bundle.privacy["steps"] == STEPS
