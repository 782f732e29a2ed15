"""`rapid tune` as a user meets it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tests_process import run

from rapid.cli import main

CANDIDATES = """\
small: {private.expected_batch: 10, private.steps: 2}
large:
  private.expected_batch: 40
  private.learning_rate: 0.002
"""


def test_settings_are_chosen_privately(tmp_path: Path, public_bundle: Path, digits: Path) -> None:
    (tmp_path / "candidates.yaml").write_text(CANDIDATES)
    env = os.environ | {"RAPID_LEDGER": str(tmp_path / "ledger.jsonl")}
    out = tmp_path / "out"
    command = (
        "tune", "--base", public_bundle, "--private", digits, "--epsilon", 5, "--delta", 1e-3, "--out", out,
        "--candidates", tmp_path / "candidates.yaml", "--mean-trials", 1.5, "--shape", 0, "--score-images", 20,
    )  # fmt: skip
    done = run(*command, env=env)
    assert done.returncode == 0, done.stderr
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["epsilon"] <= 5
    assert statement["selection"]["chosen"] in ("small", "large")
    assert [release["name"] for release in statement["releases"]] == ["overlap", "probe", "denoiser", "tuning-score"]
    assert "choosing among 2: 1.5 trials on average, at most 3 with a probability of 95%" in done.stderr
    assert re.search(r"chosen: (small|large), whose synthetic images teach .* of 100 private images", done.stdout)
    assert "chosen privately among 2" in done.stdout
    # no progress: neither of trainings nor of anything else
    assert "step/s" not in done.stderr
    assert "%|" not in done.stderr
    shown = run("ledger", "show", env=env).stdout
    assert "by Renyi divergences (RDP), as private selection needs" in shown
    (found,) = json.loads(run("ledger", "show", "--json", env=env).stdout)["datasets"]
    assert found["epsilon_prv"] <= statement["epsilon"]
    assert "RDP" in found["accountant"]
    made = run("generate", "--model", out, "--count", 10, "--out", tmp_path / "made.npz", env=env)
    assert made.returncode == 0, made.stderr
    assert len(np.load(tmp_path / "made.npz")["images"]) == 10


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        ("a: {private.steps: 0}", "", "'a': private.steps: must be at least 1"),
        ("a: {denoiser.channels: 4}", "", "'a': denoiser.channels: the public bundle (--base) fixes 'denoiser'"),
        ("a: {private.nothing: 4}", "", "'a': private.nothing"),
        ("a: {}\nb: {private.expected_batch: 101}", "", "--candidates: 'b': private.expected_batch 101: "),
        (
            "a: {private.steps: 5}",
            "--set private.expected_batch=101",
            "--candidates: 'a': private.expected_batch 101: ",
        ),
        (
            "a: {}\nb: {private.noise_source: device}",
            "--device cpu",
            "--candidates: 'b': private.noise_source device: ",
        ),
        ("- private.steps=3", "", "must name candidates and their settings"),
        ("a: [private.steps=3]", "", "'a' must be a name with a mapping"),
        ("a: {", "", "is not valid YAML"),
        ("", "", "must name candidates"),
        ("a: {}\na: {private.steps: 3}", "", "candidates.yaml: 'a' stands twice; give each candidate"),
        ("a: {private.steps: 3, private.steps: 4}", "", "candidates.yaml: 'private.steps' stands twice; give each"),
        ("a: {}", "--mean-trials 1", "--mean-trials 1.0: must be above 1"),
        ("a: {}", "--mean-trials nan", "--mean-trials nan: must be above 1"),
        ("a: {}", "--shape -1", "--shape -1.0: must lie in [0, 100]"),
        ("a: {}", "--score-images 2", "--score-images 2: must be at least 10"),
        ("a: {}", "--score-share 1", "--score-share 1.0: must lie in (0, 1)"),
        ("a: {}", "--candidates none.yaml", "none.yaml: cannot be read"),
        ("a: {}", "--set private.nothing=1", "private.nothing"),
    ],
)
def test_bad_input(
    content: str, more: str, words: str, tmp_path: Path, public_bundle: Path, digits: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "candidates.yaml").write_text(content)
    command = ["tune", "--base", str(public_bundle), "--private", str(digits), "--epsilon", "5", "--out",
               str(tmp_path / "out"), "--candidates", str(tmp_path / "candidates.yaml"), *more.split()]  # fmt: skip
    assert main(command) == 2
    shown = capfd.readouterr().err.strip()
    assert words in shown
    assert [line for line in shown.splitlines() if line.startswith("rapid: ")] == shown.splitlines()[-1:]
    assert not (tmp_path / "out").exists()
