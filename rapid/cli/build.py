"""`rapid build-kb`. Nothing private is imported here."""

from __future__ import annotations

import argparse

from rapid.config.sections import MethodSettings
from rapid.errors import InputError
from rapid.methods import apply_overrides, load_settings
from rapid.runtime import choose_device
from rapid.stages.public import build_public_bundle


def build_kb(options: argparse.Namespace) -> None:
    """`rapid build-kb`."""
    settings = settings_without_base(options, "letters-mnist")
    device = choose_device(options.device)
    bundle = build_public_bundle(
        options.public, options.out, settings, device, resume=options.resume, networks=options.networks
    )
    held = bundle.config.facts.get("knowledge_base", {}).get("entries")
    print(f"public bundle: {bundle.path}" + (f" ({held:,} records in the knowledge base)" if held else ""))
    print(f"next: rapid train-private --base {bundle.path} --private PATH --epsilon 1 --out DIR")


def settings_without_base(options: argparse.Namespace, default_preset: str = "") -> MethodSettings:
    """Those of --preset, or the defaults of --method, or those of the default preset."""
    preset = options.preset
    if preset is None and options.method is not None:
        return apply_overrides({"method": options.method}, options.overrides)
    settings = load_settings(preset or default_preset, options.overrides)
    if options.method not in (None, settings.method):
        raise InputError("method", f"--preset {preset} is for {settings.method}", options.method)
    return settings
