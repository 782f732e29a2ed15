"""Padded batches: sizes that follow from public numbers, and the same sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor, nn

from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.padding import OVERFLOW, pad, padded_size
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, Release


def tail(examples: int, rate: float, size: int) -> float:
    """P[Binomial > size], summed term by term."""
    terms = (
        math.lgamma(examples + 1)
        - math.lgamma(k + 1)
        - math.lgamma(examples - k + 1)
        + k * math.log(rate)
        + (examples - k) * math.log1p(-rate)
        for k in range(size + 1, examples + 1)
    )
    return math.fsum(math.exp(term) for term in terms)


@settings(max_examples=60, deadline=None)
@given(examples=st.integers(1, 3000), rate=st.floats(1e-4, 0.999), piece=st.integers(1, 64))
def test_a_larger_batch_is_as_rare_as_stated(examples: int, rate: float, piece: int) -> None:
    size = padded_size(examples, rate, piece)
    assert size % piece == 0
    assert tail(examples, rate, size) <= OVERFLOW * (1 + 1e-6)
    if size > piece:
        assert tail(examples, rate, size - piece - 1) > OVERFLOW * (1 - 1e-6)


def test_a_full_batch_has_all_examples() -> None:
    assert padded_size(10, 1.0, 4) == 12
    assert padded_size(0, 0.5, 4) == 0


@settings(max_examples=60, deadline=None)
@given(examples=st.integers(0, 50), share=st.floats(0, 1), piece=st.integers(1, 9), pieces=st.integers(0, 9))
def test_what_was_drawn_comes_first_and_counts(examples: int, share: float, piece: int, pieces: int) -> None:
    indices = torch.randperm(examples)[: round(share * examples)]
    batch = pad(indices, examples, piece * pieces, piece, Randomness())
    assert batch.indices[batch.drawn].tolist() == indices.tolist()
    if examples:
        assert len(batch.indices) == max(piece * pieces, -(-len(indices) // piece) * piece)
        assert not len(batch.indices) or 0 <= int(batch.indices.min()) <= int(batch.indices.max()) < examples
    else:
        assert len(batch.indices) == 0


def test_the_padding_is_uniform() -> None:
    batch = pad(torch.zeros(0, dtype=torch.int64), 7, 7000, 1000, Randomness())
    assert chisquare(np.bincount(batch.indices.numpy(), minlength=7)).pvalue > 1e-6


def release_of(draws: int, band: int = 1) -> Release:
    spec = DpSgdSpec(
        name="any", dataset_size=60, expected_batch=12, steps=5, clip_norm=0.5, multiplicity=draws, band=band
    )
    return Release(spec=spec, noise_multiplier=2.0)


@pytest.mark.parametrize(("physical", "draws", "band"), [(8, 1, 1), (8, 3, 1), (2, 3, 1), (8, 1, 4)])
def test_padding_changes_no_sum_and_fixes_the_work(physical: int, draws: int, band: int) -> None:
    """Also next to examples of the padding whose gradients are not finite."""
    torch.manual_seed(0)
    network, x, calls = nn.Linear(3, 2).double(), torch.randn(60, 3, dtype=torch.float64), list[int]()
    x[7] = math.nan

    def losses(indices: Tensor) -> Tensor:
        calls.append(len(indices))
        return network(x[indices]).square().sum(1)

    release = release_of(draws, band)
    mechanism = PrivateMechanism(release, network, losses, physical_batch=physical, pad_batches=True)
    plain = PrivateMechanism(release, network, losses, physical_batch=physical)
    work = set()
    for _ in range(20):
        indices = mechanism._draw_batch()
        calls.clear()
        found = mechanism._clipped_sum(*mechanism._padded(indices))
        work.add(tuple(calls))
        assert len(indices) <= -(-60 // band)
        torch.testing.assert_close(found, plain._clipped_sum(indices), rtol=1e-9, atol=1e-12)
    assert len(work) == 1


def test_pieces_in_bfloat16_have_one_size() -> None:
    """Kernels could add in another order for another size. Without a batch nothing is computed."""
    torch.manual_seed(0)
    network, x, calls = nn.Linear(3, 2), torch.randn(60, 3), list[int]()

    def losses(indices: Tensor) -> Tensor:
        calls.append(len(indices))
        return network(x[indices]).float().square().sum(1)

    mechanism = PrivateMechanism(release_of(1), network, losses, physical_batch=8, autocast=True)
    for count in (0, 1, 7, 8, 9, 60):
        calls.clear()
        batch = mechanism._padded(torch.arange(count))
        found = mechanism._clipped_sum(*batch)
        assert calls == [8] * math.ceil(count / 8)
        if count == 0:
            assert not found.any()
    calls.clear()
    for _ in range(5):
        mechanism.gradient()
    assert set(calls) <= {8}
    # a piece is no larger than a batch ever is
    large = PrivateMechanism(release_of(1), network, losses, physical_batch=4096, autocast=True)
    assert large._piece == padded_size(60, 12 / 60, 1) < 60


def test_an_empty_part_needs_no_padding() -> None:
    network = nn.Linear(3, 2)
    mechanism = PrivateMechanism(
        release_of(1), network, lambda i: network(torch.zeros(len(i), 3)).sum(1), physical_batch=4,
        pad_batches=True,
    )  # fmt: skip
    mechanism._examples = 0
    assert mechanism._clipped_sum(*mechanism._padded(torch.zeros(0, dtype=torch.int64))).count_nonzero() == 0
