"""The audit of the mechanism: run on the networks of the bundle, or taken from an earlier `rapid audit --json`.

It uses no private images. What is tested is the build of rapid that writes the report, with the noise multiplier and
the sample rate of the model. That the model was trained by the same build, only the version says.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

import rapid
from rapid.bundle import Bundle
from rapid.dp.audit import Finding, StepAudit, audit_steps
from rapid.errors import InputError
from rapid.methods import find_method
from rapid.methods.base import Inspectable
from rapid.parsing import parse_json
from rapid.release.accounts import Statement
from rapid.release.policy import AuditPolicy
from rapid.release.rules import Rule, rule

SHARP = ("noise", "sensitivity")
"""Of these, must be sharp; with a sample rate of 1 there is none to test."""
PART = re.compile(r", (no examples|[0-9]+ examples|resumed)$")
"""Of the name of a subject: the part of its tests."""
Json = dict[str, Any]


class _StepTests(BaseModel):
    findings: tuple[Finding, ...] = Field(min_length=1)
    seconds: float
    false_alarm: float = Field(gt=0, lt=1)


class _Earlier(BaseModel):
    rapid: str
    refuted: bool
    claimed: float
    delta: float
    bound: float
    conclusive: bool
    noise_multiplier: float
    sample_rate: float
    step_tests: _StepTests


def run_audit(bundle: Bundle, statement: Statement) -> Json:
    """Test the steps of the mechanism, on the networks of the model if its method offers them; some minutes.

    Args:
        bundle: whose networks are used.
        statement: with the noise multiplier, the sample rate and the noise band of the claim.
    """
    method = find_method(bundle.config.method)
    subjects = method.audited(bundle) if isinstance(method, Inspectable) else ()
    steps = audit_steps(
        subjects,
        noise_multiplier=statement.noise_multiplier,
        sample_rate=statement.sample_rate,
        band=statement.noise_band,
    )
    return _record(steps, source="run for this report") | {
        "noise_multiplier": statement.noise_multiplier,
        "sample_rate": statement.sample_rate,
        "networks_of_the_model": bool(subjects),
    }


def read_audit(path: Path, band: int = 1) -> Json:
    """The record of an earlier audit by the same version of rapid.

    Args:
        path: what `rapid audit --json` printed.
        band: steps over which the noise of the model is correlated.

    Raises:
        InputError: it is something else, of another version, or did not test such noise.
    """
    try:
        content = path.read_bytes()
        earlier = _Earlier.model_validate(parse_json(content))
    except (OSError, ValueError, ValidationError):
        raise InputError("audit", "is not what rapid audit --json prints; write its output to a file", path) from None
    if earlier.rapid != rapid.__version__:
        problem = f"is of rapid {earlier.rapid}, and this is {rapid.__version__}; run the audit again"
        raise InputError("audit", problem, path)
    tests = earlier.step_tests
    record = _record(
        StepAudit(tests.findings, tests.seconds, tests.false_alarm), source="an earlier rapid audit --json"
    )
    if band > 1 and not any(f"noise band {band}" in subject for subject in record["subjects"]):
        problem = f"did not test correlated noise; run the audit again with --set private.noise_band={band}"
        raise InputError("audit", problem, path)
    game = {
        "claimed": earlier.claimed,
        "delta": earlier.delta,
        "bound": _finite(earlier.bound),
        "conclusive": earlier.conclusive,
    }
    return record | {
        "refuted": record["refuted"] or earlier.refuted,
        "noise_multiplier": earlier.noise_multiplier,
        "sample_rate": earlier.sample_rate,
        "networks_of_the_model": False,
        "game": game,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def audit_rule(policy: AuditPolicy, found: Json | None) -> Rule:
    """Whether no test refutes the claim."""
    demand = "no test of the mechanism's noise, sensitivity and sampling finds a deviation"
    if found is None:
        return rule("audit", demand, "the audit was not run", None, required=policy.required)
    blunt = [what for what in SHARP if found["detects"].get(what, math.inf) > policy.max_undetected]
    if found["deviations"]:
        first = found["deviations"][0]
        words = f"{len(found['deviations'])} deviations, the first in '{first['subject']}': {first['test']}"
    elif found["refuted"]:
        words = "the game on canaries refutes its claim"
    elif blunt:
        words = f"the tests are too blunt: {', '.join(blunt)} off by {policy.max_undetected:.3g} may go unnoticed"
        return rule("audit", demand, words, None, required=policy.required)
    else:
        sharp = ", ".join(f"{what} off by {share:.1%}" for what, share in found["detects"].items())
        words = f"none in {found['tests']} tests" + (f", which find {sharp} with 95% power" if sharp else "")
    return rule("audit", demand, words, not found["refuted"], required=policy.required)


def _record(steps: StepAudit, source: str) -> Json:
    return {
        "source": source,
        "rapid": rapid.__version__,
        "tests": len(steps.findings),
        "subjects": list(dict.fromkeys(PART.sub("", finding.subject) for finding in steps.findings)),
        "false_alarm": steps.false_alarm,
        "smallest_p_value": _finite(min(finding.p_value for finding in steps.findings)),
        "deviations": [
            {
                "subject": one.subject,
                "test": one.test,
                "p_value": _finite(one.p_value),
                "observed": _finite(one.observed),
            }
            for one in steps.deviations
        ],
        "detects": steps.sharpness,
        "refuted": steps.refuted,
        "seconds": round(steps.seconds),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
