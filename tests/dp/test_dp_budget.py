"""Budgets: shares, composition, two accountants, groups, and the record of an earlier run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, NoOpDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rapid.dp import Budget, DpSgdSpec, QuerySpec, Release, calibrate
from rapid.dp.accounting import DISAGREEMENT, LARGEST_DISAGREEMENT, agrees, group_epsilon, prv_epsilon, rdp_epsilon
from rapid.errors import InputError, PrivacyRefused

SIZE, DELTA = 1000, 1e-5


def training(name: str = "denoiser", share: float | None = None, **changes: Any) -> DpSgdSpec:
    numbers = {"dataset_size": SIZE, "expected_batch": 100, "steps": 50, "clip_norm": 1.0, "name": name, "share": share}
    return DpSgdSpec.model_validate(numbers | changes)


def query(name: str, share: float | None, kind: str = "count", **changes: Any) -> QuerySpec:
    return QuerySpec.model_validate({"name": name, "kind": kind, "share": share, "dataset_size": SIZE} | changes)


SPECS = [
    query("overlap", 0.05),
    training("probe", 0.4, expected_batch=SIZE, steps=20),
    training(),
    query("centre", 0.1, "mean", sensitivity=0.3),
]


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_each_share_and_all_together_are_spent(epsilon: float) -> None:
    budget = calibrate(SPECS, epsilon=epsilon, delta=DELTA)
    assert budget.names == ("overlap", "probe", "denoiser", "centre")
    assert budget.main == budget.release("denoiser") == budget.releases[2]
    assert [release.spec for release in budget.releases] == SPECS
    for release in budget.releases:
        if release.spec.share is not None:
            alone = prv_epsilon([release.event()], DELTA)
            # numerical composition adds its own error to the closed form of one Gaussian
            assert 0.97 * epsilon * release.spec.share <= alone <= 1.02 * epsilon * release.spec.share + 6e-3
    assert budget.spent == prv_epsilon(budget.events(), DELTA)
    assert 0.97 * epsilon <= budget.spent <= epsilon
    # releases compose like squares: the others cost the main one little
    main = calibrate([SPECS[2]], epsilon=epsilon, delta=DELTA).main
    assert 1 < budget.main.noise_multiplier / main.noise_multiplier < 1.25


def test_a_query_can_be_what_spends_the_rest() -> None:
    budget = calibrate([query("many", None), training("probe", 0.5)], epsilon=1.0, delta=DELTA)
    assert budget.main.name == "many"
    assert 0.97 <= budget.spent <= 1.0


def test_no_noise_is_less_than_what_a_spec_asks_for() -> None:
    specs = [query("overlap", 0.05, least_noise_multiplier=500.0), training(least_noise_multiplier=40.0)]
    budget = calibrate(specs, epsilon=5.0, delta=DELTA)
    assert [release.noise_multiplier for release in budget.releases] == [500.0, 40.0]
    assert budget.spent < 0.5


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([training("probe", 0.4)], "exactly one release must have no share of epsilon, not 0"),
        ([training("probe"), training()], "exactly one release must have no share of epsilon, not 2"),
        ([], "not 0"),
        ([training("probe", 0.4), training("probe")], "two releases have the same name"),
        ([training("probe", 0.4, dataset_size=SIZE + 1), training()], "all releases must have the dataset_size"),
    ],
)
def test_specs_that_do_not_fit_together(specs: list[DpSgdSpec], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate(specs, epsilon=1.0, delta=DELTA)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"group_size": SIZE + 1}, "private.group_size"),
        # shares that leave nothing for the main release
        ({"specs": [query(f"q{number}", 0.9) for number in range(9)] + [training()]}, "epsilon"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], field: str) -> None:
    arguments = {"specs": [training()], "epsilon": 1.0, "delta": DELTA} | changes
    with pytest.raises(InputError) as refused:
        calibrate(arguments.pop("specs"), **arguments)
    assert refused.value.field == field


def test_only_what_is_listed_is_a_release() -> None:
    budget = calibrate(SPECS[:3], epsilon=1.0, delta=DELTA)
    with pytest.raises(PrivacyRefused, match="'gan' is not in the budget, which lists overlap, probe, denoiser"):
        budget.release("gan")


def test_steps_that_were_not_taken_reveal_nothing() -> None:
    budget = calibrate(SPECS, epsilon=1.0, delta=DELTA)
    assert budget.events() == [release.event() for release in budget.releases]
    assert budget.events({}) == [NoOpDpEvent()] * 4
    some = budget.events({"overlap": 1, "denoiser": 3})
    assert some == [budget.releases[0].event(), NoOpDpEvent(), budget.main.event(3), NoOpDpEvent()]
    assert prv_epsilon(some, DELTA) < budget.spent


@settings(max_examples=8, deadline=None)
@given(
    epsilon=st.floats(0.1, 20),
    delta=st.sampled_from([1e-3, 1e-5, 1e-8]),
    batch=st.sampled_from([10, 100, SIZE]),
    steps=st.sampled_from([1, 30, 200]),
    shares=st.lists(st.floats(0.02, 0.5), max_size=3),
)
def test_two_accountants_agree(epsilon: float, delta: float, batch: int, steps: int, shares: list[float]) -> None:
    specs = [query(f"query{number}", share) for number, share in enumerate(shares)]
    try:
        budget = calibrate([*specs, training(expected_batch=batch, steps=steps)], epsilon=epsilon, delta=delta)
    except InputError as error:
        # queries that spend all of epsilon
        assert error.field == "epsilon"
        assert sum(share**2 for share in shares) > 0.2
        return
    assert budget.spent_pld == pytest.approx(budget.spent, rel=DISAGREEMENT, abs=LARGEST_DISAGREEMENT)
    assert budget.spent <= budget.spent_rdp * (1 + 1e-9)
    assert budget.spent <= epsilon
    budget.check()


@pytest.mark.parametrize("noise", [0.5, 1.3432906656654937, 2.0, 3.7, 8.0, 11.1])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_group_in_a_query_is_one_gaussian_with_its_shift(noise: float, size: int) -> None:
    releases = (Release(spec=query("many", None), noise_multiplier=noise),)
    budget = Budget(epsilon=1, delta=DELTA, dataset_size=SIZE, group_size=size, releases=releases)
    assert budget.spent_group == pytest.approx(prv_epsilon([GaussianDpEvent(noise / size)], DELTA), rel=0.02, abs=0.01)


def test_groups_spend_more_than_one_image() -> None:
    spent = [calibrate(SPECS, epsilon=1.0, delta=DELTA, group_size=size).spent_group for size in (1, 2, 4)]
    budget = calibrate(SPECS, epsilon=1.0, delta=DELTA, group_size=4)
    assert spent[0] == budget.spent < spent[1] < spent[2]
    assert spent[2] == group_epsilon(budget.events(), DELTA, 4)
    # the noise is that of one image
    assert budget.releases == calibrate(SPECS, epsilon=1.0, delta=DELTA).releases


@pytest.mark.parametrize("factor", [0.5, 0.95, math.nan])
def test_a_budget_is_refused_where_the_accountants_disagree(factor: float) -> None:
    """As if the first accountant had found less than the second one does, or no number."""
    budget = calibrate(SPECS, epsilon=1.0, delta=DELTA)
    budget.check()
    budget.__dict__["spent_pld"] = budget.spent_pld / factor
    with pytest.raises(PrivacyRefused, match=r"two accountants disagree .* nothing was spent"):
        budget.check()


@pytest.mark.parametrize(
    ("first", "second", "confirmed"),
    [
        (1.0, 0.0, True), (1.0, 1.03, True), (1.0, 1.05, False), (0.008, 0.0105, True), (0.008, 0.02, False),
        (200.0, math.inf, True), (200.0, 210.0, False), (50.0, math.inf, False), (1.0, math.nan, False),
    ],
)  # fmt: skip
def test_what_confirms_an_epsilon(first: float, second: float, confirmed: bool) -> None:
    assert agrees(first, second) == confirmed


@pytest.mark.parametrize("delta", [9.9e-11, 1e-11, 1e-30, 0.0, math.nan])
def test_a_delta_that_is_too_small_to_compute_with_is_bad_input(delta: float) -> None:
    with pytest.raises(InputError, match=r"must be at least 1e-10|must lie in") as refused:
        calibrate([training()], epsilon=1.0, delta=delta)
    assert refused.value.field == "delta"
    # nor is a run of an older rapid resumed with it
    budget, record = recorded()
    with pytest.raises(InputError, match=r"must be at least|must lie in|was altered"):
        Budget.from_record(record | {"delta": delta}, budget.epsilon, delta)


def test_a_budget_without_noise_is_refused() -> None:
    releases = (Release(spec=training(), noise_multiplier=0.0),)
    budget = Budget(epsilon=10, delta=DELTA, dataset_size=SIZE, releases=releases)
    with pytest.raises(PrivacyRefused, match="not finite"):
        budget.check()


def recorded() -> tuple[Budget, dict[str, Any]]:
    """A budget, and what a run folder keeps of it."""
    budget = calibrate(SPECS, epsilon=1.0, delta=DELTA, group_size=2)
    return budget, json.loads(json.dumps(budget.model_dump(mode="json")))


def test_a_record_gives_the_same_budget() -> None:
    budget, record = recorded()
    assert Budget.from_record(record, 1.0, DELTA) == budget
    # solved on another machine, the last digits may differ
    record["releases"][2]["noise_multiplier"] *= 1 - 1e-9
    assert Budget.from_record(record, 1.0, DELTA).main.noise_multiplier < budget.main.noise_multiplier


def less_noise(record: dict[str, Any]) -> None:
    record["releases"][2]["noise_multiplier"] *= 0.98


def no_noise(record: dict[str, Any]) -> None:
    record["releases"][0]["noise_multiplier"] = 0


def more_steps(record: dict[str, Any]) -> None:
    record["releases"][2]["spec"]["steps"] += 5


def larger_batches(record: dict[str, Any]) -> None:
    record["releases"][2]["spec"]["expected_batch"] += 5


def one_release_more(record: dict[str, Any]) -> None:
    record["releases"].append(record["releases"][2] | {"spec": SPECS[2].model_dump() | {"name": "more"}})


def the_same_name_twice(record: dict[str, Any]) -> None:
    record["releases"][0]["spec"]["name"] = "denoiser"


def no_main_release(record: dict[str, Any]) -> None:
    del record["releases"][2]


def other_images(record: dict[str, Any]) -> None:
    record["dataset_size"] += 1


def a_number_that_is_no_setting(record: dict[str, Any]) -> None:
    record["releases"][2]["spec"]["dropout"] = 0.1


def no_number(record: dict[str, Any]) -> None:
    record["releases"][2]["noise_multiplier"] = math.nan


def empty(record: dict[str, Any]) -> None:
    record.clear()


@pytest.mark.parametrize(
    "change",
    [
        less_noise,
        no_noise,
        more_steps,
        larger_batches,
        one_release_more,
        the_same_name_twice,
        no_main_release,
        other_images,
        a_number_that_is_no_setting,
        no_number,
        empty,
    ],
)
def test_an_altered_record_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    _, record = recorded()
    change(record)
    with pytest.raises(InputError, match="was altered") as refused:
        Budget.from_record(record, 1.0, DELTA)
    assert refused.value.field == "resume"


def test_a_record_of_another_epsilon_or_delta_is_refused() -> None:
    _, record = recorded()
    for epsilon, delta in ((0.5, DELTA), (2.0, DELTA), (1.0, DELTA / 2), (1.0, 2 * DELTA)):
        with pytest.raises(InputError, match="was altered"):
            Budget.from_record(record, epsilon, delta)


def test_public_numbers_of_a_budget_cannot_be_changed() -> None:
    budget, _ = recorded()
    with pytest.raises(ValidationError, match="frozen"):
        budget.releases = ()


def test_rdp_is_told_for_comparison() -> None:
    budget, _ = recorded()
    assert budget.spent_rdp == rdp_epsilon(budget.events(), DELTA) > budget.spent
