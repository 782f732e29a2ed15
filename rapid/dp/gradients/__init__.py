"""Per-example gradients by book-keeping: one forward, one backward for activations only, clipped sums from both."""

from rapid.dp.gradients.bookkeeper import BookKeeper
from rapid.dp.gradients.layers import UnsupportedLayer

__all__ = ["BookKeeper", "UnsupportedLayer"]
