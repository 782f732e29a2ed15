"""scripts/check-gpu as a process, on the CPU with the smallest sizes: what passes, and what a failure leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tests_process

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_gpu.py"
SLOW = (
    "serve", "audit", "evaluate", "two ranks", "info, plan, ledger", "train-private late", "train-private ldm",
    "images, pndm", "images, dpm-solver++", "step of imagenet32", "auto",
)  # fmt: skip
"""Commands that other tests run, and checks that differ from others in a setting alone."""
BROKEN = """
import sys

sys.path.insert(0, {scripts!r})
import check_gpu
from checks import Failed, Skipped


def fails(setup):
    raise Failed("7 numbers differ")


def skips(setup):
    raise Skipped("needs two of them")


def breaks(setup):
    return 1 / 0


check_gpu.CHECKS = {{"fails": fails, "skips": skips, "breaks": breaks}}
sys.exit(check_gpu.main())
"""


def run(out: Path, *arguments: str, script: Path = SCRIPT) -> tuple[int, str, dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "index", ROOT / "server")))}
    process = tests_process.run("--out", out, *arguments, env=environment, script=script, timeout=300)
    content = json.loads(out.read_text()) if out.exists() else {}
    return process.returncode, process.stdout + process.stderr, content


def test_all_that_a_cpu_can_check_passes(tmp_path: Path) -> None:
    skipped = [word for name in SLOW for word in ("--skip", name)]
    code, output, report = run(tmp_path / "r.json", "--device", "cpu", "--smallest", "--minutes", "60", *skipped)
    results = {one["name"]: one for one in report["checks"]}
    assert [one for one in report["checks"] if one["verdict"] == "FAIL"] == []
    assert code == 0
    assert report["counts"]["FAIL"] == 0
    assert set(results) == set(names()) - set(SLOW)
    verdicts = {name: one["verdict"] for name, one in results.items() if one["verdict"] != "PASS"}
    assert set(verdicts) == {"bundle for times", "recordings that fail"}
    assert all(name in output for name in results)
    assert results["machine"]["figures"]["versions"]["torch"]
    norms = results["norm of one example"]["figures"].values()
    assert 0.98 <= min(norms) <= max(norms) <= 1
    # the device is the CPU, so the images are the same ones
    assert all(one["figures"]["share"] == 0 for name, one in results.items() if name.startswith("images, "))
    step = results["step of letters-mnist"]["figures"]["seconds"]
    parts = {"data", "sum", "noise", "optimizer", "average"}
    assert set(step) == parts | {"sum, not replayed", "plain gradient, not replayed", "public step"}


def test_a_failure_is_told_and_ends_with_1(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(scripts=str(ROOT / "scripts")))
    code, output, report = run(tmp_path / "r.json", "--device", "cpu", script=script)
    assert code == 1
    assert [one["verdict"] for one in report["checks"]] == ["FAIL", "SKIP", "FAIL"]
    assert [one["line"] for one in report["checks"]][:2] == ["7 numbers differ", "needs two of them"]
    assert "ZeroDivisionError" in report["checks"][2]["line"]
    assert "in breaks" in report["checks"][2]["trace"]
    assert "0 passed, 2 failed, 1 skipped" in output


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--device", "tpu"], "choose auto, cpu or cuda"), (["--only", "nonsense"], "is no check")]
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], words: str) -> None:
    code, output, report = run(tmp_path / "r.json", *arguments)
    assert code == 2
    assert words in output
    assert report == {}


def names() -> list[str]:
    return tests_process.run("--list", script=SCRIPT).stdout.splitlines()
