"""Epsilon and delta in text never claim more than what holds."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid.rounding import as_typed, rounded_down, rounded_up, up_to_places

NUMBERS = st.floats(1e-300, 1e300) | st.floats(1e-15, 1e4)
DIGITS = st.integers(1, 8)


def unit(value: float, digits: int) -> Decimal:
    """One in the last of the significant digits."""
    return Decimal(10) ** (Decimal(value).adjusted() - digits + 1)


@given(NUMBERS, DIGITS)
def test_up_is_never_below_and_within_one_unit(value: float, digits: int) -> None:
    shown = rounded_up(value, digits)
    assert float(shown) >= value
    assert Decimal(shown) - Decimal(value) <= unit(value, digits) * (1 + Decimal(10) ** -6)
    assert len(Decimal(shown).normalize().as_tuple().digits) <= digits


@given(NUMBERS, DIGITS)
def test_down_is_never_above_and_within_one_unit(value: float, digits: int) -> None:
    shown = rounded_down(value, digits)
    assert float(shown) <= value
    assert Decimal(value) - Decimal(shown) <= unit(value, digits) * (1 + Decimal(10) ** -6)


@given(NUMBERS, DIGITS)
def test_rounding_again_changes_nothing(value: float, digits: int) -> None:
    for rounded in (rounded_up, rounded_down):
        shown = rounded(value, digits)
        assert rounded(float(shown), digits) == shown


@given(NUMBERS | st.integers(0, 1000))
def test_a_requested_number_keeps_all_its_digits(value: float) -> None:
    assert float(as_typed(value)) == value


@given(st.floats(0, 1e6), st.integers(0, 6))
def test_places(value: float, places: int) -> None:
    found = up_to_places(value, places)
    assert value <= found
    assert Decimal(found) - Decimal(value) <= Decimal(10) ** -places * (1 + Decimal(10) ** -3)
    assert found == round(found, places)


@pytest.mark.parametrize(
    ("value", "digits", "up", "down"),
    [
        (1.2345, 3, "1.24", "1.23"),
        (1.0, 3, "1", "1"),
        (0.1, 3, "0.1", "0.1"),
        (1e-5, 2, "1e-05", "1e-05"),
        (1.5148e-6, 2, "1.6e-06", "1.5e-06"),
        (9.9991, 3, "10", "9.99"),
        (1234.5, 3, "1240", "1230"),
        (0.00012341, 3, "0.000124", "0.000123"),
        (0, 3, "0", "0"),
        (math.inf, 3, "inf", "inf"),
    ],
)
def test_examples(value: float, digits: int, up: str, down: str) -> None:
    assert (rounded_up(value, digits), rounded_down(value, digits)) == (up, down)


def test_what_is_no_number_is_told() -> None:
    assert rounded_up(math.nan) == rounded_down(math.nan) == "nan"
    assert math.isinf(up_to_places(math.inf, 6))
    assert [as_typed(value) for value in (1, 1.0, 0.5, 1e-5, 1.25e-7, 100.0)] == [
        "1", "1", "0.5", "1e-05", "1.25e-07", "100",
    ]  # fmt: skip
