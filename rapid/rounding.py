"""Numbers in text, rounded so that they never claim more privacy than there is.

Epsilon, delta and sample rates are rounded up, noise multipliers and lower bounds down. The value of a float is that of
its shortest decimal form, so 0.1 stays 0.1.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

SMALLEST_FIXED = -4
"""Power of ten below which numbers have an exponent, as in Python's format `g`."""


def rounded_up(value: float, digits: int = 3) -> str:
    """The value to `digits` significant digits, never below it: "0.715", "1.6e-05"; "inf" and "nan" as they are."""
    return _rounded(value, digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 3) -> str:
    """The value to `digits` significant digits, never above it."""
    return _rounded(value, digits, ROUND_FLOOR)


def percent_up(value: float) -> str:
    """A share in percent with one decimal, never below it: "73.2%"."""
    return _percent(value, ROUND_CEILING)


def percent_down(value: float) -> str:
    """The same, never above it."""
    return _percent(value, ROUND_FLOOR)


def as_typed(value: float) -> str:
    """A requested number with all its digits, as a user types it: "1", "0.5", "1e-05"."""
    return _text(Decimal(repr(float(value)))) if math.isfinite(value) else repr(float(value))


def up_to_places(value: float, places: int) -> float:
    """The least number with `places` decimals that is not below the value; infinities and NaN as they are."""
    if not math.isfinite(value):
        return value
    return float(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), ROUND_CEILING))


def _percent(value: float, direction: str) -> str:
    return f"{100 * Decimal(repr(float(value))).quantize(Decimal('0.001'), direction):.1f}%"


def _rounded(value: float, digits: int, direction: str) -> str:
    number = float(value)
    if not math.isfinite(number) or number == 0:
        return as_typed(number)
    exact = Decimal(repr(number))
    return _text(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), direction))


def _text(number: Decimal) -> str:
    """Without trailing zeros; with an exponent for small numbers."""
    if number == 0:
        return "0"
    if number.adjusted() >= SMALLEST_FIXED:
        text = format(number, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
    mantissa = f"{digits[0]}.{digits[1:]}".rstrip(".")
    return f"{'-' if number < 0 else ''}{mantissa}e-{-number.adjusted():02d}"
