"""Candidates: images that the model drew for given classes, and what the private probe takes them for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.methods.rapid.distillation_settings import When
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.parts import Parts
from rapid.progress import Progress
from rapid.sampling.streams import make_streams
from rapid.stopping import check_stop


@dataclass(frozen=True, eq=False)
class Candidates:
    """Drawn images.

    Attributes:
        images: uint8 (n, H, W) or (n, H, W, 3).
        probabilities: of each class by the probe, float32 (n, classes).
        wanted: classes that they were drawn for, int64 (n,).
    """

    images: NDArray[np.uint8]
    probabilities: NDArray[np.float32]
    wanted: NDArray[np.int64]

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Which of them the probe takes for the class that they were drawn for, (n,)."""
        return self.accepted_at(0.0)

    def accepted_at(self, confidence: float) -> NDArray[np.bool_]:
        """Those that are accepted if the probe must be at least so sure, (n,)."""
        sure = self.probabilities.max(1) >= confidence
        found: NDArray[np.bool_] = (self.probabilities.argmax(1) == self.wanted) & sure
        return found


def draw_candidates(parts: Parts, device: torch.device, number: int = 0, when: When = "after") -> Candidates:
    """Draw `private.distillation.candidates` images, of all classes equally many.

    Args:
        parts: of a private bundle with classes and a probe.
        device: where to compute.
        number: of the round; the first draws as `distillation.sampling` says, later ones as images are drawn.
        when: before or after DP-SGD; their seeds differ.

    Raises:
        Stopped: a stop was requested.
    """
    own, generation = parts.settings.private.distillation, parts.settings.generation
    chosen = generation if number else own.sampling or generation
    # with one attempt for an image a sampler has no probe
    sampler = RapidSampler(parts, device, chosen.model_copy(update={"attempts": max(2, chosen.attempts)}))
    seed = number + (own.rounds if when == "before" else 0)
    wanted = np.arange(own.candidates, dtype=np.int64) % len(parts.classes)
    with Progress("candidates", own.candidates, "image") as progress:
        return judged(sampler, wanted, seed, progress)


def judged(sampler: RapidSampler, wanted: NDArray[np.int64], seed: int, progress: Progress) -> Candidates:
    """Draw images of given classes, and let the probe judge them.

    Args:
        sampler: with a probe.
        wanted: classes, int64 (n,), n >= 1.
        seed: of the streams 0 to n - 1.
        progress: advances by n.

    Raises:
        Stopped: a stop was requested.
    """
    images, probabilities = [], []
    for numbers in _portions(len(wanted), sampler.batch_size):
        check_stop()
        drawn, chances = sampler.finish(sampler.sample(make_streams(seed, numbers), wanted[numbers])[1])
        assert chances is not None
        images.append(drawn)
        probabilities.append(chances)
        progress.advance(len(numbers))
    return Candidates(np.concatenate(images), np.concatenate(probabilities), wanted)


def surest(
    probabilities: NDArray[np.float32], wanted: NDArray[np.int64], keep: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the images that the probe takes for the class that they were drawn for, the surest of each class.

    Args:
        probabilities: float32 (n, classes).
        wanted: classes that the images were drawn for, int64 (n,).
        keep: share of such images of each class that is kept; at least one where there is any.

    Returns:
        Rows, int64 (m,), and their classes, int64 (m,).
    """
    labels, sure = probabilities.argmax(1), probabilities.max(1)
    rows = []
    for number in range(probabilities.shape[1]):
        own = np.flatnonzero((labels == number) & (wanted == number))
        order = own[np.argsort(-sure[own], kind="stable")]
        rows.append(order[: max(1, round(keep * len(order)))])
    chosen = np.concatenate(rows)
    return chosen, labels[chosen].astype(np.int64)


def _portions(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    return (np.arange(start, min(start + size, count)) for start in range(0, count, size))
