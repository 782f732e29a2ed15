"""Samplers against the paper's algorithms, written as loops, and on a Gaussian whose score is known in closed form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rapid.diffusion.call_table import combine
from rapid.diffusion.preconditioning import sampling_levels
from rapid.diffusion.samplers import SAMPLERS, Churn, Path, SamplerName

Array = NDArray[np.float64]
Denoise = Callable[[Array, float], Array]
MEAN, DEVIATION = 0.3, 0.5


def gaussian(x: Array, sigma: float) -> Array:
    """D(x; sigma) for data from N(MEAN, DEVIATION^2): the posterior mean."""
    precisions = 1 / DEVIATION**2, 1 / sigma**2
    return (precisions[0] * MEAN + precisions[1] * x) / sum(precisions)


def curved(x: Array, sigma: float) -> Array:
    """Any nonlinear denoiser."""
    return np.sin(x) / (1 + sigma) + np.cos(3 * sigma) / 5


class Noise:
    """A fixed sequence of arrays."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._rng, self._shape = np.random.default_rng(5), shape

    def __call__(self) -> Array:
        return self._rng.standard_normal(self._shape)


def algorithm_3(denoise: Denoise, z: Noise, levels: Array, stochastic: bool) -> Array:
    x = levels[0] * z()
    for s, t in itertools.pairwise(levels):
        d = denoise(x, s)
        if stochastic:
            x = x + 2 * (t - s) / s * (x - d) + math.sqrt(2 * (s - t) * s) * z()
        else:
            x = x + (t - s) / s * (x - d)
    return denoise(x, levels[-1])


def algorithm_4(denoise: Denoise, z: Noise, levels: Array, churn: Churn) -> Array:
    steps = len(levels)
    x = levels[0] * z()
    for n, s in enumerate(levels):
        t = levels[n + 1] if n + 1 < steps else 0.0
        gamma = min(churn.amount / steps, math.sqrt(2) - 1) if churn.least <= s <= churn.most else 0.0
        raised = s * (1 + gamma)
        if gamma > 0:
            x = x + math.sqrt(raised**2 - s**2) * churn.scale * z()
        f = (x - denoise(x, raised)) / raised
        following = x + (t - raised) * f
        if t:
            g = (following - denoise(following, t)) / t
            following = x + (t - raised) * 0.5 * (f + g)
        x = following
    return x


def run(path: Path, denoise: Denoise, z: Noise) -> Array:
    """All calls of a path with one batch."""
    x = torch.from_numpy(path.first_level * z())
    kept = torch.zeros_like(x)
    for sigma, weights, noisy in zip(path.sigmas.tolist(), path.weights.double(), path.noisy, strict=True):
        denoised = torch.from_numpy(denoise(x.numpy(), sigma))
        fresh = torch.from_numpy(z()) if noisy else torch.zeros_like(x)
        after = combine(weights.expand(len(x), 2, 4), torch.stack([x, kept, denoised, fresh], 1))
        x, kept = after[:, 0], after[:, 1]
    return x.numpy()


CHURNS = [Churn(), Churn(10, 0.2, 10, 1.005), Churn(200, 0.01, 50), Churn(4, 0.05, 50)]


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("churn", CHURNS)
def test_the_algorithms_of_the_paper(steps: int, churn: Churn) -> None:
    levels, shape = sampling_levels(steps), (5, 2, 3)
    for name, stochastic in (("ddim", False), ("stochastic-ddim", True)):
        wanted = algorithm_3(curved, Noise(shape), levels, stochastic)
        path = Path.build(name, steps)  # type: ignore[arg-type]
        assert len(path) == steps
        np.testing.assert_allclose(run(path, curved, Noise(shape)), wanted, rtol=1e-4, atol=1e-4)
    wanted = algorithm_4(curved, Noise(shape), levels, churn)
    path = Path.build("churn", steps, churn)
    assert len(path) == 2 * steps - 1
    np.testing.assert_allclose(run(path, curved, Noise(shape)), wanted, rtol=1e-4, atol=1e-4)


def solution(x: Array) -> Array:
    """Where the probability flow leads x from level 80 to 0: distances to the mean shrink as sqrt(s^2 + sigma^2)."""
    return MEAN + (x - MEAN) * DEVIATION / math.sqrt(DEVIATION**2 + 80**2)


@pytest.mark.parametrize(("name", "order"), [("ddim", 1), ("churn", 2)])
def test_errors_fall_with_the_order_of_the_method(name: SamplerName, order: int) -> None:
    starts = 80 * Noise((50, 1, 1))()

    def error(steps: int) -> float:
        return float(np.abs(run(Path.build(name, steps), gaussian, Noise((50, 1, 1))) - solution(starts)).max())

    coarse, fine = error(40), error(160)
    assert coarse / fine == pytest.approx(4**order, rel=0.35)
    assert fine < 0.03


class Moments(NamedTuple):
    mean: float
    variance: float


def moments(path: Path) -> list[Moments]:
    """Mean and variance of X after each call, exactly: the denoiser of a Gaussian is linear, so states are normal."""
    mean, covariance = np.zeros(2), np.diag([path.first_level**2, 0.0])
    found = []
    for sigma, weights in zip(path.sigmas.tolist(), path.weights.double().numpy(), strict=True):
        slope = DEVIATION**2 / (DEVIATION**2 + sigma**2)
        offset = MEAN * sigma**2 / (DEVIATION**2 + sigma**2)
        matrix = weights[:, :2] + np.outer(weights[:, 2], [slope, 0])
        mean = matrix @ mean + weights[:, 2] * offset
        covariance = matrix @ covariance @ matrix.T + np.outer(weights[:, 3], weights[:, 3])
        found.append(Moments(mean[0], covariance[0, 0]))
    return found


@pytest.mark.parametrize(
    ("name", "churn"),
    [("stochastic-ddim", Churn()), ("churn", Churn()), *(("churn", churn) for churn in CHURNS[2:]),
     ("churn", Churn(100, 0.05))],
)  # fmt: skip
def test_the_marginal_is_kept(name: SamplerName, churn: Churn) -> None:
    """The last state has the distribution of the data, the better the more steps; so has every state with its noise."""
    errors = []
    for steps in (500, 2000):
        path = Path.build(name, steps, churn)
        assert path.first_level == pytest.approx(80, rel=0.5)
        states = moments(path)
        assert states[-1].mean == pytest.approx(MEAN, abs=0.02)
        errors.append(abs(math.sqrt(states[-1].variance) / DEVIATION - 1))
    assert errors[1] < 2e-3
    # the weights are float32
    assert errors[1] < max(errors[0] / 2.5, 1e-4)
    for sigma, state in zip(path.sigmas.tolist()[1:], states, strict=False):
        # a Heun step's first half may be off by the square of the step
        assert math.sqrt(state.variance) == pytest.approx(math.sqrt(DEVIATION**2 + sigma**2), rel=0.01)


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize("last", [0.002, 0.3, 1.0])
def test_the_image_is_what_is_denoised_at_the_last_level(name: SamplerName, last: float) -> None:
    """Of a Gaussian, its mean given the noisy image, whose variance is s^4 / (s^2 + sigma^2)."""
    path = Path.build(name, 1000, Churn(), last)
    assert path.sigmas[-1] == pytest.approx(last)
    state = moments(path)[-1]
    assert state.mean == pytest.approx(MEAN, abs=0.02)
    assert state.variance == pytest.approx(DEVIATION**4 / (DEVIATION**2 + last**2), rel=0.02)


def test_noise_is_larger_than_the_marginal_with_a_scale_above_one() -> None:
    plain, more = (moments(Path.build("churn", 200, Churn(60, 0.05, 50, scale)))[-1] for scale in (1.0, 1.05))
    assert more.variance > 1.01 * plain.variance


def test_every_sampler_ends_without_noise() -> None:
    for name in SAMPLERS:
        path = Path.build(name, 5, Churn(50, 0, 100))  # type: ignore[arg-type]
        assert not path.noisy[-1]
        assert any(path.noisy) == (name != "ddim")
