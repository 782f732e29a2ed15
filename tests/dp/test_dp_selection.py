"""Budgets of a private choice: never above what was asked for, whatever the candidates are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from pydantic import ValidationError

from rapid.dp.accounting import prv_epsilon
from rapid.dp.events import OneOfDpEvent, event_from_json
from rapid.dp.releases import DpSgdSpec
from rapid.dp.renyi import ORDERS, renyi_epsilon
from rapid.dp.selection import CLOSE, SCORE, Selection, Specs, calibrate_selection, score_spec
from rapid.dp.statement import privacy_statement, selection_statement
from rapid.dp.trials import Trials
from rapid.errors import InputError, PrivacyRefused

GUARANTEE = Path(__file__).parents[2] / "docs" / "guarantee.md"
SIZE, DELTA = 2000, 1e-4


def specs(batch: int, steps: int) -> Specs:
    main = DpSgdSpec(name="denoiser", dataset_size=SIZE, expected_batch=batch, steps=steps, clip_norm=1.0)
    return [main, score_spec(SIZE, 0.1)]


@pytest.fixture(scope="module")
def selection() -> Selection:
    return calibrate_selection(
        {"long": specs(50, 40), "short": specs(400, 10)}, epsilon=3.0, delta=DELTA, trials=Trials(mean=5)
    )


def test_it_spends_what_was_asked_for(selection: Selection) -> None:
    assert 3.0 * CLOSE <= selection.spent <= 3.0
    assert isinstance(selection.trial_event, OneOfDpEvent)
    # each candidate alone, by dp-accounting, costs no more than all of them
    for candidate in selection.candidates:
        accountant = RdpAccountant(orders=list(ORDERS))
        accountant.compose(RepeatAndSelectDpEvent(candidate.event, 5.0, 1.0))
        assert accountant.get_epsilon(DELTA) <= selection.spent * (1 + 1e-9)
        assert SCORE in candidate.budget.names
    # candidates share a trial's epsilon, which is far below the whole
    each = [prv_epsilon(candidate.budget.events(), DELTA) for candidate in selection.candidates]
    assert max(each) == pytest.approx(min(each), rel=0.01)
    assert selection.trial_epsilon == max(each) < 0.6 * selection.spent


def test_one_candidate_needs_no_choice(selection: Selection) -> None:
    alone = selection.model_copy(update={"candidates": selection.candidates[1:]})
    assert alone.trial_event == selection.candidates[1].event
    twice = (*alone.candidates, alone.candidates[0].model_copy(update={"name": "again"}))
    assert selection.model_copy(update={"candidates": twice}).event == alone.event


def test_the_statement_is_of_everything(selection: Selection) -> None:
    own = privacy_statement(selection.candidates[0].budget, method="toy", noise_source="chacha20")
    more = selection_statement(selection, "long")
    statement: dict[str, Any] = json.loads(json.dumps(own | more))
    again = renyi_epsilon([event_from_json(statement["event"])], DELTA)
    assert again <= statement["epsilon"] <= 3.0
    assert statement["epsilon"] > own["epsilon"]
    assert "RDP" in statement["accountant"]
    assert statement["selection"]["trials"] == {
        "distribution": "truncated negative binomial", "mean": 5.0, "shape": 1.0, "gamma": selection.trials.gamma,
    }  # fmt: skip
    assert statement["selection"]["candidates"] == ["long", "short"]
    assert {release["name"] for release in statement["releases"]} == {"denoiser", SCORE}


def test_the_program_of_the_docs_computes_the_same(
    selection: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n([^`]*OneOfDpEvent.*?)```", GUARANTEE.read_text(), re.DOTALL)
    own = privacy_statement(selection.candidates[0].budget, method="toy", noise_source="chacha20")
    (tmp_path / "bundle-tuned").mkdir()
    statement = json.dumps(own | selection_statement(selection, "long"))
    (tmp_path / "bundle-tuned" / "privacy.json").write_text(statement)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(GUARANTEE), "exec"), {})
    computed, stated = map(float, capsys.readouterr().out.split())
    assert computed <= stated
    assert computed == pytest.approx(stated, rel=2e-3)


def test_a_record_is_taken_only_as_it_was(selection: Selection) -> None:
    record = json.loads(json.dumps(selection.model_dump(mode="json")))
    assert Selection.from_record(record, 3.0, DELTA) == selection
    with pytest.raises(InputError, match="altered"):
        Selection.from_record(record, 2.0, DELTA)
    for release in record["candidates"][1]["budget"]["releases"]:
        release["noise_multiplier"] *= 0.9
    with pytest.raises(InputError, match="altered"):
        Selection.from_record(record, 3.0, DELTA)
    with pytest.raises(InputError, match="altered"):
        Selection.from_record({}, 3.0, DELTA)


def test_candidates_must_fit_together(selection: Selection) -> None:
    budget = selection.candidates[0].budget
    first = selection.candidates[0].model_dump()
    bad = [([], "at least 1 item"), ([first, first], "the same name")]
    bad.append(([{"name": "x", "budget": budget.model_copy(update={"releases": budget.releases[:1]})}], "no score"))
    for change in ({"delta": 2e-4}, {"dataset_size": SIZE + 1}, {"unit": "one person"}, {"group_size": 2}):
        other = budget.model_dump() | change
        for release in other["releases"]:
            release["spec"]["dataset_size"] = other["dataset_size"]
        bad.append(([first, {"name": "x", "budget": other}], "different data sets"))
    for candidates, words in bad:
        with pytest.raises(ValidationError, match=words):
            Selection.model_validate(selection.model_dump() | {"candidates": candidates})


def test_accountants_that_disagree_refuse(selection: Selection) -> None:
    """As if our own had found half of what the library finds."""
    selection.check()
    wrong = selection.model_copy()
    wrong.__dict__["spent"] = selection.spent / 2
    with pytest.raises(PrivacyRefused, match="two accountants disagree"):
        wrong.check()


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_bad_shares(share: float) -> None:
    with pytest.raises(InputError, match="score_share"):
        score_spec(SIZE, share)


def test_bad_epsilon() -> None:
    for epsilon, delta, field in ((0.0, DELTA, "epsilon"), (1.0, 0.0, "delta"), (1.0, 1e-12, "delta")):
        with pytest.raises(InputError) as refused:
            calibrate_selection({"a": specs(400, 10)}, epsilon=epsilon, delta=delta, trials=Trials(mean=3))
        assert refused.value.field == field
