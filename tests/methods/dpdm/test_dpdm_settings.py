"""Settings of sampling reach the sampler: its calls against EDM's and DPDM's algorithms, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from methods.tiny import TINY
from numpy.typing import NDArray

from rapid.diffusion.samplers import Path
from rapid.methods import apply_overrides
from rapid.methods.dpdm.generator import DpdmSampler
from rapid.methods.dpdm.private_stage import new_denoiser
from rapid.methods.dpdm.settings import DpdmGenerationSettings, DpdmSettings

CPU = torch.device("cpu")
STEPS = 6
LARGEST, RHO = 80.0, 7
GUIDED = 1.5
CHURN = ["generation.churn=1.2", "generation.churn_min=0.1", "generation.churn_max=20", "generation.churn_noise=1.25"]


def sampler(*overrides: str) -> DpdmSampler:
    own = apply_overrides(
        {"method": "dpdm", **TINY["dpdm"]["settings"]}, ["image.size=8", f"generation.steps={STEPS}", *overrides]
    )
    assert isinstance(own, DpdmSettings)
    denoiser = new_denoiser(own, 3, "edm").eval()
    return DpdmSampler(denoiser, own, ("a", "b", "c"), 10.0, CPU, own.generation)


def path(*overrides: str) -> Path:
    (phase,) = sampler(*overrides).route()
    assert isinstance(phase.sampler, Path)
    return phase.sampler


def levels(last: float = 0.002) -> NDArray[np.float64]:
    """EDM, Equation 5."""
    low, high = last ** (1 / RHO), LARGEST ** (1 / RHO)
    return np.array([(high + i / (STEPS - 1) * (low - high)) ** RHO for i in range(STEPS)])


def test_churn_is_that_of_the_settings() -> None:
    """EDM, Algorithm 2: gamma = S_churn / N within [S_min, S_max], and noise of deviation S_noise."""
    found, sigma = path("generation.sampler=churn", *CHURN), levels()
    within = (sigma >= 0.1) & (sigma <= 20)
    assert 0 < within.sum() < STEPS - 1
    raised = sigma * np.where(within, 1 + 1.2 / STEPS, 1)
    # the calls of a step: at its raised level, and at the next level
    np.testing.assert_allclose(found.sigmas[::2].numpy(), raised, rtol=1e-5)
    np.testing.assert_allclose(found.sigmas[1::2].numpy(), sigma[1:], rtol=1e-5)
    added = 1.25 * np.sqrt(raised**2 - sigma**2)
    # what arrives at the first step lies above S_max, and has no noise added
    assert found.first_level == pytest.approx(LARGEST)
    np.testing.assert_allclose(found.weights[1::2, 0, 3].numpy(), added[1:], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("change", CHURN)
def test_each_churn_setting_has_an_effect(change: str) -> None:
    """Each alone, beside the values of the paper for this epsilon."""
    usual, other = path("generation.sampler=churn"), path("generation.sampler=churn", change)
    assert not (torch.equal(usual.sigmas, other.sigmas) and torch.equal(usual.weights, other.weights))


@pytest.mark.parametrize("name", ["ddim", "stochastic-ddim"])
def test_the_last_level_is_that_of_the_settings(name: str) -> None:
    found = path(f"generation.sampler={name}", "generation.last_level=0.3")
    np.testing.assert_allclose(found.sigmas.numpy(), levels(0.3), rtol=1e-5)


def test_the_last_level_of_churn() -> None:
    found = path("generation.sampler=churn", "generation.churn=0", "generation.last_level=0.3")
    np.testing.assert_allclose(found.sigmas[::2].numpy(), levels(0.3), rtol=1e-5)


def test_aim_and_data_choose_among_the_papers_settings() -> None:
    """Tables 14 and 15 at epsilon 10: w, S_churn, S_min, S_max, S_noise."""

    def row(*overrides: str) -> tuple[float, ...]:
        found = sampler(*overrides).tuned
        return found.guidance, found.churn.amount, found.churn.least, found.churn.most, found.churn.scale

    assert row() == (0, 10, 0.025, 50, 1)
    assert row("generation.aim=fidelity") == (0.25, 50, 0.05, 50, 1)
    assert row("generation.data=fashion-mnist") == (0, 10, 0.1, 50, 1)
    assert row("generation.aim=fidelity", "generation.data=celeba") == (0, 50, 0.005, 50, 1)
    assert row("generation.aim=fidelity", "generation.guidance=0") == (0, 50, 0.05, 50, 1)


@torch.no_grad()
def test_guidance_is_w() -> None:
    """(1 + w) D(label) - w D(null)."""
    found = sampler(f"generation.guidance={GUIDED}")
    x, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    sigma = torch.tensor([0.1, 1.0, 5.0, 40.0])
    denoiser = found._denoiser
    alone, null = denoiser(x, sigma, labels), denoiser(x, sigma, denoiser.null_labels(4))
    expected = (1 + GUIDED) * alone - GUIDED * null
    torch.testing.assert_close(found.predict("denoiser", x, sigma, labels), expected, rtol=1e-3, atol=1e-4)
    off = sampler("generation.guidance=0")
    torch.testing.assert_close(off.predict("denoiser", x, sigma, labels), alone)


def test_records_of_earlier_versions_are_read() -> None:
    """`decay` is what `learning_rate_schedule` was called."""
    tree = apply_overrides({"method": "dpdm"}, []).model_dump(mode="json")
    del tree["private"]["learning_rate_schedule"]
    for earlier, now in (("none", "constant"), ("cosine", "cosine")):
        found = DpdmSettings.model_validate(tree | {"private": tree["private"] | {"decay": earlier}})
        assert found.private.learning_rate_schedule == now
    assert isinstance(found.generation, DpdmGenerationSettings)
    assert math.isclose(found.private.learning_rate, 2e-3)
