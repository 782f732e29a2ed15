"""Clipped sums of per-example gradients by book-keeping: one forward pass and one backward pass for activations."""

from rapid.dp.gradients import rules as rules  # adds the built-in rules
from rapid.dp.gradients.bookkeeper import BookKeeper
from rapid.dp.gradients.forms import ROUNDING_MARGIN, Direct, Gradient, MatrixGhost, RowsGhost
from rapid.dp.gradients.registry import Rule, UnsupportedLayer, register, rule_of

__all__ = [
    "ROUNDING_MARGIN",
    "BookKeeper",
    "Direct",
    "Gradient",
    "MatrixGhost",
    "RowsGhost",
    "Rule",
    "UnsupportedLayer",
    "register",
    "rule_of",
]
