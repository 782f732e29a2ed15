"""Renyi divergences of trees of events: against dp-accounting, and of choices against the exact ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    LaplaceDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.dp.accounting import accountant_name, composition, pld_epsilon, prv_epsilon, rdp_at_order, rdp_epsilon
from rapid.dp.events import (
    OneOfDpEvent,
    check_known,
    compose,
    dp_sgd_event,
    event_from_json,
    event_to_json,
    gaussian_event,
    has_selection,
)
from rapid.dp.renyi import ORDERS, divergence_at, renyi_accountant_name, renyi_divergences, renyi_epsilon
from rapid.dp.trials import Trials

leaves = st.one_of(
    st.builds(gaussian_event, st.floats(0.5, 50)),
    st.builds(dp_sgd_event, st.floats(0.5, 20), st.floats(1e-3, 0.9), st.integers(0, 20)),
    st.just(NoOpDpEvent()),
)
plain = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.builds(SelfComposedDpEvent, parts, st.integers(1, 4)),
        st.builds(ComposedDpEvent, st.lists(parts, max_size=3)),
    ),
    max_leaves=4,
)
trials = st.builds(lambda mean, shape: Trials(mean=mean, shape=shape), st.floats(1.1, 50), st.floats(0, 5))
selected = st.builds(lambda event, law: law.event(event), plain, trials)
one_of = st.builds(lambda parts: OneOfDpEvent(tuple(parts)), st.lists(plain, min_size=1, max_size=3))
chosen = st.builds(lambda event, law: law.event(event), one_of, trials)
trees = st.one_of(plain, selected, one_of, chosen, st.builds(ComposedDpEvent, st.lists(chosen)))


def by_library(event: DpEvent) -> RdpAccountant:
    accountant = RdpAccountant(orders=list(ORDERS))
    accountant.compose(event)
    return accountant


@settings(max_examples=12, deadline=None)
@given(st.one_of(plain, selected))
def test_divergences_and_epsilon_are_those_of_another_library(event: DpEvent) -> None:
    other = by_library(event)
    found = renyi_divergences(event, ORDERS)
    assert found == pytest.approx(other.rdp, rel=1e-6, abs=1e-9)
    assert renyi_epsilon([event], 1e-5) == pytest.approx(other.get_epsilon(1e-5), rel=1e-6, abs=1e-3)
    assert divergence_at(event, 7) == pytest.approx(found[ORDERS.index(7)])
    assert rdp_at_order([event], 7) == pytest.approx(found[ORDERS.index(7)])


@settings(max_examples=10, deadline=None)
@given(st.lists(plain, min_size=1, max_size=3), trials)
def test_one_of_several_costs_as_much_as_the_dearest_at_each_order(parts: list[DpEvent], law: Trials) -> None:
    dearest = np.max([by_library(part).rdp for part in parts], axis=0)
    event = OneOfDpEvent(tuple(parts))
    assert renyi_divergences(event, ORDERS) == pytest.approx(dearest, rel=1e-6, abs=1e-9)
    assert renyi_divergences(law.event(event), ORDERS) == pytest.approx(law.divergences(ORDERS, dearest), rel=1e-6)


def test_a_mixture_is_no_easier_to_tell_than_its_worst_part() -> None:
    """Exact divergence of the published choice and its result, for two Gaussians of sensitivity 1."""
    order, sigmas = 6, (1.3, 2.0)
    parts = [order / (2 * sigma**2) for sigma in sigmas]
    mixture = np.logaddexp.reduce([(order - 1) * part + math.log(0.5) for part in parts]) / (order - 1)
    event = OneOfDpEvent(tuple(gaussian_event(sigma) for sigma in sigmas))
    assert mixture <= renyi_divergences(event, [order])[0] == pytest.approx(max(parts))


@settings(max_examples=60, deadline=None)
@given(trees)
def test_trees_survive_the_ledger(event: DpEvent) -> None:
    written = json.loads(json.dumps(event_to_json(event)))
    again = event_from_json(written)
    assert event_to_json(again) == written
    check_known(again)
    assert has_selection(again) == has_selection(event)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"type": "OneOfDpEvent", "events": []}, "OneOfDpEvent"),
        ({"type": "RepeatAndSelectDpEvent", "mean": 1.0, "shape": 1.0, "event": {"type": "NoOpDpEvent"}}, "mean"),
        ({"type": "RepeatAndSelectDpEvent", "mean": 2.0, "shape": -1.0, "event": {"type": "NoOpDpEvent"}}, "shape"),
        ({"type": "RepeatAndSelectDpEvent", "mean": True, "shape": 1.0, "event": {"type": "NoOpDpEvent"}}, "mean"),
        ({"type": "RepeatAndSelectDpEvent", "mean": 2.0, "shape": math.inf, "event": {"type": "NoOpDpEvent"}}, "shape"),
        ({"type": "RepeatAndSelectDpEvent", "mean": 2.0, "shape": 1.0}, "RepeatAndSelectDpEvent"),
        ({"type": "RepeatAndSelectDpEvent", "mean": 2.0, "shape": 1.0, "event": {"type": "Laplace"}}, "Laplace"),
    ],
)
def test_bad_events_are_refused(data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        event_from_json(data)


def test_unknown_events_are_found_at_any_depth() -> None:
    sampled = PoissonSampledDpEvent(0.5, LaplaceDpEvent(1.0))
    for inner in (LaplaceDpEvent(1.0), sampled):
        for event in (inner, OneOfDpEvent((inner,)), RepeatAndSelectDpEvent(ComposedDpEvent([inner]), 3.0, 1.0)):
            with pytest.raises(ValueError, match="DpEvent"):
                check_known(event)


def test_prv_falls_back_and_says_so() -> None:
    single, best = dp_sgd_event(1.2, 0.05, 100), Trials(mean=5).event(dp_sgd_event(1.2, 0.05, 100))
    assert composition([single], 1e-5).accountant == accountant_name()
    assert composition([single, best], 1e-5).accountant == renyi_accountant_name()
    assert prv_epsilon([single, best], 1e-5) == renyi_epsilon([single, best], 1e-5)
    # everything together, and an upper bound: never less than without the choice
    assert prv_epsilon([single], 1e-5) < prv_epsilon([best], 1e-5) < prv_epsilon([single, best], 1e-5)
    for accountant in (pld_epsilon, rdp_epsilon):
        with pytest.raises(ValueError, match="RepeatAndSelect"):
            accountant([best], 1e-5)


def test_no_noise_and_nothing() -> None:
    assert renyi_epsilon([], 1e-5) == renyi_epsilon([SelfComposedDpEvent(gaussian_event(0.0), 0)], 1e-5) == 0
    assert renyi_epsilon([Trials(mean=3).event(gaussian_event(0.0))], 1e-5) == math.inf
    assert compose([NoOpDpEvent()]) == NoOpDpEvent()
    assert divergence_at(NoOpDpEvent(), 5) == 0
