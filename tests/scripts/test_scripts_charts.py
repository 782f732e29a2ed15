"""The charts of the sweeps: what is drawn, and that equal numbers give equal files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests_support import module_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def chart():
    return module_of(SCRIPTS / "charts.py").chart


def test_a_chart_shows_its_lines_and_columns(chart) -> None:
    lines = {"ddim": {"10": 80.0, "20": 90.0}, "pndm": {"20": 85.0}}
    drawn = chart("accuracy, %", "network calls", ["10", "20"], lines)
    texts = {"".join(node.itertext()).strip() for node in ElementTree.fromstring(drawn).iter() if "text" in node.tag}
    assert {"accuracy, %", "network calls", "10", "20", "ddim", "pndm"} <= texts
    assert drawn == chart("accuracy, %", "network calls", ["10", "20"], lines)
