"""`rapid plan` and `rapid train-private`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rapid.bundle import Bundle
from rapid.bundle.card import CLASSIFICATION, privacy_in_words
from rapid.cli.arguments import check_resume
from rapid.cli.build import MINUTES, settings_without_base
from rapid.cli.tables import plan_table
from rapid.config.presets import AUTO, private_settings
from rapid.config.sections import DpSgdSettings, ImageSettings, MethodSettings
from rapid.data import ImageSet
from rapid.data.classes import UNDECLARED, read_classes
from rapid.data.private import PrivateImages
from rapid.data.units import ONE_IMAGE, ONE_PERSON, PeopleFrom
from rapid.dp import PublicFacts, Ranks, default_delta
from rapid.dp.proposal import EXPLANATION, choices, propose
from rapid.dp.releases import DpSgdSpec, QuerySpec, check_budget
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method
from rapid.progress import Progress
from rapid.ranks import LONG_TIMEOUT
from rapid.rounding import rounded_up
from rapid.runtime import choose_device
from rapid.stages.automatic import AutomaticChoice, PrivateChoice
from rapid.stages.private import train_private_bundle
from rapid.stages.private_set import check_colours, check_privacy, check_request, warn_of_delta
from rapid.stages.setup import Setup
from rapid.stages.timed import TimedSteps

CLASSES = 10
"""Assumed where `rapid plan` neither sees the images nor is told their classes."""


def plan(options: argparse.Namespace) -> None:
    """`rapid plan`."""
    base = None if options.base is None else Bundle.open(options.base, "base", "public")
    settings = settings_without_base(options, "letters-mnist") if base is None else _settings_on(base, options)
    method = find_method(settings.method)
    numbers_of = settings.private
    if not isinstance(numbers_of, DpSgdSettings):
        field = "base" if base else "method" if options.preset is None else "preset"
        raise InputError(field, f"{method.name} has no batches and steps to compare")
    epsilons = options.epsilon or [1.0, 10.0]
    _check_plan(options, epsilons)
    images = None if options.private is None else private_images(options).load(settings.image)
    if images is not None:
        check_colours(images, settings, base)
        if not images.declared:
            warnings.warn(UNDECLARED, stacklevel=2)
    facts = _facts(options, images)
    delta = default_delta(facts.dataset_size) if options.delta is None else options.delta
    for epsilon in epsilons:
        # of very many images the default delta may be too small
        check_budget(epsilon, delta, facts.dataset_size)
    parameters = method.trained_parameters(settings, len(facts.classes) or 1)

    def specs(batch: int, steps: int) -> list[DpSgdSpec | QuerySpec]:
        numbers = [f"private.expected_batch={batch}", f"private.steps={steps}"]
        chosen = apply_overrides(settings.model_dump(mode="json"), numbers)
        try:
            return list(Setup(method, chosen, base).releases(facts))
        except InputError as error:
            if error.field == "private.expected_batch" and batch in options.batch:
                raise InputError("batch", error.problem, batch) from None
            raise

    pairs = choices(numbers_of, facts.dataset_size, options.batch, options.steps)
    warn_of_delta(delta, facts)
    group_size, rows = settings.private.group_size, []
    with Progress("planning", len(pairs) * len(epsilons), "plan") as progress:
        for found in propose(
            specs, delta, epsilons, pairs, parameters=parameters, group_size=group_size, unit=facts.unit
        ):
            rows.append(found.row())
            progress.advance()
    shares = {spec.name: spec.share for spec in specs(*pairs[0]) if spec.share is not None}
    common = {
        "dataset_size": facts.dataset_size,
        "unit": facts.unit,
        "delta": delta,
        "clip_norm": numbers_of.clip_norm,
        "multiplicity": numbers_of.multiplicity,
        **({"noise_band": numbers_of.noise_band} if numbers_of.noise_band > 1 else {}),
        "group_size": group_size,
        "shares": shares,
        "parameters": parameters,
    }
    if options.json:
        print(json.dumps(common | {"plans": rows}, indent=2))
    else:
        _print_plan(settings, facts, common, rows)


def _check_plan(options: argparse.Namespace, epsilons: Sequence[float]) -> None:
    """Refuse arguments that are wrong whatever the images are, before they are read.

    Raises:
        InputError: see above.
    """
    for field, numbers in (("batch", options.batch), ("steps", options.steps)):
        if any(number < 1 for number in numbers):
            raise InputError(field, "must be at least 1", min(numbers))
    for epsilon in epsilons:
        check_privacy(epsilon, options.delta)


def _print_plan(
    settings: MethodSettings, facts: PublicFacts, common: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """The plans as a table, with what they have in common."""
    trained = f"{common['parameters']:,} trained parameters ({settings.preset or settings.method})"
    counted = "people, each with all their images" if facts.unit == ONE_PERSON else "private images"
    print(f"{facts.dataset_size:,} {counted}, delta {rounded_up(common['delta'])}, {trained}")
    if spent := [f"'{name}' alone would spend {share:.3g} of it" for name, share in common["shares"].items()]:
        print(f"epsilon covers all releases together; {', '.join(spent)}")
    if band := common.get("noise_band"):
        print(f"noise is correlated over {band} steps, which signal/noise allows for; images take turns")
    if settings.preset == AUTO:
        print("train-private chooses batch and steps of its own by --minutes; other numbers, as here, are for --set")
    print()
    print(plan_table(rows, common["group_size"]))
    print(f"\n{EXPLANATION}")
    print("next: rapid train-private ... --epsilon E --set private.expected_batch=B --set private.steps=S")


def train_private(options: argparse.Namespace) -> None:
    """`rapid train-private`."""
    device = choose_device(options.device)
    with Ranks.join(device, LONG_TIMEOUT) as ranks:
        settings = ranks.all_or_none(lambda: settings_of_run(options.base, options))
        images = ranks.all_or_none(lambda: private_images(options))
        ranks.all_or_none(lambda: check_run(options, images) if ranks.first else None)
        automatic = ranks.all_or_none(lambda: _automatic(options))
        if ranks.first:
            tell_fit(settings.image)
        bundle = train_private_bundle(
            options.base,
            images,
            options.out,
            settings,
            epsilon=options.epsilon,
            delta=options.delta,
            device=device,
            resume=options.resume,
            ranks=ranks,
            ledger=options.ledger,
            automatic=automatic,
        )
    if bundle is None:
        return
    assert bundle.privacy is not None
    print(f"private bundle: {bundle.path}")
    print(privacy_in_words(bundle.privacy))
    made = quote(str(bundle.path))
    if bundle.config.facts.get("task") == CLASSIFICATION:
        print(f"next: rapid predict --model {made} --data PATH --out predictions.csv")
    else:
        print(f"next: rapid generate --model {made} --count 100 --out images.npz")


def _automatic(options: argparse.Namespace) -> PrivateChoice | None:
    """A request that the method chooses, if --preset auto or an automatic --base asks for it; or the steps alone."""
    if settings_chosen(options):
        method = Bundle.open(options.base, "base", "public").config.method
        minutes = MINUTES if options.minutes is None else options.minutes
        return AutomaticChoice(method, tuple(options.overrides), minutes, print)
    if options.minutes is None:
        return None
    people = _people(options) is not None
    return TimedSteps(options.base, tuple(options.overrides), options.minutes, print, people)


def settings_chosen(options: argparse.Namespace) -> bool:
    """Whether a run with these options chooses its settings: by --preset auto, or on an automatic --base."""
    if options.base is None or options.preset not in (None, AUTO):
        return False
    return AUTO in (options.preset, Bundle.open(options.base, "base", "public").config.settings.get("preset"))


def check_run(options: argparse.Namespace, images: PrivateImages) -> None:
    """Refuse what is wrong with the arguments of a private run by themselves, before anything is told of the run.

    Raises:
        InputError: see above.
    """
    check_resume(options)
    check_request(images, options.out, options.epsilon, options.delta, resume=options.resume)


def tell_fit(form: ImageSettings) -> None:
    """Say on stderr what the settings do to private images; what these are like is not told."""
    if form.fit == "contain":
        how = "larger ones are scaled down, with their aspect ratio kept, and all are padded with black"
        print(f"private images are fitted into {form.size}x{form.size}: {how}", file=sys.stderr, flush=True)


def private_images(options: argparse.Namespace) -> PrivateImages:
    """--private, with the flags that say how to read it."""
    return PrivateImages(
        options.private,
        classes=_classes(options),
        people=_people(options),
        label_column=options.label_column,
        show_paths=options.show_paths,
    )


def _classes(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Those of --classes, if it is given."""
    return None if options.classes is None else read_classes(options.classes)


def _people(options: argparse.Namespace) -> PeopleFrom | None:
    """What --unit-column or --unit-folders says; None: the unit is one image."""
    return PeopleFrom(options.unit_column) if options.unit_folders or options.unit_column is not None else None


def settings_of_run(base: Path | None, options: argparse.Namespace) -> MethodSettings:
    """Those of the base with preset and overrides; without a base, those of the preset or of the method."""
    if base is not None:
        return _settings_on(Bundle.open(base, "base", "public"), options)
    if options.preset is None and options.method is None:
        raise InputError("base", "give a public bundle, or a --method that needs none")
    return settings_without_base(options)


def _settings_on(base: Bundle, options: argparse.Namespace) -> MethodSettings:
    """The settings of a private run on a public bundle."""
    if options.method not in (None, base.config.method):
        raise InputError("method", f"--base was made for {base.config.method}", options.method)
    settings: MethodSettings = base.settings_as(find_method(base.config.method).settings)
    preset = None if options.preset == AUTO else options.preset
    return private_settings(settings, preset, options.overrides)


def _facts(options: argparse.Namespace, images: ImageSet | None) -> PublicFacts:
    """Those of the images, or of `size` images or people of these classes; of ten if they are not declared."""
    if images is not None:
        return PublicFacts.of(images)
    size, unit = options.size, ONE_IMAGE if _people(options) is None else ONE_PERSON
    if size is None or size < 1:
        counted = "people" if unit == ONE_PERSON else "private images"
        raise InputError("size", f"must be the number of {counted}, at least 2", size)
    if size == 1:
        # as of a set itself: see `PrivateImages.load`
        one, more = ("person", "people") if unit == ONE_PERSON else ("image", "images")
        raise InputError("size", f"is a single {one}, and noise hides one among many; give more {more}", size)
    return PublicFacts(size, tuple(_classes(options) or map(str, range(CLASSES))), (), unit)
