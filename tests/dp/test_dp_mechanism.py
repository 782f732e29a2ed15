"""The mechanism: Poisson batches, clipped sums, noise, and neighbouring data sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data import load_images, sample_path
from rapid.dp.budget import calibrate
from rapid.dp.gradients import BookKeeper
from rapid.dp.gradients.forms import ROUNDING_MARGIN
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import DeviceRandomness
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release
from rapid.errors import PrivacyRefused
from rapid.ranks import Ranks


def release_of(noise_multiplier: float = 2.0, **changes: float) -> Release:
    base = {"name": "any", "dataset_size": 40, "expected_batch": 10, "steps": 5, "clip_norm": 0.5}
    return Release(spec=DpSgdSpec.model_validate(base | changes), noise_multiplier=noise_multiplier)


class Data:
    """A small regression: per-example losses by index, and a record of the calls."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.x = torch.randn(count, 3)
        self.calls: list[int] = []

    def losses(self, indices: Tensor) -> Tensor:
        self.calls.append(len(indices))
        return self.network(self.x[indices]).square().sum(1)


@settings(max_examples=40, deadline=None)
@given(physical=st.integers(1, 50), count=st.integers(0, 40), draws=st.integers(1, 7))
def test_physical_pieces_of_any_size_give_the_same_sum(physical: int, count: int, draws: int) -> None:
    data = Data(40)
    release = release_of(multiplicity=draws)
    indices = torch.randperm(40)[:count]
    whole = PrivateMechanism(release, data.network, data.losses, physical_batch=1000)._clipped_sum(indices)
    data.calls.clear()
    pieces = PrivateMechanism(release, data.network, data.losses, physical_batch=physical)._clipped_sum(indices)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)
    assert sum(data.calls) == count * draws
    assert all(0 < size <= physical for size in data.calls)


@pytest.mark.parametrize("physical", [2, 5, 100])
def test_several_draws_of_an_example_are_averaged_before_clipping(physical: int) -> None:
    """Against a loop: each draw's gradient by autograd, the mean of an example's draws, then the clipping."""
    torch.manual_seed(1)
    network, count, draws = nn.Linear(3, 2), 6, 5
    x, noise = torch.randn(count, 3), torch.randn(count, draws, 3)
    seen = [0] * count

    def losses(indices: Tensor) -> Tensor:
        rows = []
        for index in indices.tolist():
            rows.append(x[index] + noise[index, seen[index]])
            seen[index] += 1
        return network(torch.stack(rows)).square().sum(1)

    mechanism = PrivateMechanism(release_of(multiplicity=draws), network, losses, physical_batch=physical)
    found = mechanism._clipped_sum(torch.arange(count))
    expected = torch.zeros_like(found)
    for index in range(count):
        parts = [
            torch.autograd.grad(network(x[index] + noise[index, k]).square().sum(), list(network.parameters()))
            for k in range(draws)
        ]
        mean = torch.stack([torch.cat([g.flatten() for g in part]) for part in parts]).mean(0)
        expected += mean * min(1.0, 0.5 / (1 + ROUNDING_MARGIN) / float(mean.norm()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_batches_are_poisson() -> None:
    data = Data(1)
    release = release_of(dataset_size=500, expected_batch=60)
    mechanism = PrivateMechanism(release, data.network, data.losses, physical_batch=8)
    draws = np.zeros((400, 500), bool)
    for row in draws:
        row[mechanism._draw_batch().numpy()] = True
    rate = 60 / 500
    # sizes follow the binomial, each image is drawn at the rate, and pairs are independent
    sizes = draws.sum(1)
    edges = stats.binom.ppf(np.linspace(0, 1, 9)[1:-1], 500, rate)
    observed = np.histogram(sizes, np.concatenate([[-1], edges + 0.5, [501]]))[0]
    expected = 400 * np.diff(stats.binom.cdf(np.concatenate([[-1], edges, [500]]), 500, rate))
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    assert abs(draws.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / draws.size)
    often = draws.sum(0)
    edges = stats.binom.ppf(np.linspace(0, 1, 9)[1:-1], 400, rate)
    observed = np.histogram(often, np.concatenate([[-1], edges + 0.5, [401]]))[0]
    expected = 500 * np.diff(stats.binom.cdf(np.concatenate([[-1], edges, [400]]), 400, rate))
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    pairs = (draws[:, ::2] & draws[:, 1::2]).mean()
    assert abs(pairs - rate**2) < 5 * np.sqrt(rate**2 / (400 * 250))


def test_noise_has_the_planned_scale_once_a_step_whatever_the_pieces() -> None:
    network = nn.Linear(300, 300)
    for physical in (1, 64):
        release = release_of(dataset_size=60, expected_batch=30, noise_multiplier=3.0, clip_norm=0.2)
        # losses without a gradient: what comes out is the noise
        mechanism = PrivateMechanism(
            release, network, lambda i: network(torch.zeros(len(i), 300)).sum(1) * 0, physical_batch=physical
        )
        noise = torch.cat([part.flatten() for part in mechanism.gradient()]).numpy()
        scale = 3.0 * 0.2 / 30
        assert stats.kstest(noise / scale, "norm").pvalue > 1e-5


def test_the_noise_of_the_device_has_the_same_scale() -> None:
    total = torch.zeros(200_001, dtype=torch.float64)
    DeviceRandomness().add_noise(total, 0.3)
    assert stats.kstest((total / 0.3).numpy(), "norm").pvalue > 1e-5
    again = torch.zeros(200_001, dtype=torch.float64)
    DeviceRandomness().add_noise(again, 0.3)
    assert not torch.equal(total, again)


def test_ranks_cut_the_noise_among_them() -> None:
    """Each number of the sum gets its noise from exactly one rank, whatever the number of ranks."""
    network = nn.Linear(7, 9)
    for count in (1, 2, 3, 80):
        noised = torch.zeros(72)
        for rank in range(count):
            mechanism = PrivateMechanism(
                release_of(), network, lambda i: i, physical_batch=4, ranks=Ranks(rank, count)
            )  # fmt: skip
            own = torch.full((72,), 1e6, dtype=torch.float64)
            mechanism._add_noise(own)
            noised += (own != 0).float()
        assert noised.eq(1).all()


def test_ranks_cut_the_examples_among_them() -> None:
    for size, count in ((10, 1), (10, 3), (2, 5)):
        parts = [set(Ranks(rank, count).part(size)) for rank in range(count)]
        assert set().union(*parts) == set(range(size))
        assert sum(len(part) for part in parts) == size


def test_any_module_and_loss_can_be_trained() -> None:
    """A classifier of the digits that ship with rapid, privately: no diffusion in it."""
    images = load_images(sample_path("digits"), "digits")
    assert images.labels is not None
    x = torch.from_numpy(images.images[:4000]).float()[:, None] / 255
    y = torch.from_numpy(images.labels[:4000])
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 4, 4), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 49, 10)
    )  # fmt: skip
    spec = DpSgdSpec(name="classifier", dataset_size=3000, expected_batch=300, steps=60, clip_norm=1.0)
    release = calibrate([spec], epsilon=8, delta=1e-4).main
    mechanism = PrivateMechanism(
        release, network, lambda i: F.cross_entropy(network(x[i]), y[i], reduction="none"), physical_batch=256
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(release.spec.steps):
        for parameter, gradient in zip(mechanism.parameters, mechanism.gradient(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    accuracy = (network(x[3000:]).argmax(1) == y[3000:]).float().mean().item()
    assert accuracy > 0.75


def test_an_empty_batch_is_a_step_with_noise() -> None:
    data = Data(100_000)
    release = release_of(dataset_size=100, expected_batch=1)
    mechanism = PrivateMechanism(release, data.network, data.losses, physical_batch=8)
    for _ in range(release.spec.steps):
        assert not mechanism._clipped_sum(torch.zeros(0, dtype=torch.int64)).any()
        assert any(part.any() for part in mechanism.gradient())
    assert mechanism.steps_taken == release.spec.steps


def test_the_sum_is_divided_by_the_expected_batch() -> None:
    data = Data(40)
    release = release_of(noise_multiplier=0.0, expected_batch=40)
    mechanism = PrivateMechanism(release, data.network, data.losses, physical_batch=16)
    total, _ = BookKeeper(data.network).clipped_sum(lambda: data.losses(torch.arange(40)), 40, 0.5)
    torch.testing.assert_close(mechanism.gradient(), [part.float() / 40 for part in total], rtol=1e-4, atol=1e-7)


def test_a_step_beyond_the_plan_is_refused_before_any_example_is_seen() -> None:
    data = Data(40)
    mechanism = PrivateMechanism(release_of(), data.network, data.losses, physical_batch=8, steps_taken=5)
    with pytest.raises(PrivacyRefused, match="5 planned steps"):
        mechanism.gradient()
    assert not data.calls


def test_steps_are_counted_before_the_examples_are_read_and_by_nobody_else() -> None:
    data = Data(40)

    def fails(indices: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    mechanism = PrivateMechanism(release_of(expected_batch=40), data.network, fails, physical_batch=8)
    with pytest.raises(RuntimeError, match="out of memory"):
        mechanism.gradient()
    assert mechanism.steps_taken == 1
    with pytest.raises(AttributeError):
        mechanism.steps_taken = 0


def test_a_query_is_no_training() -> None:
    data = Data(40)
    query = Release(spec=QuerySpec(name="many", kind="count", dataset_size=40), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="'many' is a count, not dp-sgd"):
        PrivateMechanism(query, data.network, data.losses, physical_batch=8)
