"""Epsilon recomputed, and the ledger's lines about the private images."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid.bundle import Bundle
from rapid.data import load_images
from rapid.data.classes import UNDECLARED_NOTE
from rapid.data.stored import image_digests
from rapid.data.units import ONE_IMAGE, ONE_PERSON
from rapid.dp.accounting import pld_epsilon, prv_epsilon
from rapid.dp.entry import Limit, Spent
from rapid.dp.events import compose, dp_sgd_event, event_to_json, gaussian_event
from rapid.dp.ledger import Ledger
from rapid.dp.releases import DpSgdSpec
from rapid.dp.selection import calibrate_selection, score_spec
from rapid.dp.spending import set_limit
from rapid.dp.statement import privacy_statement, selection_statement
from rapid.dp.trials import Trials
from rapid.errors import InputError
from rapid.release.accounts import Recomputed, Statement, ledger_rules, read_account, statement_rules
from rapid.release.policy import LedgerPolicy, Policy
from rapid.release.rules import Rule

LOOSE = Policy(max_epsilon=100, max_delta=0.1, unit="one image", ledger=LedgerPolicy(max_epsilon=None))


def changed(bundle: Bundle, **changes: Any) -> Bundle:
    return Bundle(bundle.path, bundle.config, {}, copy.deepcopy(bundle.privacy or {}) | changes)


def outcomes(bundle: Bundle, found: Recomputed, policy: Policy = LOOSE) -> dict[str, str]:
    return {one.name: one.outcome for one in statement_rules(policy, Statement.of(bundle), found)}


@pytest.fixture(scope="module")
def found(private: Bundle) -> Recomputed:
    return Recomputed.of(Statement.of(private))


def test_an_honest_statement_passes(private: Bundle, found: Recomputed) -> None:
    assert set(outcomes(private, found).values()) == {"pass"}
    assert private.privacy is not None
    assert found.prv <= private.privacy["epsilon"] <= found.prv + 1e-6
    assert found.pld == pytest.approx(private.privacy["epsilon_pld"], abs=2e-6)


def test_the_band_of_correlated_noise_is_read(private: Bundle) -> None:
    assert private.privacy is not None
    assert Statement.of(private).noise_band == 1
    releases = [one | ({"noise_band": 4} if number else {}) for number, one in enumerate(private.privacy["releases"])]
    assert Statement.of(changed(private, releases=releases)).noise_band == 4


def test_a_model_that_was_chosen_privately_is_judged_by_all_trials(private: Bundle) -> None:
    assert private.privacy is not None
    size = private.privacy["dataset_size"]
    specs = {
        name: [
            DpSgdSpec(name="network", dataset_size=size, expected_batch=batch, steps=10, clip_norm=1.0),
            score_spec(size, 0.2),
        ]
        for name, batch in (("small", 10), ("large", 20))
    }
    selection = calibrate_selection(specs, epsilon=5.0, delta=1e-3, trials=Trials(mean=3))
    own = selection.candidates[1]
    statement = privacy_statement(own.budget, method="rapid", noise_source="chacha20")
    chosen = Bundle(private.path, private.config, {}, statement | selection_statement(selection, own.name))
    again = Recomputed.of(Statement.of(chosen))
    assert set(outcomes(chosen, again).values()) == {"pass"}
    assert again.prv == pytest.approx(selection.spent) and 0 < again.pld <= again.prv * 1.02
    assert all("RDP" in name for name in again.record()["accountants"])
    assert Statement.of(chosen).spent == [Spent.of("tune", selection.event)]
    # the releases of a trial that was no candidate
    other = calibrate_selection({"other": [*specs["small"][:1], score_spec(size, 0.3)]}, epsilon=5.0, delta=1e-3,
                                trials=Trials(mean=3)).candidates[0]  # fmt: skip
    listed = privacy_statement(other.budget, method="rapid", noise_source="chacha20")["releases"]
    assert (
        outcomes(changed(chosen, releases=listed), Recomputed.of(Statement.of(changed(chosen, releases=listed))))[
            "accounting"
        ]
        == "fail"
    )


def test_each_rule_finds_what_it_is_for(private: Bundle, found: Recomputed) -> None:
    assert private.privacy is not None
    events = [release["event"] for release in private.privacy["releases"]]
    weaker = copy.deepcopy(private.privacy["releases"])
    weaker[0]["noise_source"] = "torch.randn"
    cases = {
        "epsilon": changed(private, epsilon=101.0),
        "accounting": changed(private, epsilon=5.0),
        "delta": changed(private, delta=0.2),
        "delta-1/N": changed(private, delta=0.01),
        "unit": changed(private, unit="one person"),
        "noise": changed(private, releases=weaker),
        "classes": changed(private, notes=[UNDECLARED_NOTE]),
    }
    for name, bundle in cases.items():
        assert outcomes(bundle, found)[name] == "fail", name
    # an event tree that leaves out a release has a smaller epsilon
    partial = changed(private, event=events[0])
    assert outcomes(partial, Recomputed.of(Statement.of(partial)))["accounting"] == "fail"
    # and so has one in which a release that is listed took no step
    empty = event_to_json(compose([]))
    nothing = [private.privacy["releases"][0], *(one | {"event": empty} for one in private.privacy["releases"][1:])]
    less = Recomputed.of(Statement.of(changed(private, event=events[0], releases=nothing)))
    assert outcomes(changed(private, epsilon=less.prv), less)["accounting"] == "fail"
    # of a delta for which an accountant has no number there is a report, too
    tiny = changed(private, delta=1e-16)
    assert outcomes(tiny, Recomputed.of(Statement.of(tiny)))["accounting"] == "fail"
    assert outcomes(private, found, LOOSE.model_copy(update={"max_epsilon": 9.0}))["epsilon"] == "fail"


def test_damaged_statements_are_refused(private: Bundle) -> None:
    for changes in ({"epsilon": None}, {"event": {"type": "Other"}}, {"releases": []}, {"delta": 2.0}):
        with pytest.raises(InputError, match="does not say"):
            Statement.of(changed(private, **changes))


class Book:
    """A ledger with one run of the model's releases, in two attempts."""

    def __init__(self, folder: Path, bundle: Bundle) -> None:
        self.folder = folder
        self.images = load_images_of(folder)
        self.statement = Statement.of(bundle)
        self.begin("ledger")
        whole = self.statement.spent
        self.charge("own", 1, whole[:1])
        self.charge("own", 2, whole[1:])

    def begin(self, name: str) -> None:
        self.path = self.folder / f"{name}.jsonl"
        self.ledger = Ledger(self.path)
        self.digests = image_digests(self.images.images)
        self.dataset = self.ledger.account(self.digests)

    def charge(
        self, run: str, attempt: int, releases: list[Spent], continues: Sequence[str] = (), unit: str = ONE_IMAGE
    ) -> None:
        how: Any = {"attempt": attempt, "checkpoints": []}
        with self.ledger.transaction() as lines:
            lines.charge("reserve", self.dataset, run, Limit(1, 1e-5), releases, continues=continues, unit=unit, **how)
            lines.charge("settle", self.dataset, run, Limit(1, 1e-5), releases, **how)

    def rules(self, policy: Policy) -> dict[str, str]:
        return {name: one.outcome for name, one in self.found(policy).items()}

    def found(self, policy: Policy) -> dict[str, Rule]:
        account = read_account(self.path, self.digests, self.statement)
        return {one.name: one for one in ledger_rules(policy, account, self.statement.delta)}


def load_images_of(folder: Path) -> Any:
    np.savez(folder / "images.npz", images=np.arange(64, dtype=np.uint8).reshape(4, 4, 4))
    return load_images(folder / "images.npz", "private")


@pytest.fixture
def book(tmp_path: Path, private: Bundle) -> Book:
    return Book(tmp_path, private)


def test_the_run_of_the_model_is_found(book: Book) -> None:
    account = read_account(book.path, book.digests, book.statement)
    assert not isinstance(account, str)
    assert account.model_run == "own"
    assert (account.lines, len(account.runs)) == (4, 2)
    assert book.rules(LOOSE) == {"ledger": "pass", "ledger-run": "pass"}
    # that were charged for less, or with other noise, are of other models
    noise, rate = book.statement.noise_multiplier, book.statement.sample_rate
    for number, event in enumerate((dp_sgd_event(noise, rate, 2), dp_sgd_event(noise * 2, rate, 3)), 2):
        book.begin(f"book{number}")
        book.charge("other", 1, [*book.statement.spent[:-1], Spent.of("denoiser", event)])
        book.charge("half", 1, book.statement.spent[:-1])
        assert book.rules(LOOSE)["ledger-run"] == "fail"
    book.charge("other", 2, book.statement.spent)
    assert book.rules(LOOSE)["ledger-run"] == "pass"


def test_the_run_of_a_model_is_found_under_all_of_its_names(book: Book) -> None:
    """As after its folder was moved."""
    book.begin("moved")
    whole = book.statement.spent
    book.charge("first", 1, whole[:1])
    book.charge("second", 1, whole[1:], continues=["first"])
    account = read_account(book.path, book.digests, book.statement)
    assert not isinstance(account, str)
    assert account.model_run == "second"
    assert [row["made_this_model"] for row in account.record(LOOSE, book.statement.delta)["runs"]] == [True, True]


def test_the_total_is_that_of_all_runs(book: Book) -> None:
    delta = book.statement.delta
    more = [gaussian_event(0.5), dp_sgd_event(0.8, 0.1, 50)]
    book.charge("second", 1, [Spent.of("a", more[0]), Spent.of("b", more[1])])
    account = read_account(book.path, book.digests, book.statement)
    assert not isinstance(account, str)
    adaptive, fixed = account.together(LOOSE, delta)
    whole = [book.statement.tree, *more]
    assert fixed == pytest.approx(prv_epsilon(whole, delta), rel=1e-3)
    assert fixed == pytest.approx(pld_epsilon(whole, delta), rel=0.05)
    assert adaptive > fixed
    for most, outcome in ((adaptive * 1.5, "pass"), (fixed, "fail")):
        policy = LOOSE.model_copy(update={"ledger": LedgerPolicy(max_epsilon=most)})
        assert book.rules(policy)["ledger-total"] == outcome
    record = account.record(LOOSE, delta)
    json.dumps(record, allow_nan=False)
    assert record["epsilon"] >= adaptive
    assert [run["run"] for run in record["runs"]] == ["own", "own", "second"]
    assert [run["made_this_model"] for run in record["runs"]] == [True, True, False]
    assert record["runs"][2]["releases"][0] == {"name": "a", "event": event_to_json(more[0])}
    assert record["limit"] is None
    set_limit(book.ledger, book.dataset, Limit(3, 1e-6))
    limited = read_account(book.path, book.digests, book.statement)
    assert not isinstance(limited, str)
    assert limited.record(LOOSE, delta)["limit"] == {"epsilon": 3.0, "delta": 1e-6}


@pytest.mark.parametrize(
    ("policy", "own", "other", "outcome", "words"),
    [
        (ONE_PERSON, ONE_PERSON, ONE_PERSON, "pass", ""),
        (ONE_PERSON, ONE_PERSON, ONE_IMAGE, "fail", "run first is for one image"),
        (ONE_PERSON, ONE_PERSON, "", "not measured", "run first is for an unknown unit"),
        (ONE_PERSON, "", ONE_IMAGE, "fail", "run first is for one image, run own is for an unknown unit"),
        (ONE_IMAGE, ONE_IMAGE, ONE_IMAGE, "pass", ""),
        # an image of a person who stays is protected less than the person
        (ONE_IMAGE, ONE_IMAGE, ONE_PERSON, "fail", "run first is for one person"),
        (ONE_IMAGE, ONE_IMAGE, "", "not measured", "run first is for an unknown unit"),
    ],
)
def test_a_total_is_for_runs_of_the_same_unit(
    book: Book, policy: str, own: str, other: str, outcome: str, words: str
) -> None:
    """Three images of one person are three images to a run for images, and one unit to another run."""
    book.begin("units")
    book.statement = book.statement.model_copy(update={"unit": policy})
    book.charge("first", 1, [Spent.of("a", gaussian_event(4.0))], unit=other)
    book.charge("own", 1, book.statement.spent, unit=own)
    wide = LOOSE.model_copy(update={"unit": policy, "ledger": LedgerPolicy(max_epsilon=100)})
    total = book.found(wide)["ledger-total"]
    assert total.outcome == outcome
    assert total.stops == (outcome != "pass")
    assert total.demand == f"all releases about these images together spend at most epsilon 100 for {policy}"
    assert total.found.partition(f", which is not known to hold for {policy}: ")[2] == words
    # too much is too much for any unit
    narrow = wide.model_copy(update={"ledger": LedgerPolicy(max_epsilon=0.1)})
    assert book.rules(narrow)["ledger-total"] == "fail"
    # what took nothing does not count
    book.begin("empty")
    book.charge("first", 1, [], unit=other)
    book.charge("own", 1, book.statement.spent, unit=policy)
    assert book.rules(wide)["ledger-total"] == "pass"


def test_a_run_for_another_unit_made_another_model(book: Book) -> None:
    book.begin("other")
    book.charge("own", 1, book.statement.spent, unit=ONE_PERSON)
    assert book.rules(LOOSE)["ledger-run"] == "fail"
    book.charge("old", 1, book.statement.spent, unit="")
    assert book.rules(LOOSE)["ledger-run"] == "pass"


def test_a_report_names_the_unit_of_each_run(book: Book) -> None:
    for run in range(5):
        book.charge(f"old{run}", 1, [Spent.of("a", gaussian_event(4.0))], unit="")
    account = read_account(book.path, book.digests, book.statement)
    assert not isinstance(account, str)
    record = account.record(LOOSE, book.statement.delta)
    assert [run["unit"] for run in record["runs"]] == [ONE_IMAGE] * 2 + [None] * 5
    assert (record["unit"], record["for_others"]) == (ONE_IMAGE, [f"old{run}" for run in range(5)])
    wide = LOOSE.model_copy(update={"ledger": LedgerPolicy(max_epsilon=100)})
    assert book.found(wide)["ledger-total"].found.endswith("run old2 is for an unknown unit and 2 more")


def test_what_is_not_known_never_passes(book: Book, tmp_path: Path) -> None:
    assert set(book.rules(Policy()).values()) == {"pass", "fail"}
    other = load_images_of(tmp_path)
    other.images[0, 0, 0] ^= 1
    book.digests = image_digests(other.images)
    assert book.rules(LOOSE) == {"ledger": "pass", "ledger-run": "fail"}
    for missing in (None, read_account(tmp_path / "none.jsonl", book.digests, book.statement)):
        found = ledger_rules(Policy(), missing, 1e-5)
        assert {one.outcome for one in found} == {"not measured"}
        assert all(one.stops for one in found)
    assert not (tmp_path / "none.jsonl.key").exists()


@pytest.mark.parametrize("harm", ["line", "head", "key", "cut"])
def test_an_altered_ledger_fails(book: Book, harm: str) -> None:
    head, key = (book.path.with_name(book.path.name + end) for end in (".head", ".key"))
    if harm == "line":
        book.path.write_text(book.path.read_text().replace('"delta": 1e-05', '"delta": 1e-06', 1))
    elif harm == "cut":
        book.path.write_text("".join(book.path.read_text().splitlines(True)[:2]))
    else:
        shutil.move({"head": head, "key": key}[harm], book.path.parent / "away")
    found = {one.name: one for one in ledger_rules(LOOSE, read_account(book.path, book.digests, book.statement), 1e-5)}
    assert found["ledger"].outcome == "fail"
    assert found["ledger-run"].stops
    assert str(book.path.parent) not in found["ledger"].found


def test_no_number_is_no_pass(private: Bundle) -> None:
    statement = Statement.of(private)
    for broken in (Recomputed(math.nan, 1.0, True), Recomputed(1.0, math.nan, True), Recomputed(1.0, 1.0, False)):
        found = {one.name: one.outcome for one in statement_rules(LOOSE, statement, broken)}
        assert found["accounting"] == "fail"
        json.dumps(broken.record(), allow_nan=False)
