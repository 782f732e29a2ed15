"""`rapid audit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import rapid
from rapid.bundle import Bundle
from rapid.dp.audit import Audit, StepAudit, audit_steps
from rapid.dp.audit import audit as run_audit
from rapid.errors import InputError, PrivacyRefused, RapidError
from rapid.methods import apply_overrides, load_settings
from rapid.methods.rapid.audited import subjects
from rapid.methods.rapid.settings import RapidSettings


def audit(options: argparse.Namespace) -> None:
    """`rapid audit`."""
    base = None if options.base is None else Bundle.open(options.base, "base", "public")
    settings = (
        load_settings(options.preset or "demo", options.overrides)
        if base is None
        else apply_overrides(base.settings_as(RapidSettings).model_dump(mode="json"), options.overrides)
    )
    if not isinstance(settings, RapidSettings):
        raise InputError("preset", f"is for the method {settings.method}; the audit trains a denoiser of rapid")
    game = run_audit(
        settings,
        epsilon=options.epsilon,
        delta=options.delta,
        canaries=options.canaries,
        steps=options.steps,
        sample_rate=options.sample_rate,
        confidence=options.confidence,
    )
    steps = audit_steps(
        subjects(settings, base),
        noise_multiplier=game.noise_multiplier,
        sample_rate=game.sample_rate,
        band=settings.private.noise_band,
    )
    print(json.dumps(_record(game, steps), indent=2) if options.json else _words(game, steps))
    if game.refuted or steps.refuted:
        raise PrivacyRefused("the claim is refuted: do not use this build for private images, and report the bug")
    if options.require_conclusive and not game.conclusive:
        raise RapidError(f"inconclusive: {_size(game)}")


def _record(game: Audit, steps: StepAudit) -> dict[str, Any]:
    """The fields of the game, and those of the step tests under `step_tests`."""
    return asdict(game) | {
        "rapid": rapid.__version__,
        "refuted": game.refuted or steps.refuted,
        "conclusive": game.conclusive,
        "canaries_needed": game.canaries_needed,
        "step_tests": asdict(steps) | {"level": steps.level, "refuted": steps.refuted},
    }


def _words(game: Audit, steps: StepAudit) -> str:
    lines = [
        f"claimed:  epsilon {game.claimed:g} at delta {game.delta:g}",
        f"steps:    {_outcome(steps)} ({len(steps.findings)} tests, {steps.seconds:.0f} s)",
        *(
            f"          {finding.subject}: {finding.test}: observed {finding.observed:.4g}, "
            f"p = {finding.p_value:.1e}{f' ({finding.where})' if finding.where else ''}"
            for finding in steps.deviations
        ),
        *([] if steps.refuted else [f"          {_sharpness(steps)}"]),
        f"measured: epsilon at least {game.bound:.3f}, with {game.confidence:.0%} confidence "
        f"({game.right} of {game.guesses} guesses right; {game.canaries} canaries, {game.steps} steps, "
        f"{game.seconds:.0f} s)",
        f"          {game.canaries} canaries can refute claims below epsilon {game.largest_refutable:.2f}",
    ]
    if not game.conclusive:
        lines.append(f"NOT CONCLUSIVE: {_size(game)}")
    return "\n".join(lines)


def _outcome(steps: StepAudit) -> str:
    if steps.refuted:
        return f"{len(steps.deviations)} deviations from the claimed noise, sensitivity or sampling"
    return f"no deviation found, at a false-alarm rate of {steps.false_alarm:g}"


def _sharpness(steps: StepAudit) -> str:
    """The largest deviation that any of the main tests would have missed."""
    words = []
    for what, name in (("noise", "noise: scale"), ("sensitivity", "one example"), ("sample rate", "sampling: rate")):
        # few single counts are made: they have the noise of the sums, of which there are many
        listed = [one for one in steps.findings if one.test.endswith(name) and one.subject != "counts"]
        found = [one.detects for one in listed if one.detects]
        words.append(f"{what} off by {max(found):.1%}")
    return f"found with 95% power in every network: {', '.join(words)}"


def _size(game: Audit) -> str:
    needed = game.canaries_needed
    advice = (
        "no number of canaries is enough at this delta"
        if needed is None
        else f"about {needed:,} could (--canaries {needed})"
    )
    return (
        f"the game with {game.canaries} canaries could not have refuted epsilon {game.claimed:g}, even if there were "
        f"no noise at all; {advice}. Only the tests of the steps say something about this claim"
    )
