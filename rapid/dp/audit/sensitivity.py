"""Tests of how much one example, or many, can change the sum: with almost no noise, and with the claimed noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scipy.stats import norm
from torch import Tensor, nn

from rapid.dp.audit.bench import GAIN, Bench, Build, Subject, alone
from rapid.dp.audit.findings import Finding, certain, deviations_needed, smallest
from rapid.ranks import Ranks

QUIET = 0.1
"""Expected norm of the noise in the quiet tests, in clip norms."""
LARGEST_QUIET = 0.005
TOLERANCE = 1e-4
"""Relative error of what is measured: gradients come back in float32, and are sums of many."""
SINGLES = 4
IDENTICAL = 64
WEIGHTS = (1e10, 1e25, math.inf, math.nan)
"""Factors of extreme losses: gradients whose squares are large, overflow, or are no numbers."""
LEAST_REACH = 0.9
"""Share of the clip norm that the canaries must reach for the tests to have power."""


def sensitivity_findings(
    subject: Subject, build: Build, ranks: Ranks | None = None, layers: bool = True
) -> list[Finding]:
    """Test that an example changes the sum by at most the clip norm, in l2, whatever it is.

    With all noise at hand the null hypothesis is ||S - S'|| <= b for the sums S, S' with and without an example (b = C)
    or many (b = n C). The released difference is S - S' plus independent normals of standard deviation s in d places.
    Its norm is a 1-Lipschitz function of these, with mean at most sqrt(b^2 + d s^2), so it exceeds that by t with
    probability at most exp(-t^2 / (2 s^2)) (Boucheron, Lugosi, Massart, Concentration Inequalities, Theorem 5.6).
    The noise is chosen so small that a few parts in a thousand are found.

    Args:
        subject: its network and canaries.
        build: makes the mechanism.
        ranks: the processes that share the work.
        layers: also audit each layer as if it were the only one that is trained.
    """
    quiet = _quiet(subject.size)
    bench = Bench(subject, build, steps=2 * (SINGLES + len(WEIGHTS)) + 4, noise_multiplier=quiet, ranks=ranks)
    count = len(bench.weights)
    singles = []
    for canary in range(min(SINGLES, count)):
        singles.append((f"canary {canary}", *_shift(bench, [canary], GAIN, quiet)))
    extreme = [(f"losses times {w:g}", *_shift(bench, [count - 1], w, quiet)) for w in WEIGHTS]
    reach = min(observed for _, _, observed in singles)
    bench.canaries.zero_()
    many = _shift(bench, range(count), GAIN, quiet)
    detects = _detects(quiet)
    found = [
        smallest(subject.name, "sensitivity: one example", singles, detects),
        smallest(subject.name, "sensitivity: extreme losses", extreme, detects),
        Finding(subject.name, "sensitivity: many identical examples", *many, detects),
        certain(subject.name, "sensitivity: the canaries reach the clip norm", reach >= LEAST_REACH, reach),
    ]
    if layers:
        found.append(_layers(subject, build, ranks))
    return found


def shift_finding(subject: Subject, busy: Tensor, silent: Tensor, examples: int, noise: float, sums: Tensor) -> Finding:
    """Test the same at the claimed noise: n identical examples shift the mean of the steps by at most n clip norms.

    Null: the projection of the difference of the means on any fixed direction is normal with mean at most n.

    Args:
        subject: for the findings.
        busy: sums of steps with all examples, float64 (T, d), in clip norms.
        silent: sums of steps without, float64 (T', d).
        examples: n.
        noise: the claimed noise multiplier.
        sums: what the examples add up to, from steps that are in neither, (d,); only its direction counts.
    """
    direction = sums / sums.norm()
    shift = float((busy.mean(0) - silent.mean(0)) @ direction)
    width = noise * math.sqrt(1 / len(busy) + 1 / len(silent))
    p_value = float(norm.sf((shift - examples * (1 + TOLERANCE)) / width)) if math.isfinite(shift) else 0.0
    test = "sensitivity: identical examples at the claimed noise"
    return Finding(subject.name, test, p_value, shift / examples, deviations_needed() * width / examples)


def _quiet(size: int) -> float:
    return min(LARGEST_QUIET, QUIET / math.sqrt(size))


def _detects(quiet: float) -> float:
    """Relative excess of the sensitivity that is found almost surely, at most."""
    spread = math.sqrt(2) * quiet
    return TOLERANCE + spread * (math.sqrt(2 * math.log(1e5 * 50)) + 2)


def _shift(bench: Bench, examples: Sequence[int], weight: float, quiet: float) -> tuple[float, float]:
    """P-value, and by how much the examples shift the sum, in clip norms an example."""
    chosen = list(examples)
    bench.weights[chosen] = weight
    present = bench.step()
    bench.weights[chosen] = 0.0
    absent = bench.step()
    bench.weights[chosen] = GAIN
    return excess(present - absent, len(chosen), quiet)


def excess(difference: Tensor, examples: int, quiet: float) -> tuple[float, float]:
    """P-value of the norm of a difference between two quiet releases, and how far it is without noise, an example.

    Args:
        difference: float64 (d,), in clip norms.
        examples: n; the difference is claimed to be at most n clip norms.
        quiet: standard deviation of the noise of each release.
    """
    stat, size = float(difference.norm()), len(difference)
    if not math.isfinite(stat):
        return 0.0, stat
    spread = math.sqrt(2) * quiet
    beyond = stat - math.sqrt((examples * (1 + TOLERANCE)) ** 2 + size * spread**2)
    p_value = math.exp(-(beyond**2) / (2 * spread**2)) if beyond > 0 else 1.0
    # without the part of the norm that is noise
    return p_value, math.sqrt(max(0.0, stat**2 - size * spread**2)) / examples


def _layers(subject: Subject, build: Build, ranks: Ranks | None) -> Finding:
    parts = []
    listed = alone(subject.network)
    for name, parameters in listed:
        with _only(subject.network, parameters):
            quiet = _quiet(subject.size)
            bench = Bench(subject, build, steps=2, noise_multiplier=quiet, examples=2, ranks=ranks)
            bench.weights.fill_(GAIN**2)
            parts.append((name, *_shift(bench, [1], GAIN**2, quiet)))
    return smallest(subject.name, "sensitivity: each layer alone", parts, _detects(LARGEST_QUIET))


@contextmanager
def _only(network: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Only these parameters are trained."""
    trained = [p for p in network.parameters() if p.requires_grad]
    kept = {id(p) for p in parameters}
    for parameter in trained:
        parameter.requires_grad_(id(parameter) in kept)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
