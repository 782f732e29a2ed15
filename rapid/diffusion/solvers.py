"""Deterministic samplers: diffusers' schedulers, as tables of weights, on one arithmetic grid of timesteps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, PNDMScheduler
from torch import Tensor

from rapid.diffusion.call_table import KEPT, OUTPUT, CallTable, X
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


@dataclass(frozen=True, eq=False)
class Solver:
    """One sampler on one grid.

    Every sampler here is linear: each state is a fixed combination of the first state and of the noises predicted so
    far. So a state needs no scheduler object, and images at different steps can share a batch.

    Attributes:
        timesteps: of each network call, descending. PNDM (without Runge-Kutta steps) calls twice at the second one.
        weights: float32 (calls, calls + 1); the state after call i is weights[i, 0] times the first state plus
            weights[i, 1 + j] times the noise that call j <= i predicted. The last one is x_0.
    """

    timesteps: tuple[int, ...]
    weights: Tensor

    @classmethod
    def build(
        cls, name: SamplerName, schedule: Schedule, grid: list[int], stride: int, *, denoise_last: bool = False
    ) -> Self:
        """Read the weights off diffusers' scheduler, by running it on unit vectors.

        Args:
            name: the scheduler.
            schedule: abar.
            grid: descending timesteps in 1..T, `stride` apart.
            stride: distance between two timesteps, and from the last one to x_0.
            denoise_last: the last call gives the one-step estimate of x_0 instead of a step: the query at k.
        """
        # diffusers indexes its schedule from 0
        indices = [t - 1 for t in grid]
        scheduler = _scheduler(name, schedule, indices, stride)
        if name == "pndm" and len(indices) > 1:
            # the linear multistep start-up calls the network twice at the second timestep
            indices = [indices[0], indices[1], *indices[1:]]
        basis = torch.eye(len(indices) + 1, dtype=torch.float64)
        x, weights = basis[0], []
        for call, index in enumerate(indices, 1):
            if denoise_last and call == len(indices):
                # the one-step estimate of `Schedule.denoise`, in float64 and wherever the schedule's tables are
                abar = schedule.abar[index + 1]
                x = (x - (1 - abar).sqrt() * basis[call]) / abar.sqrt()
            else:
                x = scheduler.step(basis[call], torch.tensor(index), x).prev_sample
            weights.append(x.float())
        return cls(tuple(index + 1 for index in indices), torch.stack(weights))

    @cached_property
    def table(self) -> CallTable:
        """All calls: KEPT stays the first state, and each predicted noise has a part of its own."""
        calls = len(self.timesteps)
        weights = torch.zeros(calls, 2, OUTPUT + calls)
        weights[:, X, KEPT:] = self.weights
        weights[:, KEPT, KEPT] = 1
        return CallTable(torch.tensor(self.timesteps), range(OUTPUT, OUTPUT + calls), (False,) * calls, weights)

    def run(self, predict: Predict, x: Tensor) -> Tensor:
        """Take all steps with a batch whose images are all at the same step.

        Args:
            predict: the denoiser.
            x: the first state, float (N, C, H, W).

        Returns:
            x_0, or its estimate from the last timestep of the grid, float (N, C, H, W).
        """
        seen = [x]
        for t, weights in zip(self.timesteps, self.weights.tolist(), strict=True):
            seen.append(predict(x, t))
            x = sum(
                (weight * state for weight, state in zip(weights[1:], seen[1:], strict=False)), weights[0] * seen[0]
            )
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
    # both compute the stride as T // steps
    solver.set_timesteps(schedule.timesteps // stride)
    return solver
