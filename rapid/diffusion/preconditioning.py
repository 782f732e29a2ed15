"""Denoisers D(x; sigma) from networks F, as in EDM (Karras et al. 2022), in the four configurations of DPDM.

D(x; sigma) = c_skip(sigma) x + c_out(sigma) F(c_in(sigma) x; c_noise(sigma)), trained by the mean over sigma and n of
lambda(sigma) ||D(x0 + n; sigma) - x0||^2 with n ~ N(0, sigma^2 I). The configurations are those of DPDM (Dockhorn, Cao,
Vahdat, Kreis 2022, arXiv 2210.09929), Table 7. Levels sigma are floats of any shape; images are in [-1, 1].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Configuration = Literal["vp", "ve", "v", "edm"]
Network = Callable[[Tensor, Tensor], Tensor]
"""F: (scaled images (N, C, H, W), c_noise (N,)) -> (N, C, H, W)."""

SIGMA_DATA = math.sqrt(1 / 3)
"""Standard deviation of pixels that are uniform on [-1, 1]: a constant, because measuring it would cost privacy."""
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0
"""Of the levels at which images are sampled."""
BELOW_1 = 1 - 2.0**-53


@dataclass(frozen=True)
class Preconditioning(ABC):
    """One configuration: one column of Table 7."""

    sigma_data: float = SIGMA_DATA

    @abstractmethod
    def skip(self, sigma: Tensor) -> Tensor:
        """c_skip."""

    @abstractmethod
    def out(self, sigma: Tensor) -> Tensor:
        """c_out."""

    def scale(self, sigma: Tensor) -> Tensor:
        """c_in."""
        return (1 + sigma.square()).rsqrt()

    @abstractmethod
    def time(self, sigma: Tensor) -> Tensor:
        """c_noise, the network's time input."""

    @abstractmethod
    def level(self, uniform: Tensor) -> Tensor:
        """Quantile function of the levels in training: sigma from float64 in (0, 1], uniform."""

    def weight(self, sigma: Tensor) -> Tensor:
        """The weight of the loss: lambda = 1 / c_out^2, so that the error of F has weight 1."""
        return self.out(sigma).square().reciprocal()

    def denoise(self, network: Network, x: Tensor, sigma: Tensor) -> Tensor:
        """D(x; sigma).

        Args:
            network: F.
            x: noisy images, float (N, C, H, W).
            sigma: level of each, float (N,).
        """
        column = sigma.view(-1, 1, 1, 1)
        estimate = network(self.scale(column) * x, self.time(sigma))
        return self.skip(column) * x + self.out(column) * estimate

    def losses(self, denoised: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
        """lambda(sigma) times the mean squared error of each example, float (N,).

        The paper writes the squared norm; like its code, this takes the mean over pixels, the unit of clip_norm.

        Args:
            denoised: D(x0 + n; sigma), float (N, C, H, W).
            x0: images, as `denoised`.
            sigma: level of each, float (N,).
        """
        return self.weight(sigma) * (denoised - x0).square().flatten(1).mean(1)


class VP(Preconditioning):
    """Variance preserving: a linear schedule of betas."""

    BETA_D, BETA_MIN, LEAST_TIME, TIMESTEPS = 19.9, 0.1, 1e-5, 1000

    def skip(self, sigma: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(sigma)

    def out(self, sigma: Tensor) -> Tensor:
        """c_out = -sigma."""
        return -sigma

    def time(self, sigma: Tensor) -> Tensor:
        """(M - 1) t(sigma), with t the inverse of sigma(t)."""
        area = 2 * self.BETA_D * sigma.square().log1p()
        return (self.TIMESTEPS - 1) * ((self.BETA_MIN**2 + area).sqrt() - self.BETA_MIN) / self.BETA_D

    def level(self, uniform: Tensor) -> Tensor:
        """Uniform t, with sigma(t) = sqrt(exp(beta_d t^2 / 2 + beta_min t) - 1)."""
        t = self.LEAST_TIME + (1 - self.LEAST_TIME) * uniform
        return (0.5 * self.BETA_D * t.square() + self.BETA_MIN * t).expm1().sqrt()


class VE(Preconditioning):
    """Variance exploding."""

    def skip(self, sigma: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(sigma)

    def out(self, sigma: Tensor) -> Tensor:
        """c_out = sigma."""
        return sigma

    def scale(self, sigma: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(sigma)

    def time(self, sigma: Tensor) -> Tensor:
        """ln(sigma / 2)."""
        return (sigma / 2).log()

    def level(self, uniform: Tensor) -> Tensor:
        """Uniform ln sigma."""
        return (math.log(SIGMA_MIN) + uniform * math.log(SIGMA_MAX / SIGMA_MIN)).exp()


class V(Preconditioning):
    """v-prediction (Salimans and Ho 2022), with the weight "SNR + 1".

    The paper prints c_skip = 1 / sqrt(1 + sigma^2); of a network that predicts v it is the square of that.
    """

    LOG_SNR = -9.0, 13.0

    def skip(self, sigma: Tensor) -> Tensor:
        """1 / (1 + sigma^2)."""
        return (1 + sigma.square()).reciprocal()

    def out(self, sigma: Tensor) -> Tensor:
        """-sigma / sqrt(1 + sigma^2)."""
        return -sigma * (1 + sigma.square()).rsqrt()

    def time(self, sigma: Tensor) -> Tensor:
        """t(sigma), where sigma = tan(pi t / 2)."""
        return sigma.atan() * (2 / math.pi)

    def level(self, uniform: Tensor) -> Tensor:
        """Uniform t, between the times of two signal-to-noise ratios."""
        most, least = (math.atan(math.exp(-snr / 2)) for snr in self.LOG_SNR)
        return (least + (most - least) * uniform).tan()


class EDM(Preconditioning):
    """Karras et al. 2022: inputs and targets of the network have unit variance."""

    MEAN, DEVIATION = -1.2, 1.2

    def skip(self, sigma: Tensor) -> Tensor:
        """sigma_data^2 / (sigma^2 + sigma_data^2)."""
        return self.sigma_data**2 / (sigma.square() + self.sigma_data**2)

    def out(self, sigma: Tensor) -> Tensor:
        """c_out = sigma sigma_data / sqrt(sigma^2 + sigma_data^2)."""
        return sigma * self.sigma_data * (sigma.square() + self.sigma_data**2).rsqrt()

    def scale(self, sigma: Tensor) -> Tensor:
        """1 / sqrt(sigma^2 + sigma_data^2)."""
        return (sigma.square() + self.sigma_data**2).rsqrt()

    def time(self, sigma: Tensor) -> Tensor:
        """ln(sigma) / 4."""
        return sigma.log() / 4

    def level(self, uniform: Tensor) -> Tensor:
        """Normal ln sigma."""
        # 1 itself would be an infinite level
        normal: Tensor = torch.special.ndtri(uniform.clamp(max=BELOW_1))
        return (self.MEAN + self.DEVIATION * normal).exp()


CONFIGURATIONS: dict[str, type[Preconditioning]] = {"vp": VP, "ve": VE, "v": V, "edm": EDM}


def sampling_levels(count: int, last: float = SIGMA_MIN) -> NDArray[np.float64]:
    """Levels from SIGMA_MAX down to `last`, float64 (count,): equal steps of sigma^(1/rho) (EDM, Eq. 5)."""
    levels: NDArray[np.float64] = np.linspace(SIGMA_MAX ** (1 / RHO), last ** (1 / RHO), count) ** RHO
    return levels
