"""Guidance by the private probe: covariance, direction and length of a move, and what becomes of images."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rapid_variants import make
from torch import Tensor

from rapid.bundle import Bundle
from rapid.config.presets import generation_settings
from rapid.config.sections import ScheduleSettings
from rapid.diffusion import Schedule
from rapid.errors import InputError
from rapid.methods.rapid import guidance
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.generator import PRIVATE
from rapid.methods.rapid.guidance import REACH, PosteriorCovariance, ProbeGuidance
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder
from rapid.probe.network import Probe
from rapid.sampling.generate import generate
from rapid.sampling.streams import make_streams

SHAPE, D, CLASSES = (2, 3, 3), 4, 3
ALMOST_SURE = 0.999999
"""A confidence that is not reached."""


def random_moments(covariances: int, seed: int) -> ClassMoments:
    """With an orthonormal basis."""
    generator = torch.Generator().manual_seed(seed)
    made = ClassMoments({"shape": list(SHAPE), "dimensions": D, "classes": CLASSES, "covariances": covariances})
    made.basis.copy_(torch.linalg.qr(torch.randn(18, D, generator=generator))[0].T)
    made.factors.copy_(torch.randn(covariances, D, D, generator=generator))
    made.rest.copy_(torch.rand(2, generator=generator))
    return made.eval()


@given(st.sampled_from([1, CLASSES]), st.integers(0, 2**31), st.integers(0, 4))
def test_the_covariance_is_that_of_a_gaussian_given_a_noisy_value(covariances: int, seed: int, count: int) -> None:
    """Against the conditional covariance S - a^2 S (a^2 S + b^2)^-1 S of dense matrices in float64.

    Outside of the subspace the variances of channels are taken along the axes, projected: exact where they are equal.
    """
    moments = random_moments(covariances, seed)
    deviation = float(moments.rest[0])
    moments.rest.mul_(deviation / moments.outside_deviation())
    schedule = Schedule.build(ScheduleSettings())
    generator = torch.Generator().manual_seed(seed)
    t = torch.randint(1, 1001, (count,), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    directions = torch.randn(count, *SHAPE, generator=generator)
    found = PosteriorCovariance(moments, schedule).times(directions, t, labels)
    assert found.shape == directions.shape
    basis, rest = moments.basis.double(), deviation**2
    for row in range(count):
        factor = moments.factors[labels[row] if covariances > 1 else 0].double()
        prior = basis.T @ factor @ factor.T @ basis + rest * (torch.eye(18) - basis.T @ basis)
        a, b = (float(part(t[row : row + 1]).square()) for part in (schedule.signal, schedule.noise))
        given_x = prior - a * prior @ torch.linalg.solve(a * prior + b * torch.eye(18), prior)
        torch.testing.assert_close(found[row].flatten().double(), given_x @ directions[row].flatten().double(),
                                   rtol=1e-3, atol=1e-4)  # fmt: skip


def test_without_moments_latents_are_standard_normal() -> None:
    schedule = Schedule.build(ScheduleSettings())
    directions, t = torch.randn(3, *SHAPE), torch.tensor([1, 500, 1000])
    found = PosteriorCovariance(None, schedule).times(directions, t, torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(found, schedule.noise(t).square() * directions)


def alike(limit: float) -> Tensor:
    """The same limit for ten classes."""
    return torch.full((10,), limit)


def parts_of(private: Bundle) -> tuple[Probe, Autoencoder, Schedule]:
    schedule = Schedule.build(private.settings_as(RapidSettings).schedule)
    return private.component("probe", Probe), private.component("autoencoder", Autoencoder), schedule


def states(private: Bundle, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, timesteps, and labels."""
    shape = private.settings_as(RapidSettings).latent_shape
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(count, *shape, generator=generator)
    return x0, torch.randint(1, 1001, (count,), generator=generator), torch.arange(count) % 10


def test_a_move_goes_up_the_likelihood(private: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its direction is compared with difference quotients of log p(label) of decoded images, in float64."""
    monkeypatch.setattr(guidance, "ROUGHNESS", 0.0)
    monkeypatch.setattr(guidance, "SHIFT", 0)
    probe, autoencoder, schedule = parts_of(private)
    x0, t, labels = states(private, 1)
    moved = ProbeGuidance(probe, autoencoder, schedule, None, alike(ALMOST_SURE)).towards(x0, t, labels)
    exact, decoder = deepcopy(probe).double(), deepcopy(autoencoder).double()

    @torch.no_grad()
    def likelihood(latents: Tensor) -> float:
        return float(exact(decoder.decode_raw(decoder.unnormalised(latents))).log_softmax(1)[0, labels[0]])

    directions = torch.randn(8, *x0.shape, generator=torch.Generator().manual_seed(1)).double()
    slopes = [(likelihood(x0 + 1e-5 * way) - likelihood(x0 - 1e-5 * way)) / 2e-5 for way in directions]
    along = [float(((moved - x0) * way).sum()) for way in directions]
    assert np.corrcoef(slopes, along)[0, 1] > 0.999
    assert np.dot(slopes, along) > 0


def test_a_move_is_as_long_as_told(private: Bundle) -> None:
    """In standard deviations of x_0 given x_t, which without moments are those of the noise."""
    x0, t, labels = states(private, 6)
    probe, autoencoder, schedule = parts_of(private)
    moved = ProbeGuidance(probe, autoencoder, schedule, None, alike(ALMOST_SURE)).towards(x0, t, labels)
    lengths = ((moved - x0) / schedule.noise(t)).square().flatten(1).mean(1).sqrt()
    torch.testing.assert_close(lengths, torch.full((6,), REACH), rtol=1e-3, atol=0)


def test_nothing_moves_where_the_probe_is_confident(private: Bundle) -> None:
    x0, t, labels = states(private, 6)
    moved = ProbeGuidance(*parts_of(private), None, alike(1e-9)).towards(x0, t, labels)
    assert torch.equal(moved, x0)


def test_each_class_has_its_own_limit(private: Bundle) -> None:
    """Rows of a class with limit 0 stay, and the others move as they do by themselves; so on other devices, too."""
    x0, t, labels = states(private, 10)
    limits = alike(ALMOST_SURE)
    limits[::2] = 0
    guide = ProbeGuidance(*parts_of(private), None, limits)
    moved = guide.towards(x0, t, labels)
    assert torch.equal(moved[::2], x0[::2])
    everyone = ProbeGuidance(*parts_of(private), None, alike(ALMOST_SURE)).towards(x0, t, labels)
    torch.testing.assert_close(moved[1::2], everyone[1::2], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(guide._moved(x0, t, labels, limits[labels]), moved, rtol=1e-3, atol=1e-4)


def test_a_move_does_not_depend_on_the_batch(private: Bundle) -> None:
    """Rows of a batch may be at different timesteps."""
    x0, t, labels = states(private, 7)
    guide = ProbeGuidance(*parts_of(private), None, alike(ALMOST_SURE))
    whole = guide.towards(x0, t, labels)
    for row in range(7):
        one = slice(row, row + 1)
        torch.testing.assert_close(guide.towards(x0[one], t[one], labels[one]), whole[one], rtol=1e-3, atol=1e-4)


def test_successive_timesteps_are_seen_differently() -> None:
    """Whatever the number of steps: their distance is no multiple of the number of views."""
    assert all((1000 // steps) % guidance.VIEWS for steps in range(1, 1001))


def test_guided_images_are_taken_for_their_class_more_often(private: Bundle) -> None:
    found = []
    for confidence in (0.0, 0.9):
        generator = make(private, retrieval="none", probe_guidance=confidence)
        labels = np.arange(40) % 10
        chances = generator.label(generator.decode(generator.sample(make_streams(1, np.arange(40)), labels)[1]))
        assert chances is not None
        found.append(np.log(chances[np.arange(40), labels]).mean())
    assert found[1] > found[0]


def test_it_applies_to_the_private_denoiser_and_to_classes(private: Bundle) -> None:
    plain, guided = (make(private, retrieval="none", attempts=1, probe_guidance=some) for some in (0.0, 0.9))
    x, t, labels = states(private, 2)
    assert not torch.equal(plain.predict(PRIVATE, x, t, labels), guided.predict(PRIVATE, x, t, labels))
    assert torch.equal(plain.predict(PRIVATE, x, t, None), guided.predict(PRIVATE, x, t, None))


def test_a_probe_that_knows_no_classes_does_not_guide(public_bundle: Path) -> None:
    bundle = Bundle.open(public_bundle, "model")
    plain, guided = (generate(make(bundle, probe_guidance=some), 3, seed=1).images for some in (0.0, 0.5))
    assert np.array_equal(plain, guided)


@pytest.mark.parametrize("value", ["-0.1", "1", "nan"])
def test_a_confidence_is_a_probability_below_one(private: Bundle, value: str) -> None:
    with pytest.raises(InputError, match="probe_guidance"):
        generation_settings(private.settings_as(RapidSettings), [f"generation.probe_guidance={value}"])
