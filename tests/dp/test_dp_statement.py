"""`privacy.json`: epsilon recomputed from its own numbers by two accountants, and what is told of every release."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant

from rapid.bundle import Bundle
from rapid.dp import Budget, DpSgdSpec, QuerySpec, calibrate
from rapid.dp.statement import privacy_statement

GUARANTEE = Path(__file__).parents[2] / "docs" / "guarantee.md"
SIZE, DELTA = 500, 1e-5
SPECS = [
    QuerySpec(name="overlap", kind="count", title="a count", share=0.05, dataset_size=SIZE),
    DpSgdSpec(name="probe", share=0.4, dataset_size=SIZE, expected_batch=SIZE, steps=20, clip_norm=0.1),
    QuerySpec(name="centre", kind="mean", share=0.1, sensitivity=0.3, dataset_size=SIZE),
    DpSgdSpec(
        name="denoiser", title="steps", dataset_size=SIZE, expected_batch=50, steps=80, clip_norm=1.0, multiplicity=4
    ),
]


def budget_of(epsilon: float = 2.0, **changes: Any) -> Budget:
    return calibrate(SPECS, epsilon=epsilon, delta=DELTA, **changes)


def statement_of(budget: Budget, **changes: Any) -> dict[str, Any]:
    """As it is read from disk."""
    stated = privacy_statement(budget, **{"method": "rapid", "noise_source": "chacha20"} | changes)
    read: dict[str, Any] = json.loads(json.dumps(stated, allow_nan=False))
    return read


def tree(data: Any) -> Any:
    """The event that JSON describes, by the names of dp_accounting's own classes and attributes."""
    if isinstance(data, list):
        return [tree(one) for one in data]
    if not isinstance(data, dict):
        return data
    attributes = {name: tree(value) for name, value in data.items() if name != "type"}
    return getattr(dp_accounting, data["type"])(**attributes)


def rows(data: dict[str, Any], times: int = 1) -> list[tuple[float, float, int]]:
    """(noise_multiplier, sample_rate, steps), as Opacus keeps its history."""
    match data["type"]:
        case "GaussianDpEvent":
            return [(data["noise_multiplier"], 1.0, times)]
        case "PoissonSampledDpEvent":
            return [(data["event"]["noise_multiplier"], data["sampling_probability"], times)]
        case "SelfComposedDpEvent":
            return rows(data["event"], times * data["count"])
    assert data["type"] == "ComposedDpEvent"
    return [row for part in data["events"] for row in rows(part, times)]


def by_pld(event: dict[str, Any], delta: float) -> float:
    return float(PLDAccountant(value_discretization_interval=1e-3).compose(tree(event)).get_epsilon(delta))


def by_prv(event: dict[str, Any], delta: float) -> float:
    accountant = PRVAccountant()
    accountant.history = rows(event)
    with warnings.catch_warnings():
        # of its first guess by RDP, and of logarithms whose value it does not use
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(accountant.get_epsilon(delta, eps_error=0.005))


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_epsilon_follows_from_the_event(epsilon: float) -> None:
    budget = budget_of(epsilon)
    stated = statement_of(budget)
    for computed in (by_pld(stated["event"], DELTA), by_prv(stated["event"], DELTA)):
        assert computed == pytest.approx(stated["epsilon"], rel=0.02)
        assert computed == pytest.approx(epsilon, rel=0.03)
    assert stated["epsilon_pld"] == pytest.approx(stated["epsilon"], rel=0.02)
    assert stated["epsilon"] <= stated["epsilon_rdp"]
    assert stated["delta"] == DELTA


def test_epsilon_of_a_bundle_follows_from_its_event(private: Bundle) -> None:
    stated = json.loads((private.path / "privacy.json").read_text())
    for computed in (by_pld(stated["event"], stated["delta"]), by_prv(stated["event"], stated["delta"])):
        assert computed == pytest.approx(stated["epsilon"], rel=0.02)
    # calibration to a thousandth of the noise
    assert 0.97 * 10 <= stated["epsilon"] <= 10
    assert [one["name"] for one in stated["releases"]] == ["overlap", "probe", "denoiser"]


def test_another_accountant_computes_epsilon_as_the_docs_show(
    private: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(import json\nfrom pathlib.*?)```", GUARANTEE.read_text(), re.DOTALL)
    shutil.copytree(private.path, tmp_path / "bundle-private")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(GUARANTEE), "exec"), {})
    computed, pld, prv = map(float, capsys.readouterr().out.split())
    assert private.privacy is not None
    assert (pld, prv) == (private.privacy["epsilon_pld"], private.privacy["epsilon"])
    # its grid is another one; both are upper bounds
    assert computed == pytest.approx(pld, rel=2e-3)
    assert computed == pytest.approx(prv, rel=0.02)


def test_the_relation_is_the_accountants(private: Bundle) -> None:
    assert private.privacy is not None
    stated = private.privacy["relation"]
    relation = dp_accounting.NeighboringRelation[stated["name"]]
    assert relation is dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    assert stated["library"].startswith("dp_accounting ")
    assert "one image is replaced by one that contributes nothing" in stated["words"]
    assert private.privacy["adjacency"] == "add or remove one image"
    # one image that contributes nothing costs what removing it costs, and half of what replacing it by any other costs
    event, delta = tree(private.privacy["event"]["events"][0]), private.privacy["delta"]
    found = {one: PLDAccountant(one).compose(event).get_epsilon(delta) for one in dp_accounting.NeighboringRelation}
    assert found[relation] == found[dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE]
    assert found[relation] < 0.6 * found[dp_accounting.NeighboringRelation.REPLACE_ONE]


def test_every_release_is_told_with_its_numbers() -> None:
    budget = budget_of()
    stated = statement_of(budget)
    assert [one["name"] for one in stated["releases"]] == list(budget.names)
    for told, release in zip(stated["releases"], budget.releases, strict=True):
        spec = release.spec
        assert told["title"] == spec.title
        assert tree(told["event"]) == release.event()
        assert (told["noise_multiplier"], told["sample_rate"], told["steps"]) == (
            release.noise_multiplier,
            spec.sample_rate,
            spec.steps,
        )
        assert told["clip_norm"] == spec.sensitivity
    assert tree(stated["event"]) == dp_accounting.ComposedDpEvent(budget.events())
    training, mean = stated["releases"][3], stated["releases"][2]
    assert (training["expected_batch"], training["multiplicity"]) == (50, 4)
    assert training["mechanism"] == "DP-SGD: Poisson-sampled, per-example clipped, Gaussian noise"
    assert stated["releases"][1]["mechanism"] == "DP-SGD: full batch, per-example clipped, Gaussian noise"
    assert mean["mechanism"] == "mean with Gaussian noise, once"


def test_the_numbers_of_the_main_release_stand_on_top() -> None:
    stated = statement_of(budget_of())
    main = {name: value for name, value in stated["releases"][3].items() if name not in ("name", "title", "event")}
    assert {name: stated[name] for name in main} == main
    assert stated["dataset_size"] == SIZE


def test_what_the_contract_names_is_there() -> None:
    stated = statement_of(budget_of().model_copy(update={"unit": "one person"}))
    wanted = {
        "epsilon", "delta", "accountant", "adjacency", "unit", "noise_multiplier", "sample_rate", "steps", "clip_norm",
        "dataset_size", "noise_source", "created", "packages",
    }  # fmt: skip
    assert wanted <= stated.keys()
    assert (stated["unit"], stated["adjacency"]) == ("one person", "add or remove one person")
    assert stated["packages"].keys() >= {"rapid", "torch", "opacus", "dp-accounting", "cryptography"}
    assert "opacus" in stated["accountant"]


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 3.0])
def test_epsilon_is_rounded_up(epsilon: float) -> None:
    budget = budget_of(epsilon)
    stated = statement_of(budget)
    exact = {"epsilon": budget.spent, "epsilon_rdp": budget.spent_rdp, "epsilon_pld": budget.spent_pld}
    for name, value in exact.items():
        assert value <= stated[name] < value + 1.1e-6
        assert stated[name] == round(stated[name], 6)


def test_queries_always_have_noise_from_the_stream_cipher() -> None:
    stated = statement_of(budget_of(), noise_source="device")
    assert "not cryptographic" in stated["noise_source"]
    assert ["ChaCha20" in one["noise_source"] for one in stated["releases"]] == [True, False, True, False]
    assert all("ChaCha20" in one["noise_source"] for one in statement_of(budget_of())["releases"])


def test_a_group_is_told_where_there_is_one() -> None:
    assert "group" not in statement_of(budget_of())
    budget = budget_of(group_size=3)
    stated = statement_of(budget)
    group = stated["group"]
    assert (group["size"], group["delta"], group["unit"]) == (3, DELTA, "3 images of one person")
    assert stated["epsilon"] < group["epsilon"]
    assert math.isclose(group["epsilon"], budget.spent_group, abs_tol=1.1e-6)
    assert group["epsilon"] >= budget.spent_group
    assert "dp-accounting" in group["accountant"]
