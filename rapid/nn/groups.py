"""How many groups a group normalisation has."""

from __future__ import annotations


def group_count(channels: int) -> int:
    """The largest divisor of `channels` that is at most 32 and leaves four channels a group where it can.

    With one channel a group the normalisation would cancel every vector that is added before it, and with it the
    timestep and the class.
    """
    most = max(1, min(32, channels // 4))
    return next(count for count in range(most, 0, -1) if channels % count == 0)
