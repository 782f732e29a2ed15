"""An audit of a method's whole private stage: it is run on canary images, and it is tested what it releases of them.

What runs is `train_private_bundle`, with a ledger of its own: budget, releases, checkpoints, charges, statement and
bundle are those of a real run. Only the access masks the canaries that do not take part (`rapid.dp.audit.canaries`).
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.config.sections import DpSgdSettings, MethodSettings
from rapid.data import ImageSet, load_images
from rapid.data.private import PrivateImages
from rapid.dp.attempts import counted, steps_of
from rapid.dp.audit.canaries import CanaryAccess, canaries_among, canary_images
from rapid.dp.audit.evidence import NOISE, RATE, SENSITIVITY, Evidence, bound, bound_if
from rapid.dp.audit.findings import Finding, StepAudit, certain
from rapid.dp.audit.guesses import MOST_CANARIES, SHARES, best_bound, largest_refutable
from rapid.dp.ledger import Ledger
from rapid.dp.randomness import Randomness
from rapid.dp.releases import Release
from rapid.errors import InputError
from rapid.rounding import rounded_up
from rapid.stages.private import train_private_bundle

HALF = 0.5
"""An audit is conclusive if its bound would refute the claim with noise of this share of what is claimed."""


@dataclass(frozen=True)
class Guesses:
    """What one adversary guessed.

    Attributes:
        guesses: how many coins were guessed.
        right: how many of the guesses were right.
        bound: epsilon is at least this.
    """

    guesses: int
    right: int
    bound: float


@dataclass(frozen=True)
class Power:
    """What the size of an audit can find of one release with 95 % power; computed, whatever the noise was.

    Attributes:
        noise: relative deviation of the noise; None if what was released is not finite.
        sensitivity: relative excess of the sensitivity; None if no canary was in a batch.
        rate: relative deviation of the sample rate; None where everyone takes part, and any is found.
    """

    noise: float | None
    sensitivity: float | None
    rate: float | None


@dataclass(frozen=True)
class StageAudit:
    """Result of an audit of a private stage. All bounds hold together with probability `confidence`.

    Attributes:
        method: its name.
        releases: names of the releases that were made.
        counts: those of them that are counts and histograms, of which only the guesses say something.
        claimed: epsilon for which all releases together were calibrated, at `delta`.
        delta: of the claim, and of the bounds.
        confidence: of the bounds.
        canaries: m.
        tests: of what each step released.
        gaussian: epsilon is at least this if trainings and means are subsampled Gaussian mechanisms.
        white_box: guesses of an adversary who sees every step.
        black_box: of one who sees the results of queries and the trained networks alone.
        power: of the tests, by release.
        with_half_the_noise: what `gaussian` would be at least, with 95 % power, if all noise were half of the claim's.
        largest_refutable: the bound if all guesses were right: guesses cannot refute larger claims.
        canaries_needed: about how many would make the audit conclusive; None if no number does.
        seconds: duration.
    """

    method: str
    releases: tuple[str, ...]
    counts: tuple[str, ...]
    claimed: float
    delta: float
    confidence: float
    canaries: int
    tests: StepAudit
    gaussian: float
    white_box: Guesses
    black_box: Guesses
    power: dict[str, Power]
    with_half_the_noise: float
    largest_refutable: float
    canaries_needed: int | None
    seconds: float

    @property
    def bound(self) -> float:
        """The largest of the three bounds."""
        return max(self.gaussian, self.white_box.bound, self.black_box.bound)

    @property
    def refuted(self) -> bool:
        """Whether a bound or a test refutes the claim."""
        return self.bound > self.claimed or self.tests.refuted

    @property
    def conclusive(self) -> bool:
        """Whether so many canaries and steps would have refuted the claim with half of the noise."""
        return self.with_half_the_noise > self.claimed


def audit_stage(
    base: Path | None,
    settings: MethodSettings,
    *,
    epsilon: float,
    delta: float,
    canaries: int = 200,
    images: Path | None = None,
    confidence: float = 0.95,
    device: torch.device | None = None,
    access: Callable[..., CanaryAccess] = CanaryAccess,
) -> StageAudit:
    """Run the private stage of a method once on canary images, and test it.

    Each canary takes part by the toss of a fair coin. All that is scored, and how, is fixed before the run.

    Args:
        base: public bundle; None for a run without one.
        settings: of the run.
        epsilon: for which the releases are calibrated, as in a real run.
        delta: in (0, 1).
        canaries: m, at least 20.
        images: public images from which the canaries are drawn; default: noise, each image with a class of its own.
        confidence: in (0, 1); the failure probability is split between the Gaussian bound (half) and both adversaries.
        device: where networks are trained, by default the CPU.
        access: anything but the default is for tests of the audit itself.

    Raises:
        InputError: an argument out of range, correlated noise, or settings that do not fit the base or so few images.
        PrivacyRefused: the method refuses to go on.
        RapidError: a training's losses have draws that cannot be made again.
        Stopped: a stop was requested.
    """
    if canaries < (least := round(1 / min(SHARES))):
        raise InputError("canaries", f"must be at least {least}", canaries)
    if not 0 < confidence < 1:
        raise InputError("confidence", "must lie in (0, 1)", confidence)
    if isinstance(own := settings.private, DpSgdSettings) and own.noise_band > 1:
        problem = "must be 1 with --end-to-end, which tests independent noise; without it rapid audit tests the band"
        raise InputError("private.noise_band", problem, own.noise_band)
    begin = time.monotonic()
    chosen = _canaries(images, canaries, settings)
    coins: NDArray[np.bool_] = (Randomness().uniform(canaries) <= 0.5).numpy()
    where = device or torch.device("cpu")
    seen, written = _run(base, chosen, settings, epsilon, delta, where, partial(access, coins=coins))
    evidence = seen.evidence
    found = [*(finding for one in evidence for finding in one.findings()), *written]
    # of the failure probability, half is for the Gaussian bound and a quarter for each adversary
    half, quarter = (1 - (1 - confidence) * share for share in (1 / 2, 1 / 4))
    white, black = (
        Guesses(*best_bound(coins, scores.numpy(), delta, quarter))
        for scores in (seen.adversary.white_box, seen.adversary.black_box)
    )
    return StageAudit(
        method=settings.method,
        releases=seen.budget.names,
        counts=tuple(r.name for r in seen.budget.releases if r.spec.kind in ("count", "histogram")),
        claimed=epsilon,
        delta=delta,
        confidence=confidence,
        canaries=canaries,
        tests=StepAudit(tuple(found), time.monotonic() - begin),
        gaussian=bound(evidence, delta, half),
        white_box=white,
        black_box=black,
        power={one.release.name: _power(one.release.name, found) for one in evidence},
        with_half_the_noise=bound_if(evidence, delta, half, HALF),
        largest_refutable=largest_refutable(canaries, delta, quarter),
        canaries_needed=_canaries_needed(evidence, epsilon, delta, half, canaries),
        seconds=time.monotonic() - begin,
    )


def _run(
    base: Path | None,
    canaries: ImageSet,
    settings: MethodSettings,
    epsilon: float,
    delta: float,
    device: torch.device,
    access: Callable[..., CanaryAccess],
) -> tuple[CanaryAccess, list[Finding]]:
    """Run the private stage; what was seen of it, and what it wrote down (`_written`)."""
    opened: list[CanaryAccess] = []

    def masked(*arguments: Any, **options: Any) -> CanaryAccess:
        opened.append(access(*arguments, **options))
        return opened[0]

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # advice to the owner of private images, such as that they are few
        warnings.simplefilter("ignore", UserWarning)
        place = Path(folder)
        ledger = place / "ledger.jsonl"
        _save(place / "canaries.npz", canaries)
        train_private_bundle(
            base,
            PrivateImages(place / "canaries.npz"),
            place / "out",
            settings,
            epsilon=epsilon,
            delta=delta,
            device=device,
            resume=False,
            ledger=ledger,
            access=masked,
        )
        return opened[0], _written(ledger, place / "out", opened[0].budget.releases, epsilon, delta)


def _canaries(images: Path | None, count: int, settings: MethodSettings) -> ImageSet:
    if images is None:
        return canary_images(count, settings.image.size, settings.image.channels)
    return canaries_among(load_images(images, "images", target=settings.image), count)


def _save(path: Path, images: ImageSet) -> None:
    if images.labels is None:
        np.savez(path, images=images.images)
    else:
        np.savez(path, images=images.images, labels=images.labels, classes=np.array(images.classes))


def _written(ledger: Path, out: Path, releases: Sequence[Release], epsilon: float, delta: float) -> list[Finding]:
    """Whether the ledger was charged for all releases, and the statement says no more than was asked for."""
    entries = Ledger(ledger).entries()
    charged = steps_of(release for line in counted(entries, entries[-1].dataset) for release in line.releases)
    planned = {(r.name, r.noise_multiplier, r.spec.sample_rate): r.spec.steps for r in releases}
    statement = json.loads((out / "privacy.json").read_text())
    stated = statement["epsilon"] is not None and statement["epsilon"] <= epsilon and statement["delta"] == delta
    return [
        certain("ledger", "charged for every step of every release", charged == planned),
        certain("statement", f"epsilon at most {rounded_up(epsilon)} at the same delta", stated, statement["epsilon"]),
    ]


def _power(name: str, found: Sequence[Finding]) -> Power:
    """From the findings of one release."""
    tests = (NOISE, SENSITIVITY, RATE)
    noise, sensitivity, rate = (
        next((one.detects for one in found if (one.subject, one.test) == (name, test)), None) for test in tests
    )
    return Power(noise, sensitivity, rate)


def _canaries_needed(
    evidence: Sequence[Evidence], epsilon: float, delta: float, confidence: float, canaries: int
) -> int | None:
    """To within a factor of two, the least number whose bound would refute the claim with half of the noise."""
    counts = [canaries << power for power in range(max(1, (MOST_CANARIES // canaries).bit_length()))]
    least = bisect_left(
        counts, True, key=lambda count: bound_if(evidence, delta, confidence, HALF, count / canaries) > epsilon
    )
    return counts[least] if least < len(counts) else None
