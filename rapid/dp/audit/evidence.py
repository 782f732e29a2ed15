"""What the results of a real run show about its noise, its sensitivity and its batches.

An auditor who knows coins, batches and gradients subtracts from each released sum what the canaries in the batch
should have added. If the mechanism does what it claims, what is left is noise, and nothing of it points along a canary.
This is the white-box view of Nasr et al. (Tight auditing of differentially private machine learning, USENIX Security
2023):

    tests      noise, sensitivity and sampling are those of the claim (p-values, see `rapid.dp.audit.findings`)
    bound      confidence limits of the three numbers on the safe side, and the epsilon of a subsampled Gaussian
               mechanism that has these: the true epsilon is at least this if the mechanism is one, and every example
               adds the same multiple of its clipped gradient

The bound is far sharper than that from guesses, because it takes the form of the mechanism for granted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, chi2, norm
from torch import Tensor

from rapid.dp.accounting import composition
from rapid.dp.audit.findings import Finding, certain, deviations_needed
from rapid.dp.audit.noise import noise_findings, scale_finding
from rapid.dp.audit.sampling import batch_findings
from rapid.dp.audit.sensitivity import TOLERANCE
from rapid.dp.events import dp_sgd_event
from rapid.dp.releases import Release
from rapid.errors import RapidError

LIMITS = 3
"""Confidence limits of a release: of noise, sensitivity and sample rate."""
MISSED = 0.05
"""Probability with which a deviation that is said to be found is missed."""
NOISE, SENSITIVITY, RATE = "noise: scale", "sensitivity: canaries that take part", "sampling: rate"
"""Names of the tests whose power is told."""
LEAST_NOISE = 0.05
"""Effective noise multipliers below this are taken as this: their epsilon is in the hundreds, and hard to compute."""


@dataclass
class Along:
    """Sums along the directions u of canaries' gradients, over steps t.

    Attributes:
        count: n, number of canaries, each counted in each of its steps.
        norms: sum of the norms of their clipped gradients, in clip norms.
        known: sum over t of <sum of u, sum of the clipped gradients>: `norms`, if gradients are orthogonal.
        dot: sum over t of <sum of u, what is left of the released sum>, in clip norms.
        squares: sum over t of |sum of u|^2, so that `dot` has standard deviation sigma * sqrt(squares).
    """

    count: int = 0
    norms: float = 0.0
    known: float = 0.0
    dot: float = 0.0
    squares: float = 0.0

    def add(self, count: int, norms: float, known: float, dot: float, squares: float) -> None:
        """Add a step."""
        self.count += count
        self.norms += norms
        self.known += known
        self.dot += dot
        self.squares += squares

    @property
    def shift(self) -> float:
        """Mean contribution of a canary, in clip norms, if each is the same multiple of its clipped gradient."""
        return self.reach * (1 + self.dot / self.known)

    @property
    def spread(self) -> float:
        """Standard deviation of `shift` for noise of multiplier 1."""
        return self.reach * math.sqrt(self.squares) / abs(self.known)

    @property
    def reach(self) -> float:
        """Mean norm of a clipped gradient, in clip norms."""
        return self.norms / self.count


@dataclass
class Evidence:
    """What a training showed, or a query for a mean, which is one step.

    Attributes:
        release: as claimed.
        parts: names and sizes of the trained parameters; sizes add up to d.
        noise: what is left of the released sums, in units of the claimed noise, float32 (d,), of the steps kept.
        present: which canaries were drawn in each step, whether they take part or not, bool (m,).
        there: of canaries that were drawn and take part.
        elsewhere: of all others.
    """

    release: Release
    parts: list[tuple[str, int]]
    noise: list[Tensor] = field(default_factory=list)
    present: list[NDArray[np.bool_]] = field(default_factory=list)
    there: Along = field(default_factory=Along)
    elsewhere: Along = field(default_factory=Along)

    @property
    def steps(self) -> int:
        """Number of steps that were seen."""
        return len(self.present)

    @classmethod
    def of_mean(cls, release: Release, rows: Tensor, coins: NDArray[np.bool_], total: Tensor) -> Evidence:
        """What the result of a mean showed.

        Args:
            release: as claimed.
            rows: contributions of the canaries, float64 (m, d).
            coins: which of them take part, bool (m,).
            total: noisy sum, float64 (d,).
        """
        rows, total = rows / release.spec.sensitivity, total / release.spec.sensitivity
        found, norms = cls(release, [("features", len(total))]), rows.norm(dim=1)
        there, left = torch.from_numpy(coins), total - rows[torch.from_numpy(coins)].sum(0)
        directions = torch.where(norms[:, None] > 0, rows / norms[:, None], 0.0)
        for along, who, sizes in ((found.there, there, norms), (found.elsewhere, ~there, torch.zeros_like(norms))):
            summed = directions[who].sum(0)
            known = float(summed @ rows[who].sum(0)) if along is found.there else 0.0
            along.add(
                int(who.sum()), float(sizes[who].sum()), known, float(summed @ left), float(summed.square().sum())
            )
        found.noise.append((left / release.noise_multiplier).float())
        found.present.append(np.ones(len(rows), bool))
        return found

    def findings(self) -> list[Finding]:
        """The tests of one release; those of a query are marked with *.

        | test                             | null distribution                                                       |
        |----------------------------------|-------------------------------------------------------------------------|
        | noise, or its scale alone *      | `noise_findings`, of what is left of each step                          |
        | canaries that take part *        | mean contribution: normal with mean at most one clip norm, one-sided    |
        | ... that are absent *, or not in | mean contribution: normal with mean 0                                   |
        | the batch                        |                                                                         |
        | sampling                         | `batch_findings`; everyone is in every batch if the sample rate is 1    |
        | steps                            | as many as planned                                                      |
        """
        name, sigma, spec = self.release.name, self.release.noise_multiplier, self.release.spec
        query = spec.kind != "dp-sgd"
        found = (
            [scale_finding(name, NOISE, self.noise[0].double().numpy())]
            if query
            else noise_findings(name, torch.stack(self.noise), self.parts)
        )
        if self.there.known:
            spread = sigma * self.there.spread
            excess = self.there.shift - (1 + TOLERANCE)
            detects = (deviations_needed() * spread + 1 + TOLERANCE) / self.there.reach - 1
            p_value = float(norm.sf(excess / spread)) if math.isfinite(excess) else 0.0
            found.append(Finding(name, SENSITIVITY, p_value, self.there.shift, detects))
        if self.elsewhere.squares:
            score = self.elsewhere.dot / (sigma * math.sqrt(self.elsewhere.squares))
            p_value = 2 * float(norm.sf(abs(score))) if math.isfinite(score) else 0.0
            test = "nothing of canaries that are absent or not in the batch"
            found.append(Finding(name, test, p_value, self.elsewhere.dot / self.elsewhere.count))
        if query:
            return found
        present = np.stack(self.present)
        if spec.sample_rate < 1:
            found += batch_findings(name, present, spec.sample_rate)
        else:
            found.append(certain(name, "sampling: everyone is in every batch", bool(present.all())))
        return [*found, certain(name, "steps: as many as planned", self.steps == spec.steps, self.steps)]

    def limits(self, failure: float) -> Limits:
        """Confidence limits, each wrong with probability `failure` at most, on the side of a small epsilon."""
        values = torch.cat(self.noise).double()
        scale = math.sqrt(float(values.square().sum()) / float(chi2.ppf(failure, len(values))))
        noise, there = scale * self.release.noise_multiplier, self.there
        shift = there.shift - float(norm.isf(failure)) * noise * there.spread if there.known else 0.0
        drawn, coins = int(np.sum(self.present)), self.steps * len(self.present[0])
        # where everyone is in every batch there is no coin
        sampled = float(beta.ppf(failure, drawn, coins - drawn + 1)) if drawn else 0.0
        rate = 1.0 if self.release.spec.sample_rate == 1 and drawn == coins else sampled
        return Limits(noise, shift, rate, self.steps)

    def limits_if(self, factor: float, failure: float, missed: float, more: float = 1.0) -> Limits:
        """What `limits` would be if sigma were `factor` of the claimed one, but for bad luck of probability `missed`.

        It depends on the plan and the canaries, not on the noise.

        Args:
            factor: of the noise.
            failure: see `limits`.
            missed: probability of each limit to be worse than this.
            more: factor of the number of canaries.
        """
        values, there = sum(len(part) for part in self.noise), self.there
        scale = factor * math.sqrt(float(chi2.isf(missed, values)) / float(chi2.ppf(failure, values)))
        noise, deviations = scale * self.release.noise_multiplier, float(norm.isf(failure) + norm.isf(missed))
        shift = there.reach - deviations * noise * there.spread / math.sqrt(more) if there.known else 0.0
        rate, coins = self.release.spec.sample_rate, self.steps * self.release.spec.dataset_size * more
        return Limits(noise, shift, rate - deviations * math.sqrt(rate * (1 - rate) / coins), self.steps)


@dataclass(frozen=True)
class Limits:
    """Confidence limits of a release's mechanism.

    Attributes:
        noise: the standard deviation is at most this, in clip norms.
        shift: an example adds at least this, in clip norms.
        rate: the sample rate is at least this.
        steps: number of steps.
    """

    noise: float
    shift: float
    rate: float
    steps: int

    @property
    def noise_multiplier(self) -> float:
        """Noise over sensitivity is at most this; infinity if nothing of the canaries was seen."""
        return self.noise / self.shift if self.shift > 0 and self.rate > 0 else math.inf


def least_epsilon(limits: Sequence[Limits], delta: float) -> float:
    """Epsilon of subsampled Gaussian mechanisms with these numbers together; releases that show nothing count as none.

    Args:
        limits: of the releases of one run.
        delta: in (0, 1).
    """
    seen = [one for one in limits if math.isfinite(one.noise_multiplier)]
    scale = 1.0
    while True:
        # more noise than was seen gives a smaller epsilon, which holds as well
        multipliers = [max(LEAST_NOISE, one.noise_multiplier) * scale for one in seen]
        events = [dp_sgd_event(noise, one.rate, one.steps) for noise, one in zip(multipliers, seen, strict=True)]
        # an upper bound by Renyi divergences says nothing about the least epsilon
        with contextlib.suppress(RapidError):
            found = composition(events, delta)
            if found.numerical and math.isfinite(found.epsilon):
                return found.epsilon
        scale *= 1.5


def bound(evidence: Sequence[Evidence], delta: float, confidence: float) -> float:
    """Epsilon is at least this with probability `confidence`, if the releases are subsampled Gaussian mechanisms."""
    failure = (1 - confidence) / max(1, LIMITS * len(evidence))
    return least_epsilon([one.limits(failure) for one in evidence], delta)


def bound_if(
    evidence: Sequence[Evidence], delta: float, confidence: float, factor: float, canaries: float = 1.0
) -> float:
    """What `bound` would show with 95 % power if the noise of all releases were `factor` of what is claimed.

    Args:
        evidence: of the releases; what the noise was in them does not matter.
        delta: in (0, 1).
        confidence: of the bound.
        factor: in (0, 1].
        canaries: factor of their number.
    """
    parts = max(1, LIMITS * len(evidence))
    limits = [one.limits_if(factor, (1 - confidence) / parts, MISSED / parts, canaries) for one in evidence]
    return least_epsilon(limits, delta)
