"""What was spent: the statement of the model, recomputed, and the ledger's lines about its private images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from rapid.bundle import Bundle
from rapid.data.classes import UNDECLARED_NOTE
from rapid.dp.accounting import accountant_name, agrees, composition, pld_accountant_name, pld_epsilon
from rapid.dp.attempts import counted, steps_of
from rapid.dp.budget import SOLVED_AGAIN
from rapid.dp.entry import Entry, Spent
from rapid.dp.events import check_known, compose, event_from_json, has_selection, poisson_gaussian_steps
from rapid.dp.filter import RenyiFilter
from rapid.dp.ledger import Ledger, TamperedLedger, ledger_exists
from rapid.dp.plans import earlier_names
from rapid.dp.randomness import NOISE_SOURCES, Randomness
from rapid.dp.renyi import candidates_of, library_epsilon
from rapid.dp.selection import TUNE
from rapid.dp.spending import limit_of
from rapid.errors import InputError, RapidError
from rapid.release.policy import Policy
from rapid.release.rules import Rule, rule
from rapid.rounding import as_typed, rounded_down, rounded_up, up_to_places

CRYPTOGRAPHIC = NOISE_SOURCES[Randomness.source]
ADAPTIVE = "holds even if later releases were chosen after the results of earlier ones were seen"
FIXED = "holds if all releases had been fixed in advance"
LIBRARY = f"RDP of each candidate alone (dp-accounting {metadata.version('dp-accounting')})"
NAMED = 3
"""Runs that a rule names; the report lists all of them."""
Json = dict[str, Any]


def _known(event: dict[str, Any]) -> dict[str, Any]:
    check_known(event_from_json(event))
    return event


def _composed(event: dict[str, Any]) -> dict[str, Any]:
    poisson_gaussian_steps(event_from_json(event))
    return event


Event = Annotated[dict[str, Any], AfterValidator(_known)]
ReleaseEvent = Annotated[dict[str, Any], AfterValidator(_composed)]


class _Release(BaseModel):
    name: str
    title: str = ""
    noise_source: str
    event: ReleaseEvent
    noise_band: int = Field(1, ge=1)


class Statement(BaseModel):
    """The part of `privacy.json` that the gate reads; see `rapid.dp.statement`."""

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    unit: str
    adjacency: str
    accountant: str
    dataset_size: int = Field(ge=1)
    noise_multiplier: float = Field(gt=0)
    sample_rate: float = Field(gt=0, le=1)
    releases: list[_Release] = Field(min_length=1)
    event: Event
    relation: dict[str, str] = {}
    group: dict[str, Any] | None = None
    notes: list[str] = []
    created: str = ""

    @property
    def tree(self) -> DpEvent:
        """Everything that training released."""
        return event_from_json(self.event)

    @property
    def noise_band(self) -> int:
        """Steps over which noise is correlated; 1 where it is not."""
        return max(release.noise_band for release in self.releases)

    @property
    def chosen_privately(self) -> bool:
        """Whether the model is the best of several trials, whose event tells what all of them spent."""
        return isinstance(self.tree, RepeatAndSelectDpEvent)

    @property
    def spent(self) -> list[Spent]:
        """What was released, as the ledger has it."""
        if self.chosen_privately:
            return [Spent(TUNE, self.event)]
        return [Spent(release.name, release.event) for release in self.releases]

    @classmethod
    def of(cls, bundle: Bundle) -> Statement:
        """The statement of a private bundle.

        Raises:
            InputError: it is damaged, or of a version of rapid that wrote no event tree.
        """
        try:
            return cls.model_validate(bundle.privacy)
        except ValidationError as error:
            name = ".".join(str(part) for part in error.errors()[0]["loc"])
            problem = f"privacy.json does not say '{name}' as this version of rapid writes it; train again"
            raise InputError("model", problem, bundle.path) from None


@dataclass(frozen=True)
class Recomputed:
    """Epsilon of the statement's event tree at its delta, by two accountants; NaN where one gives no number."""

    prv: float
    pld: float
    consistent: bool
    """Whether the tree holds exactly the releases that the statement lists, none without a step; of several trials, one
    of them."""
    names: tuple[str, str] = ("", "")
    """Of the accountants."""

    @classmethod
    def of(cls, statement: Statement) -> Recomputed:
        """Compute both."""
        tree = statement.tree
        events = [event_from_json(release.event) for release in statement.releases]
        listed = compose(events)
        # of a chosen model the list is that of its own trial
        possible = candidates_of(tree) if isinstance(tree, RepeatAndSelectDpEvent) else (tree,)
        consistent = all(map(_rows, events)) and any(_rows(event) == _rows(listed) for event in possible)
        first, name = _together([tree], statement.delta)
        names = name, LIBRARY if has_selection(tree) else pld_accountant_name()
        return cls(first, _second(statement), consistent, names)

    def record(self) -> Json:
        """Ready for JSON; rounded up."""
        return {
            "accountants": dict(zip(self.names, (number(self.prv), number(self.pld)), strict=True)),
            "event_holds_all_releases": self.consistent,
        }


def number(value: float) -> float | None:
    """Rounded up to six decimals; None if it is not finite."""
    return up_to_places(value, 6) if math.isfinite(value) else None


def statement_rules(policy: Policy, statement: Statement, found: Recomputed) -> list[Rule]:
    """Epsilon, delta, accountants, unit, noise and classes."""
    claimed, delta = statement.epsilon, statement.delta
    # a NaN fails these comparisons
    first = found.prv <= claimed * (1 + SOLVED_AGAIN)
    second = agrees(claimed, found.pld)
    least = 1 / statement.dataset_size
    others = sorted({one.noise_source for one in statement.releases} - {CRYPTOGRAPHIC})
    undeclared = UNDECLARED_NOTE in statement.notes
    agreed = f"recomputed: {rounded_up(found.prv, 4)} and, by a second accountant, {rounded_up(found.pld, 4)}"
    rules = [
        rule(
            "epsilon",
            f"epsilon of the model is at most {as_typed(policy.max_epsilon)}",
            f"{rounded_up(claimed, 4)}",
            claimed <= policy.max_epsilon,
        ),
        rule(
            "accounting",
            "two accountants confirm epsilon from the list of all releases",
            agreed + ("" if found.consistent else "; the statement's list and its event tree differ"),
            first and second and found.consistent,
        ),
        rule(
            "delta", f"delta is at most {as_typed(policy.max_delta)}", f"{rounded_up(delta)}", delta <= policy.max_delta
        ),
    ]
    if policy.delta_under_one_over_n:
        rules.append(
            rule(
                "delta-1/N",
                "delta is under 1/N, so that publishing one record at random would violate it",
                f"delta {rounded_up(delta)}, 1/N = {rounded_down(least)}",
                delta < least,
            )
        )
    rules.append(rule("unit", f"the guarantee is for {policy.unit}", statement.unit, statement.unit == policy.unit))
    if policy.cryptographic_noise:
        rules.append(
            rule("noise", "all noise is cryptographic", "; ".join(others) or "ChaCha20, all of it", not others)
        )
    if policy.declared_classes:
        words = "taken from the labels of private images" if undeclared else "declared"
        rules.append(rule("classes", "the list of classes was declared", words, not undeclared))
    return rules


@dataclass(frozen=True)
class Account:
    """What the ledger says about the private images.

    Attributes:
        lines: of the whole ledger.
        dataset: keyed identifier of the images.
        runs: what each attempt is charged for.
        limit: on their spending.
        model_run: the run that is charged for at least what the statement lists; empty if there is none.
        model_names: all names of that run: a folder that was moved gives another.
    """

    lines: int
    dataset: str
    runs: tuple[Entry, ...]
    limit: RenyiFilter | None
    model_run: str
    model_names: frozenset[str]

    @classmethod
    def of(cls, ledger: Ledger, dataset: str, statement: Statement) -> Account:
        """Read the ledger.

        Raises:
            TamperedLedger: it was altered.
        """
        entries = ledger.entries()
        runs = tuple(counted(entries, dataset))
        possible = [entry for entry in runs if entry.unit in ("", statement.unit)]
        names = {entry.run: {entry.run} | earlier_names(entries, entry.run) for entry in possible}
        return cls(len(entries), dataset, runs, limit_of(entries, dataset), *_run_of(possible, names, statement))

    @property
    def events(self) -> list[DpEvent]:
        """Everything that was released, or may be by a run that goes on."""
        return [release.dp_event for entry in self.runs for release in entry.releases]

    def for_others(self, unit: str) -> dict[str, str]:
        """The unit of each run that is not known to protect `unit`; empty if that is not known either."""
        return {entry.run: entry.unit for entry in self.runs if entry.unit != unit}

    def together(self, policy: Policy, delta: float, more: Sequence[DpEvent] = ()) -> tuple[float, float]:
        """Epsilon of all runs together at `delta`: one that holds for adaptive choices, and the tighter PRV figure.

        Args:
            policy: its limit on the total fixes the Renyi order; the ledger's own without one.
            delta: of the model.
            more: what else will be released.
        """
        events = [*self.events, *more]
        if self.limit is not None and policy.ledger.max_epsilon is None:
            adaptive = RenyiFilter(self.limit.epsilon, delta, self.limit.order)
        else:
            adaptive = RenyiFilter.of(policy.ledger.max_epsilon or policy.max_epsilon, delta)
        return adaptive.spent(events), _together(events, delta)[0]

    def record(self, policy: Policy, delta: float) -> Json:
        """The excerpt for the report."""
        adaptive, fixed = self.together(policy, delta)
        return {
            "intact": True,
            "lines": self.lines,
            "dataset": self.dataset,
            "limit": {"epsilon": self.limit.epsilon, "delta": self.limit.delta} if self.limit else None,
            "model_run": self.model_run or None,
            "delta": delta,
            "unit": policy.unit,
            "for_others": sorted(self.for_others(policy.unit)),
            "epsilon": number(adaptive),
            "epsilon_means": ADAPTIVE,
            "epsilon_prv": number(fixed),
            "epsilon_prv_means": FIXED,
            "runs": [_row(entry, entry.run in self.model_names) for entry in self.runs],
        }


def open_ledger(path: Path) -> Ledger | None:
    """The ledger if it exists; none is made.

    Raises:
        TamperedLedger: its key is missing or damaged.
        InputError: it cannot be used.
    """
    return Ledger(path) if ledger_exists(path) else None


def read_account(ledger: Path, digests: NDArray[np.uint8], statement: Statement) -> Account | str:
    """The account of private images, or why there is none, in words without a path.

    Args:
        ledger: the file.
        digests: see `Ledger.account`.
        statement: of the model.
    """
    try:
        book = open_ledger(ledger)
        if book is None:
            return "there is no ledger"
        return Account.of(book, book.account(digests), statement)
    except TamperedLedger:
        return "the ledger was altered: rapid ledger verify names the place"


def ledger_rules(policy: Policy, account: Account | str | None, delta: float) -> list[Rule]:
    """Whether the ledger is intact and complete, and what all runs spent together.

    Args:
        policy: its section `ledger`.
        account: None if no private images were given; text if there is none to read.
        delta: of the model.
    """
    demand, required, others = policy.ledger, policy.ledger.required, dict[str, str]()
    words = ["the ledger is intact", "the ledger is charged for this model, under these private images"]
    if account is None:
        account = "no --private images were given, so their account is not known"
    if isinstance(account, str):
        rules = [rule("ledger", words[0], account, False if "altered" in account else None, required=required)]
        rules.append(rule("ledger-run", words[1], account, None, required=required))
        found, total = account, None
    else:
        run = f"run {account.model_run}" if account.model_run else "no run is charged for what privacy.json lists"
        rules = [rule("ledger", words[0], f"{account.lines} lines, none altered", True, required=required)]
        rules.append(rule("ledger-run", words[1], run, bool(account.model_run), required=required))
        adaptive, fixed = account.together(policy, delta)
        found = f"{rounded_up(adaptive, 4)} at delta {rounded_up(delta)} ({rounded_up(fixed, 4)} if fixed in advance)"
        total, others = adaptive, account.for_others(policy.unit)
    if demand.max_epsilon is not None:
        spent = f"spend at most epsilon {as_typed(demand.max_epsilon)} for {policy.unit}"
        most = f"all releases about these images together {spent}"
        holds = None if total is None else total <= demand.max_epsilon
        if others:
            found = f"{found}, which is not known to hold for {policy.unit}: {_units_in_words(others)}"
            # what a run for one unit tells about another is not known
            holds = None if holds and not any(others.values()) else False
        rules.append(rule("ledger-total", most, found, holds, required=required))
    return rules


def _units_in_words(units: Mapping[str, str]) -> str:
    words = [f"run {run} is for {unit or 'an unknown unit'}" for run, unit in units.items()]
    return ", ".join(words[:NAMED]) + (f" and {len(words) - NAMED} more" if len(words) > NAMED else "")


def _run_of(runs: Sequence[Entry], names: Mapping[str, set[str]], statement: Statement) -> tuple[str, frozenset[str]]:
    """The run that is charged for what a statement lists, and all of its names."""
    wanted = steps_of(statement.spent)
    for run, own in names.items():
        steps = steps_of(release for entry in runs if entry.run in own for release in entry.releases)
        if wanted and all(steps.get(key, 0) >= count for key, count in wanted.items()):
            return run, frozenset(own)
    return "", frozenset()


def _row(entry: Entry, made_this_model: bool) -> Json:
    state = {"settle": "spent", "spend": "spent at most"}.get(entry.kind, "reserved")
    return {
        "run": entry.run,
        "made_this_model": made_this_model,
        "attempt": entry.attempt,
        "unit": entry.unit or None,
        "time": entry.time,
        "state": state,
        "asked_epsilon": entry.epsilon,
        "asked_delta": entry.delta,
        "releases": [{"name": release.name, "event": release.event} for release in entry.releases],
    }


def _together(events: Sequence[DpEvent], delta: float) -> tuple[float, str]:
    """Epsilon and the name of its accountant; NaN if it gives no number."""
    try:
        epsilon, _, name = composition(events, delta)
    except RapidError:
        return math.nan, accountant_name()
    return epsilon, name


def _second(statement: Statement) -> float:
    """By PLD, or where that knows nothing by the other library's Renyi divergences."""
    tree = statement.tree
    try:
        if isinstance(tree, RepeatAndSelectDpEvent):
            return library_epsilon(tree, statement.delta)
        return pld_epsilon([tree], statement.delta)
    except RapidError:
        return math.nan


def _rows(event: DpEvent) -> list[tuple[float, float, int]]:
    return sorted(poisson_gaussian_steps(event))
