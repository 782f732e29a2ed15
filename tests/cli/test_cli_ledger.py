"""The ledger and the audit as a user meets them: commands, exit codes, one line."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests_ledgers import ASKED, counted
from tests_process import Program, run

from rapid.cli import main
from rapid.dp.events import poisson_gaussian_steps
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge
from rapid.training.run_folder import RunFolder


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "book" / "ledger.jsonl"


def rapid(*arguments: object, ledger: Path) -> CompletedProcess[str]:
    return run(*arguments, env=os.environ | {"RAPID_LEDGER": str(ledger)})


def last(stderr: str) -> str:
    return stderr.strip().splitlines()[-1]


def test_a_second_run_beyond_the_limit_is_refused(
    tmp_path: Path, ledger: Path, public_bundle: Path, digits: Path, letters: Path
) -> None:
    train = ["train-private", "--base", public_bundle, "--private", digits, "--delta", "1e-4"]
    limited = rapid("ledger", "limit", digits, "--epsilon", 2, "--delta", 1e-4, ledger=ledger)
    assert limited.returncode == 0, limited.stderr
    assert "0 of epsilon 2 spent" in limited.stdout
    first = rapid(*train, "--epsilon", 1, "--out", tmp_path / "first", ledger=ledger)
    assert first.returncode == 0, first.stderr
    refused = rapid(*train, "--epsilon", 1.9, "--out", tmp_path / "second", ledger=ledger)
    assert refused.returncode == 3
    assert last(refused.stderr).startswith("rapid: the limit of this data set is epsilon 2 at delta 0.0001;")
    assert "step/s" not in refused.stderr
    assert not (tmp_path / "second").exists()
    # together, a smaller run fits
    third = rapid(*train, "--epsilon", 0.3, "--out", tmp_path / "third", ledger=ledger)
    assert third.returncode == 0, third.stderr
    # a finished run is not charged again
    again = rapid(*train, "--epsilon", 0.3, "--out", tmp_path / "third", "--resume", ledger=ledger)
    assert again.returncode == 0, again.stderr
    shown = rapid("ledger", "show", "--json", ledger=ledger)
    (found,) = json.loads(shown.stdout)["datasets"]
    assert len(found["runs"]) == 2
    assert found["limit"] == {"epsilon": 2.0, "delta": 1e-4}
    assert 1.0 < found["epsilon"] <= 2
    assert {(run["kind"], run["unit"]) for run in found["runs"]} == {("settle", "one image")}
    assert found["epsilon_prv"] < found["epsilon_filter"] == found["epsilon"]
    told = rapid("ledger", "show", found["dataset"][:8], ledger=ledger).stdout
    assert "of 2 at delta 0.0001" in told
    assert told.count("spent, asked for") == 2
    assert "holds even if plans are chosen after seeing earlier results" in told
    assert "holds if all plans had been fixed in advance" in told and "one image" not in told
    verified = rapid("ledger", "verify", ledger=ledger)
    assert (verified.returncode, "none altered" in verified.stdout) == (0, True)
    # nor if it was moved; a copy of an unfinished one is another run
    (tmp_path / "third").rename(tmp_path / "moved")
    arguments = ["--epsilon", 0.3, "--out", tmp_path / "moved", "--resume"]
    assert rapid(*train, *arguments, ledger=ledger).returncode == 0
    kinds = [entry.kind for entry in Ledger(ledger).entries()]
    assert (kinds.count("reserve"), kinds.count("settle"), kinds[-1]) == (2, 2, "settle")
    # but not with other images, or another ledger
    for images, book in ((letters, ledger), (digits, tmp_path / "another.jsonl")):
        command = ["train-private", "--base", public_bundle, "--private", images, "--delta", "1e-4", *arguments]
        bound = rapid(*command, ledger=book)
        assert bound.returncode == 2, bound.stderr
    assert "--private: differs from the images of the run in --out, or --ledger from its ledger" in last(bound.stderr)
    for name in ("config.json", "denoiser/diffusion_pytorch_model.safetensors"):
        (tmp_path / "moved" / name).unlink()
    (tmp_path / "moved" / "denoiser" / "config.json").unlink()
    (tmp_path / "moved" / "denoiser").rmdir()
    assert rapid("ledger", "limit", digits, "--epsilon", 1.1, "--delta", 1e-4, ledger=ledger).returncode == 0
    copied = rapid(*train, *arguments, ledger=ledger)
    assert copied.returncode == 3, copied.stderr
    assert (tmp_path / "moved" / "probe").exists()
    # one digit in one line
    ledger.write_text(ledger.read_text().replace('"epsilon": 2.0', '"epsilon": 9.2', 1))
    for command in (["ledger", "verify"], [*train, "--epsilon", 1, "--out", tmp_path / "second"]):
        tampered = rapid(*command, ledger=ledger)
        assert tampered.returncode == 3
        assert "line 1 is not the one that was written" in last(tampered.stderr)


def test_units_are_named_where_they_are_not_one_image(ledger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    book = Ledger(ledger)
    told = []
    for run_name, unit in (("old", ""), ("first", "one image"), ("second", "one person")):
        Charge(book, "a" * 32, run_name, ASKED, unit=unit).begin([counted(8.0)])
        assert main(["ledger", "show", "--ledger", str(ledger)]) == 0
        told.append(capfd.readouterr().out)
    for shown in told[:2]:
        assert "one " not in shown.partition("data set")[2].partition("  run ")[2]
    assert [line.partition("at 1e-05")[2] for line in told[2].splitlines() if "asked for" in line] == [
        "", "", ", for one person",
    ]  # fmt: skip
    assert told[2].endswith("  not all of these runs protect the same: the figures add them up as if they did\n")


def test_a_stopped_run_is_charged_for_its_steps(
    tmp_path: Path, ledger: Path, public_bundle: Path, digits: Path
) -> None:
    command = ["train-private", "--base", public_bundle, "--private", digits, "--epsilon", 1, "--delta", 1e-4]
    command += ["--out", tmp_path / "out", "--set", "private.steps=4000", "--set", "private.checkpoint_seconds=0"]
    process = Program(*command, env=os.environ | {"RAPID_LEDGER": str(ledger)})
    state = tmp_path / "out" / "checkpoints" / "denoiser.pt"
    deadline = time.monotonic() + 100
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    reserved, *begun, settled = Ledger(ledger).entries()
    assert {entry.kind for entry in begun} == {"spend"}
    assert (reserved.kind, settled.kind) == ("reserve", "settle")
    planned, taken = (
        {release.name: sum(row[2] for row in poisson_gaussian_steps(release.dp_event)) for release in entry.releases}
        for entry in (reserved, settled)
    )
    assert planned == {"overlap": 1, "probe": 3, "denoiser": 4000}
    assert taken == {"overlap": 1, "probe": 3, "denoiser": taken["denoiser"]}
    assert 0 < taken["denoiser"] < 4000


def test_a_place_where_no_lock_can_be_made_is_refused_at_once(digits: Path) -> None:
    """As a place that is read-only, and without waiting for a lock that never comes."""
    limit = ("ledger", "limit", digits, "--epsilon", 3, "--delta", 1e-5, "--ledger", "/proc/rapid.jsonl")
    refused = run(*limit, timeout=60)
    assert refused.returncode == 2
    assert last(refused.stderr).startswith("rapid: --ledger /proc/rapid.jsonl: cannot be used (")


def test_a_set_that_nothing_was_spent_on(ledger: Path, digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Charge(Ledger(ledger), "a" * 32, "run", ASKED).begin([counted(8.0)])
    show = ["ledger", "show", str(digits), "--ledger", str(ledger)]
    assert main(show) == 0
    shown = capfd.readouterr().out
    assert shown.splitlines()[3:] == ["  nothing was spent on it, no limit set"]
    assert main(["ledger", "limit", str(digits), "--epsilon", "3", "--delta", "1e-5", "--ledger", str(ledger)]) == 0
    assert main(show) == 0
    assert "epsilon 0 of 3 at delta 1e-05" in capfd.readouterr().out


def test_nothing_is_spent_at_the_default_place_before_the_first_run(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAPID_LEDGER", str(ledger))
    assert main(["ledger", "show"]) == 0
    assert capfd.readouterr().out == f"{ledger}: 0 lines\n"
    assert not ledger.parent.exists()


def test_a_limit_below_what_was_spent_says_that_it_admits_nothing(
    ledger: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Charge(Ledger(ledger), "a" * 32, "run", ASKED).begin([counted(8.0)])
    for epsilon, full in (("0.2", True), ("1000", False)):
        command = ["ledger", "limit", "a" * 32, "--epsilon", epsilon, "--delta", "1e-5", "--ledger", str(ledger)]
        assert main(command) == 0
        told = capfd.readouterr().out
        assert f"of epsilon {epsilon} spent at delta 1e-05" in told
        assert told.endswith("; nothing more will be admitted\n") == full


@pytest.mark.parametrize("command", ["verify", "show"])
def test_lines_that_were_all_removed_are_missed(ledger: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    Charge(Ledger(ledger), "a" * 32, "run", ASKED).begin([counted(8.0)])
    ledger.unlink()
    assert main(["ledger", command, "--ledger", str(ledger)]) == 3
    assert "1 of 1 lines are missing at the end" in last(capfd.readouterr().err)


@pytest.mark.filterwarnings("ignore:at this epsilon")
def test_two_processes_do_not_share_an_output_folder(
    tmp_path: Path, public_bundle: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with RunFolder.enter(out, "train-private", {}, resume=False):
        command = f"train-private --base {public_bundle} --private {digits} --epsilon 1 --out {out} --resume"
        assert main(command.split()) == 2
    assert "is in use by another process" in last(capfd.readouterr().err)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ledger limit {digits} --epsilon 0 --delta 1e-5", "--epsilon 0"),
        ("ledger limit {digits} --epsilon 1 --delta 2", "--delta 2: must lie in (0, 1), and well under 1/N for N im"),
        ("ledger limit {digits} --epsilon 1 --delta 1e-11", "--delta 1e-11: must be at least 1e-10"),
        ("audit --epsilon 1 --delta 1e-11", "delta 1e-11: must be at least 1e-10"),
        ("ledger limit nowhere --epsilon 1 --delta 1e-5", "DATASET nowhere"),
        ("ledger verify --ledger {tmp}/none.jsonl", "does not exist"),
        ("ledger show --ledger {tmp}/none.jsonl", "/none.jsonl: does not exist; nothing was spent with it"),
        ("ledger show --json --ledger {tmp}/none.jsonl", "does not exist"),
        ("ledger show {digits} --ledger {tmp}/none.jsonl", "does not exist"),
        ("ledger show --ledger {tmp}", "is a folder"),
        ("audit --epsilon 1 --canaries 3", "--canaries 3"),
        ("audit --epsilon 1 --sample-rate 0", "--sample-rate 0"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, digits: Path, command: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command.format(digits=digits, tmp=tmp_path).split()) == 2
    err = capfd.readouterr().err
    assert err.startswith("rapid: ")
    assert err.count("\n") == 1
    assert words in err


def test_audit_prints_what_it_found(capfd: pytest.CaptureFixture[str]) -> None:
    command = "audit --epsilon 1 --canaries 100 --steps 3 --set denoiser.channels=16 --set denoiser.heads=2"
    assert main(command.split()) == 0
    out = capfd.readouterr().out
    assert "claimed:  epsilon 1 at delta 1e-05" in out
    assert "with 95% confidence" in out
    assert "no deviation found" in out
