"""Splitting the public images into D_pre, which trains the networks, and D_ref, which fills the knowledge base."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rapid.config.sections import SplitSettings
from rapid.errors import InputError


def split_indices(count: int, settings: SplitSettings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the indices 0..count-1 at random into D_pre and D_ref.

    The seed is fixed, so the split can be reproduced from a bundle's settings. Use it for public images only.

    Returns:
        Indices of D_pre and of D_ref, int64, sorted and disjoint.

    Raises:
        InputError: one of the parts would be empty.
    """
    reference = round(count * settings.reference)
    if not 0 < reference < count:
        problem = f"{count} images cannot be split with split.reference={settings.reference}"
        raise InputError("public", f"{problem}; give more images")
    order = np.random.default_rng(settings.seed).permutation(count)
    return np.sort(order[reference:]), np.sort(order[:reference])
