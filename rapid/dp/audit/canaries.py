"""Canary images in the place of private ones, and the access through which a private stage is run on them.

`CanaryAccess` is the real access with a mask: an image that does not take part contributes nothing to any release,
which is the neighbouring relation of the guarantee. N stays as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import ANY_BATCH
from rapid.data import ImageSet
from rapid.dp.access import PrivateAccess
from rapid.dp.audit.adversary import Adversary
from rapid.dp.audit.evidence import Evidence
from rapid.dp.audit.watch import Watch
from rapid.dp.execution import Execution
from rapid.dp.queries import clipped_rows
from rapid.dp.randomness import Randomness
from rapid.dp.releases import Release
from rapid.dp.rows import PrivateTensor, Rows, apply
from rapid.errors import InputError, RapidError
from rapid.training import Trainer


def canary_images(count: int, size: int, channels: int) -> ImageSet:
    """Images of uniform noise, each the only one of its class: no two have much in common, or resemble an image.

    Args:
        count: m.
        size: height and width.
        channels: 1 for grey images, 3 for RGB.
    """
    shape = (count, size, size) if channels == 1 else (count, size, size, 3)
    words = Randomness().words(-(-math.prod(shape) // 8))
    pixels = words.numpy().view(np.uint8)[: math.prod(shape)].reshape(shape).copy()
    return ImageSet(pixels, np.arange(count), tuple(f"canary {number}" for number in range(count)), "canaries")


def canaries_among(images: ImageSet, count: int) -> ImageSet:
    """So many images of a public set, drawn at random, with their labels.

    Raises:
        InputError: there are fewer.
    """
    size = len(images.images)
    if size < count:
        raise InputError("canaries", f"--images has only {size}", count)
    chosen = Randomness().uniform(size).argsort()[:count].numpy()
    labels = None if images.labels is None else images.labels[chosen]
    return replace(images, images=images.images[chosen], labels=labels, units=None)


class CanaryDraws(Randomness):
    """Draws within losses that depend on the canary and the step alone, so that they can be made again.

    They are the adversary's knowledge. The guarantee allows that: they do not depend on who is in a batch.

    Draws for n rows must be asked for in multiples of n, row by row.
    """

    def __init__(self) -> None:
        super().__init__()
        self._key = int.from_bytes(os.urandom(16), "little")
        self._rows: Sequence[tuple[int, int, int]] = ()
        self._asked = 0

    def belong_to(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Whose draws come next: canary, step and repetition of each row; (): nobody's, fresh ones."""
        self._rows, self._asked = rows, 0

    def uniform(self, count: int) -> Tensor:
        """See `Randomness`."""
        if not self._rows:
            return super().uniform(count)
        return self._draw(count, lambda source, size: 1 - source.random(size)).double()

    def normal(self, count: int) -> Tensor:
        """See `Randomness`."""
        if not self._rows:
            return super().normal(count)
        return self._draw(count, lambda source, size: source.standard_normal(size, np.float32)).float()

    def _draw(self, count: int, draw: Callable[[np.random.Generator, int], NDArray[Any]]) -> Tensor:
        if count % len(self._rows):
            raise RapidError(f"the losses asked for {count} draws for {len(self._rows)} rows: they cannot be audited")
        self._asked += 1
        size = count // len(self._rows)
        parts = [draw(np.random.default_rng([self._key, *row, self._asked]), size) for row in self._rows]
        return torch.from_numpy(np.concatenate(parts))


class CanaryAccess(PrivateAccess):
    """Access to canaries of which some take part, and what is seen from outside of it.

    The adversary sees the noisy gradient of every step, the results of all queries and the trained networks. It knows
    the canaries, the functions that are applied to them and the draws of these, but not the coins, batches and noise.
    The evidence is for an auditor, who knows coins and batches as well.

    Args:
        arguments: of `PrivateAccess`; images are the units, and there is one rank.
        coins: which canaries take part, bool (m,).
        options: of `PrivateAccess`.

    Attributes:
        adversary: its scores.
        evidence: of each training and mean.
    """

    def __init__(self, *arguments: Any, coins: NDArray[np.bool_], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.draws: CanaryDraws = CanaryDraws()
        self.adversary = Adversary(len(coins))
        self.evidence: list[Evidence] = []
        self._coins = coins.copy()
        self._present = PrivateTensor(torch.from_numpy(self._coins))
        self._numbers = PrivateTensor(torch.arange(len(coins)))

    def train(
        self,
        name: str,
        trainer: Trainer,
        losses: Rows,
        data: Sequence[PrivateTensor],
        *,
        execution: Execution | None = None,
        before_update: Callable[[], None] | None = None,
        between_steps: Callable[[int], None] | None = None,
    ) -> None:
        """As `PrivateAccess.train`; losses of absent canaries are multiplied by 0, and batches are not padded.

        Raises:
            RapidError: the losses have draws that do not come from `draws`.
        """
        trainer.network.eval()
        # not with the mask and the watch: it would look like draws of canaries
        super()._rehearse(trainer, losses, data, self.budget.release(name))
        # padding changes no sum, but the canaries that pad a batch would look like drawn ones
        chosen = replace(execution or Execution(), pad_batches=False)
        if chosen.autocast:
            # batches are padded to whole pieces
            chosen = replace(chosen, physical_batch=1)
        if chosen.physical_batch is None:
            # a measurement would look like draws of canaries
            chosen = replace(chosen, physical_batch=ANY_BATCH)
        watch = Watch(
            trainer.network,
            losses,
            data,
            self.budget.release(name),
            self._coins,
            self.draws,
            self.adversary,
            autocast=chosen.autocast,
        )

        def masked(*rows: Tensor) -> Tensor:
            *own, numbers, present = rows
            watch.drawn(numbers)
            found = losses(*own)
            return found * present.to(found)

        before = watch.mean_losses()
        # what leaves is seen before the weights, at which it was taken, move on
        hook = trainer.optimizer.register_step_pre_hook(lambda *_: watch.see())
        try:
            super().train(
                name,
                trainer,
                masked,
                [*data, self._numbers, self._present],
                execution=chosen,
                before_update=before_update,
                between_steps=between_steps,
            )
        finally:
            hook.remove()
            self.draws.belong_to(())
        self.adversary.add_losses(before - watch.mean_losses())
        self.evidence.append(watch.evidence())

    def _rehearse(self, trainer: Trainer, losses: Rows, data: Sequence[PrivateTensor], release: Release) -> None:
        """Done by `train`."""

    def count(self, name: str, predicate: Rows, *tensors: PrivateTensor) -> int:
        """As `PrivateAccess.count`; absent canaries do not satisfy the predicate."""
        result = super().count(name, _masked(predicate, 0), *tensors, self._present)
        rows = apply(predicate, tensors).bool().double().view(-1, 1)
        self._queried(name, rows, torch.tensor([result], dtype=torch.float64))
        return result

    def mean(self, name: str, features: Rows, *tensors: PrivateTensor) -> Tensor:
        """As `PrivateAccess.mean`; the features of absent canaries are 0."""
        result = super().mean(name, _masked(features, 0), *tensors, self._present)
        rows = clipped_rows(apply(features, tensors), self.budget.release(name).spec.sensitivity)
        total = result.flatten() * self.facts.dataset_size
        self._queried(name, rows, total)
        self.evidence.append(Evidence.of_mean(self.budget.release(name), rows, self._coins, total))
        return result

    def histogram(self, name: str, bins: int, function: Rows, *tensors: PrivateTensor) -> Tensor:
        """As `PrivateAccess.histogram`; absent canaries are in no bin."""
        result = super().histogram(name, bins, _masked(function, -1), *tensors, self._present)
        found = apply(function, tensors)
        self._queried(name, (found[:, None] == torch.arange(bins)).double(), result)
        return result

    def _queried(self, name: str, rows: Tensor, total: Tensor) -> None:
        self.adversary.add_result(rows, total, self.budget.release(name).noise_stddev)


def _masked(function: Rows, absent: Any) -> Rows:
    """The function with `absent` for canaries that do not take part; the last argument tells which do."""

    def masked(*rows: Tensor) -> Tensor:
        found = function(*rows[:-1])
        present = rows[-1].to(found.device).view(-1, *[1] * (found.ndim - 1))
        return torch.where(present, found, torch.full_like(found, absent))

    return masked
