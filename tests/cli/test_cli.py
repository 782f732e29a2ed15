"""The command line: bad input in one line, nothing half-written; stopped and resumed as a process."""

from __future__ import annotations

import argparse
import json
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests_process import Program, wait_for
from tests_support import TINY

from rapid.bundle import Bundle
from rapid.cli import main
from rapid.cli.main import flag
from rapid.cli.parser import build_parser
from rapid.data import load_images
from rapid.dp.accounting import prv_epsilon
from rapid.dp.events import dp_sgd_event
from rapid.nn import Denoiser

Paths = dict[str, Path]


@pytest.fixture
def paths(tmp_path: Path, public_bundle: Path, private_bundle: Path, letters: Path, digits: Path) -> Paths:
    np.savez(tmp_path / "floats.npz", images=np.zeros((4, 28, 28)))
    np.savez(tmp_path / "large.npz", images=np.zeros((4, 40, 40), np.uint8))
    np.savez(tmp_path / "one.npz", images=np.zeros((1, 28, 28), np.uint8))
    np.savez(tmp_path / "four.npz", images=np.zeros((4, 28, 28), np.uint8), labels=np.arange(4))
    np.savez(tmp_path / "colours.npz", images=np.full((300, 28, 28, 3), (1, 2, 3), np.uint8))
    np.savez(tmp_path / "unlabelled.npz", images=np.zeros((9, 28, 28), np.uint8))
    names = np.array(["0", "1\nrapid: all is well\x1b[2J"])
    np.savez(tmp_path / "lines.npz", images=np.zeros((9, 28, 28), np.uint8), labels=np.arange(9) % 2, classes=names)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    return {
        "tmp": tmp_path, "public": public_bundle, "private": private_bundle, "letters": letters, "digits": digits,
        "new": tmp_path / "new",
    }  # fmt: skip


BUILD = "build-kb --public {letters} --out {new} --preset demo"
TRAIN = "train-private --base {public} --private {digits} --epsilon 1 --out {new}"
EVALUATE = "evaluate --synthetic {letters} --real {digits} --out {new}.json"
GENERATE = "generate --model {private} --count 2 --out {new}.npz"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("build-kb --public {tmp}/none --out {new}", "--public"),
        ("build-kb --public {tmp}/empty --out {new}", "no images"),
        ("build-kb --public {tmp}/floats.npz --out {new}", "uint8"),
        ("build-kb --public {tmp}/large.npz --out {new} --preset demo", "image.fit=resize"),
        ("build-kb --public {letters} --out {tmp}/full", "--out"),
        ("build-kb --public {tmp}/one.npz --out {new} --preset demo", "1 images cannot be split"),
        ("build-kb --public {tmp}/one.npz --out {tmp}/empty --preset demo", "1 images cannot be split"),
        (BUILD + " --networks {tmp}/none", "--networks"),
        (BUILD + " --networks {private}", "is a private bundle, expected a public one"),
        (BUILD.replace("demo", "nonsense"), "--preset nonsense"),
        (BUILD + " --set retrieval.k=100", "k must be larger than v"),
        (BUILD + " --set retrieval.k=200", "k must be larger than v"),
        (BUILD + " --set retrieval.k=1001", "1..1000"),
        (BUILD + " --set retrieval.v=0", "retrieval.v"),
        (BUILD + " --set denoiser.chanels=3", "denoiser.chanels"),
        (BUILD + " --set nonsense", "section.name=value"),
        (BUILD + " --set image.size=30", "divisible"),
        (BUILD + " --device tpu", "--device tpu"),
        (TRAIN.replace("--epsilon 1", "--epsilon 0"), "--epsilon"),
        (TRAIN.replace("--epsilon 1", "--epsilon -3"), "--epsilon"),
        (TRAIN.replace("--epsilon 1", "--epsilon nan"), "--epsilon"),
        ("plan --size 0", "--size"),
        ("plan --size 100 --epsilon 0", "--epsilon"),
        ("plan --size 100 --batch 101 --steps 5", "rapid: --batch 101: "),
        ("plan --size 100 --batch 0", "--batch"),
        ("plan --size 100 --delta 2", "--delta"),
        ("plan --private {tmp}/none", "--private"),
        ("plan --size 100 --base {public} --method dp-gan", "--method dp-gan: --base was made for rapid"),
        ("plan --size 100 --preset dpdm-mnist --method rapid", "--method rapid: --preset dpdm-mnist is for dpdm"),
        (TRAIN + " --set private.multiplicity=0", "private.multiplicity"),
        (TRAIN + " --set private.noise_source=dice", "private.noise_source"),
        (TRAIN + " --set private.noise_source=device --device cpu", "use chacha20 on a CPU"),
        (TRAIN + " --set private.physical_batch=0", "use a whole number of at least 1, or auto"),
        (TRAIN + " --set private.precision=bfloat16 --device cpu", "no faster; use float32"),
        (TRAIN + " --set private.group_size=101", "--set private.group_size=101"),
        (TRAIN + " --delta 0", "--delta"),
        (TRAIN + " --delta 1.5", "--delta"),
        (TRAIN + " --set private.expected_batch=101", "expected_batch"),
        (TRAIN + " --set retrieval.k=900", "the public bundle"),
        (TRAIN + " --set private.trainable=[nothing]", "private.trainable"),
        (TRAIN.replace("{public}", "{private}"), "expected a public one"),
        (TRAIN.replace("{public}", "{tmp}/none"), "--base"),
        (TRAIN.replace("{public}", "{tmp}/full"), "no config.json"),
        (TRAIN.replace("{digits}", "{tmp}/none"), "--private"),
        (TRAIN.replace("{digits}", "{tmp}/large.npz"), "do not fit"),
        (GENERATE.replace("--count 2", "--count 0"), "--count 0"),
        (GENERATE + " --labels 0,11", "--labels 11"),
        (GENERATE + " --seed -1", "--seed"),
        (GENERATE + " --set private.steps=3", "generation"),
        (GENERATE + " --set generation.sampler=magic", "generation.sampler"),
        (GENERATE.replace("{new}.npz", "{tmp}/full"), "not empty"),
        (GENERATE.replace("{new}.npz", "{new}.jpg"), "--out"),
        (GENERATE.replace("{private}", "{tmp}/empty"), "--model"),
        (EVALUATE.replace("{letters}", "{tmp}/none"), "--synthetic"),
        (EVALUATE.replace("{digits}", "{tmp}/none"), "--real"),
        (EVALUATE.replace("{new}.json", "{new}.txt"), "--out"),
        (EVALUATE.replace("{new}.json", "{tmp}/folder.json"), "is a folder"),
        (EVALUATE.replace("{letters}", "{tmp}/four.npz"), "--synthetic"),
        (EVALUATE.replace("{digits}", "{tmp}/four.npz"), "give at least 6"),
        (EVALUATE, "has the class '0'"),
        (
            "evaluate --synthetic {digits} --real {tmp}/lines.npz --out {new}.json",
            "the class '1?rapid: all is well?[2J'",
        ),
        (EVALUATE.replace("{letters}", "{tmp}/unlabelled.npz"), "--synthetic"),
        (EVALUATE + " --train-real {digits}", "add --open-data"),
        (EVALUATE + " --classifiers small,vgg", "--classifiers vgg"),
        (EVALUATE + " --classifiers small,small", "one twice"),
        (EVALUATE + " --epochs 0", "--epochs 0"),
        (EVALUATE + " --public {tmp}/none", "--public"),
        (EVALUATE + " --public {tmp}/large.npz", "--public"),
        (EVALUATE + " --train-real {tmp}/four.npz --open-data", "--train-real"),
        (EVALUATE + " --model {tmp}/empty", "--model"),
        (EVALUATE + " --inception {tmp}/none.pth", "--inception"),
        (EVALUATE.replace("{digits}", "{tmp}/unlabelled.npz"), "--classifiers none"),
        (EVALUATE.replace("{digits}", "{tmp}/unlabelled.npz") + " --classifiers none", "labelled --public"),
        ("info {tmp}/full", "no config.json"),
        ("plan --base {public} --private {tmp}/colours.npz --epsilon 1", "has colour images, and --base makes grey"),
        ("plan --base {public} --private {digits} --epsilon 0", "--epsilon 0.0: must be a positive number"),
        (
            "train-private --base {public} --private {digits} --epsilon 0 --out {new}",
            "--epsilon 0.0: must be a positive",
        ),
        ("serve --model {tmp}/empty --port 0", "--model"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    command: str, words: str, paths: Paths, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(paths["tmp"].rglob("*"))
    assert main([part.format(**paths) for part in command.split()]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rapid: ")]
    assert len(lines) == 1
    assert words in lines[0]
    left = [path for path in sorted(paths["tmp"].rglob("*")) if path not in before]
    assert not left


UNREAD = "--public {tmp}/floats.npz"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"build-kb {UNREAD} --out {{tmp}}/full", "holds other files and no run of rapid"),
        (f"build-kb {UNREAD} --out {{public}}", "continue with --resume"),
        (f"build-kb {UNREAD} --out {{tmp}}/full/mine.txt/out", "mine.txt is not a folder; choose another name"),
        (f"build-kb {UNREAD} --out {{new}} --set retreival.k=3", "--set retreival: there is no such setting"),
        (f"build-kb {UNREAD} --out {{new}} --set denoiser.channels=many", "--set denoiser.channels: must be a"),
        (f"build-kb {UNREAD} --out {{new}} --preset nonsense", "unknown; choose one of auto, "),
        (f"build-kb {UNREAD} --out {{new}} --preset demo --set private.stps=3", "; did you mean private.steps?"),
        ("train-private --base {public} --private {tmp}/floats.npz --epsilon 1 --out {tmp}/full", "holds other files"),
        ("train-private --base {public} --private {tmp}/floats.npz --epsilon 1 --out {private}", "--resume"),
        ("train-private --base {public} --private {tmp}/none --epsilon 1 --out {new} --set private.a=1", "private.a:"),
        (f"build-kb {UNREAD} --out {{new}} --resume", "holds no run to resume; correct the name, or leave out"),
        ("train-private --base {public} --private {tmp}/floats.npz --epsilon 1 --out {new} --resume", "holds no run"),
        ("generate --model {tmp}/none --count 2 --out {tmp}/floats.npz", "floats.npz: exists already; choose another"),
        ("plan --private {tmp}/floats.npz --batch 0", "--batch 0: must be at least 1"),
        ("predict --model {tmp}/none --data {tmp}/none --out {tmp}/full/mine.txt/new.csv", "mine.txt is not a folder"),
        ("evaluate --synthetic {tmp}/none --real {tmp}/none --out {tmp}/full/mine.txt/new.json", "is not a folder"),
        ("generate --model {tmp}/none --count 2 --out {tmp}/full/mine.txt/new.npz", "--out"),
        ("generate --model {tmp}/none --count 2 --out {new}.npz --report {tmp}/full/mine.txt/r.json", "--report"),
        ("generate --model {tmp}/none --count 0 --out {new}.npz", "--count 0: must be at least 1"),
        ("generate --model {tmp}/none --count 10000001 --out {new}.npz", "must be at most 10,000,000; make the rest"),
        ("generate --model {tmp}/none --count 2 --seed -1 --out {new}.npz", "--seed -1: must lie in 0.."),
    ],
)  # fmt: skip
def test_arguments_are_checked_before_anything_is_read(
    command: str, words: str, paths: Paths, capfd: pytest.CaptureFixture[str]
) -> None:
    """The images or the model would be refused, too; and nothing else is shown, such as progress."""
    assert main([part.format(**paths) for part in command.split()]) == 2
    found = capfd.readouterr()
    assert (len(found.err.splitlines()), found.out) == (1, "")
    assert words in found.err
    assert not paths["new"].exists()


def test_other_commands_are_not_distributed(
    paths: Paths, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["info", str(paths["tmp"])]) == 2
    assert "runs as a single process" in capfd.readouterr().err


def test_a_large_delta_is_warned_of(paths: Paths) -> None:
    process = Program(*[part.format(**paths) for part in (TRAIN + " --delta 0.02").split()])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0
    assert "rapid: warning: --delta 0.02 is more than 1/N" in errors


def test_generate_and_info(paths: Paths, capfd: pytest.CaptureFixture[str]) -> None:
    out = paths["tmp"] / "images.npz"
    command = ["generate", "--model", str(paths["private"]), "--count", "5", "--labels", "3,7", "--seed", "4"]
    assert main([*command, "--out", str(out)]) == 0
    with np.load(out) as made:
        assert made["images"].shape == (5, 32, 32)
        assert made["labels"].tolist() == [3, 7, 3, 7, 3]
        assert made["classes"].tolist() == list("0123456789")
        images = made["images"]
    assert "seed 4" in capfd.readouterr().out
    folder = paths["tmp"] / "folder"
    assert main([*command, "--out", str(folder)]) == 0
    again = load_images(folder, "public")
    assert again.classes == ("3", "7")
    assert (again.images == images).all()
    capfd.readouterr()
    assert main(["info", str(paths["private"])]) == 0
    text = capfd.readouterr().out
    assert json.loads(text[: text.rindex("}") + 1])["privacy"]["dataset_size"] == 100
    assert "differentially private" in text


def test_plan_prints_what_trainings_would_cost(paths: Paths, capfd: pytest.CaptureFixture[str]) -> None:
    command = "plan --size 60000 --epsilon 1 --epsilon 4 --batch 1000 --batch 2000 --steps 100 --delta 1e-6 --json"
    assert main([*command.split(), "--set", "private.multiplicity=3", "--set", "private.group_size=2"]) == 0
    shared = json.loads(capfd.readouterr().out)
    without = ["private.multiplicity=3", "private.group_size=2", "private.probe.share=0"]
    without.append("private.overlap.share=0")
    assert main([*command.split(), *(part for override in without for part in ("--set", override))]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["dataset_size"] == 60000
    assert (shared["shares"], found["shares"]) == ({"overlap": 0.05, "probe": 0.4}, {})
    for less, alone in zip(shared["plans"], found["plans"], strict=True):
        assert 0.97 * less["epsilon_wanted"] <= less["epsilon_prv"] <= less["epsilon_wanted"]
        assert less["noise_multiplier"] > alone["noise_multiplier"]
    assert [(row["epsilon_wanted"], row["expected_batch"]) for row in found["plans"]] == [
        (1, 1000), (1, 2000), (4, 1000), (4, 2000),
    ]  # fmt: skip
    for row in found["plans"]:
        rate = row["expected_batch"] / 60000
        assert (
            row["epsilon_prv"]
            == prv_epsilon([dp_sgd_event(row["noise_multiplier"], rate, 100)], 1e-6)
            <= row["epsilon_wanted"]
        )
        assert row["epsilon_rdp"] > row["epsilon_prv"]
        assert row["epsilon_group"] > row["epsilon_prv"]
        assert row["gradient_computations"] == row["expected_batch"] * 100 * 3
        noise = row["noise_multiplier"] * found["parameters"] ** 0.5
        assert row["signal_to_noise"] == pytest.approx(row["expected_batch"] / noise)
        assert row["signal_to_noise_all"] == pytest.approx(10 * row["signal_to_noise"])
    # what is planned is what is trained
    network = Bundle.open(paths["public"], "base").component("denoiser", Denoiser).with_classes(10)
    assert main(["plan", "--private", str(paths["digits"]), "--base", str(paths["public"]), "--epsilon", "2"]) == 0
    table = capfd.readouterr().out
    assert f"{sum(p.numel() for p in network.parameters()):,} trained parameters" in table
    assert table.startswith("100 private images, delta 0.00218")
    assert "noise_multiplier" in table
    assert len([line for line in table.splitlines() if line.strip().startswith("2 ")]) == 5


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser; of `ledger` its actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                deeper = list(subcommands(inner))
                yield from [(f"{name} {words}", one) for words, one in deeper] if deeper else [(name, inner)]


def test_every_command_has_help_and_can_be_imported(capfd: pytest.CaptureFixture[str]) -> None:
    commands = dict(subcommands(build_parser()))
    assert len(commands) >= 13
    for words, parser in commands.items():
        with pytest.raises(SystemExit) as caught:
            main([*words.split(), "--help"])
        assert caught.value.code == 0
        assert f"usage: rapid {words}" in capfd.readouterr().out
        assert callable(pkgutil.resolve_name(parser.get_default("run"))), words
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2


def test_help_does_not_wait_for_torch() -> None:
    program = "import sys; import rapid.cli.parser as p; p.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        ("train_real", "--train-real"),
        ("out", "--out"),
        ("private.expected_batch", "--set private.expected_batch"),
        ("DATASET", "DATASET"),
        ("", ""),
    ],
)
def test_a_field_is_shown_as_the_user_gave_it(field: str, shown: str) -> None:
    assert flag(field) == shown


def tiny(*more: str) -> list[str]:
    return [part for override in [*TINY, *more] for part in ("--set", override)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_build_kb_is_stopped_and_resumed(tmp_path: Path, letters: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    arguments = ["build-kb", "--public", str(letters), "--out", str(out), "--preset", "demo"]
    arguments += tiny("autoencoder.training.steps=300", "denoiser.training.steps=40")
    process = Program(*arguments)
    # the first network is done, so the second is under way or about to be
    wait_for(out / "autoencoder")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "rerun the command with --resume to continue" in errors
    assert "Traceback" not in errors
    assert not (out / "config.json").exists()
    weights = (out / "autoencoder" / "diffusion_pytorch_model.safetensors").stat().st_mtime_ns
    again = Program(*arguments, "--resume")
    output, errors = again.communicate(timeout=90)
    assert again.returncode == 0, errors
    assert "18 records" in output
    assert (out / "autoencoder" / "diffusion_pytorch_model.safetensors").stat().st_mtime_ns == weights


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_remembered_if_the_exception_is_replaced(number: signal.Signals) -> None:
    # safetensors, for one, turns a KeyboardInterrupt within it into a ValueError
    program = """
import os, sys
from argparse import Namespace
from rapid.cli.main import run

def command(options):
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except KeyboardInterrupt:
        raise ValueError("something else") from None

sys.exit(run(Namespace(command="test", run="__main__:command")))
"""
    found = subprocess.run(
        [sys.executable, "-c", program, str(int(number))], check=False, capture_output=True, text=True
    )
    assert found.returncode == 130, found.stderr
    assert found.stderr == "rapid: stopped\n"


def test_train_private_is_stopped_and_resumed(tmp_path: Path, public_bundle: Path, digits: Path) -> None:
    out = tmp_path / "out"
    arguments = ["train-private", "--base", str(public_bundle), "--private", str(digits), "--epsilon", "8"]
    arguments += ["--out", str(out), "--set", "private.steps=60"]
    process = Program(*arguments)
    # the bar appears before the first step, and ends its line long after
    shown = ""
    while "denoiser" not in shown:
        character = process.stderr.read(1)
        assert character, shown
        shown += character
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert not (out / "privacy.json").exists()
    refused = Program(*arguments)
    assert "--resume" in refused.communicate(timeout=60)[1]
    assert refused.returncode == 2
    again = Program(*arguments, "--resume")
    output, errors = again.communicate(timeout=90)
    assert again.returncode == 0, errors
    assert "differentially private" in output
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["steps"] == 60
    assert statement["epsilon"] <= 8
    once_more = Program(*arguments, "--resume")
    once_more.communicate(timeout=60)
    assert once_more.returncode == 0
