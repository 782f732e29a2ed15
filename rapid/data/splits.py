"""The disjoint split of the public images into D_pre and D_ref."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid.config.sections import SplitSettings
from rapid.errors import InputError


def split_indices(count: int, settings: SplitSettings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of D_pre (training) and D_ref (knowledge base): disjoint, sorted, together 0..count-1.

    Public data only, so a fixed seed is allowed: the split can be rebuilt from the settings in the bundle.

    Raises:
        InputError: too few images for both parts to have one.
    """
    reference = round(count * settings.reference)
    if not 0 < reference < count:
        raise InputError(
            f"--public: {count} images cannot be split with split.reference={settings.reference}; give more"
        )
    order = np.random.default_rng(settings.seed).permutation(count)
    return np.sort(order[reference:]), np.sort(order[:reference])
