"""Deterministic samplers over diffusers' schedulers, on one arithmetic grid of timesteps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, PNDMScheduler
from torch import Tensor

from rapid.diffusion.schedule import Schedule

SamplerName = Literal["ddim", "pndm", "dpm-solver++"]
Predict = Callable[[Tensor, int], Tensor]
"""(x_t, t) -> predicted noise; t in 1..T is the same for the whole batch."""


def late_grid(start: int, stride: int) -> list[int]:
    """Timesteps start, start - stride, ... > 0: the network calls that lead from x_start to x_0."""
    return list(range(start, 0, -stride))


def early_grid(timesteps: int, k: int, stride: int) -> list[int]:
    """Timesteps that lead from noise to the query at k, k last: max(1, (T - k) // stride) calls.

    The last call is the one-step denoising that the query needs, so it is at k itself. Noise is taken for x_t at
    the first timestep, one stride below T, as in the "leading" spacing of the latent-diffusion code base.
    """
    calls = max(1, (timesteps - k) // stride)
    return [k + stride * step for step in reversed(range(calls))]


def run(
    name: SamplerName,
    schedule: Schedule,
    predict: Predict,
    x: Tensor,
    grid: list[int],
    stride: int,
    *,
    denoise_last: bool = False,
) -> Tensor:
    """Integrate the probability flow over `grid`.

    Args:
        name: the scheduler. PNDM (without Runge-Kutta steps) calls the network once more than the grid is long.
        schedule: abar.
        predict: the denoiser.
        x: the state at grid[0], float (N, C, H, W).
        grid: descending timesteps in 1..T, `stride` apart.
        stride: what lies between two timesteps, and below the last one, where x_0 is reached.
        denoise_last: the last call gives the one-step estimate of x_0 instead of a step: the query at k.

    Returns:
        x_0, or its estimate from the last timestep of the grid, float (N, C, H, W).
    """
    # diffusers indexes its schedule from 0
    indices = [t - 1 for t in grid]
    solver = _scheduler(name, schedule, indices, stride)
    if name == "pndm" and len(indices) > 1:
        # the linear multistep start-up calls the network twice at the second timestep
        indices = [indices[0], indices[1], *indices[1:]]
    for call, index in enumerate(indices, 1):
        noise = predict(x, index + 1)
        if denoise_last and call == len(indices):
            return schedule.denoise(x, noise, torch.full((len(x),), index + 1, device=x.device))
        x = solver.step(noise, torch.tensor(index), x).prev_sample
    return x


def _scheduler(name: SamplerName, schedule: Schedule, indices: list[int], stride: int) -> Any:
    common = {"num_train_timesteps": schedule.timesteps, "trained_betas": schedule.betas.numpy()}
    if name == "dpm-solver++":
        solver = DPMSolverMultistepScheduler(**common, final_sigmas_type="zero")
        solver.set_timesteps(timesteps=indices)
        solver.set_begin_index(0)
        return solver
    if name == "ddim":
        solver = DDIMScheduler(**common, clip_sample=False, set_alpha_to_one=True)
    else:
        solver = PNDMScheduler(**common, skip_prk_steps=True, set_alpha_to_one=True)
    # both take T // steps for the stride
    solver.set_timesteps(schedule.timesteps // stride)
    return solver
