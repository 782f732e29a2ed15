"""The audit of a mechanism's steps: whether its noise, sensitivity, batches and resumption are as claimed.

DP-SGD is epsilon-DP because each step is a Gaussian mechanism of known noise and sensitivity on a Poisson sample; the
accounting follows from these numbers. An auditor who sees a step's result and may choose the examples can test the
numbers themselves, far more sharply than any attack can bound epsilon. The threat model is the white-box one of Nasr
et al. (Tight auditing of differentially private machine learning, USENIX Security 2023), in which each step is
compared with the Gaussian mechanism that it should be.

The steps are taken on the network of the method, with its losses, at fixed weights. No private images are needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from rapid.dp.access import PrivateAccess
from rapid.dp.audit.bench import Bench, Build, Subject, every_rule
from rapid.dp.audit.correlation import band_findings
from rapid.dp.audit.findings import Finding, StepAudit, certain
from rapid.dp.audit.noise import noise_findings
from rapid.dp.audit.queries import OpenAccess, query_findings
from rapid.dp.audit.sampling import sampling_findings
from rapid.dp.audit.sensitivity import IDENTICAL, QUIET, sensitivity_findings, shift_finding
from rapid.dp.mechanism import PrivateMechanism
from rapid.errors import PrivacyRefused
from rapid.ranks import Ranks

SILENT, BUSY, RESUMED = 12, 24, 2
VALUES = 1 << 16
"""Least number of noise values that are looked at: small networks take more steps."""
MOST_SILENT = 128


def audit_steps(
    subjects: Sequence[Subject],
    *,
    noise_multiplier: float,
    sample_rate: float,
    build: Build = PrivateMechanism,
    access: OpenAccess = PrivateAccess,
    ranks: Ranks | None = None,
    band: int = 1,
) -> StepAudit:
    """Test the steps of a mechanism on the given networks, on one with every layer rule, and the queries.

    | claim                                   | tests                                                      |
    |-----------------------------------------|------------------------------------------------------------|
    | noise is normal, of the claimed scale,  | `noise.noise_findings`, of steps without examples and of   |
    | fresh in each place and step            | differences between steps with the same ones               |
    | an example adds at most clip_norm       | `sensitivity.sensitivity_findings`, and at the claimed     |
    |                                         | noise `sensitivity.shift_finding`                          |
    | batches are Poisson samples             | `sampling.sampling_findings`                               |
    | a resumed run has fresh noise and no    | noise before and after, and the number of steps            |
    | more steps than planned                 |                                                            |
    | queries: noise and sensitivity          | `queries.query_findings`                                   |
    | with a band: noise, sensitivity, turns  | `correlation.band_findings`, of one network                |

    The probability of any alarm is at most `StepAudit.false_alarm` if the claim holds.

    Args:
        subjects: networks and canaries of the method.
        noise_multiplier: of the claim.
        sample_rate: of the claim.
        build: makes the mechanism; anything but the default is for tests of the audit itself.
        access: opens the images of the queries, likewise.
        ranks: the processes that share the work; each gets the same findings. Queries are audited on one rank only.
        band: steps over which the noise is correlated, in addition to the tests without.
    """
    begin = time.monotonic()
    found: list[Finding] = []
    for subject in (*subjects, every_rule()):
        found += subject_findings(subject, noise_multiplier, build, ranks)
    found += sampling_findings(sample_rate, build, ranks)
    if band > 1:
        noise = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
        first = subjects[0] if subjects else every_rule()
        found += band_findings(first, band, **noise, build=build, ranks=ranks)
    if ranks is None or ranks.count == 1:
        found += query_findings(access)
    return StepAudit(tuple(found), time.monotonic() - begin)


def subject_findings(
    subject: Subject, noise_multiplier: float, build: Build = PrivateMechanism, ranks: Ranks | None = None
) -> list[Finding]:
    """The tests of noise, sensitivity and resumption for one network.

    In bfloat16 noise is tested together with examples only, and resumption not again: they do not depend on it.

    Args:
        subject: the network and its canaries.
        noise_multiplier: of the claim, above 0.
        build: makes the mechanism.
        ranks: the processes that share the work.
    """
    silent_steps = min(MOST_SILENT, max(SILENT, -(-VALUES // subject.size)))
    name = subject.name
    bench = Bench(
        subject, build, steps=silent_steps + BUSY, noise_multiplier=noise_multiplier, examples=IDENTICAL, ranks=ranks
    )
    bench.canaries.zero_()
    busy = torch.stack([bench.step() for _ in range(BUSY)])
    bench.silent()
    silent = torch.stack([bench.step() for _ in range(silent_steps)])
    found = []
    if not subject.autocast:
        found += noise_findings(f"{name}, no examples", silent / noise_multiplier, subject.parts)
    # the same examples are in every batch, so their sum cancels
    found += noise_findings(
        f"{name}, {IDENTICAL} examples",
        (busy[::2] - busy[1::2]) / (2**0.5 * noise_multiplier),
        subject.parts,
    )
    quiet = Bench(subject, build, steps=1, noise_multiplier=QUIET / subject.size**0.5, examples=IDENTICAL, ranks=ranks)
    quiet.canaries.zero_()
    found.append(shift_finding(subject, busy, silent, IDENTICAL, noise_multiplier, quiet.step()))
    found += sensitivity_findings(subject, build, ranks)
    return (
        found
        if subject.autocast
        else found + _resumed(subject, noise_multiplier, build, ranks, bench, silent[:RESUMED])
    )


def _resumed(
    subject: Subject,
    noise_multiplier: float,
    build: Build,
    ranks: Ranks | None,
    finished: Bench,
    earlier: torch.Tensor,
) -> list[Finding]:
    """Resume after all but `RESUMED` steps: the noise is new, and the planned steps are all there are."""
    planned = finished.release.spec.steps
    resumed = Bench(
        subject,
        build,
        steps=planned,
        noise_multiplier=noise_multiplier,
        steps_taken=planned - RESUMED,
        ranks=ranks,
    )
    resumed.silent()
    later = torch.stack([resumed.step() for _ in range(RESUMED)])
    name = f"{subject.name}, resumed"
    found = noise_findings(name, torch.cat([earlier, later]) / noise_multiplier, subject.parts)
    stopped = all(_refuses(bench) for bench in (finished, resumed))
    return [*found, certain(name, "steps: no more than planned", stopped)]


def _refuses(bench: Bench) -> bool:
    try:
        bench.step()
    except PrivacyRefused:
        return True
    return False
