"""Files without the right to read them: one line that says so, exit code 2, and never an error of the system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests_ledgers import ASKED, counted
from tests_rights import as_anyone, locked

from rapid.cli import main
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge

DENIED = "cannot be read (permission denied); give yourself the right to read it\n"
USED = "permission denied; give yourself the right to use it\n"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A ledger of one line."""
    ledger = Ledger(tmp_path / "book" / "ledger.jsonl")
    Charge(ledger, "a" * 32, "run", ASKED).begin([counted(8.0)])
    return ledger.path


@pytest.fixture
def bundle(tmp_path: Path, private_bundle: Path) -> Iterator[Path]:
    """A bundle of its own, whose rights come back so that it can be removed."""
    shutil.copytree(private_bundle, tmp_path / "bundle", symlinks=True)
    yield tmp_path / "bundle"
    for path in (tmp_path / "bundle", *(tmp_path / "bundle").rglob("*")):
        path.chmod(0o700)


def refused(*arguments: object, capfd: pytest.CaptureFixture[str]) -> str:
    with as_anyone():
        assert main([str(one) for one in arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_ledger(book: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    locked(book)
    assert refused("ledger", command, "--ledger", book, capfd=capfd) == f"rapid: --ledger {book}: {DENIED}"
    book.chmod(0o600)
    locked(book.with_name("ledger.jsonl.key"))
    told = refused("ledger", command, "--ledger", book, capfd=capfd)
    assert told.startswith(f"rapid: --ledger {book}: cannot be used (Permission denied)")


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ("denoiser", DENIED),
        ("denoiser/diffusion_pytorch_model.safetensors", DENIED),
        ("knowledge_base", DENIED),
        ("config.json", DENIED),
        ("privacy.json", DENIED),
        ("", USED),
    ],
)
def test_a_bundle(bundle: Path, hidden: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    locked(bundle / hidden)
    told = refused("info", bundle, capfd=capfd)
    assert told.startswith(f"rapid: {'' if words == USED else 'DIR '}{bundle / hidden}")
    assert told.endswith(words)
    told = refused("generate", "--model", bundle, "--count", 2, "--out", tmp_path / "made.npz", capfd=capfd)
    assert told.startswith(f"rapid: {'' if words == USED else '--model '}{bundle / hidden}")
    assert told.endswith(words)


def test_other_files(private_bundle: Path, digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("counts.json", "features.safetensors"):
        (tmp_path / name).write_text("{}")
        locked(tmp_path / name)
    np.savez(tmp_path / "images.npz", images=np.zeros((9, 28, 28), np.uint8))
    generate = ("generate", "--model", private_bundle, "--class-counts", tmp_path / "counts.json")
    told = refused(*generate, "--out", tmp_path / "made.npz", capfd=capfd)
    assert told == f"rapid: --class-counts {tmp_path}/counts.json: {DENIED}"
    evaluate = ("evaluate", "--synthetic", digits, "--real", digits, "--features", tmp_path / "features.safetensors")
    told = refused(*evaluate, "--out", tmp_path / "report.json", capfd=capfd)
    assert told == f"rapid: --features {tmp_path}/features.safetensors: {DENIED}"
    train = ("train-private", "--method", "dp-gan", "--private", locked(tmp_path / "images.npz"), "--epsilon", 1)
    told = refused(*train, "--out", tmp_path / "out", capfd=capfd)
    assert told == f"rapid: --private {tmp_path}/images.npz: {DENIED}"
