"""Near-copies: how many private images have a synthetic image nearer than a public distance, counted with noise.

The distance is chosen from public images alone. An image is compared with the synthetic ones by itself, and its exact
integer distances do not depend on the images beside it, so it changes the count by at most 1. People are counted if one
of their images has a near-copy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from rapid.data.units import ONE_PERSON, plural
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget, calibrate
from rapid.dp.releases import QuerySpec
from rapid.errors import InputError
from rapid.evaluate.neighbours import nearest_images
from rapid.progress import Progress
from rapid.release.policy import CopiesPolicy
from rapid.release.rules import Rule, rule
from rapid.rounding import rounded_down, rounded_up

NAME = "near-copies"
AT_ONCE = 2000
"""Synthetic images that are held as float64 at a time."""
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Nearness:
    """What counts as a near-copy; public.

    Attributes:
        synthetic: uint8 (M, H, W) or (M, H, W, 3).
        squared: largest squared l2 distance of a near-copy, pixels in 0..255.
        references: number of public images that the distance was chosen from.
    """

    synthetic: Images
    squared: int
    references: int

    @property
    def distance(self) -> float:
        """Largest l2 distance of a near-copy, pixels in [0, 1]."""
        return math.sqrt(self.squared) / 255

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the synthetic images."""
        return fingerprint(self.synthetic)

    @classmethod
    def of(cls, synthetic: Images, public: Images, share: float, device: torch.device) -> Nearness:
        """Choose the distance: at most a share of the public images is as near to a synthetic one.

        Args:
            synthetic: uint8 (M, H, W) or (M, H, W, 3).
            public: uint8, at least 1 / share images of the same shape, none of them private.
            share: in (0, 1).
            device: where to search.

        Raises:
            InputError: too few public images.
        """
        check_number(len(public), share)
        with Progress("public images", len(public), "image") as progress:
            found = nearest_images(public, synthetic, device, progress.advance)
        squares = np.sort(np.rint(np.square(found.distances * 255)).astype(np.int64))
        # fewer than share * N lie strictly below this one; identical images are near in any case
        return cls(synthetic, max(0, int(squares[math.floor(share * len(public))]) - 1), len(public))

    def holds(self, images: Tensor, device: torch.device) -> Tensor:
        """Whether each image has a near-copy among the synthetic ones; bool (n,).

        All numbers are whole and below 2^53, so float64 is exact, whatever else is in the batch.

        Args:
            images: uint8 (n, H, W) or (n, H, W, 3).
            device: where to compute.
        """
        own = images.flatten(1).to(device, torch.float64)
        near = torch.zeros(len(own), dtype=torch.bool, device=device)
        norms = own.square().sum(1, keepdim=True)
        for start in range(0, len(self.synthetic), AT_ONCE):
            other = torch.from_numpy(self.synthetic[start : start + AT_ONCE]).flatten(1).to(device, torch.float64)
            squares = norms + other.square().sum(1) - 2 * (own @ other.T)
            near |= (squares <= self.squared).any(1)
        return near.cpu()


def fingerprint(images: Images) -> str:
    """sha256 (hex) of images and their shape."""
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()


def check_number(public: int, share: float) -> None:
    """Refuse too few public images: one of them must be as near as a near-copy.

    Raises:
        InputError: fewer than 1 / share.
    """
    least = math.ceil(1 / share)
    if public < least:
        problem = f"{public} images; the distance of near-copies needs {least} or more"
        raise InputError("public", f"{problem}, or a larger copies.reference_share in the policy")


def budget(near: Nearness, facts: PublicFacts, epsilon: float, delta: float) -> Budget:
    """The budget of the count.

    The title binds its recorded result to the synthetic images and the distance.

    Raises:
        InputError: epsilon or delta out of range.
        PrivacyRefused: two accountants disagree.
    """
    who = "people of whom an image has" if facts.unit == ONE_PERSON else "private images with"
    title = (
        f"number of {who} one of {len(near.synthetic):,} synthetic images (sha256 {near.fingerprint[:16]}) within an "
        f"l2 distance of {math.sqrt(near.squared):.6g} (pixels in 0..255)"
    )
    spec = QuerySpec(name=NAME, kind="count", title=title, dataset_size=facts.dataset_size)
    return calibrate([spec], epsilon=epsilon, delta=delta, unit=facts.unit)


def release_count(access: PrivateAccess, near: Nearness) -> int:
    """Release the number of private images (or people) with a near-copy, with noise.

    Args:
        access: within `charged`, of the budget of `budget`.
        near: what counts as a near-copy.

    Raises:
        PrivacyRefused: the budget does not list the count.
        Stopped: a stop was requested.
    """
    return access.count(NAME, lambda images: near.holds(images, access.device), access.images)


@dataclass(frozen=True)
class Counted:
    """The noisy count and what it tells.

    Attributes:
        count: noisy; may be negative.
        noise_stddev: of its noise.
        dataset_size: N, private images or people.
        unit: what N counts.
        epsilon: what it spent, at `delta`.
        delta: of the count.
        with_model: epsilon of model and count together, at `delta`.
        confidence: of `at_most`.
    """

    count: int
    noise_stddev: float
    dataset_size: int
    unit: str
    epsilon: float
    delta: float
    with_model: float
    confidence: float

    @classmethod
    def of(cls, count: int, spent: Budget, model: Sequence[DpEvent], confidence: float) -> Counted:
        """What a count tells."""
        return cls(
            count=count,
            noise_stddev=spent.main.noise_stddev,
            dataset_size=spent.dataset_size,
            unit=spent.unit,
            epsilon=spent.spent,
            delta=spent.delta,
            with_model=prv_epsilon([*model, *spent.events()], spent.delta),
            confidence=confidence,
        )

    @property
    def at_most(self) -> int:
        """Upper bound on the true count: the noise is below it with `confidence`."""
        return max(0, math.ceil(self.count + blur(self.noise_stddev, self.confidence)))

    def record(self, near: Nearness) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "count": self.count,
            "noise_stddev": self.noise_stddev,
            "at_most": self.at_most,
            "confidence": self.confidence,
            "dataset_size": self.dataset_size,
            "unit": self.unit,
            "epsilon": float(rounded_up(self.epsilon, 6)),
            "delta": self.delta,
            "epsilon_with_model": float(rounded_up(self.with_model, 6)),
            "distance": near.distance,
            "synthetic": len(near.synthetic),
            "synthetic_sha256": near.fingerprint,
            "references": near.references,
        }


def blur(noise_stddev: float, confidence: float) -> float:
    """What noise and rounding may take from a count, with a one-sided confidence."""
    return float(norm.ppf(confidence)) * noise_stddev + 0.5


def largest_count(policy: CopiesPolicy, dataset_size: int) -> int:
    """The largest number of near-copies that the policy allows."""
    return math.floor(policy.max_share * dataset_size)


def too_blurred(policy: CopiesPolicy, spent: Budget) -> str:
    """Why the count could not pass even without near-copies; empty if it can."""
    noise, most = blur(spent.main.noise_stddev, policy.confidence), largest_count(policy, spent.dataset_size)
    if noise <= most:
        return ""
    return (
        f"noise alone may be {rounded_up(noise)}, and {most:,} of {spent.dataset_size:,} {plural(spent.unit)} are "
        "allowed: nothing was counted or spent; raise copies.epsilon or copies.max_share"
    )


def copies_rule(policy: CopiesPolicy, found: Counted | str, unit: str) -> Rule:
    """Whether few enough private images have a near-copy; text says why it was not counted."""
    share = f"{100 * policy.max_share:.3g}%"
    demand = f"at most {share} of the private {plural(unit)} have a near-copy among the synthetic images"
    if isinstance(found, str):
        return rule(NAME, demand, found, None, required=policy.required)
    most = largest_count(policy, found.dataset_size)
    words = (
        f"{found.count:,} of {found.dataset_size:,}, counted with noise of standard deviation "
        f"{rounded_down(found.noise_stddev)}: at most {found.at_most:,} with {found.confidence:.0%} confidence; "
        f"{most:,} allowed"
    )
    return rule(NAME, demand, words, found.at_most <= most, required=policy.required)
