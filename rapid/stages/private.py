"""The private stage: a public bundle (or none) and private images in, a private bundle with its statement out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rapid.bundle import Bundle, BundleConfig, Component, is_finished, write_bundle
from rapid.bundle.card import base_note, private_card
from rapid.config.sections import MethodSettings
from rapid.data.classes import UNDECLARED_NOTE
from rapid.data.private import PrivateImages
from rapid.data.units import ONE_IMAGE, ONE_PERSON
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget, calibrate
from rapid.dp.entry import Limit, Spent
from rapid.dp.ledger import Ledger, default_path
from rapid.dp.spending import Charge
from rapid.dp.statement import privacy_statement
from rapid.mapped import scratch_in
from rapid.ranks import Ranks
from rapid.stages.automatic import PrivateChoice, earlier_settings
from rapid.stages.given import checked_components, described
from rapid.stages.private_set import Json, PrivateSet, check_request
from rapid.stages.setup import Setup, check_releases
from rapid.training import RunFolder

OpenAccess = Callable[..., PrivateAccess]
"""(images, facts, budget, run_folder, device=..., ranks=...) -> access to the images."""


@dataclass(frozen=True)
class Prepared:
    """Inputs of one training that were read and checked before anything is written.

    Attributes:
        setup: what is run.
        private: on what.
        budget: what it spends.
        asked: the request: public facts only, ready for JSON.
    """

    setup: Setup
    private: PrivateSet
    budget: Budget
    asked: Json


def train_private_bundle(  # noqa: PLR0913 - each is an argument of the command
    base: Path | None,
    private: PrivateImages,
    out: Path,
    settings: MethodSettings,
    *,
    epsilon: float,
    delta: float | None,
    device: torch.device,
    resume: bool,
    ranks: Ranks | None = None,
    ledger: Path | None = None,
    automatic: PrivateChoice | None = None,
    access: OpenAccess | None = None,
) -> Bundle | None:
    """Run the private stage of a method: the result is (epsilon, delta)-DP with respect to the private images.

    Args:
        base: public bundle; None for a run without one.
        private: the image set. A warning says so if its classes are not declared, and the labels decide.
        out: new folder, or with `resume` the folder of an earlier run with the same arguments.
        settings: those of `base` with the requested private and generation sections.
        epsilon: budget, > 0.
        delta: in (0, 1), default 1 / (N ln N).
        device: where to train.
        resume: continue the run in `out`.
        ranks: the processes that share the work; all get the same arguments, and the first one writes `out`.
        ledger: file in which the run is charged before its first step; default: `ledger.default_path`.
        automatic: a request to choose what `settings` leaves open, by public facts and a measurement.
        access: opens the images, by default `PrivateAccess`; another is for audits, on images that are not private.

    Returns:
        The finished private bundle; None on all ranks but the first.

    Raises:
        InputError: bad images or arguments, or an `out` that holds something else, such as a run with other images.
        PrivacyRefused: private images are among the public ones of `base`, or their limit would be exceeded.
        RapidError: the method breaks its contract, such as by a release that it plans and does not make.
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved, and the steps that were begun are charged.
    """
    ranks = ranks or Ranks()
    ranks.all_or_none(lambda: check_request(private, out, epsilon, delta, resume=resume) if ranks.first else None)
    ranks.agree("--device", device.type.encode())
    setup = ranks.all_or_none(lambda: Setup.open(base, settings, device))
    # before the images are read, on whose number and files a measurement must not depend: what it decides is published
    choose = None if automatic is None else _chooser(automatic, settings, epsilon, out, device, ranks)
    book = Ledger(ledger or default_path()) if ranks.first else None
    with scratch_in(out):
        mine = ranks.all_or_none(lambda: _prepare(setup, private, out, epsilon, delta, book, choose))
    # the first rank's budget: calibration on another kind of CPU may differ in the last digit
    budget = ranks.broadcast(mine.budget)
    # once before anything is spent: they see nothing private, and what is wrong with them must not come at the end
    own = mine.setup
    ranks.all_or_none(lambda: described(own.method, own.settings, own.base, budget) if ranks.first else None)
    # not the default unit, which the manifests of earlier versions do not name
    record = mine.asked | {
        "budget": budget.model_dump(mode="json", exclude=set() if budget.unit == ONE_PERSON else {"unit"})
    }
    ranks.agree("the settings or --base", json.dumps(record, sort_keys=True).encode())
    if ranks.count > 1:
        ranks.agree("--private", mine.private.images.fingerprint().encode())
    with scratch_in(out), ExitStack() as stack:

        def enter() -> tuple[RunFolder, Charge | None]:
            entered = RunFolder.enter(out, "train-private", record, resume=resume)
            if book is None:
                return RunFolder(out), None
            run_folder = stack.enter_context(entered)
            return run_folder, mine.private.charge(book, run_folder, Limit(budget.epsilon, budget.delta))

        run_folder, charge = ranks.all_or_none(enter)
        if not ranks.broadcast(is_finished(out)):
            _run(run_folder, mine, budget, device, ranks, charge, access)
        elif charge is not None:
            charge.settle_finished()
        if not ranks.first:
            return None
        # the charge is settled: from here on nothing is needed to know what was spent
        run_folder.leave()
        return Bundle.open(out, "out", "private")


def _run(
    run_folder: RunFolder,
    run: Prepared,
    budget: Budget,
    device: torch.device,
    ranks: Ranks,
    charge: Charge | None,
    access: OpenAccess | None,
) -> None:
    """Charge the budget, let the method spend it, and write the bundle; the charge is settled after that."""
    own, facts = run.private.part(ranks), run.private.facts
    opened = (access or PrivateAccess)(own, facts, budget, run_folder, device=device, ranks=ranks)
    with ExitStack() as stack:
        ranks.all_or_none(lambda: stack.enter_context(opened.charged(charge)))
        made = run.setup.method.train_private(opened, run.setup.base, run.setup.settings)
        if ranks.first:
            components = checked_components(run.setup.method.name, made, opened)
            retaken = [] if charge is None else charge.retaken(budget.releases)
            write_model(run_folder.out, run, budget, components, retaken=retaken)


def _prepare(
    setup: Setup,
    images: PrivateImages,
    out: Path,
    epsilon: float,
    delta: float | None,
    ledger: Ledger | None,
    choose: Callable[[PublicFacts], MethodSettings] | None,
) -> Prepared:
    """Read and check everything before anything is written."""
    private = PrivateSet.read(images, setup.settings, setup.base, ledger)
    # before the choice, which needs an epsilon that is one
    request = private.request(setup.base, epsilon, delta)
    if choose is not None:
        setup = replace(setup, settings=choose(private.facts))
    settings = setup.settings
    asked: Json = {"settings": settings.model_dump(mode="json")} | request
    specs = setup.releases(private.facts)
    budget = _earlier_budget(out, asked)
    if budget is not None:
        check_releases(budget, specs, out)
    else:
        group_size, unit = settings.private.group_size, private.facts.unit
        budget = calibrate(specs, epsilon=epsilon, delta=asked["delta"], group_size=group_size, unit=unit)
        # computed now: if it fails, no steps are spent for a statement that cannot be made
        _ = budget.spent_group
        if ledger is not None:
            private.warn([budget])
    return Prepared(setup, private, budget, asked)


def _chooser(
    automatic: PrivateChoice,
    settings: MethodSettings,
    epsilon: float,
    out: Path,
    device: torch.device,
    ranks: Ranks,
) -> Callable[[PublicFacts], MethodSettings]:
    """The choice of settings as a function of public facts alone, the same on all ranks.

    Nothing is measured if the first rank finds an earlier run in `out`, which has its settings.
    """

    def begin() -> tuple[Json, float]:
        earlier = earlier_settings(out, "train-private") if ranks.first else {}
        wanted = ranks.first and not earlier
        return earlier, automatic.measured(settings, device, ranks.count) if wanted else 0.0

    # other ranks may be on machines that do not see `out`
    earlier, found = ranks.broadcast(ranks.all_or_none(begin))
    return lambda facts: automatic.private_settings(settings, facts, epsilon, found, earlier, ranks)


def _earlier_budget(out: Path, asked: Json) -> Budget | None:
    """The budget of an earlier run in the same folder, if that run had the same request."""
    earlier = RunFolder(out).earlier_with(asked)
    if earlier is None:
        return None
    budget = Budget.from_record(earlier.get("budget", {}), asked["epsilon"], asked["delta"])
    return budget.model_copy(update={"unit": asked.get("unit", ONE_IMAGE)})


def write_model(
    out: Path,
    run: Prepared,
    budget: Budget,
    components: Mapping[str, Component],
    more: Mapping[str, Any] | None = None,
    *,
    retaken: Sequence[Spent] = (),
) -> None:
    """Write the components, the statement with what `more` has instead, the card, and last `config.json`."""
    method, settings, base = run.setup.method, run.setup.settings, run.setup.base
    found, notes = described(method, settings, base, budget)
    noise_source = settings.private.noise_source
    statement = privacy_statement(budget, method=method.name, noise_source=noise_source, retaken=retaken)
    statement |= more or {}
    statement["notes"] = [*statement.get("notes", []), *notes]
    if not run.private.images.declared:
        statement["notes"].append(UNDECLARED_NOTE)
    if base is not None and base.origins:
        statement["notes"].append(base_note(base.origins))
    config = BundleConfig(
        kind="private",
        method=method.name,
        settings=settings.model_dump(mode="json"),
        image=settings.image,
        classes=run.private.facts.classes,
        public=None if base is None else base.config.public,
        facts=found.facts,
    )
    write_bundle(out, config, components, card=private_card(config, statement, found.about), privacy=statement)
