"""Scripts as processes: bad input is one line and exit code 2, and a folder keeps the arguments it was begun with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tests_process

ROOT = Path(__file__).parents[2]


def failed(script: str, *arguments: object) -> str:
    """What a script says that ends with exit code 2; `-W error` as in tests."""
    found = tests_process.run(
        *map(str, arguments), env=os.environ | {"PYTHONPATH": str(ROOT)}, script=ROOT / "scripts" / script
    )
    assert found.returncode == 2, found.stderr
    return found.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("sweep_sampling.py", "--model {no} --test {digits} --out {out}", "sweep-sampling: --model {no}: is not a fo"),
        ("sweep_private.py", "{no} --data {no}", "sweep-private: {no}: No such file"),
        ("export_networks.py", "--base {no} --out {out} --card {no}", "export-networks: --base {no}: is not a folder"),
        ("export_networks.py", "--base {base} --out {out} --card {no}", "export-networks: {no}: No such file"),
        ("export_networks.py", "--base {base} --out {digits} --card {digits}", "--card {digits}: is no text"),
        ("bench_dp_step.py", "--device nope", "bench-dp-step: --device nope: "),
    ],
)
def test_one_line(script: str, arguments: str, words: str, digits: Path, public_bundle: Path, tmp_path: Path) -> None:
    places = {"no": tmp_path / "nowhere", "digits": digits, "base": public_bundle, "out": tmp_path / "out"}
    told = failed(script, *arguments.format(**places).split())
    assert told.count("\n") == 1
    assert words.format(**places) in told


def test_figures_keep_their_arguments(digits: Path, private_bundle: Path, tmp_path: Path) -> None:
    """The folder of an earlier run with other images."""
    (tmp_path / "arguments.json").write_text('{"model": "another", "count": 8000, "seed": 0}')
    told = failed("sweep_sampling.py", "--model", private_bundle, "--test", digits, "--out", tmp_path)
    assert "--out" in told
    assert "was begun with model another, and now it is" in told
    assert [path.name for path in tmp_path.iterdir()] == ["arguments.json"]
