"""A file that finds no room ends a command with one line that names the file and the fix, and leaves what can be
resumed."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY as METHODS
from methods.tiny import flags
from tests_process import run
from torch import nn

from rapid.bundle import Bundle
from rapid.dp.ledger import Ledger
from rapid.dp.spending import balances
from rapid.files import replacing
from rapid.nn.storage import write_weights
from rapid.training import Checkpoint


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process have at most `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [4096, 30_000])
@pytest.mark.parametrize("kind", ["state", "weights", "array", "text"])
def test_a_file_without_room_is_an_error_of_the_system_and_the_last_one_stays(
    tmp_path: Path, kind: str, size: int
) -> None:
    """Torch, safetensors and numpy have errors of their own for it."""
    path, values = tmp_path / "file", torch.zeros(10_000)
    path.write_bytes(b"before")
    # numpy does not tell which it was
    words = r"\[Errno 28\] No space left on device" if kind == "array" else r"\[Errno 27\] File too large"
    told = pytest.raises(OSError, match=f"^{words}: '{path}'$")
    with told, largest_file(size):
        if kind == "state":
            Checkpoint(path).save({"step": 3, "values": values, "more": [torch.zeros(50)]})
        else:
            with replacing(path) as target:
                if kind == "weights":
                    write_weights(nn.Linear(100, 100), target)
                elif kind == "array":
                    with target.open("wb") as stream:
                        np.save(stream, values.numpy())
                else:
                    target.write_text("x" * 40_000)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


def test_other_errors_of_the_block_are_as_they_were(tmp_path: Path) -> None:
    for error in (OSError(5, "Input/output error"), OSError("of a library"), FileNotFoundError(2, "gone", "other")):
        with pytest.raises(OSError) as raised, replacing(tmp_path / "file"):
            raise error
        assert raised.value is error


def test_a_training_without_room_for_its_state_is_resumed(tmp_path: Path, digits: Path) -> None:
    """As at `ulimit -f`; a full disk differs in its number alone."""
    out, book = tmp_path / "out", tmp_path / "ledger.jsonl"
    command = ["train-private", "--method", "dp-classifier", "--private", digits, "--epsilon", 3, "--delta", "1e-4"]
    command += ["--out", out, "--ledger", book, *flags(METHODS["dp-classifier"]["settings"])]
    limited = f'ulimit -f 24; exec {sys.executable} -m rapid "$@"'
    full = subprocess.run(
        ["sh", "-c", limited, "sh", *map(str, command)], check=False, capture_output=True, text=True, timeout=120
    )
    assert full.returncode == 1
    last = full.stderr.splitlines()[-1]
    assert last.startswith(f"rapid: [Errno 27] File too large: '{out / 'checkpoints'}/")
    assert last.endswith("; allow larger files there (ulimit -f), and rerun the command with --resume to continue")
    assert "Traceback" not in full.stderr
    done = run(*command, "--resume")
    assert done.returncode == 0, done.stderr
    bundle = Bundle.open(out, "model", "private")
    assert bundle.privacy is not None
    (spent,) = balances(Ledger(book).entries())
    assert bundle.privacy["epsilon"] <= min(3, spent.epsilon)
