"""How far the private probe guides each class: no further than it takes for enough of its candidates to be accepted.

Guidance moves images towards what the probe tells classes apart by, and so their means away from those of the private
classes. Classes that the denoiser draws well enough by itself are better off without it.

Formal guarantee: the model's own images and the private probe are all that is used, so this is post-processing.
"""

from __future__ import annotations

import numpy as np
import torch

from rapid.methods.rapid.candidates import judged
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.guidance import GuidanceLevels
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.progress import Progress

SHARES = 0.0, 0.2, 0.5
"""Of `generation.probe_guidance`: what is tried for a class, before all of it."""
DRAWN, LEAST_DRAWN, SEED = 256, 16, 0
"""Images that are drawn with each share, and the fewest of a class."""


def levels_wanted(settings: RapidSettings) -> bool:
    """Whether levels are to be found where there is a probe: it guides, and candidates may be refused."""
    own = settings.generation
    return own.probe_guidance > 0 and own.enough_accepted > 0 and own.attempts > 1


def drawn_of_each(classes: int) -> int:
    """Number of images that are drawn of each class, of at least one, with each share."""
    return max(LEAST_DRAWN, DRAWN // classes)


def fit_levels(parts: Parts, device: torch.device) -> GuidanceLevels:
    """Find the least guidance of each class with which the probe accepts a share of `generation.enough_accepted`.

    Args:
        parts: with classes and a probe, as images will be drawn with them.
        device: where to compute.

    Raises:
        Stopped: a stop was requested.
    """
    own, count = parts.settings.generation, len(parts.classes)
    levels = GuidanceLevels({"classes": count})
    levels.limits.fill_(1)
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
    return levels
