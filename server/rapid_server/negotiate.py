"""Content negotiation (RFC 9110, section 12.5.1): the offered media type that an Accept header prefers."""

from __future__ import annotations

from collections.abc import Sequence


def choose(accept: str, offered: Sequence[str]) -> str | None:
    """Return the member of `offered` that the header `accept` prefers, or None if it accepts none of them.

    The quality of a type is that of the most specific range that matches it. Of equal qualities the more specific range
    wins, then the earlier type in `offered`. An empty header accepts everything. Parameters other than q are ignored,
    and so are malformed ranges.
    """
    ranges = [parsed for part in accept.split(",") if (parsed := _parse(part)) is not None]
    if not accept.strip():
        ranges = [("*/*", 1.0)]
    best: tuple[float, int] = (0.0, 0)
    chosen = None
    for media_type in offered:
        specificity, quality = max(
            ((_specificity(name, media_type), q) for name, q in ranges),
            default=(0, 0.0),
        )
        if specificity and quality > 0 and (quality, specificity) > best:
            best, chosen = (quality, specificity), media_type
    return chosen


def _specificity(name: str, media_type: str) -> int:
    """3 for the type itself, 2 for `image/*`, 1 for `*/*`, 0 if it does not match."""
    if name == media_type:
        return 3
    if name == media_type.partition("/")[0] + "/*":
        return 2
    return 1 if name == "*/*" else 0


def _parse(part: str) -> tuple[str, float] | None:
    """Split `image/png;q=0.5` into type and quality; None if it is malformed."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    if name.count("/") != 1:
        return None
    quality = 1.0
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return None
            if not 0 <= quality <= 1:
                return None
    return name, quality
