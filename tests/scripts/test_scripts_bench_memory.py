"""The benchmark of memory, at a size of no interest: it runs both commands and tells what they needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEFORE = {
    name: {"all_bytes": 2e9, "own_bytes": 1e9, "seconds": 9.0, "processor_seconds": 8.0}
    for name in ("build-kb", "train-private")
}


def measure(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "scripts/bench_memory.py", "--images", "300", "--scratch", str(scratch), *arguments]
    return subprocess.run(
        [*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )


def test_both_commands_are_measured_and_too_much_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(json.dumps({"1000": BEFORE}))
    # the figures are written all the same: which part is too large is what one wants to see
    done = measure(tmp_path, "--limit", "0.05")
    assert done.returncode == 1, done.stderr
    assert "GB, more than --limit 0.05" in done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["1000"] == BEFORE
    assert list(results["300"]) == ["build-kb", "train-private"]
    for found in results["300"].values():
        # torch alone needs a hundred megabytes; mapped libraries are in the larger figure only
        assert 1e8 < found["own_bytes"] < found["all_bytes"] < 4e9
        assert found["processor_seconds"] > 1 < found["seconds"]
    assert list((tmp_path / "scratch").iterdir()) == []
    told = (tmp_path / "out" / "table.md").read_text()
    assert told in done.stdout
    rows = [line.split(" | ")[:2] for line in told.splitlines()[2:]]
    assert rows == [[f"| {n}", f"`{name}`"] for n in ("300", "1,000") for name in ("build-kb", "train-private")]


def test_too_few_images(tmp_path: Path) -> None:
    refused = measure(tmp_path, "--images", "99")
    assert refused.returncode == 2
    assert "argument --images: must be at least 100" in refused.stderr
