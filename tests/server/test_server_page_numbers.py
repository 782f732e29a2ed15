"""Epsilon and delta on the page are rounded up: its own functions, run by Node.js."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest
from rapid_server.app import STATIC

PROGRAM = """
import { number, rounded } from "./words.js";
const asked = JSON.parse(process.argv[2]);
const both = (told) => [told(1), told(-1)];
const told = asked.map(([value, digits]) => [
  ...both((direction) => rounded(value, digits, direction)), ...both((direction) => number(value, direction)),
]);
console.log(JSON.stringify(told));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_numbers_are_never_below_the_true_ones(tmp_path: Path) -> None:
    for name in ("words.js", "element.js"):
        shutil.copy(STATIC / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.js").write_text(PROGRAM)
    chance = random.Random(0)
    values = [10 ** chance.uniform(-13, 6) for _ in range(500)]
    values += [1.0, 10.0, 1e-5, 1.5148e-6, 9.9999, 9.9999e-5, 0.1, 1e-3, 99999.5, 0.99999]
    asked = [(value, chance.randint(1, 6)) for value in values]
    command = ["node", str(tmp_path / "program.js"), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    for (value, digits), (up, down, shown, shown_down) in zip(asked, json.loads(done.stdout), strict=True):
        exact = Decimal(repr(value))
        unit = Decimal(10) ** (exact.adjusted() - digits + 1)
        assert exact <= Decimal(repr(up)) < exact + unit
        assert exact - unit < Decimal(repr(down)) <= exact
        above, below = (read(text) for text in (shown, shown_down))
        assert below <= exact <= above
        assert above - below <= exact / 10


def read(text: str) -> Decimal:
    """A number as the page writes it."""
    return Decimal(text.replace(",", "").replace(" \u00d7 10^", "e"))
