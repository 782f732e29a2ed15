"""Ledgers of older versions today, and lines that none can read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests_ledgers import ASKED, DELTA, counted, gaussian, spent

from rapid.dp.accounting import prv_epsilon
from rapid.dp.entry import Spent
from rapid.dp.events import dp_sgd_event, gaussian_event
from rapid.dp.filter import RenyiFilter
from rapid.dp.ledger import START, Ledger, TamperedLedger
from rapid.dp.spending import Charge
from rapid.errors import PrivacyRefused


def write_as_rapid_0_1(ledger: Ledger, lines: list[dict[str, object]]) -> None:
    """Lines of rapid 0.1, which knew no names and wrote a release as [noise_multiplier, sample_rate, steps]."""
    mac = START
    with ledger.path.open("ab") as stream:
        for number, line in enumerate(lines):
            content = {"number": number, "time": "2025-01-01T00:00:00+00:00", "dataset": "a" * 32, **line}
            mac = ledger._mac(mac, content)
            stream.write(json.dumps(content | {"mac": mac}).encode() + b"\n")
    ledger._write_head(len(lines), mac)


@pytest.fixture
def old(tmp_path: Path) -> Ledger:
    """A limit, a finished run of three releases and one that stopped before its first step."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    run = [[1.0, 0.01, 100], [4.0, 1, 1], [9.0, 1.0, 3]]
    common = {"run": "one", "epsilon": 1.0, "delta": DELTA}
    write_as_rapid_0_1(
        ledger,
        [
            {"kind": "limit", "run": "", "epsilon": 2.5, "delta": DELTA, "releases": []},
            {"kind": "reserve", **common, "releases": run},
            {"kind": "settle", **common, "releases": run},
            {"kind": "reserve", **common, "run": "two", "releases": run},
            {"kind": "settle", **common, "run": "two", "releases": []},
        ],
    )
    return ledger


def test_lines_of_rapid_0_1_are_read_and_composed_with_new_ones(old: Ledger) -> None:
    events = [dp_sgd_event(1.0, 0.01, 100), gaussian_event(4.0), dp_sgd_event(9.0, 1.0, 3)]
    found = spent(old.path)
    assert [run.run for run in found.runs] == ["one"]
    assert found.runs[0].releases == tuple(Spent.of("", event) for event in events)
    assert found.epsilon_prv == prv_epsilon(events, DELTA)
    # its limit gets the filter that a new one would get
    assert found.epsilon_filter == RenyiFilter.of(2.5, DELTA).spent(events)
    before = old.path.read_bytes()
    Charge(old, "a" * 32, "three", ASKED).begin([counted(20.0, "overlap")])
    assert old.path.read_bytes().startswith(before)
    assert spent(old.path).epsilon_prv == pytest.approx(prv_epsilon([*events, gaussian_event(20.0)], DELTA))
    with pytest.raises(PrivacyRefused, match=r"limit of this data set is epsilon 2\.5"):
        Charge(old, "a" * 32, "four", ASKED).begin(gaussian(2.0))


def test_a_run_of_an_older_rapid_that_goes_on_is_charged_for_both(old: Ledger) -> None:
    """Its last line counts as it did, and what the new attempt takes is added."""
    Charge(old, "a" * 32, "one", ASKED).begin([counted(30.0)])
    old_events = [dp_sgd_event(1.0, 0.01, 100), gaussian_event(4.0), dp_sgd_event(9.0, 1.0, 3)]
    assert spent(old.path).epsilon_prv == pytest.approx(prv_epsilon([*old_events, gaussian_event(30.0)], DELTA))


def test_lines_without_units_are_read_and_go_on(tmp_path: Path) -> None:
    """A ledger that was written by the code before lines had units."""
    book = Path(shutil.copytree(Path(__file__).with_name("ledger_without_units"), tmp_path / "book"))
    ledger = Ledger(book / "ledger.jsonl")
    before = ledger.path.read_bytes()
    assert len(ledger.entries()) == 7
    old = [gaussian_event(8.0), dp_sgd_event(3.0, 0.1, 2), gaussian_event(8.0)]
    assert [(run.run, run.unit) for run in spent(ledger.path).runs] == [("one", ""), ("two", "")]
    assert spent(ledger.path).epsilon_prv == pytest.approx(prv_epsilon(old, DELTA))
    # the old run goes on, and says from now on whom it protects
    for run, unit in (("two", "one image"), ("three", "one person")):
        Charge(ledger, "a" * 32, run, ASKED, unit=unit).begin([counted(30.0)]).begin("count", 1)
    assert ledger.path.read_bytes().startswith(before)
    again = Ledger(ledger.path)
    assert [entry.unit for entry in again.entries()[7:]] == ["one image", "", "one person", ""]
    # whichever line of an attempt counts
    runs = [("one", ""), ("two", ""), ("two", "one image"), ("three", "one person")]
    assert [(run.run, run.unit) for run in spent(ledger.path).runs] == runs
    assert spent(ledger.path).epsilon_prv == pytest.approx(prv_epsilon([*old, *[gaussian_event(30.0)] * 2], DELTA))
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content.replace(b"one person", b"one image", 1))
    with pytest.raises(TamperedLedger, match="line 10 is not the one"):
        Ledger(ledger.path).entries()


def test_changed_lines_of_rapid_0_1_are_found(old: Ledger) -> None:
    for one, other in ((b"[9.0,", b"[8.0,"), (b"[4.0, 1, 1]", b"[4.0, 1.0, 1]"), (b" 100]", b" 99]")):
        content = old.path.read_bytes()
        assert one in content  # with a bracket: a hexadecimal MAC of an earlier line can hold any digits
        old.path.write_bytes(content.replace(one, other, 1))
        with pytest.raises(TamperedLedger, match="line 2 is not the one"):
            old.entries()
        old.path.write_bytes(content)


@pytest.mark.parametrize(
    "releases",
    [
        [["denoiser", {"type": "LaplaceDpEvent", "noise_multiplier": 1.0}]],
        [["denoiser", {"type": "GaussianDpEvent"}]],
        [
            [
                "denoiser",
                {"type": "PoissonSampledDpEvent", "sampling_probability": 0.5, "event": {"type": "NoOpDpEvent"}},
            ]
        ],
        [[1.0, 2.0, 1]],
        [[1.0, 0.5]],
        [["denoiser"]],
    ],
)
def test_a_line_that_no_accountant_can_read_is_no_line(tmp_path: Path, releases: list[object]) -> None:
    """Even with the right MAC: it would be spent without being counted."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    line = {"kind": "settle", "run": "one", "epsilon": 1.0, "delta": DELTA, "releases": releases}
    write_as_rapid_0_1(ledger, [line])
    with pytest.raises(TamperedLedger, match="line 1 cannot be read"):
        ledger.entries()
