"""The loss with noise multiplicity against a loop over images and draws, and the distribution of its draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from methods.tiny import TINY
from oracles.gradients import clipped_sum
from scipy import stats
from torch import Tensor

from rapid.diffusion.preconditioning import CONFIGURATIONS, Configuration
from rapid.dp.gradients import BookKeeper
from rapid.dp.randomness import Randomness
from rapid.methods import apply_overrides
from rapid.methods.dpdm.objective import DenoisingObjective
from rapid.methods.dpdm.private_stage import new_denoiser
from rapid.methods.dpdm.settings import DpdmSettings

SD = math.sqrt(1 / 3)
# lambda of Table 7
WEIGHTS: dict[str, Callable[[float], float]] = {
    "vp": lambda s: 1 / s**2,
    "ve": lambda s: 1 / s**2,
    "v": lambda s: (s**2 + 1) / s**2,
    "edm": lambda s: (s**2 + SD**2) / (s * SD) ** 2,
}


def tiny() -> DpdmSettings:
    found = apply_overrides({"method": "dpdm", **TINY["dpdm"]["settings"]}, ["image.size=8"])
    assert isinstance(found, DpdmSettings)
    return found


def objective(configuration: Configuration = "edm", dropout: float = 0.5) -> DenoisingObjective:
    return DenoisingObjective(new_denoiser(tiny(), 3, configuration).eval(), dropout, Randomness())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_k_draws_are_averaged_before_clipping(name: Configuration) -> None:
    """Algorithm 1, once more: (1/K) sum over k of lambda ||D(x + n) - x||^2, per image, its gradient clipped."""
    count, draws_each, clip = 3, 4, 0.4
    loss = objective(name)
    denoiser = loss.denoiser
    x0, labels = torch.rand(count, 1, 8, 8) * 2 - 1, torch.tensor([0, 1, 2])
    rows = torch.arange(count).repeat_interleave(draws_each)
    draws = loss.draw((count * draws_each, 1, 8, 8))
    keeper = BookKeeper(denoiser)
    found, norms = keeper.clipped_sum(
        lambda: loss.losses(x0[rows], labels[rows], draws), count, clip, multiplicity=draws_each
    )

    def one(examples: slice) -> Tensor:
        i, total = examples.start, torch.zeros(())
        for k in range(i * draws_each, (i + 1) * draws_each):
            sigma = float(draws.sigma[k])
            label = 3 if draws.dropped[k] else int(labels[i])
            noisy = x0[i] + sigma * draws.noise[k]
            error = denoiser(noisy[None], draws.sigma[k : k + 1], torch.tensor([label]))[0] - x0[i]
            total = total + WEIGHTS[name](sigma) * (error**2).mean()
        return total[None] / draws_each

    expected, expected_norms = clipped_sum(keeper.parameters, one, count, clip)
    torch.testing.assert_close(norms.double(), expected_norms, rtol=1e-3, atol=1e-6)
    whole = torch.sqrt(sum((e.square().sum() for e in expected), torch.zeros((), dtype=torch.float64)))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-3, atol=2e-4 * float(whole))


def test_draws() -> None:
    loss = objective(dropout=0.2)
    draws = loss.draw((2000, 1, 8, 8))
    assert stats.kstest(draws.noise.flatten()[:20_000].numpy(), "norm").pvalue > 1e-6
    assert stats.kstest(draws.sigma.log().numpy(), stats.norm(-1.2, 1.2).cdf).pvalue > 1e-6
    assert stats.binomtest(int(draws.dropped.sum()), 2000, 0.2).pvalue > 1e-6
    assert not objective(dropout=0.0).draw((500, 1, 8, 8)).dropped.any()


def test_pixels_are_in_minus_one_to_one() -> None:
    """A loss of uint8 images is that of the same images as floats, with the same draws."""
    loss = objective(dropout=0.0)
    images, labels = torch.randint(0, 256, (5, 8, 8), dtype=torch.uint8), torch.arange(5) % 3
    draws = loss.draw((5, 1, 8, 8))
    loss.draw = lambda shape: draws  # type: ignore[method-assign]
    wanted = loss.losses(images[:, None].double().div(127.5).sub(1).float(), labels, draws)
    torch.testing.assert_close(loss(images, labels), wanted)
    null = loss.losses(images[:, None].double().div(127.5).sub(1).float(), torch.full((5,), 3), draws)
    torch.testing.assert_close(loss(images), null)


def test_levels_are_those_of_the_configuration_times_a_factor() -> None:
    """Of EDM, ln sigma is normal with mean -1.2 and deviation 1.2; a factor of 3.3 moves the mean to -0.006."""
    loss = DenoisingObjective(new_denoiser(tiny(), 3, "edm").eval(), 0.0, Randomness(), level_scale=3.3)
    found = loss.draw((4000, 1, 1, 1)).sigma.log().double().numpy()
    assert stats.kstest(found, stats.norm(-1.2 + math.log(3.3), 1.2).cdf).pvalue > 1e-4


def test_the_first_weights_are_always_the_same() -> None:
    state = torch.get_rng_state()
    first, second = (new_denoiser(tiny(), 3, "edm").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)
