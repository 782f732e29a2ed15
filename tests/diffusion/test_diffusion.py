"""Schedule, losses and samplers against closed forms, loops and the step-by-step chain."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, PNDMScheduler
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from rapid.config.sections import LEAST_SIGNAL, ScheduleSettings
from rapid.diffusion import Schedule
from rapid.diffusion.losses import denoising_loss, guided_loss, info_nce, noise_prediction_loss
from rapid.diffusion.solvers import SamplerName, Solver, early_grid, late_grid
from rapid.methods.dp_diffusion.networks import build_schedule
from rapid.methods.dp_diffusion.settings import LinearScheduleSettings

SCHEDULE = Schedule.build(ScheduleSettings())
SAMPLERS: list[SamplerName] = ["ddim", "pndm", "dpm-solver++"]


def test_abar() -> None:
    roots = [0.0015**0.5 + (0.0155**0.5 - 0.0015**0.5) * i / 999 for i in range(1000)]
    product = 1.0
    for t, root in enumerate(roots, 1):
        product *= 1 - root**2
        assert SCHEDULE.abar[t].item() == pytest.approx(product)
    assert SCHEDULE.abar[0] == 1
    assert SCHEDULE.abar[800].item() == pytest.approx(0.010, abs=5e-4)  # the paper's k: -20 dB


@given(timesteps=st.integers(2, 60), first=st.floats(1e-5, 0.99), last=st.floats(1e-5, 0.99))
def test_schedules_are_refused_where_no_image_is_left(timesteps: int, first: float, last: float) -> None:
    sections = {ScheduleSettings: Schedule.build, LinearScheduleSettings: build_schedule}
    for section, build in sections.items():
        choice = {"timesteps": timesteps, "beta_start": first, "beta_end": last}
        signal = build(section.model_construct(**choice)).abar[-1].sqrt().item()  # type: ignore[operator]
        assume(not math.isclose(signal, LEAST_SIGNAL, rel_tol=1e-6))
        with nullcontext() if signal > LEAST_SIGNAL else pytest.raises(ValidationError, match=r"leaves .* of an image"):
            section(**choice)


def test_the_closed_form_is_the_markov_chain_in_distribution() -> None:
    """Eq. 1: x_t = sqrt(1 - beta_t) x_{t-1} + sqrt(beta_t) eps, step by step."""
    generator = torch.Generator().manual_seed(0)
    count, x0 = 40_000, 1.7
    x = torch.full((count,), x0)
    for t in range(1, 301):
        beta = SCHEDULE.betas[t - 1].item()
        x = (1 - beta) ** 0.5 * x + beta**0.5 * torch.randn(count, generator=generator)
    start, t = torch.full((count, 1, 1, 1), x0), torch.full((count,), 300)
    closed = SCHEDULE.diffuse(start, torch.randn(count, 1, 1, 1, generator=generator), t).flatten()
    error = 5 / count**0.5
    assert x.mean().item() == pytest.approx(closed.mean().item(), abs=2 * error)
    assert x.std().item() == pytest.approx(closed.std().item(), abs=2 * error)


def test_denoise_and_implied_noise_invert_diffuse() -> None:
    x0, eps, t = torch.randn(5, 2, 3, 3), torch.randn(5, 2, 3, 3), torch.tensor([1, 10, 200, 600, 1000])
    x_t = SCHEDULE.diffuse(x0, eps, t)
    torch.testing.assert_close(SCHEDULE.implied_noise(x0, x_t, t), eps, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(SCHEDULE.denoise(x_t, eps, t), x0, rtol=1e-3, atol=1e-3)


def test_plain_loss_against_a_loop() -> None:
    x0, eps, t = torch.randn(3, 1, 2, 2), torch.randn(3, 1, 2, 2), torch.tensor([3, 400, 999])
    found = noise_prediction_loss(lambda x, t, y: x.sin(), SCHEDULE, x0, torch.zeros(3), t, eps)
    for i in range(3):
        abar = SCHEDULE.abar[t[i]].item()
        errors = [
            (e - math.sin(math.sqrt(abar) * x + math.sqrt(1 - abar) * e)) ** 2
            for x, e in zip(x0[i].flatten().tolist(), eps[i].flatten().tolist(), strict=True)
        ]
        assert found[i].item() == pytest.approx(sum(errors) / len(errors), rel=1e-4)


class Table(torch.nn.Module):
    """It predicts the same for all images of a class; the last class is the null class."""

    def __init__(self, classes: int, *, velocity: bool) -> None:
        super().__init__()
        self.predicts_velocity = velocity
        self.rows = torch.nn.Parameter(torch.zeros(classes + 1, 1, 2, 2))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        return self.rows[labels] + 0 * x


@pytest.mark.parametrize("velocity", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1.5, 3.0])
def test_a_guided_loss_is_least_at_guided_predictions(scale: float, velocity: bool) -> None:
    """The least loss of a table is at means of the noise, so guidance of it has a closed form."""
    generator = torch.Generator().manual_seed(0)
    labels, t = torch.tensor([0, 1, 2] * 4), torch.full((12,), 100)
    x0, eps = torch.randn(2, 12, 1, 2, 2, generator=generator)
    # each image once with its class, and once without
    rows = (torch.cat([x0, x0]), torch.cat([labels, torch.full((12,), 3)]))
    table = Table(3, velocity=velocity)
    optimiser = torch.optim.SGD(table.parameters(), lr=2.0)
    for _ in range(400):
        optimiser.zero_grad()
        null, times = torch.full((24,), 3), torch.cat([t, t])
        guided_loss(table, SCHEDULE, *rows, null, times, torch.cat([eps, eps]), scale).mean().backward()
        optimiser.step()
    of_all = eps.mean(0)
    torch.testing.assert_close(table.rows[3], of_all, rtol=1e-4, atol=1e-4)
    for number in range(3):
        guided = of_all + scale * (eps[labels == number].mean(0) - of_all)
        torch.testing.assert_close(table.rows[number], guided, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("velocity", [False, True])
def test_without_guidance_the_guided_loss_is_the_plain_one(velocity: bool) -> None:
    x0, eps, t, labels = torch.randn(3, 1, 2, 2), torch.randn(3, 1, 2, 2), torch.tensor([3, 400, 999]), torch.arange(3)
    table, null = Table(3, velocity=velocity), torch.full((3,), 3)
    torch.nn.init.normal_(table.rows)
    plain = denoising_loss(table, SCHEDULE, x0, labels, t, eps)
    assert torch.equal(guided_loss(table, SCHEDULE, x0, labels, null, t, eps, 1.0), plain)
    # images without a label have no direction to be guided in
    plain = denoising_loss(table, SCHEDULE, x0, null, t, eps)
    torch.testing.assert_close(guided_loss(table, SCHEDULE, x0, null, null, t, eps, 4.0), plain)


@pytest.mark.parametrize("count", [2, 7])
def test_info_nce_against_a_loop(count: int) -> None:
    views = torch.nn.functional.normalize(torch.randn(2 * count, 5), dim=1)
    tau, total = 0.3, 0.0
    for i in range(2 * count):
        partner = (i + count) % (2 * count)
        positive = math.exp(float(views[i] @ views[partner]) / tau)
        negatives = sum(math.exp(float(views[i] @ views[j]) / tau) for j in range(2 * count) if j not in (i, partner))
        total -= math.log(positive / (positive + negatives))
    assert info_nce(views[:count], views[count:], tau).item() == pytest.approx(total / (2 * count), rel=1e-5)


def test_grids() -> None:
    early, late = early_grid(1000, 800, 10), late_grid(200, 10)
    assert len(early) == len(late) == 20
    assert (early[0], early[-1]) == (990, 800)
    assert (late[0], late[-1]) == (200, 10)
    assert len(late_grid(1000, 10)) == 100
    assert early_grid(1000, 1000, 10) == [1000]
    assert late_grid(5, 10) == [5]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("denoise_last", [False, True])
def test_calls_and_exactness(name: SamplerName, denoise_last: bool) -> None:
    """With the exact noise of a known x_0 every sampler must arrive at it; PNDM calls once more."""
    x0 = torch.randn(3, 2, 4, 4)
    calls: list[int] = []

    def predict(x: Tensor, t: int) -> Tensor:
        calls.append(t)
        return SCHEDULE.implied_noise(x0, x, torch.full((3,), t))

    grid = early_grid(1000, 800, 10) if denoise_last else late_grid(200, 10)
    start = SCHEDULE.diffuse(x0, torch.randn_like(x0), torch.full((3,), grid[0]))
    found = Solver.build(name, SCHEDULE, grid, 10, denoise_last=denoise_last).run(predict, start)
    torch.testing.assert_close(found, x0, rtol=1e-2, atol=1e-2)
    assert len(calls) == 20 + (name == "pndm")
    assert set(calls) == set(grid)


def test_ddim_against_its_formula() -> None:
    x = start = torch.randn(2, 1, 3, 3)
    grid = late_grid(300, 30)
    for t in grid:
        a, b = SCHEDULE.abar[t].item(), SCHEDULE.abar[max(0, t - 30)].item()
        eps = torch.tanh(x) * t / 300
        x0 = (x - (1 - a) ** 0.5 * eps) / a**0.5
        x = b**0.5 * x0 + (1 - b) ** 0.5 * eps
    found = Solver.build("ddim", SCHEDULE, grid, 30).run(lambda y, t: torch.tanh(y) * t / 300, start)
    torch.testing.assert_close(found, x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("stride", [10, 50])
def test_the_weights_are_the_scheduler(name: SamplerName, stride: int) -> None:
    """A nonlinear network, step by step with diffusers' own object."""
    grid = late_grid(700, stride)
    indices = [t - 1 for t in grid]
    common = {"num_train_timesteps": 1000, "trained_betas": SCHEDULE.betas.numpy()}
    scheduler: Any
    if name == "dpm-solver++":
        scheduler = DPMSolverMultistepScheduler(**common, final_sigmas_type="zero")
        scheduler.set_timesteps(timesteps=indices)
        scheduler.set_begin_index(0)
    else:
        kinds = {"ddim": (DDIMScheduler, {"clip_sample": False}), "pndm": (PNDMScheduler, {"skip_prk_steps": True})}
        kind, options = kinds[name]
        scheduler = kind(**common, set_alpha_to_one=True, **options)
        scheduler.set_timesteps(1000 // stride)
    calls = [indices[0], indices[1], *indices[1:]] if name == "pndm" else indices

    def predict(x: Tensor, t: int) -> Tensor:
        return torch.tanh(x) * t / 700

    x = start = torch.randn(3, 2, 4, 4)
    for index in calls:
        x = scheduler.step(predict(x, index + 1), torch.tensor(index), x).prev_sample
    torch.testing.assert_close(Solver.build(name, SCHEDULE, grid, stride).run(predict, start), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("grid", [[7], [1000], [20, 10]])
def test_short_grids(name: SamplerName, grid: list[int]) -> None:
    found = Solver.build(name, SCHEDULE, grid, 10).run(lambda x, t: 0.1 * x, torch.randn(1, 1, 2, 2))
    assert torch.isfinite(found).all()


def test_all_samplers_agree_on_a_smooth_field() -> None:
    """x_0 ~ N(0, 1) has a known denoiser; x_0 is then a multiple of x_t, and finer grids agree."""

    def predict(x: Tensor, t: int) -> Tensor:
        return (1 - SCHEDULE.abar[t].item()) ** 0.5 * x

    start = torch.randn(1, 1, 4, 4)
    ends = [Solver.build(name, SCHEDULE, late_grid(200, 1), 1).run(predict, start) for name in SAMPLERS]
    for end in ends:
        assert np.allclose(end, start, rtol=2e-2, atol=2e-2)


@given(s=st.integers(1, 1000), further=st.integers(0, 999))
def test_diffusing_on_is_the_same_process(s: int, further: int) -> None:
    """Mean and variance of x_t by way of x_s are those of x_t from x_0; from s to s nothing changes."""
    t = min(1000, s + further)
    steps = (torch.tensor([s]), torch.tensor([t]))
    one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    signal = SCHEDULE.diffuse_on(SCHEDULE.diffuse(one, zero, steps[0]), zero, *steps)
    early = SCHEDULE.diffuse_on(SCHEDULE.diffuse(zero, one, steps[0]), zero, *steps)
    late = SCHEDULE.diffuse_on(zero, one, *steps)
    torch.testing.assert_close(signal, SCHEDULE.signal(steps[1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((early**2 + late**2).sqrt(), SCHEDULE.noise(steps[1]), rtol=1e-4, atol=1e-4)
    if s == t:
        x = torch.randn(1, 2, 3, 3)
        assert torch.equal(SCHEDULE.diffuse_on(x, torch.randn(1, 2, 3, 3), *steps), x)
