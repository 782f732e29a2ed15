"""`rapid build-kb`. Nothing private is imported here."""

from __future__ import annotations

import argparse
from shlex import quote

from rapid.bundle import Bundle
from rapid.bundle.networks import open_networks
from rapid.cli.arguments import check_resume
from rapid.config.presets import AUTO, DEFAULT_METHOD, check_overrides, networks_settings
from rapid.config.sections import MethodSettings
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method, load_settings, settings_class
from rapid.methods.base import Automatic, Extending
from rapid.ranks import LONG_TIMEOUT, Ranks
from rapid.runtime import choose_device
from rapid.stages.automatic import AutomaticChoice
from rapid.stages.public import build_public_bundle

MINUTES = 30.0
"""Default of --minutes."""


def build_kb(options: argparse.Namespace) -> None:
    """`rapid build-kb`."""
    device = choose_device(options.device)
    with Ranks.join(device, LONG_TIMEOUT) as ranks:
        ranks.all_or_none(lambda: check_resume(options) if ranks.first else None)
        networks, settings = ranks.all_or_none(lambda: _asked(options))
        bundle = build_public_bundle(
            options.public,
            options.out,
            settings,
            device,
            resume=options.resume,
            networks=networks,
            label_column=options.label_column,
            ranks=ranks,
        )
    if not ranks.first:
        return
    held = bundle.config.facts.get("knowledge_base", {}).get("entries")
    print(f"public bundle: {bundle.path}" + (f" ({held:,} records in the knowledge base)" if held else ""))
    for line in bundle.config.facts.get("findings", []):
        print(line)
    made = quote(str(bundle.path))
    if find_method(bundle.config.method).base == "none":
        print(f"next: rapid generate --model {made} --count 1000 --out DIR")
    else:
        print(f"next: rapid train-private --base {made} --private PATH --epsilon 1 --out DIR")


def _asked(options: argparse.Namespace) -> tuple[Bundle | None, MethodSettings | AutomaticChoice]:
    """The networks to build on, if any; and the settings, or a request that the method chooses them."""
    networks = None if options.networks is None else open_networks(options.networks)
    settings: MethodSettings | AutomaticChoice
    if networks is not None and networks.config.kind == "networks":
        settings = settings_of_networks(networks, options)
        refuse_minutes(options)
    elif networks is not None and options.preset is None and options.method in (None, networks.config.method):
        own: MethodSettings = networks.settings_as(find_method(networks.config.method).settings)
        settings = apply_overrides(own.model_dump(mode="json"), options.overrides)
        refuse_minutes(options)
    elif options.preset == AUTO or (options.preset is None and _chooses(options.method)):
        method = options.method or DEFAULT_METHOD
        # all else is chosen by the images, which take longer to read
        check_overrides(settings_class(method), options.overrides)
        minutes = MINUTES if options.minutes is None else options.minutes
        settings = AutomaticChoice(method, tuple(options.overrides), minutes, print)
    else:
        settings = settings_without_base(options)
        refuse_minutes(options)
    return networks, settings


def settings_of_networks(networks: Bundle, options: argparse.Namespace) -> MethodSettings:
    """Settings of a public stage on networks that are trained already.

    Raises:
        InputError: a method or a preset that does not fit them, or an override of what they fix.
    """
    name = networks.config.method
    if options.method not in (None, name):
        raise InputError("method", f"the networks (--networks) are of the method {name}", options.method)
    if options.preset == AUTO:
        raise InputError("preset", "the networks (--networks) are trained already; leave it out", AUTO)
    method: object = find_method(name)
    if not isinstance(method, Extending):
        raise InputError("networks", f"{name} trains its own networks; leave it out", options.networks)
    base: MethodSettings = networks.settings_as(find_method(name).settings)
    return networks_settings(base, method.fixed_by_networks(base), options.preset, options.overrides)


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
