"""Per-example losses of the private stage: `rapid` (Eq. 5), and `late` and `ldm`, with which it is compared.

With `private.start` beyond v, the retrieved value is first diffused to that step with fresh noise, and Eq. 5 applies
there, so the knowledge base and the public stage do not depend on where the late steps begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from rapid_index import KnowledgeBase
from torch import Tensor

from rapid.diffusion import Schedule
from rapid.diffusion.losses import denoising_loss, retrieval_noise
from rapid.dp.objective import Objective
from rapid.dp.randomness import Randomness
from rapid.methods.rapid.neighbours import choose_neighbours
from rapid.methods.rapid.networks import one_step_query
from rapid.methods.rapid.search import Search, open_search
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser, TrajectoryEncoder


class Draws(NamedTuple):
    """Random draws for n examples, made before any of them is read."""

    t: Tensor
    """Timesteps of the loss, int64 (n,)."""
    eps: Tensor
    """Noise, float (n, c, h, w): of the query for `rapid`, of the loss for `late` and `ldm`."""
    dropped: Tensor
    """Where the label becomes the null class, bool (n,)."""
    onward: Tensor
    """Noise that diffuses retrieved values from v to the first late step, shaped as eps; (n, 0, 0, 0) if not needed."""
    pick: Tensor
    """Chooses among the neighbours, float (n,) in [0, 1); (n, 0) if there is no choice."""


@dataclass(frozen=True)
class Retriever:
    """Query at step k, retrieve at step v (Algorithm 2). All networks are public and frozen.

    With several `neighbours`, one of them is drawn at random. The paper leaves open how to aggregate them;
    their mean would not do, because it has less noise than the denoiser is trained for.
    """

    schedule: Schedule
    denoiser: Denoiser
    encoder: TrajectoryEncoder
    knowledge_base: KnowledgeBase
    k: int
    neighbours: int = 1

    @cached_property
    def _search(self) -> Search:
        return open_search(self.knowledge_base, next(self.encoder.parameters()).device)

    @torch.no_grad()
    def retrieve(self, latents: Tensor, eps: Tensor, pick: Tensor | None = None) -> Tensor:
        """Values of step v whose keys are nearest to the keys of latents diffused to k with `eps`; float (n, c, h, w).

        `pick`, float (n,) in [0, 1), chooses among the neighbours; None takes the nearest.
        """
        queries = self.encoder(one_step_query(self.denoiser, self.schedule, latents, eps, self.k))
        indices = choose_neighbours(self._search, queries, self.neighbours, None if pick is None else pick.numpy())
        return torch.from_numpy(self.knowledge_base.values(indices)).to(latents.device)


class PrivateObjective(Objective):
    """Losses of private examples, each from its own latent and label.

    Args:
        settings: objective, k, v, label dropout.
        denoiser: the network that is trained.
        retriever: needed for `rapid`.
        randomness: of timesteps, noise and label dropout. Privacy depends on it, too: another image changes which
            draws the others get, so the draws must be as secret as the noise.
    """

    def __init__(
        self, settings: RapidSettings, denoiser: Denoiser, retriever: Retriever | None, randomness: Randomness
    ) -> None:
        self.settings = settings
        self.denoiser = denoiser
        self.retriever = retriever
        self.randomness = randomness
        device = denoiser.class_table.weight.device
        self.schedule = Schedule.build(settings.schedule).to(device)
        self.last_timestep = trained_timesteps(settings)
        self._device = device
        self._onward = retriever is not None and self.last_timestep > settings.retrieval.v
        self._pick = retriever is not None and retriever.neighbours > 1

    def draw(self, count: int) -> Draws:
        """Draw for `count` examples: v' (or t) uniform on 1..v (or 1..T), noise, and label dropout."""
        shape = (count, *self.settings.latent_shape)
        # uniform on (0, 1], so that the ceiling is uniform on 1..last
        t = (self.randomness.uniform(count) * self.last_timestep).ceil().long()
        eps = self.randomness.normal(math.prod(shape)).view(shape)
        dropped = self.randomness.uniform(count) <= self.settings.private.label_dropout
        onward = self.randomness.normal(math.prod(shape)).view(shape) if self._onward else eps.new_zeros(count, 0, 0, 0)
        # stays on the CPU, where the knowledge base is searched
        pick = 1 - self.randomness.uniform(count) if self._pick else torch.zeros(count, 0)
        device = self._device
        return Draws(t.to(device), eps.to(device), dropped.to(device), onward.to(device), pick)

    def losses(self, latents: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """Losses of examples, float (n,), for given draws; arguments as for `prepared`."""
        return self.compute(*self.prepared(latents, labels, draws))

    def prepare(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """With fresh draws, what `compute` takes, of latents and labels; see `prepared`."""
        latents, labels = rows
        return self.prepared(latents, labels, self.draw(len(latents)))

    def prepared(self, latents: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Latents, labels, timesteps and the noise of the loss.

        Args:
            latents: normalised, float (n, c, h, w).
            labels: int64 (n,), the null class if the images are unlabelled.
            draws: of the n examples.
        """
        y = torch.where(draws.dropped, self.denoiser.num_classes, labels)
        if self.retriever is None:
            return latents, y, draws.t, draws.eps
        value = self.retriever.retrieve(latents, draws.eps, draws.pick if self._pick else None)
        if self._onward:
            v, start = (torch.full_like(draws.t, step) for step in (self.settings.retrieval.v, self.last_timestep))
            value = self.schedule.diffuse_on(value, draws.onward, v, start)
        return latents, y, draws.t, retrieval_noise(self.schedule, latents, value, self.last_timestep)

    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses of examples, float (n,)."""
        latents, labels, t, eps = prepared
        return denoising_loss(self.denoiser, self.schedule, latents, labels, t, eps)


def uses_retrieval(settings: RapidSettings) -> bool:
    """Whether the private objective starts from retrieved values."""
    return settings.private.objective == "rapid"


def trained_timesteps(settings: RapidSettings) -> int:
    """The last timestep that the private objective trains: T for `ldm`, otherwise where the late steps begin."""
    return settings.schedule.timesteps if settings.private.objective == "ldm" else settings.late_start
