"""`rapid audit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import rapid
from rapid.bundle import Bundle
from rapid.cli.build import settings_without_base
from rapid.config.presets import private_settings
from rapid.config.sections import DpSgdSettings, MethodSettings
from rapid.dp.audit import Audit, StepAudit, audit_steps
from rapid.dp.audit import audit as run_audit
from rapid.errors import InputError, PrivacyRefused, RapidError
from rapid.methods import apply_overrides, find_method, load_settings
from rapid.methods.rapid.audited import subjects
from rapid.methods.rapid.settings import RapidSettings
from rapid.rounding import rounded_down, rounded_up
from rapid.runtime import choose_device
from rapid.stages.audited import StageAudit, audit_stage

RAPID = "rapid"
"""The method whose denoiser is trained without --end-to-end."""
GAME = {"canaries": 1000, "sample_rate": 0.25}
STAGE = {"canaries": 200, "sample_rate": 0.1}
"""Defaults with --end-to-end."""
REFUTED = "the claim is refuted: do not use this build for private images, and report the bug"


def audit(options: argparse.Namespace) -> None:
    """`rapid audit`."""
    for field, value in (STAGE if options.end_to_end else GAME).items():
        if getattr(options, field) is None:
            setattr(options, field, value)
    if options.end_to_end:
        _whole_stage(options)
        return
    for field in ("method", "images"):
        if getattr(options, field) is not None:
            problem = "is for --end-to-end; without it, a denoiser of rapid is trained on random latents"
            raise InputError(field, problem, getattr(options, field))
    base = None if options.base is None else Bundle.open(options.base, "base", "public")
    if base is not None and base.config.method != RAPID:
        problem = f"was made for {base.config.method}, and a denoiser of {RAPID} would be trained; add --end-to-end"
        raise InputError("base", problem, options.base)
    settings = (
        load_settings(options.preset or "demo", options.overrides)
        if base is None
        else apply_overrides(base.settings_as(RapidSettings).model_dump(mode="json"), options.overrides)
    )
    if not isinstance(settings, RapidSettings):
        problem = f"is for {settings.method}, and a denoiser of {RAPID} would be trained; add --end-to-end"
        raise InputError("preset", problem, options.preset)
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
        raise PrivacyRefused(REFUTED)
    if options.require_conclusive and not game.conclusive:
        raise RapidError(f"inconclusive: {_size(game)}")


def _whole_stage(options: argparse.Namespace) -> None:
    """`rapid audit --end-to-end`."""
    if not 0 < options.sample_rate <= 1:
        raise InputError("sample_rate", "must lie in (0, 1]", options.sample_rate)
    if options.steps < 2:
        raise InputError("steps", "must be at least 2 with --end-to-end", options.steps)
    found = audit_stage(
        options.base,
        _stage_settings(options),
        epsilon=options.epsilon,
        delta=options.delta,
        canaries=options.canaries,
        images=options.images,
        confidence=options.confidence,
        device=choose_device(options.device),
    )
    print(json.dumps(_stage_record(found), indent=2) if options.json else _stage_words(found))
    if found.refuted:
        raise PrivacyRefused(REFUTED)
    if options.require_conclusive and not found.conclusive:
        raise RapidError(f"inconclusive: {_stage_size(found)}")


def _stage_settings(options: argparse.Namespace) -> MethodSettings:
    """Those of the private run, with as many steps and as large batches as the audit wants; --set has the last word."""
    if options.base is None:
        if options.preset is None and options.method is None:
            raise InputError("base", "give a public bundle, or a --method that needs none")
        settings = settings_without_base(options)
    else:
        base = Bundle.open(options.base, "base", "public")
        if options.method not in (None, base.config.method):
            raise InputError("method", f"--base was made for {base.config.method}", options.method)
        public: MethodSettings = base.settings_as(find_method(base.config.method).settings)
        settings = private_settings(public, options.preset, options.overrides)
    own = settings.private
    sizes = []
    if isinstance(own, DpSgdSettings):
        sizes = [f"private.steps={options.steps}"]
        sizes.append(f"private.expected_batch={max(1, round(options.sample_rate * options.canaries))}")
    if hasattr(own, "probe"):
        sizes.append(f"private.probe.steps={options.steps}")
    return apply_overrides(settings.model_dump(mode="json"), [*sizes, *options.overrides])


def _stage_record(found: StageAudit) -> dict[str, Any]:
    """The fields of the audit, and what follows from them."""
    return asdict(found) | {
        "tests": asdict(found.tests) | {"level": found.tests.level, "refuted": found.tests.refuted},
        "bound": found.bound,
        "refuted": found.refuted,
        "conclusive": found.conclusive,
    }


def _stage_words(found: StageAudit) -> str:
    half = rounded_down(found.with_half_the_noise)
    lines = [
        f"claimed:  {_claim(found.claimed, found.delta)}, by {found.method}: {', '.join(found.releases)}",
        f"steps:    {_outcome(found.tests)} ({len(found.tests.findings)} tests)",
        *_deviations(found.tests),
        f"measured: epsilon at least {found.gaussian:.3f}, if trainings and means are subsampled Gaussian mechanisms",
        *(
            f"          epsilon at least {seen.bound:.3f} from guesses by {what} ({seen.right} of {seen.guesses} right)"
            for what, seen in (("every step", found.white_box), ("results alone", found.black_box))
        ),
        f"          with {found.confidence:.0%} confidence together; {found.canaries} canaries, {found.seconds:.0f} s",
        "size:     with 95% power it finds",
        *(f"            {line}" for line in _stage_power(found)),
        f"            epsilon at least {half} if all noise were half of what is claimed",
        f"          guesses alone can refute claims below epsilon {found.largest_refutable:.2f}",
        *(f"          of the count '{name}' only the guesses say something" for name in found.counts),
    ]
    if not found.conclusive and not found.refuted:
        lines.append(f"NOT CONCLUSIVE: {_stage_size(found)}")
    return "\n".join(lines)


def _stage_power(found: StageAudit) -> list[str]:
    lines = []
    for name, power in found.power.items():
        sensitivity = (
            "none of the sensitivity" if power.sensitivity is None else f"sensitivity {power.sensitivity:.0%} too large"
        )
        rate = "" if power.rate is None else f", sample rate off by {power.rate:.0%}"
        noise = "none of the noise" if power.noise is None else f"noise off by {power.noise:.1%}"
        lines.append(f"{name}: {noise}, {sensitivity}{rate}")
    return lines


def _stage_size(found: StageAudit) -> str:
    needed = found.canaries_needed
    advice = (
        "no number of canaries is enough"
        if needed is None
        else f"about {needed:,} could (--canaries {needed}), or more steps of smaller batches"
    )
    return (
        f"if all noise were half of what is claimed, {found.canaries} canaries would show epsilon at least "
        f"{rounded_down(found.with_half_the_noise)}, which does not refute {rounded_up(found.claimed, 6)}; {advice}. "
        "Only the tests of the steps say something about this claim"
    )


def _record(game: Audit, steps: StepAudit) -> dict[str, Any]:
    """The fields of the game, and those of the step tests under `step_tests`."""
    return asdict(game) | {
        "rapid": rapid.__version__,
        "refuted": game.refuted or steps.refuted,
        "conclusive": game.conclusive,
        "canaries_needed": game.canaries_needed,
        "step_tests": asdict(steps) | {"level": steps.level, "refuted": steps.refuted},
    }


def _claim(epsilon: float, delta: float) -> str:
    return f"epsilon {rounded_up(epsilon, 6)} at delta {rounded_up(delta)}"


def _words(game: Audit, steps: StepAudit) -> str:
    lines = [
        f"claimed:  {_claim(game.claimed, game.delta)}",
        f"steps:    {_outcome(steps)} ({len(steps.findings)} tests, {steps.seconds:.0f} s)",
        *_deviations(steps),
        *([] if steps.refuted else [f"          {_sharpness(steps)}"]),
        f"measured: epsilon at least {game.bound:.3f}, with {game.confidence:.0%} confidence "
        f"({game.right} of {game.guesses} guesses right; {game.canaries} canaries, {game.steps} steps, "
        f"{game.seconds:.0f} s)",
        f"          {game.canaries} canaries can refute claims below epsilon {game.largest_refutable:.2f}",
    ]
    if not game.conclusive:
        lines.append(f"NOT CONCLUSIVE: {_size(game)}")
    return "\n".join(lines)


def _deviations(steps: StepAudit) -> list[str]:
    """A line for each finding that refutes the claim."""
    return [
        f"          {finding.subject}: {finding.test}: observed {finding.observed:.4g}, "
        f"p = {finding.p_value:.1e}{f' ({finding.where})' if finding.where else ''}"
        for finding in steps.deviations
    ]


def _outcome(steps: StepAudit) -> str:
    if steps.refuted:
        return f"{len(steps.deviations)} deviations from the claimed noise, sensitivity or sampling"
    return f"no deviation found, at a false-alarm rate of {steps.false_alarm:g}"


def _sharpness(steps: StepAudit) -> str:
    words = [f"{what} off by {share:.1%}" for what, share in steps.sharpness.items()]
    return f"found with 95% power in every network: {', '.join(words)}"


def _size(game: Audit) -> str:
    needed = game.canaries_needed
    advice = (
        "no number of canaries is enough at this delta"
        if needed is None
        else f"about {needed:,} could (--canaries {needed})"
    )
    return (
        f"the game with {game.canaries} canaries could not have refuted epsilon {rounded_up(game.claimed, 6)}, even if "
        f"there were no noise at all; {advice}. Only the tests of the steps say something about this claim"
    )
