"""scripts/soak, for some seconds: a real server under good, bad and rude clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from PIL import Image
from tests_support import module_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return module_of(SCRIPT)


def test_a_short_one(private_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(private_bundle), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--minutes", "0.2", "--large", "800"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "soak.json").read_text(encoding="utf-8"))
    assert report["wrong"] == []
    assert len(report["samples"]) >= 5
    # every kind of client came to its turn
    assert set(report["requests"]) >= {"small", "again", "cut", "reset", "bad", "rude", "slow", "zip", "idle"}
    assert int(report["statuses"]["200"]) > 0
    assert report["images"] > 0
    with Image.open(tmp_path / "out" / "soak.png") as picture:
        assert picture.size == (900, 420)
    assert "RSS MiB" in done.stdout


def test_what_is_wrong_is_found(soak: ModuleType) -> None:
    def samples(*memory: float) -> list[tuple[float, ...]]:
        return [soak.Sample(float(number), rss, 9, 3, 0.0) for number, rss in enumerate(memory)]

    load = soak.Load("x", 1, 10)
    assert soak.find_faults(samples(1, 1, 5000, 5000, 5200, 5200), load, 0) == []
    assert soak.find_faults(samples(1, 1, 500, 500, 560, 560), load, 0) == []
    assert soak.find_faults(samples(1, 1, 5000, 5000, 5300, 5300), load, 0)[0].startswith("memory grows")
    assert soak.find_faults(samples(1, 1, 500, 500, 570, 570), load, 0)[0].startswith("memory grows")
    assert soak.find_faults(samples(1, 1, 1), load, 7) == ["7 images are left in the engine after the load"]
    load.wrong += ["small: 500", "small: 500"]
    assert soak.find_faults(samples(1, 1, 1), load, 0) == ["small: 500 (2 times)"]


def test_what_it_counts(soak: ModuleType) -> None:
    load = soak.Load("x", 1, 10)
    for status, headers in ((200, {}), (503, {"retry-after": "3"}), (503, {}), (500, {}), (404, {})):
        load.saw("bad", httpx.Response(status, headers=headers))
    load.saw("small", httpx.Response(404))
    assert load.statuses == Counter({"503": 2, "404": 2, "200": 1, "500": 1})
    assert load.wrong == ["bad: 503", "bad: 500", "small: 404 None"]
