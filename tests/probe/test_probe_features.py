"""How the public images of a batch are drawn for the probe."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import chisquare

from rapid.probe.features import draw_rows


def test_rows_are_drawn_as_often_as_their_weights_say() -> None:
    """A row of weight 0 never is."""
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.5, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    counts = np.bincount(draw_rows(weights.cumsum(0), 90_000, generator), minlength=6)
    assert counts[weights == 0].sum() == 0
    assert chisquare(counts[[1, 3, 4]], 90_000 * np.array([1, 3, 0.5]) / 4.5).pvalue > 0.001


def test_there_may_be_more_rows_than_torch_multinomial_takes() -> None:
    count = (1 << 24) + 5
    rows = draw_rows(torch.ones(count, dtype=torch.float64).cumsum(0), 1000, torch.Generator().manual_seed(0))
    assert rows.dtype == torch.int64
    assert 0 <= int(rows.min()) < count / 50
    assert count - count / 50 < int(rows.max()) < count
