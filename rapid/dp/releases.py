"""The frozen plan from which sampler, clipping, noise and accounting are built, so that they cannot disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rapid.dp.accounting import Release, group_epsilon, prv_epsilon, rdp_epsilon, solve_noise_multiplier
from rapid.errors import InputError


def default_delta(dataset_size: int) -> float:
    """1 / (N ln N), the field's convention; 1 / (2 N) for fewer than 8 images."""
    return 1 / (dataset_size * max(2.0, math.log(dataset_size)))


def check_budget(epsilon: float, delta: float, dataset_size: int) -> None:
    """Refuse what is no budget.

    Raises:
        InputError: an argument out of range; the message names the command-line argument.
    """
    if not epsilon > 0 or math.isinf(epsilon):
        raise InputError(f"--epsilon {epsilon}: must be a positive number, such as 1 or 10")
    if not 0 < delta < 1:
        raise InputError(f"--delta {delta}: must lie in (0, 1), and well under 1/N = {1 / dataset_size:.1e}")


class Plan(BaseModel):
    """Public numbers that fix what a private training releases.

    Adjacency: adding or removing one image. The number of images itself counts as public: it fixes the sample rate,
    which stays what it is when an image is taken away. So the guarantee compares the set with the same set in which one
    image contributes nothing.

    Attributes:
        dataset_size: N.
        expected_batch: B; the batch of a step has B examples on average.
        steps: number of steps.
        clip_norm: C, largest l2 norm of an example's gradient.
        noise_multiplier: sigma; the noise of a step has standard deviation sigma * C.
        delta: of (epsilon, delta).
        multiplicity: K draws of an example are averaged before clipping; no cost in privacy.
        group_size: images of one person, for which epsilon is told too.
        others: what else is made known of the same images; epsilon is that of all together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset_size: int = Field(ge=1)
    expected_batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    clip_norm: float = Field(gt=0)
    noise_multiplier: float = Field(ge=0)
    delta: float = Field(gt=0, lt=1)
    multiplicity: int = Field(1, ge=1)
    group_size: int = Field(1, ge=1)
    others: tuple[Release, ...] = ()

    @model_validator(mode="after")
    def _batch_fits(self) -> Self:
        if self.expected_batch > self.dataset_size:
            raise ValueError("expected_batch must be at most dataset_size")
        if self.group_size > self.dataset_size:
            raise ValueError("group_size must be at most dataset_size")
        return self

    @classmethod
    def solve(
        cls,
        *,
        epsilon: float,
        delta: float,
        dataset_size: int,
        expected_batch: int,
        steps: int,
        clip_norm: float,
        multiplicity: int = 1,
        group_size: int = 1,
        others: Sequence[Release] = (),
    ) -> Self:
        """The plan with the least noise that, with `others`, spends at most `epsilon` at `delta`, for one image.

        Raises:
            InputError: an argument out of range; the message names the command-line argument.
        """
        check_budget(epsilon, delta, dataset_size)
        if expected_batch > dataset_size:
            raise InputError(
                f"--set private.expected_batch={expected_batch}: is larger than the private set; "
                f"use at most its {dataset_size} images"
            )
        if group_size > dataset_size:
            raise InputError(f"--set private.group_size={group_size}: is larger than the private set ({dataset_size})")
        noise = solve_noise_multiplier(epsilon, delta, expected_batch / dataset_size, steps, others)
        return cls(
            dataset_size=dataset_size,
            expected_batch=expected_batch,
            steps=steps,
            clip_norm=clip_norm,
            noise_multiplier=noise,
            delta=delta,
            multiplicity=multiplicity,
            group_size=group_size,
            others=tuple(others),
        )

    @property
    def sample_rate(self) -> float:
        """Probability with which each image is in a batch."""
        return self.expected_batch / self.dataset_size

    def releases(self, steps: int | None = None) -> list[Release]:
        """What is made known of the private images by `steps` steps (default: all), and by the others."""
        return [Release(self.noise_multiplier, self.sample_rate, self.steps if steps is None else steps), *self.others]

    def epsilon(self, steps: int | None = None) -> float:
        """Epsilon spent after `steps` steps (default: all), by PRV."""
        return prv_epsilon(self.releases(steps), self.delta)

    def epsilon_rdp(self) -> float:
        """Epsilon of all steps by RDP, for comparison."""
        return rdp_epsilon(self.releases(), self.delta)

    def epsilon_group(self) -> float:
        """Epsilon of all steps for adding or removing the `group_size` images of one person."""
        return group_epsilon(self.releases(), self.delta, self.group_size)

    def gradient_computations(self) -> int:
        """Expected number of per-example gradients in all."""
        return self.expected_batch * self.steps * self.multiplicity

    def signal_to_noise(self, parameters: int) -> float:
        """Of one step: the norm of the expected batch's sum if all its clipped gradients agree, over that of the noise.

        An upper bound, reached where the gradients are clipped and point the same way. Averages over n steps have
        sqrt(n) times this.
        """
        noise = self.noise_multiplier * math.sqrt(parameters)
        return self.expected_batch / noise if noise else math.inf
