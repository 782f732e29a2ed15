"""Ctrl-C and SIGTERM to the program: it ends with 130 after the step that it is in, and --resume goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests_process import Program
from tests_support import TINY

from rapid.bundle import Bundle
from rapid.dp.ledger import Ledger

STEPS = 120
MANY = [f"autoencoder.training.steps={STEPS}", f"denoiser.training.steps={STEPS}", "private.steps=60"]


class Watched(Program):
    """The command with settings, whose progress is read while it runs."""

    def __init__(self, *arguments: object, settings: list[str]) -> None:
        super().__init__(*arguments, *[word for setting in settings for word in ("--set", setting)])
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read what it shows until there is `text`, such as the first progress bar of a training."""
        while text not in self.shown:
            more = os.read(self.stderr.fileno(), 1 << 16).decode(errors="replace")
            assert more, f"{text!r} never came: {self.shown}"
            self.shown += more

    def stop(self, number: signal.Signals) -> int | None:
        """Send a signal and return the exit code."""
        self.send_signal(number)
        return self.end()

    def end(self) -> int | None:
        """The exit code."""
        self.shown += self.communicate()[1]
        return self.returncode


def steps_in(out: Path, name: str) -> int:
    return int(torch.load(out / "checkpoints" / f"{name}.pt", weights_only=True)["step"])


def test_build_kb_is_stopped_and_resumed(tmp_path: Path, letters: Path) -> None:
    out = tmp_path / "out"
    command = ["build-kb", "--public", letters, "--out", out, "--preset", "demo"]
    settings = [*TINY, *MANY[:2]]
    first = Watched(*command, settings=settings)
    first.wait_for(f"0/{STEPS}")
    assert first.stop(signal.SIGINT) == 130
    assert "stopping after this step (again: at once)" in first.shown
    assert "rapid: stopped; rerun the command with --resume to continue" in first.shown
    assert "Traceback" not in first.shown
    done = steps_in(out, "autoencoder")
    assert 0 <= done < STEPS
    assert not (out / "config.json").exists()
    second = Watched(*command, "--resume", settings=settings)
    second.wait_for("denoiser")
    # it went on where it had stopped
    assert f"{done}/{STEPS}" in second.shown
    assert second.stop(signal.SIGTERM) == 130
    assert 0 <= steps_in(out, "denoiser") < STEPS
    third = Watched(*command, "--resume", settings=settings)
    assert third.end() == 0
    assert Bundle.open(out, "out", "public").config.kind == "public"
    assert not list((out / "checkpoints").glob("*.pt"))


def test_train_private_is_stopped_charged_and_resumed(tmp_path: Path, public_bundle: Path, digits: Path) -> None:
    out, ledger = tmp_path / "out", tmp_path / "ledger.jsonl"
    command = ["train-private", "--base", public_bundle, "--private", digits, "--epsilon", "10", "--out", out]
    settings = [*[setting for setting in TINY if setting.startswith(("private", "generation"))], MANY[2]]
    # saved often, so that it can be seen how far it is
    settings.append("private.checkpoint_seconds=0.1")
    program = Watched(*command, "--ledger", ledger, settings=settings)
    program.wait_for("denoiser")
    while not (out / "checkpoints" / "denoiser.pt").exists() or steps_in(out, "denoiser") == 0:
        assert program.poll() is None
        time.sleep(0.02)
    assert program.stop(signal.SIGINT) == 130
    assert "--resume to continue" in program.shown
    taken = steps_in(out, "denoiser")
    assert 0 < taken < 60
    # charged for the steps that were begun, and for the releases before
    last = Ledger(ledger).entries()[-1]
    assert last.kind == "settle"
    assert [release.name for release in last.releases] == ["overlap", "probe", "denoiser"]
    assert f'"count": {taken}' in json.dumps(last.releases[-1].event)
    assert Watched(*command, "--ledger", ledger, "--resume", settings=settings).end() == 0
    bundle = Bundle.open(out, "out", "private")
    assert bundle.privacy is not None
    assert bundle.privacy["steps"] == 60
    kinds = [entry.kind for entry in Ledger(ledger).entries() if entry.kind != "spend"]
    assert kinds == ["reserve", "settle"] * 2


def test_a_second_signal_ends_it_at_once(tmp_path: Path, letters: Path) -> None:
    """Both come before it is through with its step, or the second one finds it on its way out."""
    out = tmp_path / "out"
    settings = [*TINY, *MANY[:2], "autoencoder.training.batch_size=20000"]
    program = Watched("build-kb", "--public", letters, "--out", out, "--preset", "demo", settings=settings)
    program.wait_for(f"0/{STEPS}")
    program.send_signal(signal.SIGTERM)
    program.wait_for("stopping after this step")
    assert program.stop(signal.SIGTERM) == 130
    assert "--resume" not in program.shown
    assert not (out / "checkpoints" / "autoencoder.pt").exists()


@pytest.mark.parametrize("command", ["info {out}", "build-kb --public {out} --out {out}/new"])
def test_ctrl_c_while_the_program_loads(tmp_path: Path, command: str) -> None:
    """Whatever an import makes of it."""
    loads = tmp_path / "path" / "torch" / "__init__.py"
    loads.parent.mkdir(parents=True)
    loads.write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise ImportError('half loaded') from None\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "rapid", *command.format(out=tmp_path).split()],
        capture_output=True, text=True, timeout=50, check=False, env=os.environ | {"PYTHONPATH": str(loads.parents[1])},
    )  # fmt: skip
    hint = "; nothing was begun" if "--out" in command else ""
    assert (done.returncode, done.stderr) == (130, f"rapid: stopped{hint}\n")
    assert not (tmp_path / "new").exists()
