"""`rapid build-kb`. Nothing private is imported here."""

from __future__ import annotations

import argparse
from datetime import timedelta

from rapid.config.presets import DEFAULT_METHOD
from rapid.config.sections import MethodSettings
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method, load_settings
from rapid.methods.base import Automatic
from rapid.ranks import Ranks
from rapid.runtime import choose_device
from rapid.stages.automatic import PRESET, AutomaticChoice
from rapid.stages.public import build_public_bundle

MINUTES = 30.0
"""Default of --minutes."""
TIMEOUT = timedelta(hours=2)
"""The first process alone chooses settings and writes the index of a knowledge base; the others wait."""


def build_kb(options: argparse.Namespace) -> None:
    """`rapid build-kb`."""
    device = choose_device(options.device)
    with Ranks.join(device, TIMEOUT) as ranks:
        bundle = build_public_bundle(
            options.public,
            options.out,
            ranks.all_or_none(lambda: _settings(options)),
            device,
            resume=options.resume,
            networks=options.networks,
            label_column=options.label_column,
            ranks=ranks,
        )
    if not ranks.first:
        return
    held = bundle.config.facts.get("knowledge_base", {}).get("entries")
    print(f"public bundle: {bundle.path}" + (f" ({held:,} records in the knowledge base)" if held else ""))
    for line in bundle.config.facts.get("findings", []):
        print(line)
    print(f"next: rapid train-private --base {bundle.path} --private PATH --epsilon 1 --out DIR")


def _settings(options: argparse.Namespace) -> MethodSettings | AutomaticChoice:
    """Those of --preset, or a request that the method chooses them."""
    if options.preset == PRESET or (options.preset is None and _chooses(options.method)):
        minutes = MINUTES if options.minutes is None else options.minutes
        return AutomaticChoice(options.method or DEFAULT_METHOD, tuple(options.overrides), minutes, print)
    settings = settings_without_base(options)
    refuse_minutes(options)
    return settings


def refuse_minutes(options: argparse.Namespace) -> None:
    """Refuse --minutes where a preset decides.

    Raises:
        InputError: it is given.
    """
    if options.minutes is not None:
        raise InputError("minutes", "is for settings that choose themselves; leave it out, or give --preset auto")


def _chooses(method: str | None) -> bool:
    found: object = find_method(method or DEFAULT_METHOD)
    return isinstance(found, Automatic)


def settings_without_base(options: argparse.Namespace, default_preset: str = "") -> MethodSettings:
    """Those of --preset, or the defaults of --method, or those of the default preset."""
    preset = options.preset
    if preset is None and options.method is not None:
        return apply_overrides({"method": options.method}, options.overrides)
    settings = load_settings(preset or default_preset, options.overrides)
    if options.method not in (None, settings.method):
        raise InputError("method", f"--preset {preset} is for {settings.method}", options.method)
    return settings
