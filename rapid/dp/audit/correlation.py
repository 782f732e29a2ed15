"""Tests of correlated noise: what is released, encoded again from the estimates, is white noise and bounded columns."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.dp.audit.bench import Bench, Build, Subject, own_rows
from rapid.dp.audit.findings import Finding, certain, smallest
from rapid.dp.audit.noise import noise_findings
from rapid.dp.audit.sampling import CANARIES, batch_findings
from rapid.dp.audit.sensitivity import LARGEST_QUIET, LEAST_REACH, QUIET, excess
from rapid.dp.correlation import Correlation, coefficients
from rapid.dp.mechanism import PrivateMechanism
from rapid.ranks import Ranks

SILENT_ROUNDS, SINGLES, TURNS = 4, 3, 60
VALUES = 1 << 14
MOST_SILENT = 128
QUIET_COINS = 1e-3


class _Stream:
    """What a bench releases: its estimates, encoded again."""

    def __init__(self, bench: Bench, band: int) -> None:
        self._bench, self._band = bench, band
        self._encoder = Correlation(coefficients(band, bench.release.spec.steps))

    def rounds(self, count: int) -> Tensor:
        """So many rounds, float64 (count * band, d), in clip norms."""
        return torch.stack([self._encoder.encode(self._bench.step()) for _ in range(count * self._band)])


def band_findings(
    subject: Subject,
    band: int,
    *,
    noise_multiplier: float,
    sample_rate: float,
    build: Build = PrivateMechanism,
    ranks: Ranks | None = None,
) -> list[Finding]:
    """Test a mechanism with a band as `subject_findings` and `sampling_findings` test one without.

    | claim                                     | test                                                             |
    |-------------------------------------------|------------------------------------------------------------------|
    | y without examples is independent noise   | `noise.noise_findings`                                           |
    | a turn changes y by at most clip_norm     | rounds with and without an example, and one more round each for  |
    |                                           | the rest of its column: the norm of the difference, as in        |
    |                                           | `sensitivity.sensitivity_findings`                               |
    | a turn every b steps, a coin in each turn | who is in which batch; coins as in `sampling.batch_findings`     |

    Args:
        subject: the network and its canaries.
        band: b, at least 2.
        noise_multiplier: of the claim.
        sample_rate: probability that an example is drawn when it has its turn.
        build: makes the mechanism.
        ranks: the processes that share the work.
    """
    return [
        *_noise(subject, band, noise_multiplier, build, ranks),
        *_sensitivity(subject, band, build, ranks),
        *_turns(band, sample_rate, build, ranks),
    ]


def _noise(subject: Subject, band: int, noise: float, build: Build, ranks: Ranks | None) -> list[Finding]:
    steps = min(MOST_SILENT, max(SILENT_ROUNDS * band, -(-VALUES // subject.size)))
    rounds = -(-steps // band)
    bench = Bench(subject, build, steps=rounds * band, noise_multiplier=noise, examples=band, band=band, ranks=ranks)
    bench.silent()
    rows = _Stream(bench, band).rounds(rounds)
    return noise_findings(f"{subject.name}, noise band {band}", rows / noise, subject.parts)


def _sensitivity(subject: Subject, band: int, build: Build, ranks: Ranks | None) -> list[Finding]:
    size = 2 * band * subject.size
    quiet = min(LARGEST_QUIET, QUIET / math.sqrt(size))
    examples = -(-subject.count // band) * band
    steps = 5 * SINGLES * band
    # everyone is drawn in each turn
    bench = Bench(subject, build, steps=steps, noise_multiplier=quiet, examples=examples, band=band, ranks=ranks)
    stream, singles = _Stream(bench, band), []
    for canary in range(SINGLES):
        kept, rounds = bench.weights[canary].item(), []
        for weight in (0.0, kept, 0.0, 0.0, 0.0):
            bench.weights[canary] = weight
            rounds.append(stream.rounds(1))
        bench.weights[canary] = kept
        change = torch.cat(rounds[1:3]) - torch.cat(rounds[3:5])
        singles.append((f"canary {canary}", *excess(change.flatten(), 1, quiet)))
    name, reach = f"{subject.name}, noise band {band}", min(observed for _, _, observed in singles)
    return [
        smallest(name, "sensitivity: one turn", singles),
        certain(name, "sensitivity: the canaries reach the clip norm", reach >= LEAST_REACH, reach),
    ]


def _turns(band: int, sample_rate: float, build: Build, ranks: Ranks | None) -> list[Finding]:
    count = -(-CANARIES // band) * band
    subject, batch = own_rows(count), max(1, round(sample_rate * count / band))
    steps, rate, name = TURNS * band, band * batch / count, f"sampling, noise band {band}"
    bench = Bench(
        subject, build, steps=steps, noise_multiplier=QUIET_COINS, expected_batch=batch, band=band, ranks=ranks
    )
    along = np.stack([bench.step().view(count, 2).sum(1).numpy() / math.sqrt(2) for _ in range(steps)])
    present = along > 0.5
    clear = float(np.abs(along - present).max())
    rounds = present.reshape(TURNS, band, count)
    own_place = bool((rounds.any(0).sum(0) <= 1).all())
    found = [
        certain(name, "sampling: every sum is one of whole examples", clear < 0.2, clear),
        certain(name, "sampling: each example has a turn every b steps", own_place),
    ]
    coins: NDArray[np.bool_] = np.asarray(rounds.any(axis=1))
    if rate == 1:
        return [*found, certain(name, "sampling: everyone is drawn in each turn", bool(coins.all()))]
    return found + batch_findings(name, coins, rate)
