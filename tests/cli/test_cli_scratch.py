"""Scratch files lie on the disk of --out, in every command that reads images and writes something."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid import mapped
from rapid.cli import main

POLICY = """
max_epsilon: 10
max_delta: 0.01
unit: one image
signature: false
ledger: {max_epsilon: null}
copies: {epsilon: 8, max_share: 0.9, min_synthetic: 20, reference_share: 0.5}
membership: {required: false, max_advantage: 0.99, false_positive_rates: [0.1]}
audit: {required: false}
"""
COMMANDS = {
    "generate": "generate --model {model} --count 3 --labels all --out {out}/images.npz",
    "evaluate": "evaluate --synthetic {few} --real {digits} --classifiers none --out {out}/report.json",
    "save": "evaluate --save-features {out}/f.safetensors --train-real {few} --real {digits} --open-data --epochs 1",
    "predict": "predict --model {model} --data {few} --out {out}/predictions.csv",
    "release": "release --model {model} --policy {policy} --private {digits} --public {few} --out {out}/release",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_scratch_file_lies_elsewhere(
    command: str, tmp_path: Path, private_bundle: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 10
    images = rng.integers(0, 256, (40, 28, 28), np.uint8)
    np.savez_compressed(tmp_path / "few.npz", images=images, labels=labels, classes=np.arange(10).astype(str))
    (tmp_path / "policy.yaml").write_text(POLICY)
    folders: list[object] = []
    real = tempfile.TemporaryFile

    def seen(*arguments: Any, **named: Any) -> Any:
        folders.append(named.get("dir"))
        return real(*arguments, **named)

    # every array is large
    monkeypatch.setattr(mapped, "LARGE", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", seen)
    places = {"few": tmp_path / "few.npz", "policy": tmp_path / "policy.yaml"}
    assert main(command.format(model=private_bundle, digits=digits, out=out, **places).split()) in (0, 3)
    assert folders
    assert {Path(str(folder)).is_relative_to(out) for folder in folders} == {True}
