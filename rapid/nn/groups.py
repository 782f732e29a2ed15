"""The number of groups of a group normalisation."""

from __future__ import annotations


def group_count(channels: int) -> int:
    """The largest divisor of `channels` that is at most 32 and leaves at least four channels per group; else 1.

    With a single channel per group, normalisation would cancel any vector added before it, and with it the embeddings
    of timestep and class.
    """
    most = max(1, min(32, channels // 4))
    return next(count for count in range(most, 0, -1) if channels % count == 0)
