"""Power curves: how often the audit finds a deviation of a given size.

`python -m rapid.dp.audit.power` prints them as a Markdown table. The step tests run the code of the audit on a small
network and a mechanism whose noise, clip norm or sample rate is off by a factor. The game and the audit of a whole
stage are played with what they observe drawn directly: along each canary's own gradient, noise plus one clip norm if
the canary is in the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapid.dp.audit.adversary import Adversary
from rapid.dp.audit.bench import Subject
from rapid.dp.audit.evidence import Evidence, bound
from rapid.dp.audit.findings import Finding, StepAudit
from rapid.dp.audit.guesses import best_bound
from rapid.dp.audit.sampling import sampling_findings
from rapid.dp.audit.steps import subject_findings
from rapid.dp.budget import calibrate
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.releases import DpSgdSpec, Release

NOISE = (1.0, 0.98, 0.95, 0.9, 0.8, 0.5, 0.1)
SENSITIVITY = (1.0, 1.02, 1.05, 1.1, 1.25, 2.0)
RATE = (1.0, 1.02, 1.05, 1.1, 1.25, 2.0)
TESTS = 130
"""About the number of tests of the whole audit, which share its false-alarm rate."""


def off_by(noise: float = 1.0, sensitivity: float = 1.0, rate: float = 1.0) -> Callable[..., PrivateMechanism]:
    """A mechanism that claims one release and makes another one.

    Args:
        noise: factor of the standard deviation of its noise.
        sensitivity: factor of its clip norm.
        rate: factor of its sample rate.
    """

    class _Off(PrivateMechanism):
        def __init__(self, release: Release, *arguments: Any, **options: Any) -> None:
            spec = release.spec
            assert isinstance(spec, DpSgdSpec)
            clip_norm = sensitivity * spec.clip_norm
            update = {"clip_norm": clip_norm}
            multiplier = release.noise_multiplier * noise / sensitivity
            made = Release(spec=spec.model_copy(update=update), noise_multiplier=multiplier)
            super().__init__(made, *arguments, **options)

        def _draw_batch(self) -> Tensor:
            return (self._randomness.uniform(self._examples) <= rate * self._spec.sample_rate).nonzero().flatten()

    return _Off


def step_power(trials: int, build: Callable[..., PrivateMechanism], rate_only: bool = False) -> float:
    """Share of trials in which the tests of a step refute the claim, at the level of the whole audit."""
    level = StepAudit((Finding("", "", 1.0, 0.0),) * TESTS, 0.0).level
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 24))
    x = torch.randn(16, 6)
    subject = Subject("small", network, lambda indices: network(x[indices]).square().sum(1), 16, 0.5)
    found = 0
    for _ in range(trials):
        findings = sampling_findings(0.25, build) if rate_only else subject_findings(subject, 3.0, build)
        found += any(not finding.p_value >= level for finding in findings)
    return found / trials


def game_power(
    trials: int, noise: float = 1.0, sensitivity: float = 1.0, rate: float = 1.0, epsilon: float = 2.0
) -> float:
    """Share of trials in which the one-run game at the defaults of `rapid audit` refutes `epsilon` at delta 1e-5."""
    canaries, steps, claimed = 1000, 50, 0.25
    spec = DpSgdSpec(name="game", dataset_size=canaries, expected_batch=250, steps=steps, clip_norm=1.0)
    sigma = calibrate([spec], epsilon=epsilon, delta=1e-5).main.noise_multiplier
    generator, refuted = np.random.default_rng(), 0
    for _ in range(trials):
        coins = generator.random(canaries) < 0.5
        present = (generator.random((steps, canaries)) < rate * claimed) & coins
        along = sensitivity * present + noise * sigma * generator.standard_normal((steps, canaries))
        scores = np.logaddexp(np.log1p(-claimed), np.log(claimed) + (along - 0.5) / sigma**2).sum(0)
        refuted += best_bound(coins, scores, 1e-5, 0.95)[2] > epsilon
    return refuted / trials


def stage_power(
    trials: int, noise: float = 1.0, sensitivity: float = 1.0, rate: float = 1.0, epsilon: float = 2.0
) -> tuple[float, float, float, float]:
    """Power of the audit of a whole stage at the defaults of `rapid audit --end-to-end`, for a single training.

    Returns:
        Share of trials in which `epsilon` at delta 1e-5 is refuted by the tests of the steps, by the Gaussian bound and
        by guesses; and the median of the Gaussian bound.
    """
    canaries, steps, claimed, places = 200, 50, 0.1, 2000
    spec = DpSgdSpec(name="stage", dataset_size=canaries, expected_batch=20, steps=steps, clip_norm=1.0)
    release = calibrate([spec], epsilon=epsilon, delta=1e-5).main
    sigma, generator = release.noise_multiplier, np.random.default_rng()
    directions, by_tests, by_guesses, bounds = torch.eye(canaries, places), 0, 0, []
    for _ in range(trials):
        coins = generator.random(canaries) < 0.5
        evidence, adversary = Evidence(release, [("all", places)]), Adversary(canaries)
        for _ in range(steps):
            drawn = generator.random(canaries) < rate * claimed
            there = drawn & coins
            total = noise * sigma * generator.standard_normal(places)
            total[:canaries] += sensitivity * there
            adversary.add_step(directions, torch.from_numpy(total), sigma, claimed)
            total[:canaries] -= there
            count = int(there.sum())
            evidence.noise.append(torch.from_numpy(total / sigma).float())
            evidence.present.append(drawn)
            evidence.there.add(count, count, count, float(total[:canaries][there].sum()), count)
            evidence.elsewhere.add(canaries - count, 0.0, 0.0, float(total[:canaries][~there].sum()), canaries - count)
        by_tests += StepAudit(tuple(evidence.findings()), 0.0).refuted
        by_guesses += best_bound(coins, adversary.white_box.numpy(), 1e-5, 1 - 0.05 / 4)[2] > epsilon
        bounds.append(bound([evidence], 1e-5, 1 - 0.05 / 2))
    by_bound = float(np.mean(np.array(bounds) > epsilon))
    return by_tests / trials, by_bound, by_guesses / trials, float(np.median(bounds))


def main(trials: int) -> None:
    """Print the curves."""
    print(
        f"| deviation | step tests, {trials} trials | game at epsilon 2, {10 * trials} trials "
        f"| whole stage at epsilon 2, {trials} trials: tests | Gaussian bound | guesses | median bound |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, factors in (("noise", NOISE), ("sensitivity", SENSITIVITY), ("rate", RATE)):
        for factor in factors:
            build = off_by(**{name: factor})
            step = step_power(trials, build, rate_only=name == "rate")
            game = game_power(10 * trials, **{name: factor})
            tests, by_bound, guesses, median = stage_power(trials, **{name: factor})
            stage = f"{tests:.0%} | {by_bound:.0%} | {guesses:.0%} | {median:.2f}"
            print(f"| {name} * {factor:g} | {step:.0%} | {game:.0%} | {stage} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
