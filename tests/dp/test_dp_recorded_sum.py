"""Replayed sums on a CPU, where what would be recorded is run again: padding, examples that do not count, sizes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rapid.dp.gradients import BookKeeper
from rapid.dp.gradients.forms import ROUNDING_MARGIN
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.objective import Objective, Selected
from rapid.dp.randomness import Randomness
from rapid.dp.recorded_sum import SIZES, RecordedSum
from rapid.dp.releases import DpSgdSpec, Release

EXAMPLES, CLIP_NORM = 30, 0.4


def fixed_stream(seed: int = 0) -> Callable[[int], bytes]:
    generator = np.random.default_rng(seed)
    return generator.bytes


class Squares(Objective):
    """Squared errors of a network."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        return rows

    def compute(self, *prepared: Tensor) -> Tensor:
        x, y = prepared
        return (self.network(x) - y).square().sum(1)


class Subject:
    """A network, examples, and the sums of both ways."""

    def __init__(self, draws: int, piece: int) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.x, self.y = torch.randn(EXAMPLES, 5), torch.randn(EXAMPLES, 3)
        self.sizes: list[int] = []
        self.draws = draws
        self.keeper = BookKeeper(self.network)
        spec = DpSgdSpec(
            name="any", dataset_size=EXAMPLES, expected_batch=8, steps=1, clip_norm=CLIP_NORM, multiplicity=draws
        )
        self.recorded = RecordedSum(
            self.keeper,
            Selected(Squares(self.network), self.take),
            spec,
            piece=piece,
            examples=EXAMPLES,
            randomness=Randomness(),
            capture=lambda work: work,
        )

    def take(self, positions: Tensor) -> list[Tensor]:
        self.sizes.append(len(positions))
        return [self.x[positions], self.y[positions]]

    def by_loop(self, positions: Tensor, counted: Tensor) -> Tensor:
        """The sum, example by example in float64."""
        network = copy.deepcopy(self.network).double()
        parameters = list(network.parameters())
        total = self.keeper.empty_sum()
        for position in positions[counted].tolist():
            loss = (network(self.x[position].double()) - self.y[position]).square().sum()
            gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
            total += gradient * min(1.0, CLIP_NORM / (1 + ROUNDING_MARGIN) / float(gradient.norm()))
        return total


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.sampled_from([1, 3]), st.integers(0, 2**31))
def test_the_sum_is_that_of_a_loop(sizes: list[int], draws: int, seed: int) -> None:
    subject, generator = Subject(draws, piece=16), torch.Generator().manual_seed(seed)
    for size in sizes:
        positions = torch.randperm(EXAMPLES, generator=generator)[:size]
        counted = torch.rand(size, generator=generator) < 0.7
        found, wanted = subject.recorded.clipped_sum(positions, counted), subject.by_loop(positions, counted)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("piece", [1, 5, 16])
def test_pieces_are_padded_to_few_sizes(piece: int) -> None:
    subject = Subject(2, piece)
    for size in range(1, piece + 1):
        subject.recorded.clipped_sum(torch.arange(size), torch.ones(size, dtype=torch.bool))
    assert len(set(subject.sizes)) <= SIZES
    assert max(subject.sizes) == 2 * piece
    assert all(2 * size <= found < 2 * (size + -(-piece // SIZES)) for size, found in enumerate(subject.sizes, 1))


def test_padding_of_examples_that_are_not_finite_adds_nothing() -> None:
    subject = Subject(1, piece=16)
    subject.x[1:] = torch.nan
    for _ in range(3):
        found = subject.recorded.clipped_sum(torch.tensor([0]), torch.tensor([True]))
        wanted = subject.by_loop(torch.tensor([0]), torch.tensor([True]))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_weights_that_moved_are_the_ones_that_count() -> None:
    subject, one = Subject(1, piece=8), torch.tensor([True, True])
    for _ in range(4):
        with torch.no_grad():
            for parameter in subject.network.parameters():
                parameter.add_(0.3)
        found, wanted = (
            subject.recorded.clipped_sum(torch.tensor([3, 7]), one),
            subject.by_loop(torch.tensor([3, 7]), one),
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("band", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mechanism_releases_the_same_as_without_recordings(
    monkeypatch: pytest.MonkeyPatch, band: int, padded: bool
) -> None:
    """With a known byte stream for batches and almost no noise, also where earlier sums return in later steps."""
    released = []
    for recorded in (False, True):
        monkeypatch.setattr("rapid.dp.mechanism.records", lambda _, own=recorded: own)
        subject = Subject(2, piece=4)
        spec = DpSgdSpec(
            name="any",
            dataset_size=EXAMPLES,
            expected_batch=6,
            steps=8,
            clip_norm=CLIP_NORM,
            multiplicity=2,
            band=band,
        )
        mechanism = PrivateMechanism(
            Release(spec=spec, noise_multiplier=1e-9),
            subject.network,
            Selected(Squares(subject.network), subject.take),
            physical_batch=8,
            randomness=Randomness(fixed_stream()),
        )
        if padded:
            mechanism._pad_batches = True
        steps = []
        for step in range(8):
            # batches by the step, not by a stream that padding takes from, too
            mechanism._randomness = Randomness(fixed_stream(step))
            steps.append(torch.cat([part.flatten() for part in mechanism.gradient()]))
        assert (mechanism._recorded is not None) == recorded
        released.append(torch.stack(steps))
    torch.testing.assert_close(released[0], released[1], rtol=1e-3, atol=1e-6)
    assert released[0].norm(dim=1).min() > 1e-4


def test_recordings_end_with_what_made_them() -> None:
    """Their memory is large: it must not wait for the garbage collector."""
    subject = Subject(1, piece=4)
    watched = weakref.ref(subject.recorded)
    gc.disable()
    try:
        del subject.recorded
        assert watched() is None
    finally:
        gc.enable()
