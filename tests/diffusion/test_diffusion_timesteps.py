"""The mixture of uniform distributions over timesteps, against its closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rapid.diffusion.timesteps import TimestepMixture

PAPER = {
    "imagenet32": ((0.03, 0.77, 0.2), (0, 30, 800, 1000)),
    "mnist": ((0.05, 0.9, 0.05), (0, 200, 800, 1000)),
    "cifar10": ((0.015, 0.785, 0.2), (0, 30, 600, 1000)),
}


@pytest.mark.parametrize("name", PAPER)
def test_timesteps_are_drawn_as_often_as_the_mixture_says(name: str) -> None:
    weights, breaks = PAPER[name]
    mixture = TimestepMixture(weights, breaks)
    count = 200_000
    t = mixture.quantile(torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    expected = np.zeros(1000)
    for weight, low, high in zip(weights, breaks, breaks[1:], strict=False):
        expected[low:high] = weight / (high - low)
    np.testing.assert_allclose(mixture.probabilities.numpy(), expected)
    assert stats.chisquare(np.bincount(t.numpy() - 1, minlength=1000), count * expected).pvalue > 1e-5


@given(st.data())
def test_quantiles_invert_the_distribution_function(data: st.DataObject) -> None:
    breaks = (0, *sorted(data.draw(st.sets(st.integers(1, 60), min_size=1, max_size=5))))
    shares = data.draw(
        st.lists(st.integers(0, 9), min_size=len(breaks) - 1, max_size=len(breaks) - 1).filter(lambda s: sum(s) > 0)
    )
    weights = [share / sum(shares) for share in shares]
    mixture = TimestepMixture(weights, breaks)
    uniform = data.draw(st.floats(0, 1))
    (t,) = mixture.quantile(torch.tensor([uniform], dtype=torch.float64)).tolist()

    def distribution(step: int) -> float:
        """F(step), part by part."""
        parts = zip(weights, breaks, breaks[1:], strict=False)
        return sum(w * min(1.0, max(0.0, (step - low) / (high - low))) for w, low, high in parts)

    assert distribution(t - 1) - 1e-9 <= uniform <= distribution(t) + 1e-9
    # never one that the mixture leaves out
    assert distribution(t) > distribution(t - 1)
