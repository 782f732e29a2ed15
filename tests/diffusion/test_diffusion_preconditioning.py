"""The four configurations against Table 7 of DPDM, diffusers' EDM, scipy's distributions and exact predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from diffusers import EDMEulerScheduler
from scipy import optimize, stats
from torch import Tensor

from rapid.diffusion.preconditioning import CONFIGURATIONS, EDM, SIGMA_DATA, VE, VP, Preconditioning, V, sampling_levels
from rapid.dp.randomness import Randomness

SIGMAS = [0.002, 0.05, 0.5, 1.0, 7.0, 80.0]
SD = math.sqrt(1 / 3)
Scalar = Callable[[float], float]


class Column(NamedTuple):
    """A column of Table 7."""

    skip: Scalar
    out: Scalar
    scale: Scalar
    time: Scalar
    weight: Scalar


def vp_time(sigma: float) -> float:
    """t with sigma(t) = sigma, by bisection."""

    def excess(t: float) -> float:
        return math.sqrt(math.exp(0.5 * 19.9 * t**2 + 0.1 * t) - 1) - sigma

    return float(optimize.brentq(excess, 0, 1.5, xtol=1e-13))


TABLE_7 = {
    "vp": Column(
        skip=lambda s: 1,
        out=lambda s: -s,
        scale=lambda s: 1 / math.sqrt(s**2 + 1),
        time=lambda s: 999 * vp_time(s),
        weight=lambda s: 1 / s**2,
    ),
    "ve": Column(
        skip=lambda s: 1,
        out=lambda s: s,
        scale=lambda s: 1,
        time=lambda s: math.log(0.5 * s),
        weight=lambda s: 1 / s**2,
    ),
    "v": Column(
        # printed with a root, which the test of what the network predicts refutes
        skip=lambda s: 1 / (1 + s**2),
        out=lambda s: -s / math.sqrt(1 + s**2),
        scale=lambda s: 1 / math.sqrt(1 + s**2),
        time=lambda s: 2 / math.pi * math.acos(1 / math.sqrt(1 + s**2)),
        weight=lambda s: (s**2 + 1) / s**2,
    ),
    "edm": Column(
        skip=lambda s: SD**2 / (s**2 + SD**2),
        out=lambda s: s * SD / math.sqrt(SD**2 + s**2),
        scale=lambda s: 1 / math.sqrt(s**2 + SD**2),
        time=lambda s: math.log(s) / 4,
        weight=lambda s: (s**2 + SD**2) / (s * SD) ** 2,
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("field", Column._fields)
def test_table_7(name: str, field: str) -> None:
    ours = getattr(CONFIGURATIONS[name](), field)(torch.tensor(SIGMAS, dtype=torch.float64))
    theirs = [getattr(TABLE_7[name], field)(sigma) for sigma in SIGMAS]
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6)


def test_edm_as_in_diffusers() -> None:
    """Inputs, time input, outputs and sampling levels of an implementation written by others."""
    theirs = EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=SIGMA_DATA, rho=7.0)
    theirs.set_timesteps(40)
    np.testing.assert_allclose(sampling_levels(40), theirs.sigmas[:-1].numpy(), rtol=1e-5)
    x, out, sigma = torch.randn(6, 1, 4, 4), torch.randn(6, 1, 4, 4), torch.tensor(SIGMAS)
    seen: list[Tensor] = []

    def network(scaled: Tensor, time: Tensor) -> Tensor:
        seen.extend([scaled, time])
        return out

    found = EDM().denoise(network, x, sigma)
    for i in range(6):
        torch.testing.assert_close(seen[0][i], theirs.precondition_inputs(x[i], sigma[i]))
        torch.testing.assert_close(seen[1][i], theirs.precondition_noise(sigma[i]))
        torch.testing.assert_close(found[i], theirs.precondition_outputs(x[i], out[i], sigma[i]), rtol=1e-4, atol=1e-5)


def v_of(x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
    """v = alpha eps - sigma' x0 of Salimans and Ho, where alpha^2 + sigma'^2 = 1 and sigma' / alpha = sigma."""
    angle = sigma.atan()
    return angle.cos() * eps - angle.sin() * x0


@pytest.mark.parametrize(
    ("configuration", "target"),
    [
        (VP(), lambda x0, eps, sigma: eps),
        (VE(), lambda x0, eps, sigma: -eps),
        (V(), v_of),
    ],
)
def test_the_right_prediction_gives_the_image(
    configuration: Preconditioning, target: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    x0, eps = torch.randn(2, 6, 1, 3, 3, dtype=torch.float64)
    sigma = torch.tensor(SIGMAS, dtype=torch.float64)
    column = sigma.view(-1, 1, 1, 1)
    found = configuration.denoise(lambda *_: target(x0, eps, column), x0 + column * eps, sigma)
    torch.testing.assert_close(found, x0)


def test_edm_inputs_and_targets_have_unit_variance() -> None:
    """The identities from which EDM derives its functions, for data of standard deviation sigma_data."""
    edm, s = EDM(0.4), torch.tensor(SIGMAS, dtype=torch.float64)
    torch.testing.assert_close(edm.scale(s) ** 2 * (0.4**2 + s**2), torch.ones_like(s))
    # variance of x0 - c_skip (x0 + n), for independent x0 and n
    left = (1 - edm.skip(s)) ** 2 * 0.4**2 + edm.skip(s) ** 2 * s**2
    torch.testing.assert_close(left, edm.out(s) ** 2)
    # c_skip is where this is smallest, so that the network's errors are amplified least
    for shift in (-1e-3, 1e-3):
        skip = edm.skip(s) + shift
        assert ((1 - skip) ** 2 * 0.4**2 + skip**2 * s**2 > left).all()


LOG_V = (-6.5, 4.5)
DISTRIBUTIONS = {
    "vp": lambda s: (np.array([vp_time(one) for one in s]) - 1e-5) / (1 - 1e-5),
    "ve": stats.loguniform(0.002, 80).cdf,
    # the angle atan(sigma) is uniform between those of log-SNR 13 and -9
    "v": stats.uniform(
        math.atan(math.exp(LOG_V[0])), math.atan(math.exp(LOG_V[1])) - math.atan(math.exp(LOG_V[0]))
    ).cdf,
    "edm": lambda s: stats.norm(-1.2, 1.2).cdf(np.log(s)),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_levels_in_training(name: str) -> None:
    chosen = CONFIGURATIONS[name]()
    drawn = chosen.level(Randomness().uniform(1000)).numpy()
    cdf = DISTRIBUTIONS[name]
    cumulated = np.arctan(drawn) if name == "v" else drawn
    assert stats.kstest(cdf(cumulated), "uniform").pvalue > 1e-6
    ends = chosen.level(torch.tensor([2.0**-53, 1.0], dtype=torch.float64)).float()
    assert ends.isfinite().all()
    assert (ends > 0).all()


def test_the_loss_is_the_weighted_mean_over_pixels() -> None:
    denoised, x0, sigma = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4), torch.tensor([0.1, 1.0, 9.0])
    for name, chosen in CONFIGURATIONS.items():
        found = chosen().losses(denoised, x0, sigma)
        for i in range(3):
            wanted = TABLE_7[name].weight(float(sigma[i])) * float(((denoised[i] - x0[i]) ** 2).sum()) / 32
            assert float(found[i]) == pytest.approx(wanted, rel=1e-4)
