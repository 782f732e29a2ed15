"""The private mechanism: Poisson batch, clipped sum, Gaussian noise, and the account of what was spent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from rapid.errors import PrivacyRefused
from rapid.private.gradients import BookKeeper
from rapid.private.plan import Plan
from rapid.private.randomness import Randomness

Losses = Callable[[Tensor], Tensor]
"""indices int64 (n,) of private examples -> their losses, float (n,), each a function of its own example alone."""


class PrivateMechanism:
    """Noisy clipped gradients of any module and any per-example loss.

    Formal guarantee: all results of `gradient` together, at most `plan.steps`, are (plan.epsilon(), plan.delta)-
    differentially private in the private images, for adding or removing one image. Each call is the Gaussian mechanism
    with sensitivity clip_norm and standard deviation noise_multiplier * clip_norm on a Poisson sample of rate
    sample_rate; everything that `losses` does with an example (retrieval included) lies before the clipping.

    | case                     | what happens                                              |
    |--------------------------|-----------------------------------------------------------|
    | no example is drawn      | noise alone is returned, and the step counts              |
    | non-finite gradient      | the example counts as zero                                |
    | more steps than planned  | PrivacyRefused, before any example is looked at           |

    Args:
        plan: public numbers.
        network: its parameters that require gradients now are trained.
        losses: see `Losses`.
        physical_batch: examples in memory at a time; never changes what is released.
        steps_taken: steps of an earlier run that this one resumes.
        randomness: for tests only.
    """

    def __init__(
        self,
        plan: Plan,
        network: nn.Module,
        losses: Losses,
        *,
        physical_batch: int,
        steps_taken: int = 0,
        randomness: Randomness | None = None,
    ) -> None:
        self.plan = plan
        self.steps_taken = steps_taken
        self._keeper = BookKeeper(network)
        self._losses = losses
        self._physical_batch = physical_batch
        self._randomness = randomness or Randomness()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of what `gradient` returns."""
        return self._keeper.parameters

    def gradient(self) -> list[Tensor]:
        """One step: (sum of clipped gradients + noise) / expected batch, float32, one tensor a parameter.

        Raises:
            PrivacyRefused: all planned steps are taken.
        """
        if self.steps_taken >= self.plan.steps:
            raise PrivacyRefused(
                f"all {self.plan.steps} planned steps are taken; a further one would exceed the budget"
            )
        self.steps_taken += 1
        total = self.clipped_sum(self.draw_batch())
        scale = self.plan.noise_multiplier * self.plan.clip_norm
        noise = self._randomness.normal(sum(part.numel() for part in total)).mul_(scale)
        pieces = noise.to(total[0].device).split([part.numel() for part in total])
        return [
            (part + piece.view_as(part)) / self.plan.expected_batch for part, piece in zip(total, pieces, strict=True)
        ]

    def draw_batch(self) -> Tensor:
        """Poisson sample: each index of 0..dataset_size-1 with probability sample_rate, by itself; int64 (n,)."""
        return (self._randomness.uniform(self.plan.dataset_size) <= self.plan.sample_rate).nonzero().flatten()

    def clipped_sum(self, indices: Tensor) -> list[Tensor]:
        """Sum of the clipped gradients of the examples, over pieces of `physical_batch`. Private: no noise is in it."""
        total = [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in self.parameters]
        for piece in indices.split(self._physical_batch):
            if len(piece):
                losses = partial(self._losses, piece)
                sums, _ = self._keeper.clipped_sum(losses, len(piece), self.plan.clip_norm)
                torch._foreach_add_(total, sums)
        return total
