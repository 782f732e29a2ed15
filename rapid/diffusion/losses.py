"""The losses of the paper, one function per formula. All are means over an example's elements, (N,) for N examples.

The paper writes squared l2 norms (sums). Under per-example clipping the two differ only in the unit of clip_norm: the
sum's gradient is d times the mean's, with d the number of elements, so clip_norm C here is the paper's d * C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.diffusion.schedule import Schedule

Predictor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""eps_theta(x_t, t, labels) -> predicted noise."""


class Network(Protocol):
    """A denoiser that knows what it was made to predict."""

    @property
    def predicts_velocity(self) -> bool:
        """Whether the noise comes from a predicted velocity."""
        ...

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor, /) -> Tensor:
        """The predicted noise."""
        ...


def noise_prediction_loss(
    predict: Predictor, schedule: Schedule, x0: Tensor, labels: Tensor, t: Tensor, eps: Tensor
) -> Tensor:
    """Plain loss of Eq. 3, || eps - eps_theta(x_t, t) ||^2, at given timesteps and noise.

    Args:
        predict: the denoiser.
        schedule: abar.
        x0: latents, float (N, C, H, W).
        labels: int64 (N,).
        t: int64 (N,), each in 1..T.
        eps: noise, as x0.

    Returns:
        float (N,): the mean squared error of each example.
    """
    predicted = predict(schedule.diffuse(x0, eps, t), t, labels)
    return (eps - predicted).square().flatten(1).mean(1)


def denoising_loss(network: Network, schedule: Schedule, x0: Tensor, labels: Tensor, t: Tensor, eps: Tensor) -> Tensor:
    """The loss of Eq. 3 or, of velocities v = sqrt(abar_t) eps - sqrt(1 - abar_t) x_0, || v - v_theta(x_t, t) ||^2.

    The second is the first over abar_t, because eps - eps_theta = sqrt(abar_t) (v - v_theta). Arguments and result are
    those of `noise_prediction_loss`.
    """
    return _weighted(noise_prediction_loss(network, schedule, x0, labels, t, eps), network, schedule, t)


def guided_loss(
    network: Network, schedule: Schedule, x0: Tensor, labels: Tensor, null: Tensor, t: Tensor, eps: Tensor, scale: float
) -> Tensor:
    """`denoising_loss` of a network whose predictions for a label are to be guided ones (Tang et al., 2025).

    The noise to predict for a label is eps + (1 - 1 / scale) (eps_theta(label) - eps_theta(null)), with the difference
    as it is, without a gradient. Where the loss is least, eps_theta(label) is null + scale (label - null) of the
    predictions that `denoising_loss` leads to: classifier-free guidance in one network call. That of the null class
    stays the plain one.

    Args:
        network: the denoiser.
        schedule: abar.
        x0: latents, float (N, C, H, W).
        labels: int64 (N,); some of the null class.
        null: labels of the null class, int64 (N,).
        t: int64 (N,), each in 1..T.
        eps: noise, as x0.
        scale: 1 or more; 1 is without guidance, and saves a network call.

    Returns:
        float (N,).
    """
    if scale == 1:
        return denoising_loss(network, schedule, x0, labels, t, eps)
    x_t = schedule.diffuse(x0, eps, t)
    predicted = network(x_t, t, labels)
    with torch.no_grad():
        towards = predicted - network(x_t, t, null)
    losses = (eps + (1 - 1 / scale) * towards - predicted).square().flatten(1).mean(1)
    return _weighted(losses, network, schedule, t)


def _weighted(losses: Tensor, network: Network, schedule: Schedule, t: Tensor) -> Tensor:
    return losses / schedule.signal(t).flatten().square() if network.predicts_velocity else losses


def retrieval_noise(schedule: Schedule, x0: Tensor, value: Tensor, v: int) -> Tensor:
    """The noise of the late-step loss of Eq. 5: it leads from x0 to its retrieved value at step v.

    With it `denoising_loss` is that of Eq. 5; t is v' of the paper, in 1..v. At t = v the denoiser's input is exactly
    the retrieved value.

    Args:
        schedule: abar.
        x0: latents, float (N, C, H, W).
        value: retrieved public intermediates of step v, as x0.
        v: the step of the values.

    Returns:
        float (N, C, H, W).
    """
    return schedule.implied_noise(x0, value, torch.full((len(x0),), v, device=x0.device))


def info_nce(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (Algorithm 1) over N positive pairs: all other 2N - 2 views are negatives.

    Args:
        first: unit vectors of the first views, float (N, d), N >= 2.
        second: unit vectors of the second views, in the same order.
        temperature: tau.

    Returns:
        float scalar: the mean over the 2N views of -log softmax(similarity / tau) at the partner.
    """
    views = torch.cat([first, second])
    count = len(first)
    logits = views @ views.T / temperature
    logits = logits.masked_fill(torch.eye(2 * count, dtype=torch.bool, device=views.device), float("-inf"))
    partner = torch.arange(2 * count, device=views.device).roll(count)
    return F.cross_entropy(logits, partner)
