"""The benchmark of growth, at sizes of no interest: it measures, goes on where it ended, and draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def test_sizes_are_measured_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = {
        "1000": {
            "build_seconds": 1.0, "build_bytes": 1, "disk_bytes": 1, "open_seconds": 1.0, "query_seconds": 1.0,
            "exact_seconds": 1.0, "recall": 0.5, "recall_of_nearest": 0.5, "query_bytes": 1, "queries": 1,
        }
    }  # fmt: skip
    (out / "results.json").write_text(json.dumps(before))
    command = [sys.executable, "scripts/bench_knowledge_base.py", "--sizes", "1000", "2000", "--queries", "20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "index")}
    done = subprocess.run(
        [*command, "--out", str(out), "--scratch", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    found = json.loads((out / "results.json").read_text())
    assert found["1000"] == before["1000"]
    measured = found["2000"]
    # 64 numbers of a key, 16 of a value, a label and its place in a list
    assert measured["disk_bytes"] > 2000 * (4 * (64 + 16) + 8 + 8)
    assert 0.5 < measured["recall"] <= 1 and measured["queries"] == 20
    assert min(measured.values()) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    drawn = ElementTree.parse(out / "growth.svg")
    texts = {"".join(node.itertext()).strip() for node in drawn.iter() if "text" in node.tag}
    assert {"disk, GB", "peak memory, GB", "records", "every key"} <= texts
    assert "| 2,000 |" in done.stdout and (out / "table.md").read_text() in done.stdout
