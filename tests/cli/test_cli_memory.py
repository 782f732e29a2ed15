"""Too little memory ends a command with one line that names the fix."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from tests_process import Program

from rapid.cli.main import run


def test_too_little_memory_is_one_line(tmp_path: Path, digits: Path) -> None:
    """No machine has the memory of this network."""
    process = Program(
        "train-private", "--method", "dp-classifier", "--private", digits, "--epsilon", 1, "--out", tmp_path / "out",
        "--set", "network.width=100000000000",
    )  # fmt: skip
    _, errors = process.communicate(timeout=60)
    assert errors.splitlines()[-1] == (
        "rapid: out of memory; use --set private.physical_batch=N, smaller than now or auto, with a new --out"
    )
    assert "Traceback" not in errors
    assert process.returncode == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
    ],
)
def test_errors_of_memory_are_told_from_bugs(
    error: Exception, known: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As GPUs raise them; sizes are not shown, because they depend on what is private."""

    def fails(options: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr("rapid.cli.generate.generate", fails)
    options = argparse.Namespace(command="generate", run="rapid.cli.generate:generate")
    if not known:
        with pytest.raises(type(error)):
            run(options)
        return
    assert run(options) == 1
    assert capfd.readouterr().err == "rapid: out of memory; use --set generation.batch_size=N, smaller than now\n"
