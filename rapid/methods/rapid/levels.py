"""How far the private probe guides each class, and how sure of a candidate it must be: what enough of them reach.

Guidance moves images towards what the probe tells classes apart by, and so their means away from those of the private
classes. Classes that the denoiser draws well enough by itself are better off without it. A probe that is seldom sure
would cost many candidates for each image.

Formal guarantee: the model's own images and the private probe are all that is used, so this is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from rapid.methods.rapid.candidates import Candidates, judged
from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.guidance import GuidanceLevels
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.progress import Progress

SHARES = 0.0, 0.2, 0.5
"""Of `generation.probe_guidance`: what is tried for a class, before all of it."""
STEP = 0.05
"""Between confidences that are tried."""
DRAWN, LEAST_DRAWN, SEED = 256, 16, 0
"""Images that are drawn with each share, and once more for the confidence, and the fewest of a class."""


def levels_wanted(settings: RapidSettings) -> bool:
    """Whether anything is to be found where there is a probe: candidates may be refused, and one of the two is on."""
    own = settings.generation
    return own.attempts > 1 and (guides_less(own) or lowers_confidence(own))


def guides_less(own: GenerationSettings) -> bool:
    """Whether classes may be guided less than the setting says."""
    return own.probe_guidance > 0 and own.enough_accepted > 0


def lowers_confidence(own: GenerationSettings) -> bool:
    """Whether candidates may need a lower probability than the setting says."""
    return own.confidence > 0 and own.least_accepted > 0


def drawn_of_each(classes: int) -> int:
    """Number of images that are drawn of each class, of at least one, with each share."""
    return max(LEAST_DRAWN, DRAWN // classes)


def fit_levels(parts: Parts, device: torch.device) -> GuidanceLevels:
    """Find how far each class is guided, and how sure the probe must be, as far as the settings want it.

    A class gets the least guidance with which the probe accepts a share of `generation.enough_accepted`. Then all get
    the highest confidence with which it accepts a share of `generation.least_accepted` of their candidates together.

    Args:
        parts: with classes and a probe, as images will be drawn with them.
        device: where to compute.

    Raises:
        Stopped: a stop was requested.
    """
    own, classes = parts.settings.generation, {"classes": len(parts.classes)}
    levels = GuidanceLevels(classes)
    levels.limits.fill_(1)
    if guides_less(own):
        _lower_limits(levels, parts, device)
    if lowers_confidence(own):
        every = np.arange(len(parts.classes)).repeat(drawn_of_each(len(parts.classes)))
        with Progress("confidence", len(every), "image") as progress:
            found = judged(RapidSampler(replace(parts, levels=levels), device, own), every, SEED, progress)
        chosen = GuidanceLevels(classes | {"confidence": _lowered(found, own)})
        chosen.limits.copy_(levels.limits)
        return chosen
    return levels


def _lower_limits(levels: GuidanceLevels, parts: Parts, device: torch.device) -> None:
    own, count = parts.settings.generation, len(parts.classes)
    each, still = drawn_of_each(count), np.arange(count)
    with Progress("guidance", len(SHARES) * each * count, "image") as progress:
        for share in SHARES:
            limit = share * own.probe_guidance
            sampler = RapidSampler(
                parts, device, own.model_copy(update={"probe_guidance": limit, "enough_accepted": 0})
            )
            found = judged(sampler, still.repeat(each), SEED, progress)
            accepted = found.accepted_at(own.confidence).reshape(-1, each).mean(1)
            enough = accepted >= own.enough_accepted
            levels.limits[still[enough]] = limit
            still = still[~enough]
            if not len(still):
                break


def _lowered(found: Candidates, own: GenerationSettings) -> float:
    """The highest of the confidences that are tried with which enough candidates are accepted; 0 if none is.

    1 if the setting's own need not be lowered.
    """
    if found.accepted_at(own.confidence).mean() >= own.least_accepted:
        return 1.0
    tried = (own.confidence - number * STEP for number in range(1, math.ceil(own.confidence / STEP)))
    return next((sure for sure in tried if found.accepted_at(sure).mean() >= own.least_accepted), 0.0)
