"""The private stage: a public bundle (or none) and private images in, a private bundle with its statement out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid.bundle import Bundle, BundleConfig, Component, is_finished, write_bundle
from rapid.bundle.card import base_note, private_card
from rapid.config.sections import DpSgdSettings, MethodSettings
from rapid.data import ImageSet
from rapid.data.classes import UNDECLARED, UNDECLARED_NOTE
from rapid.data.private import PrivateImages
from rapid.data.units import ONE_IMAGE, ONE_PERSON
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget, calibrate
from rapid.dp.ledger import Ledger, Limit, default_path
from rapid.dp.releases import DpSgdSpec, QuerySpec, check_budget, default_delta
from rapid.dp.spending import Charge
from rapid.dp.statement import privacy_statement
from rapid.errors import InputError
from rapid.mapped import scratch_in, taken
from rapid.methods import find_method
from rapid.methods.base import Checking, Method
from rapid.ranks import Ranks
from rapid.rounding import as_typed, rounded_down
from rapid.stages.automatic import PrivateChoice, earlier_settings
from rapid.tones.release import warn_if_hidden
from rapid.training import RunFolder

Json = dict[str, Any]
OpenAccess = Callable[..., PrivateAccess]
"""(images, facts, budget, run_folder, device=..., ranks=...) -> access to the images."""


@dataclass(frozen=True)
class Prepared:
    """Inputs of one training that were read and checked before anything is written."""

    method: Method[Any]
    settings: MethodSettings
    base: Bundle | None
    images: ImageSet
    facts: PublicFacts
    account: str
    """Identifier of the data set in the ledger; empty on all ranks but the first."""
    assignment: str
    """Identifier of whose image each is; empty if images are the units, and on all ranks but the first."""
    budget: Budget
    asked: Json
    """The request: public facts only, ready for JSON."""


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
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved, and the steps that were begun are charged.
    """
    ranks = ranks or Ranks()
    ranks.all_or_none(lambda: RunFolder(out).check(resume=resume) if ranks.first else None)
    ranks.agree("--device", device.type.encode())
    opened = ranks.all_or_none(lambda: method_and_base(base, settings, device))
    choose = None if automatic is None else _chooser(automatic, settings, epsilon, out, device, ranks)
    book = Ledger(ledger or default_path()) if ranks.first else None
    with scratch_in(out):
        mine = ranks.all_or_none(lambda: _prepare(*opened, private, out, settings, epsilon, delta, book, choose))
    # the first rank's budget: calibration on another kind of CPU may differ in the last digit
    budget = ranks.broadcast(mine.budget)
    # not the default unit, which the manifests of earlier versions do not name
    record = mine.asked | {
        "budget": budget.model_dump(mode="json", exclude=set() if budget.unit == ONE_PERSON else {"unit"})
    }
    ranks.agree("the settings or --base", json.dumps(record, sort_keys=True).encode())
    if ranks.count > 1:
        ranks.agree("--private", mine.images.fingerprint().encode())
    with scratch_in(out), ExitStack() as stack:

        def enter() -> tuple[RunFolder, Charge | None]:
            entered = RunFolder.enter(out, "train-private", record, resume=resume)
            if book is None:
                return RunFolder(out), None
            run_folder = stack.enter_context(entered)
            name = run_folder.run_name(mine.account, mine.assignment)
            return run_folder, Charge(book, mine.account, name, Limit(budget.epsilon, budget.delta))

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
    own = _part(run.images, ranks)
    opened = (access or PrivateAccess)(own, run.facts, budget, run_folder, device=device, ranks=ranks)
    with ExitStack() as stack:
        ranks.all_or_none(lambda: stack.enter_context(opened.charged(charge)))
        components = run.method.train_private(opened, run.base, run.settings)
        if ranks.first:
            write_model(run_folder.out, run, budget, components)


def _prepare(
    method: Method[Any],
    public: Bundle | None,
    private: PrivateImages,
    out: Path,
    settings: MethodSettings,
    epsilon: float,
    delta: float | None,
    ledger: Ledger | None,
    choose: Callable[[PublicFacts], MethodSettings] | None,
) -> Prepared:
    """Read and check everything before anything is written."""
    images, facts, account, assignment = read_private(private, settings, public, ledger)
    if choose is not None:
        settings = choose(facts)
    check_pieces(settings, facts.unit)
    size = facts.dataset_size
    spent_at = default_delta(size) if delta is None else delta
    asked = {"settings": settings.model_dump(mode="json")} | public_request(images, facts, public, epsilon, spent_at)
    specs = method.releases(settings, facts, public)
    budget = _earlier_budget(out, asked)
    if budget is not None:
        check_releases(budget, specs, out)
    else:
        group_size = settings.private.group_size
        budget = calibrate(specs, epsilon=epsilon, delta=spent_at, group_size=group_size, unit=facts.unit)
        # computed now: if it fails, no steps are spent for a statement that cannot be made
        _ = budget.spent_group
        if ledger is not None:
            warn_of(images, facts, [budget])
    return Prepared(method, settings, public, images, facts, account, assignment, budget, asked)


def check_pieces(settings: MethodSettings, unit: str) -> None:
    """Refuse a physical batch that could tell how many images people have where it changes low bits of the result.

    Raises:
        InputError: see above.
    """
    own = settings.private
    if not isinstance(own, DpSgdSettings) or own.precision == "float32" or unit == ONE_IMAGE:
        return
    if own.physical_batch == "auto":
        problem = "depends on the memory that people's images take, and results in bfloat16 on it; give a number"
        raise InputError("private.physical_batch", problem, "auto")


def method_and_base(
    base: Path | None, settings: MethodSettings, device: torch.device
) -> tuple[Method[Any], Bundle | None]:
    """The method of the settings, and the opened public bundle; None without one.

    Raises:
        InputError: base, settings and device do not fit together.
    """
    method = find_method(settings.method)
    if settings.private.noise_source == "device" and device.type == "cpu":
        raise InputError("private.noise_source", "is for --device cuda; use chacha20 on a CPU", "device")
    if isinstance(settings.private, DpSgdSettings) and settings.private.precision != "float32" and device.type == "cpu":
        problem = "is not offered on CPUs, where it is no faster; use float32"
        raise InputError("private.precision", problem, settings.private.precision)
    if base is None and method.base == "required":
        raise InputError("base", f"{method.name} needs a public bundle; make one with rapid build-kb")
    if base is None and method.base == "optional" and settings.base_wanted:
        problem = f"is missing, but {settings.base_wanted}; make one with rapid build-kb, or change that setting"
        raise InputError("base", problem)
    if base is not None and method.base == "none":
        raise InputError("base", f"{method.name} trains without public images; leave it out", base)
    public = None if base is None else Bundle.open(base, "base", "public")
    if public is not None and public.config.method != method.name:
        raise InputError("base", f"was made for {public.config.method}, not for {method.name}", base)
    if isinstance(method, Checking):
        method.check_base(public, settings)
    return method, public


def read_private(
    private: PrivateImages, settings: MethodSettings, base: Bundle | None, ledger: Ledger | None
) -> tuple[ImageSet, PublicFacts, str, str]:
    """The private images in the form of the model, their public facts, and both identifiers of `Prepared`.

    Raises:
        InputError: bad images.
    """
    loaded = private.load(settings.image, digests=ledger is not None)
    check_colours(loaded, settings, base)
    account = assignment = ""
    if ledger is not None and loaded.digests is not None:
        # hashed as stored on disk, so that the identifier is the same at every image size
        account = ledger.account(loaded.digests)
        assignment = "" if loaded.units is None else ledger.assignment(loaded.digests, loaded.units)
    # what they were before is not for the method
    images = replace(loaded, stored=None, digests=None)
    return images, PublicFacts.of(images), account, assignment


def check_colours(loaded: ImageSet, settings: MethodSettings, base: Bundle | None) -> None:
    """Refuse colour images for a model of grey ones.

    Args:
        loaded: images as they were read, which know how they are stored.
        settings: of the run.
        base: public bundle; None without one.

    Raises:
        InputError: see above.
    """
    assert loaded.stored is not None
    if settings.image.channels == 1 and loaded.stored.channels == 3:
        made = "--base makes" if base is not None else "image.channels=1 is for"
        raise InputError(
            "private", f"has colour images, and {made} grey ones; use image.channels=3 there, or give grey images"
        )


def public_request(images: ImageSet, facts: PublicFacts, base: Bundle | None, epsilon: float, delta: float) -> Json:
    """What a run asks for, beside its settings; ready for JSON.

    Public numbers only: nothing that depends on the pixels or on how many images a class has.

    Raises:
        InputError: epsilon or delta out of range.
    """
    check_budget(epsilon, delta, facts.dataset_size)
    asked: Json = {
        "epsilon": epsilon,
        "delta": delta,
        "dataset_size": facts.dataset_size,
        "base": None if base is None else base.config.components,
        "classes": list(images.classes),
    }
    return asked | ({"unit": facts.unit} if images.units is not None else {})


def check_releases(earlier: Budget, specs: Sequence[DpSgdSpec | QuerySpec], out: Path) -> None:
    """Refuse to go on with a run whose releases are not those of this version.

    Args:
        earlier: of the run in `out`.
        specs: releases that the same request has now.
        out: folder of the run.

    Raises:
        InputError: they have other names.
    """
    if earlier.names != tuple(spec.name for spec in specs):
        problem = "holds a run of another version, with other releases; finish it with that, or give a new folder"
        raise InputError("out", problem, out)


def warn_of(images: ImageSet, facts: PublicFacts, budgets: Sequence[Budget]) -> None:
    """Warn of a delta that promises little, of classes that the labels decide, and of tones that noise would hide.

    Args:
        images: of all ranks.
        facts: about them.
        budgets: of the run, or of all candidates; at the same delta.
    """
    delta = budgets[0].delta
    if delta > 1 / facts.dataset_size:
        warnings.warn(
            f"--delta {as_typed(delta)} is more than 1/N = {rounded_down(1 / facts.dataset_size, 2)}: publishing "
            f"{'all images of a random person' if images.units is not None else 'a random image'} would satisfy it",
            stacklevel=3,
        )
    if not images.declared:
        warnings.warn(UNDECLARED, stacklevel=3)
    for budget in budgets:
        warn_if_hidden(budget, facts)


def _chooser(
    automatic: PrivateChoice,
    settings: MethodSettings,
    epsilon: float,
    out: Path,
    device: torch.device,
    ranks: Ranks,
) -> Callable[[PublicFacts], MethodSettings]:
    """The choice of settings as a function of public facts alone, the same on all ranks.

    Nothing is measured if there is an earlier run in `out`, which has its settings.
    """

    def measure() -> float:
        wanted = ranks.first and not earlier_settings(out, "train-private")
        return automatic.measured(settings, device, ranks.count) if wanted else 0.0

    found = ranks.broadcast(ranks.all_or_none(measure))
    return lambda facts: automatic.private_settings(settings, facts, epsilon, found, out, ranks)


def _earlier_budget(out: Path, asked: Json) -> Budget | None:
    """The budget of an earlier run in the same folder, if that run had the same request."""
    earlier = RunFolder(out).earlier()
    written = json.loads(json.dumps(asked))
    if earlier is None or any(earlier.get(name) != value for name, value in written.items()):
        return None
    budget = Budget.from_record(earlier.get("budget", {}), asked["epsilon"], asked["delta"])
    return budget.model_copy(update={"unit": asked.get("unit", ONE_IMAGE)})


def _part(images: ImageSet, ranks: Ranks) -> ImageSet:
    """The images of this rank, with whole people; other images never reach its network."""
    if ranks.count == 1:
        return images
    part = np.asarray(ranks.part(images.unit_count), dtype=np.int64)
    own, units = part, None
    if images.units is not None:
        own = np.flatnonzero(np.isin(images.units, part))
        units = np.searchsorted(part, images.units[own]).astype(np.int64)
    labels = None if images.labels is None else images.labels[own]
    return replace(images, images=taken(images.images, own), labels=labels, units=units)


def write_model(
    out: Path,
    run: Prepared,
    budget: Budget,
    components: Mapping[str, Component],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the components, the statement with what `more` has instead, the card, and last `config.json`."""
    found = run.method.describe_private(run.settings, run.base, budget)
    statement = privacy_statement(budget, method=run.method.name, noise_source=run.settings.private.noise_source)
    statement |= more or {}
    statement["notes"] = list(run.method.privacy_notes(run.base, budget))
    if not run.images.declared:
        statement["notes"].append(UNDECLARED_NOTE)
    if run.base is not None and run.base.origins:
        statement["notes"].append(base_note(run.base.origins))
    config = BundleConfig(
        kind="private",
        method=run.method.name,
        settings=run.settings.model_dump(mode="json"),
        image=run.settings.image,
        classes=run.facts.classes,
        public=None if run.base is None else run.base.config.public,
        facts=found.facts,
    )
    write_bundle(out, config, components, card=private_card(config, statement, found.about), privacy=statement)
