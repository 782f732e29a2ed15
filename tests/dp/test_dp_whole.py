"""Charges in one piece: whatever happens to a run, what may have been released is charged."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid.dp.accounting import prv_epsilon
from rapid.dp.entry import Limit, Spent
from rapid.dp.events import gaussian_event
from rapid.dp.filter import RenyiFilter
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge, balance, set_limit
from rapid.dp.trials import Trials
from rapid.errors import InputError, PrivacyRefused

DELTA = 1e-5
ASKED = Limit(2.0, DELTA)
EVENT = Trials(mean=4).event(gaussian_event(8.0))
RELEASE = Spent.of("tune", EVENT)
STATE, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def charge(tmp_path: Path) -> Charge:
    return Charge(Ledger(tmp_path / "ledger.jsonl"), "digits", "run", ASKED)


def times_charged(charge: Charge) -> int:
    """How often the whole is charged, found by its epsilon."""
    spent = balance(charge.ledger.entries(), "digits").epsilon
    return next(count for count in range(20) if spent <= prv_epsilon([EVENT] * count, DELTA) + 1e-9)


def test_it_is_charged_before_it_begins_and_once(charge: Charge) -> None:
    attempt = charge.begin_whole(RELEASE)
    assert not attempt.goes_on
    assert times_charged(charge) == 1
    attempt.settle(STATE)
    assert times_charged(charge) == 1
    # it stopped in order: the next one goes on, and so does the one after that
    for state in (STATE, OTHER):
        again = charge.begin_whole(RELEASE, state)
        assert again.goes_on
        again.settle(OTHER)
        assert times_charged(charge) == 1
    assert Ledger(charge.ledger.path).entries()[-1].kind == "settle"


@pytest.mark.parametrize("state", ["", STATE, OTHER])
def test_after_a_crash_it_is_charged_again(charge: Charge, state: str) -> None:
    charge.begin_whole(RELEASE)
    assert not charge.begin_whole(RELEASE, state).goes_on
    assert times_charged(charge) == 2


def test_a_crash_while_it_goes_on_costs_the_whole_again(charge: Charge) -> None:
    charge.begin_whole(RELEASE).settle(STATE)
    charge.begin_whole(RELEASE, STATE)
    assert times_charged(charge) == 1
    assert not charge.begin_whole(RELEASE, STATE).goes_on
    assert times_charged(charge) == 2


def test_a_state_that_is_put_back_is_another_use(charge: Charge) -> None:
    charge.begin_whole(RELEASE).settle(STATE)
    charge.begin_whole(RELEASE, STATE).settle(OTHER)
    assert not charge.begin_whole(RELEASE, STATE).goes_on
    # nor does a changed state go on, nor one of a copy of the folder, which is another run
    assert not charge.begin_whole(RELEASE, "ef" * 32).goes_on
    copy = Charge(charge.ledger, "digits", "copy", ASKED)
    assert not copy.begin_whole(RELEASE, OTHER).goes_on
    assert times_charged(charge) == 4


def test_a_run_that_has_ended_cannot_settle(charge: Charge) -> None:
    first = charge.begin_whole(RELEASE)
    second = charge.begin_whole(RELEASE)
    with pytest.raises(PrivacyRefused, match="another process"):
        first.settle(STATE)
    second.settle("")
    with pytest.raises(PrivacyRefused, match="has ended"):
        second.settle(STATE)
    assert not charge.begin_whole(RELEASE, "").goes_on
    assert times_charged(charge) == 3


def test_its_reserve_lines_have_its_unit(charge: Charge) -> None:
    people = Charge(charge.ledger, "digits", "people", ASKED, unit="one person")
    people.begin_whole(RELEASE).settle(STATE)
    people.begin_whole(RELEASE, STATE)
    entries = charge.ledger.entries()
    assert [(entry.kind, entry.unit) for entry in entries if entry.kind == "reserve"] == [("reserve", "one person")] * 2
    assert [run.unit for run in balance(entries, "digits").runs] == ["one person"]


def test_the_limit_is_kept(charge: Charge) -> None:
    """The first run may spend all of the limit by its own figure; after that the filter decides."""
    epsilon = prv_epsilon([EVENT], DELTA)
    assert RenyiFilter.of(epsilon, DELTA).spent([EVENT]) >= epsilon
    set_limit(charge.ledger, "digits", Limit(epsilon * 1.001, DELTA))
    charge.begin_whole(RELEASE).settle(STATE)
    lines = len(charge.ledger.entries())
    with pytest.raises(PrivacyRefused, match="the limit of this data set"):
        charge.begin_whole(RELEASE, OTHER)
    assert len(charge.ledger.entries()) == lines
    # nothing more is charged, so nothing exceeds the limit
    assert charge.begin_whole(RELEASE, STATE).goes_on


def test_a_state_of_other_images_is_refused(charge: Charge) -> None:
    charge.begin_whole(RELEASE).settle(STATE)
    for run in ("run", "copy"):
        with pytest.raises(InputError, match="differs from the images of the run"):
            Charge(charge.ledger, "letters", run, ASKED).begin_whole(RELEASE, STATE)
