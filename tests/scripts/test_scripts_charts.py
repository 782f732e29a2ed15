"""The charts of the sweeps: what is drawn, and that equal numbers give equal files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def chart():
    spec = importlib.util.spec_from_file_location("charts", SCRIPTS / "charts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["charts"] = module
    spec.loader.exec_module(module)
    return module.chart


def test_a_chart_shows_its_lines_and_columns(chart) -> None:
    lines = {"ddim": {"10": 80.0, "20": 90.0}, "pndm": {"20": 85.0}}
    drawn = chart("accuracy, %", "network calls", ["10", "20"], lines)
    texts = {"".join(node.itertext()).strip() for node in ElementTree.fromstring(drawn).iter() if "text" in node.tag}
    assert {"accuracy, %", "network calls", "10", "20", "ddim", "pndm"} <= texts
    assert drawn == chart("accuracy, %", "network calls", ["10", "20"], lines)
