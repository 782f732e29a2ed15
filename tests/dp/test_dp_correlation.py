"""Correlated noise: the strategy, its decoding, who has a turn, what a unit can change, and what is accounted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.linalg import toeplitz
from scipy.special import logsumexp
from torch import Tensor, nn

from rapid.config.sections import DpSgdSettings
from rapid.dp.accounting import pld_epsilon, prv_epsilon
from rapid.dp.audit import Subject
from rapid.dp.audit.bench import own_rows
from rapid.dp.audit.correlation import band_findings
from rapid.dp.audit.findings import StepAudit
from rapid.dp.budget import Budget, calibrate
from rapid.dp.correlation import Correlation, coefficients, deal, noise_factor, noise_of_sums
from rapid.dp.events import dp_sgd_event
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.proposal import Proposal, choices
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release
from rapid.errors import InputError

Matrix = NDArray[np.float64]


def release_of(noise_multiplier: float = 2.0, **changes: float) -> Release:
    base = {"name": "any", "dataset_size": 48, "expected_batch": 6, "steps": 12, "clip_norm": 0.5, "band": 4}
    return Release(spec=DpSgdSpec.model_validate(base | changes), noise_multiplier=noise_multiplier)


def strategy(chosen: Sequence[float], steps: int) -> Matrix:
    """The lower triangular Toeplitz matrix with these numbers in its first column."""
    column = np.zeros(steps)
    column[: min(steps, len(chosen))] = chosen[:steps]
    return np.asarray(toeplitz(column, np.zeros(steps)), np.float64)


def of_sums(chosen: Sequence[float], steps: int) -> Matrix:
    """Standard deviations of the decoded prefix sums, by inverting the matrix."""
    factor = np.tril(np.ones((steps, steps))) @ np.linalg.inv(strategy(chosen, steps))
    return np.asarray(np.linalg.norm(factor, axis=1))


def fixed_stream(seed: str) -> Randomness:
    """The same bytes for the same seed."""
    count = 0

    def stream(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(f"{seed} {count}".encode()).digest(size)

    return Randomness(stream)


def silent(release: Release, network: nn.Linear, **options: int) -> PrivateMechanism:
    """A mechanism whose losses have no gradient: what comes out is noise."""
    inputs = torch.zeros(1, network.in_features)
    return PrivateMechanism(
        release, network, lambda i: network(inputs.expand(len(i), -1)).sum(1) * 0, physical_batch=64, **options
    )


def gradient(mechanism: PrivateMechanism) -> Tensor:
    return torch.cat([part.flatten() for part in mechanism.gradient()])


# --- the strategy -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(band=st.integers(1, 24), steps=st.integers(1, 120))
def test_columns_have_norm_one_in_the_safe_direction(band: int, steps: int) -> None:
    chosen = coefficients(band, steps)
    square = sum(Fraction(c) ** 2 for c in chosen)
    assert len(chosen) == min(band, steps)
    assert 1 - Fraction(1, 2**40) < square <= 1
    # falling and positive, so the zeros of the polynomial are not inside the unit circle (Enestrom, Kakeya)
    assert chosen[0] > 0
    assert all(b <= a + 1e-12 for a, b in pairwise(chosen))
    assert chosen[-1] >= 0


@pytest.mark.parametrize(("band", "steps"), [(1, 7), (2, 40), (5, 40), (8, 30), (40, 40)])
def test_noise_of_sums_is_that_of_the_inverted_matrix(band: int, steps: int) -> None:
    chosen = coefficients(band, steps)
    np.testing.assert_allclose(noise_of_sums(chosen, steps), of_sums(chosen, steps), rtol=1e-9)
    assert noise_factor(band, steps) == pytest.approx(of_sums(chosen, steps)[-1] / math.sqrt(steps))


def test_the_strategy_is_the_best_of_its_kind() -> None:
    """Two numbers: against all angles. More: against the square-root matrix, and no small change helps."""
    steps = 40

    def mean(chosen: Sequence[float]) -> float:
        scaled = np.asarray(chosen) / np.linalg.norm(chosen)
        return float(np.square(of_sums(scaled.tolist(), steps)).mean())

    angles = np.linspace(0, math.pi / 4, 400)
    assert mean(coefficients(2, steps)) <= min(mean([math.cos(a), math.sin(a)]) for a in angles) * (1 + 1e-9)
    root = [math.comb(2 * j, j) / 4**j for j in range(steps)]
    generator = np.random.default_rng(0)
    for band in (4, 8):
        found = coefficients(band, steps)
        assert mean(found) < 0.99 * mean(root[:band])
        changes = generator.normal(0, 0.01, (50, band))
        assert mean(found) <= min(mean(found + change) for change in changes) * (1 + 1e-6)
    # Fichtenberger et al.: without a band the square root's mean error is within a factor of the optimum
    assert mean(coefficients(steps, steps)) <= mean(root)
    means = [mean(coefficients(band, steps)) for band in (1, 2, 4, 8, 16, 40)]
    assert means == sorted(means, reverse=True)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.0, 0.7), max_size=5), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_encoding_and_decoding_are_the_matrix_and_its_inverse(rest: list[float], steps: int, seed: int) -> None:
    chosen = [1.0, *rest]
    matrix = strategy(chosen, steps)
    sums, noise = np.random.default_rng(seed).normal(size=(2, steps, 3))
    correlation = Correlation(chosen)
    encoded, decoded = [], []
    for x, z in zip(torch.from_numpy(sums), torch.from_numpy(noise), strict=True):
        encoded.append(correlation.encode(x.clone()))
        decoded.append(correlation.decode(encoded[-1] + z))
    np.testing.assert_allclose(torch.stack(encoded), matrix @ sums, atol=1e-9)
    expected = sums + np.linalg.solve(matrix, noise)
    np.testing.assert_allclose(torch.stack(decoded), expected, atol=1e-9 * max(1.0, float(np.abs(expected).max())))


# --- the mechanism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [1, 2, 6])
def test_sums_of_steps_have_the_noise_of_the_closed_form(band: int) -> None:
    steps, network = 18, nn.Linear(60, 50)
    release = release_of(3.0, steps=steps, band=band)
    mechanism = silent(release, network)
    rows = torch.stack([gradient(mechanism) for _ in range(steps)]).double().numpy() * (6 / (3.0 * 0.5))
    sums, size = rows.cumsum(0), rows.shape[1]
    expected = of_sums(coefficients(band, steps), steps)
    for row, deviation in zip(sums, expected, strict=True):
        square = float(np.square(row / deviation).sum())
        assert 1e-7 < stats.chi2.cdf(square, size) < 1 - 1e-7
    # what was released is white noise again
    white = strategy(coefficients(band, steps), steps) @ rows
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-6
    assert np.abs(np.corrcoef(white) - np.eye(steps)).max() < 6 / math.sqrt(size)


def test_without_a_band_a_fixed_stream_gives_the_same_bits_as_before() -> None:
    """Against the steps of the mechanism, one by one: coins, clipped sum, noise on the grid, division."""
    torch.manual_seed(0)
    network, x = nn.Linear(3, 2), torch.randn(48, 3)
    release = release_of(band=1)

    def losses(indices: Tensor) -> Tensor:
        return network(x[indices]).square().sum(1)

    mechanism = PrivateMechanism(release, network, losses, physical_batch=7, randomness=fixed_stream("a"))
    plain = PrivateMechanism(release, network, losses, physical_batch=7)
    source = fixed_stream("a")
    for _ in range(3):
        batch = (source.uniform(48) <= 6 / 48).nonzero().flatten()
        total = plain._clipped_sum(batch)
        source.add_noise(total, 2.0 * 0.5)
        assert torch.equal(gradient(mechanism), (total / 6).float())


def test_units_take_turns_and_are_drawn_at_their_rate() -> None:
    """Read from almost noiseless sums of orthogonal gradients."""
    size, band, steps, batch = 60, 3, 240, 10
    subject = own_rows(size)
    release = release_of(1e-3, dataset_size=size, expected_batch=batch, steps=steps, clip_norm=1.0, band=band)
    mechanism = PrivateMechanism(release, subject.network, lambda i: subject.losses(i) * 1e4, physical_batch=4096)
    along = np.stack([gradient(mechanism).view(size, 2).sum(1).numpy() * batch / math.sqrt(2) for _ in range(steps)])
    present = along > 0.5
    assert np.abs(along - present).max() < 0.1
    rounds = present.reshape(steps // band, band, size)
    groups = rounds.any(0)
    # each has its own place in the round, and the groups are of one size
    assert (groups.sum(0) == 1).all()
    assert (groups.sum(1) == size // band).all()
    rate = band * batch / size
    assert stats.binomtest(int(present.sum()), size * steps // band, rate).pvalue > 1e-6
    counts = rounds.any(1).sum(0)
    assert stats.kstest(counts, stats.binom(steps // band, rate).cdf).statistic < 0.35
    assert stats.kstest(rounds.any(1).sum(1), stats.binom(size, rate).cdf).statistic < 0.35


@pytest.mark.parametrize(("count", "band"), [(0, 3), (2, 3), (17, 4), (40, 1)])
def test_groups_are_dealt_evenly(count: int, band: int) -> None:
    sizes = np.bincount(deal(count, band, Randomness()).numpy(), minlength=band)
    assert sizes.sum() == count
    assert sizes.max() - sizes.min() <= 1


@settings(max_examples=12, deadline=None)
@given(band=st.sampled_from([2, 3, 4]), steps=st.integers(1, 14), who=st.integers(0, 11), seed=st.integers(0, 10**6))
def test_a_unit_changes_the_stream_by_at_most_the_clip_norm_a_turn(band: int, steps: int, who: int, seed: int) -> None:
    """The same coins and noise, with and without the unit, whose gradient is huge; over all its turns."""
    torch.manual_seed(seed)
    network, x, clip = nn.Linear(3, 2), torch.randn(12, 3), 0.5
    release = release_of(0.01, dataset_size=12, expected_batch=3, steps=steps, band=band, clip_norm=clip)

    def stream(weight: float) -> Matrix:
        weights = torch.ones(12)
        weights[who] = weight
        mechanism = PrivateMechanism(
            release,
            network,
            lambda i: network(x[i]).square().sum(1) * weights[i],
            physical_batch=5,
            randomness=fixed_stream(str(seed)),
        )
        rows = torch.stack([gradient(mechanism) for _ in range(steps)]).double().numpy() * 3
        return strategy(coefficients(band, steps), steps) @ rows

    change = stream(1e6) - stream(0.0)
    moved = np.flatnonzero(np.linalg.norm(change, axis=1) > 1e-3)
    turns, after = 0, 0
    for step in moved:
        if step >= after:
            turns, after = turns + 1, step + band
            assert np.linalg.norm(change[step:after]) <= clip
            # no larger than it must be: the coefficients are used up
            assert after > steps or np.linalg.norm(change[step:after]) > 0.9 * clip
    assert turns <= math.ceil(steps / band)
    # all its turns have the same place in the round
    assert len({step % band for step in moved}) <= band


def test_a_resumed_stretch_knows_nothing_of_earlier_sums() -> None:
    torch.manual_seed(0)
    network, x = nn.Linear(3, 2), torch.randn(48, 3)
    release, weight = release_of(1e-3, steps=16), torch.tensor(1e6)
    mechanism = PrivateMechanism(release, network, lambda i: network(x[i]).square().sum(1) * weight, physical_batch=64)
    for _ in range(8):
        gradient(mechanism)
    weight.zero_()
    # the sums of the last steps are in what is released next, but not in the estimates
    assert float(gradient(mechanism).norm()) < 0.1
    resumed = silent(release, network, steps_taken=8)
    assert float(gradient(resumed).norm()) < 0.1
    assert resumed.steps_taken == 9
    for steps_taken in (1, 7, 9):
        with pytest.raises(ValueError, match="no whole rounds of 4"):
            silent(release, network, steps_taken=steps_taken)
    # the last round may be a short one
    short = release_of(steps=6)
    assert [short.spec.round_end(n) for n in range(7)] == [0, 4, 4, 4, 4, 6, 6]
    silent(short, network, steps_taken=6)


# --- the accounting -----------------------------------------------------------------------------------------------


def test_the_event_has_one_sampled_gaussian_a_round() -> None:
    release = release_of(1.5, steps=10)
    rate = 4 * 6 / 48
    for steps, rounds in ((None, 3), (0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        assert release.event(steps) == dp_sgd_event(1.5, rate, rounds)
    assert release_of(1.5, steps=10, band=1).event(7) == dp_sgd_event(1.5, 6 / 48, 7)


@pytest.mark.parametrize(("band", "steps", "rate"), [(2, 4, 0.5), (3, 6, 0.3), (3, 5, 1.0)])
def test_no_test_of_membership_beats_the_event(band: int, steps: int, rate: float) -> None:
    """Delta of the whole stream by its exact densities, all patterns of the unit's coins summed up, and Monte Carlo.

    The unit has the first place in the round and always the same gradient of norm 1.
    """
    sigma, matrix, epsilon = 1.3, strategy(coefficients(band, steps), steps), 0.5
    places = range(0, steps, band)
    patterns = np.zeros((2 ** len(places), steps))
    weights = []
    for row, coins in zip(patterns, product((0, 1), repeat=len(places)), strict=True):
        row[list(places)] = coins
        weights.append(math.prod(rate if coin else 1 - rate for coin in coins))
    means, logs = patterns @ matrix.T, np.log(np.maximum(weights, 1e-300))
    generator, count = np.random.default_rng(1), 60_000

    def loss(stream: Matrix) -> Matrix:
        """Logarithm of the density with the unit over that without."""
        terms = [log - np.square((stream - mean) / sigma).sum(1) / 2 for log, mean in zip(logs, means, strict=True)]
        return np.asarray(logsumexp(terms, axis=0) + np.square(stream / sigma).sum(1) / 2)

    noise = sigma * generator.normal(size=(count, steps))
    chosen = generator.choice(len(means), size=count, p=np.array(weights) / sum(weights))
    for losses in (loss(means[chosen] + noise), -loss(noise)):
        beyond = np.maximum(0.0, -np.expm1(epsilon - losses))
        delta, error = float(beyond.mean()), float(beyond.std()) / math.sqrt(count)
        event = dp_sgd_event(sigma, rate, len(places))
        assert epsilon <= pld_epsilon([event], delta - 5 * error) + 1e-3
    # the worse direction is reached but for the last block, which may be cut short
    if steps % band == 0:
        worse = max(
            float(np.maximum(0.0, -np.expm1(epsilon - values)).mean())
            for values in (loss(means[chosen] + noise), -loss(noise))
        )
        assert prv_epsilon([dp_sgd_event(sigma, rate, len(places))], worse) == pytest.approx(epsilon, abs=0.04)


def test_figures_for_groups_and_bands_too_wide_are_refused() -> None:
    spec = release_of().spec
    assert isinstance(spec, DpSgdSpec)
    with pytest.raises(InputError, match="noise_band above 1"):
        calibrate([spec], epsilon=1, delta=1e-3, group_size=2)
    with pytest.raises(ValueError, match=r"band \* expected_batch"):
        release_of(band=9)


# --- records and plans --------------------------------------------------------------------------------------------


def test_the_default_band_is_in_no_record() -> None:
    earlier = {
        "name": "denoiser", "title": "", "share": None, "least_noise_multiplier": 0.0, "kind": "dp-sgd",
        "dataset_size": 100, "expected_batch": 10, "steps": 5, "clip_norm": 1.0, "multiplicity": 1,
    }  # fmt: skip
    record = {"spec": earlier, "noise_multiplier": 2.0}
    release = Release.model_validate(record)
    assert release.model_dump(mode="json") == record
    assert "noise_band" not in DpSgdSettings().model_dump(mode="json")
    banded = Release(spec=release.spec.model_copy(update={"band": 2}), noise_multiplier=2.0)
    assert banded.model_dump(mode="json")["spec"]["band"] == 2
    assert Release.model_validate_json(banded.model_dump_json()) == banded
    again = DpSgdSettings(noise_band=2).model_dump(mode="json")
    assert DpSgdSettings.model_validate(again).noise_band == 2
    assert QuerySpec(name="many", kind="count", dataset_size=3).band == 1


def test_a_plan_tells_the_noise_of_all_steps() -> None:
    numbers = {"dataset_size": 400, "expected_batch": 20, "steps": 30}
    rows = {}
    for band in (1, 5):
        release = release_of(2.0, band=band, **numbers)
        budget = Budget(epsilon=50, delta=1e-4, dataset_size=400, releases=(release,))
        rows[band] = Proposal(50, budget, parameters=9).row()
    assert [rows[band][key] for band in (1, 5) for key in ("expected_batch", "epochs")] == [20, 1.5, 20, 1.5]
    # the sum over all steps, if gradients agree, over its noise; in clip norms
    for band, row in rows.items():
        noise = 2.0 * of_sums(coefficients(band, 30), 30)[-1] * math.sqrt(9)
        assert row["signal_to_noise_all"] == pytest.approx(20 * 30 / noise)
    own = DpSgdSettings(expected_batch=100, steps=40, noise_band=4)
    assert max(batch for batch, _ in choices(own, 1000, [], [])) == 250
    assert max(batch for batch, _ in choices(own, 1000, [], [5])) == 250


# --- the audit ----------------------------------------------------------------------------------------------------


def small() -> Subject:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 8)), torch.randn(12, 6)
    return Subject("small", network, lambda indices: network(x[indices]).square().sum(1), 12, 0.5)


class TooLong(PrivateMechanism):
    """Columns of norm 1.1."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        correlation = self._correlation
        assert correlation is not None
        chosen = [1.1 * c for c in (correlation._first, *correlation._rest)]
        correlation._first, correlation._rest = chosen[0], chosen[1:]


class EveryTurn(PrivateMechanism):
    """Everyone can be in every batch, at the rate of a group whose turn it is."""

    def _draw_batch(self) -> Tensor:
        return (self._randomness.uniform(self._examples) <= self._spec.sample_rate).nonzero().flatten()


class LessNoise(PrivateMechanism):
    def _add_noise(self, total: Tensor) -> None:
        self._randomness.add_noise(total, 0.9 * self.release.noise_stddev)


@pytest.mark.parametrize(
    ("build", "refuted"),
    [(PrivateMechanism, False), (TooLong, True), (EveryTurn, True), (LessNoise, True)],
)
def test_the_audit_knows_the_band(build: type[PrivateMechanism], refuted: bool) -> None:
    findings = band_findings(small(), 3, noise_multiplier=2.0, sample_rate=0.3, build=build)
    assert StepAudit(tuple(findings), 0.0, 1e-3 if refuted else 1e-7).refuted == refuted
