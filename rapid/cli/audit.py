"""`rapid audit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rapid.dp.audit import audit as run_audit
from rapid.errors import InputError, PrivacyRefused
from rapid.methods import load_settings
from rapid.methods.rapid.settings import RapidSettings


def audit(options: argparse.Namespace) -> None:
    """`rapid audit`."""
    settings = load_settings(options.preset, options.overrides)
    if not isinstance(settings, RapidSettings):
        raise InputError("preset", f"is for the method {settings.method}; the audit trains a denoiser of rapid")
    found = run_audit(
        settings,
        epsilon=options.epsilon,
        delta=options.delta,
        canaries=options.canaries,
        steps=options.steps,
        sample_rate=options.sample_rate,
        confidence=options.confidence,
    )
    if options.json:
        print(json.dumps(asdict(found) | {"refuted": found.refuted}, indent=2))
    else:
        print(f"claimed:  epsilon {found.claimed:g} at delta {found.delta:g}")
        print(
            f"measured: epsilon at least {found.bound:.3f}, with {found.confidence:.0%} confidence "
            f"({found.right} of {found.guesses} guesses right; {found.canaries} canaries, {found.steps} steps, "
            f"{found.seconds:.0f} s)"
        )
    if found.refuted:
        raise PrivacyRefused("the claim is refuted: do not use this build for private images, and report the bug")
