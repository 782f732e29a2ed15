"""The part of the training that private images have no part in: fakes in the discriminator's loss, generator steps.

Algorithm 1 of the paper moves the discriminator by

    (R + z + F) / (2 B),   R = sum over a Poisson batch of real images of clip(grad -log D(x, y)),
                           F = sum over B fakes of clip(grad -log(1 - D(G(u, v), v))),   z ~ N(0, sigma^2 C^2 I).

Sensitivity. Fix all earlier releases, hence the weights of both networks, and the randomness of the fakes, which is
drawn without regard to private images. Then F is a constant. An image more or less changes R by one clipped gradient,
of norm C at most, so R + F has sensitivity C, whatever the fakes are and whether they are clipped or not.

So (R + z) + F is post-processing of R + z: the mechanism computes R + z from real images alone, and F is added here.
Fakes are clipped, too, as in the paper, so that neither side outweighs the other. A loss of pairs of a real image and a
fake within the mechanism would have the same sensitivity, but the clip would then cover both gradients together: each
would count about half as much against the same noise, and a step would have as many fakes as real images were drawn.

Labels of fakes are uniform: how many real images a class has is private.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.dp.gradients import BookKeeper
from rapid.dp.randomness import Randomness
from rapid.methods.dp_gan.controller import StepController
from rapid.methods.dp_gan.settings import DpGanPrivateSettings
from rapid.nn.gan import GanDiscriminator, GanGenerator
from rapid.ranks import Ranks
from rapid.training.average import WeightAverage
from rapid.training.loop import Stateful

LEAST_RATIO = 1e-5
"""Added to the ratio of distances, which may be 0."""


def adam(network: torch.nn.Module, learning_rate: float, settings: DpGanPrivateSettings) -> torch.optim.Adam:
    """Adam with the betas of the settings, of the parameters that require gradients."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.Adam(parameters, lr=learning_rate, betas=(settings.beta1, settings.beta2))


def loss_of_real(discriminator: GanDiscriminator, images: Tensor, labels: Tensor) -> Tensor:
    """-log D of real images, float (n,); see `GanDiscriminator.forward`."""
    return F.softplus(-discriminator(images, labels))


def loss_of_fakes(discriminator: GanDiscriminator, images: Tensor, labels: Tensor) -> Tensor:
    """-log(1 - D) of fakes, float (n,)."""
    return F.softplus(discriminator(images, labels))


def closeness(images: Tensor, others: Tensor, latents: Tensor, other_latents: Tensor) -> Tensor:
    """The mode-seeking loss of pairs of fakes of one class: 1 / (distance of the images / distance of their latents).

    Mao, Lee, Tseng, Ma, Yang: Mode Seeking Generative Adversarial Networks for Diverse Image Synthesis (CVPR 2019),
    Section 3.2, here for each pair instead of for the means of a batch. Distances are mean absolute differences.

    Args:
        images: float (n, C, H, W).
        others: the same with other latents.
        latents: of `images`, float (n, length).
        other_latents: of `others`.

    Returns:
        float (n,).
    """
    of_images = (images - others).float().abs().flatten(1).mean(1)
    of_latents = (latents - other_latents).abs().mean(1)
    return 1 / (of_images / of_latents + LEAST_RATIO)


class FakeSide:
    """Fakes for the discriminator, and the steps of the generator, which never sees a private image.

    Several ranks share the fakes and add up gradients, which are then the same on all of them, as the weights are.

    Args:
        generator: trained in place.
        discriminator: trained by others; its parameters that require gradients at construction.
        settings: batch, clip norm, optimiser, controller.
        draws: of latents and labels.
        ranks: the processes that share the work.

    Attributes:
        controller: when the generator is due.
    """

    def __init__(
        self,
        generator: GanGenerator,
        discriminator: GanDiscriminator,
        settings: DpGanPrivateSettings,
        draws: Randomness,
        ranks: Ranks | None = None,
    ) -> None:
        self.controller = StepController(settings)
        self._generator, self._discriminator = generator, discriminator
        self._settings, self._draws, self._ranks = settings, draws, ranks or Ranks()
        self._keeper = BookKeeper(discriminator)
        self._device = self._keeper.parameters[0].device
        self._count = len(self._ranks.part(settings.expected_batch))
        self._optimizer = adam(generator, settings.generator_learning_rate, settings)
        self._average = WeightAverage(generator, settings.ema_decay) if settings.ema_decay else None

    @property
    def state(self) -> dict[str, Stateful]:
        """What a checkpoint has to hold of it, by name."""
        parts: dict[str, Stateful] = {
            "generator": self._generator,
            "generator_optimizer": self._optimizer,
            "controller": self.controller,
        }
        return parts if self._average is None else parts | {"generator_average": self._average}

    def add_gradients(self) -> None:
        """From (R + z) / B in `.grad` of the discriminator to (R + z + F) / (2 B), with B new fakes.

        Raises:
            LostRank: another rank is gone.
        """
        batch, parameters = self._settings.expected_batch, self._keeper.parameters
        for parameter, total in zip(parameters, self._clipped_sum(), strict=True):
            assert parameter.grad is not None
            parameter.grad = ((parameter.grad + total / batch) / 2).to(parameter.dtype)

    def after_step(self, _: int) -> None:
        """After each discriminator step: a generator step if it is due.

        Raises:
            LostRank: another rank is gone.
        """
        if self.controller.count_step():
            self._update()

    def trained(self) -> GanGenerator:
        """The generator, with averaged weights if there is an average that has seen a step."""
        if self._average is not None and int(self._average.n_averaged):
            self._generator.load_state_dict(self._average.module.state_dict())
        return self._generator

    def _clipped_sum(self) -> list[Tensor]:
        """F, float64, one tensor a parameter."""
        flat = torch.zeros(sum(p.numel() for p in self._keeper.parameters), dtype=torch.float64, device=self._device)
        sums = _split(flat, self._keeper.parameters)
        for latents, labels in self._pieces():
            with torch.no_grad(), self._autocast():
                images = self._generator(latents, labels)
            self._keeper.clipped_sum(
                partial(self._losses, images, labels), len(images), self._settings.clip_norm, into=lambda: sums
            )
        self._ranks.all_reduce(flat)
        return sums

    def _losses(self, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            return loss_of_fakes(self._discriminator, images, labels)

    def _update(self) -> None:
        """One step of the generator on B new fakes, with the loss -log D(G(u, v), v) + weight * closeness of pairs."""
        parameters = list(self._generator.parameters())
        # the gradients, and last the number of fakes that the discriminator recognises
        flat = torch.zeros(sum(p.numel() for p in parameters) + 1, dtype=torch.float64, device=self._device)
        weight = self._settings.mode_seeking
        for latents, labels, *others in self._pieces(further=1 if weight else 0):
            with self._autocast():
                images = self._generator(latents, labels)
                logits = self._discriminator(images, labels)
            losses = F.softplus(-logits)
            for other in others:
                with self._autocast():
                    apart = self._generator(other, labels)
                losses = losses + weight * closeness(images, apart, latents, other)
            gradients = torch.autograd.grad(losses.sum() / self._settings.expected_batch, parameters)
            flat[:-1] += torch.cat([gradient.flatten() for gradient in gradients])
            flat[-1] += (logits.detach() < 0).sum()
        self._ranks.all_reduce(flat)
        self.controller.count_update(float(flat[-1]) / self._settings.expected_batch)
        for parameter, gradient in zip(parameters, _split(flat[:-1], parameters), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._average is not None:
            self._average.update_parameters(self._generator)

    def _pieces(self, further: int = 0) -> list[tuple[Tensor, ...]]:
        """Latents, float (n, latent), labels, int64 (n,), and further latents of this rank's share of B fakes."""
        if self._count == 0:
            return []
        shape, classes = (self._count, self._generator.config["latent"]), self._generator.config["classes"]
        latents = self._draws.normal(math.prod(shape)).view(shape)
        # uniform numbers lie in (0, 1]
        labels = (self._draws.uniform(self._count) * classes).ceil().long().clamp(min=1) - 1
        others = [self._draws.normal(math.prod(shape)).view(shape) for _ in range(further)]
        parts = (rows.to(self._device).split(self._settings.draws_at_a_time) for rows in (latents, labels, *others))
        return list(zip(*parts, strict=True))

    def _autocast(self) -> torch.autocast:
        # without the cache, see `PrivateMechanism`
        enabled = self._settings.precision == "bfloat16"
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def _split(flat: Tensor, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    """Views of a vector in the shapes of the parameters."""
    pieces = flat.split([p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
