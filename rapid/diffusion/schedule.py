"""The variance schedule and the closed forms that follow from it (RAPID, Eq. 1 and 2)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from rapid.config.sections import ScheduleSettings


class Schedule:
    """abar_t for t in 0..T (abar_0 = 1), and the closed forms of x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps.

    Timesteps are int64 tensors (N,) with values in 1..T, one for each example; latents are float (N, C, H, W).
    """

    def __init__(self, betas: Tensor) -> None:
        self.betas = betas.double()
        abar = torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod(1 - self.betas, 0)])
        self.abar = abar
        self._signal = abar.sqrt().float()
        self._noise = (1 - abar).sqrt().float()

    @classmethod
    def build(cls, settings: ScheduleSettings) -> Self:
        """The "scaled linear" schedule of the latent-diffusion code base that the paper builds on."""
        roots = torch.linspace(
            settings.beta_start**0.5, settings.beta_end**0.5, settings.timesteps, dtype=torch.float64
        )
        return cls(roots**2)

    @classmethod
    def linear(cls, timesteps: int, beta_start: float, beta_end: float) -> Self:
        """beta_t linear in t, from beta_1 to beta_T (Ho, Jain, Abbeel 2020)."""
        return cls(torch.linspace(beta_start, beta_end, timesteps, dtype=torch.float64))

    @property
    def timesteps(self) -> int:
        """T."""
        return len(self.betas)

    def to(self, device: torch.device | str) -> Self:
        """The same schedule with its tables on `device`."""
        self._signal, self._noise = self._signal.to(device), self._noise.to(device)
        return self

    def signal(self, t: Tensor) -> Tensor:
        """sqrt(abar_t), float32 (N, 1, 1, 1)."""
        return self._signal[t].view(-1, 1, 1, 1)

    def noise(self, t: Tensor) -> Tensor:
        """sqrt(1 - abar_t), float32 (N, 1, 1, 1)."""
        return self._noise[t].view(-1, 1, 1, 1)

    def diffuse(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t of Eq. 2 for the given noise."""
        return self.signal(t) * x0 + self.noise(t) * eps

    def denoise(self, x_t: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """The one-step estimate of x_0: (x_t - sqrt(1 - abar_t) eps) / sqrt(abar_t)."""
        return (x_t - self.noise(t) * eps) / self.signal(t)

    def diffuse_on(self, x_s: Tensor, eps: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """x_t for t >= s, further along the forward process from x_s, with fresh noise.

        x_t = sqrt(abar_t / abar_s) x_s + sqrt(1 - abar_t / abar_s) eps; x_s itself where t = s.
        """
        ratio = (self.signal(t) / self.signal(s)).clamp(max=1)
        return ratio * x_s + (1 - ratio.square()).sqrt() * eps

    def implied_noise(self, x0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """eps_hat of Eq. 5: the noise that leads from x_0 to x_t, (x_t - sqrt(abar_t) x_0) / sqrt(1 - abar_t)."""
        return (x_t - self.signal(t) * x0) / self.noise(t)

    def clipped_noise(self, x_t: Tensor, eps: Tensor, t: Tensor, limit: float | None) -> Tensor:
        """The predicted noise, changed so that the x_0 that it leads to lies within +- `limit`; None: as it is.

        Where noise dominates, a small error of the prediction is a large one of x_0.
        """
        if limit is None:
            return eps
        return self.implied_noise(self.denoise(x_t, eps, t).clamp(-limit, limit), x_t, t)
