"""The one door to private images: what a method does with them goes through `PrivateAccess`.

It owns the images of this process, the budget, the charge in the ledger and the record of what was released. It refuses
a release that the budget does not list, and never makes one twice: a resumed run gets the recorded result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rapid.data import ImageSet
from rapid.dp.accounting import prv_epsilon
from rapid.dp.budget import Budget
from rapid.dp.ledger import Spent
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.queries import clipped_rows, noisy_sum
from rapid.dp.randomness import randomness_for
from rapid.dp.ranks import Ranks
from rapid.dp.releases import Release
from rapid.dp.spending import Charge
from rapid.errors import InputError, LostRank, PrivacyRefused, Stopped
from rapid.progress import Progress
from rapid.stopping import check_stop
from rapid.training import Checkpoint, RunFolder, Trainer

Rows = Callable[..., Tensor]
"""(rows of each private tensor, (n, ...)) -> (n, ...): row i depends on the rows i alone."""
BATCH = 500
EPSILON_UPDATES = 20
"""How often the epsilon beside the progress bar is computed."""
SAME = 1e-3
"""By how much a row that is computed alone may differ from the same row in a batch, relative to the largest number."""


@dataclass(frozen=True)
class PublicFacts:
    """What counts as public about the private images.

    Attributes:
        dataset_size: N.
        classes: names; empty for unlabelled images.
        image_shape: (H, W) or (H, W, 3).
        unit: what one unit of the guarantee is.
    """

    dataset_size: int
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]
    unit: str = "one image"

    @classmethod
    def of(cls, images: ImageSet) -> PublicFacts:
        """Those of a set."""
        return cls(len(images), images.classes if images.labels is not None else (), images.images.shape[1:])


@dataclass(frozen=True)
class Execution:
    """How a private training runs. None of this changes what is released.

    Attributes:
        physical_batch: losses in memory at a time.
        autocast: run the network in bfloat16; norms, sums and noise stay float32.
        checkpoint_seconds: how often the state is saved.
        noise_source: of `rapid.dp.randomness.NOISE_SOURCES`.
    """

    physical_batch: int = 256
    autocast: bool = False
    checkpoint_seconds: float = 60.0
    noise_source: str = "chacha20"


class PrivateTensor:
    """One row for each private image of this process; only `PrivateAccess` reads the rows."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"PrivateTensor({len(self)} rows of {tuple(self._rows.shape[1:])})"

    def __reduce__(self) -> str:
        raise PrivacyRefused("private rows cannot be pickled")


class PrivateAccess:
    """Private images and all that may be done with them.

    Formal guarantee: what leaves this object are results of `train`, `count`, `mean` and `histogram`, each of which is
    a release of the budget, so together they spend at most `budget.epsilon` at `budget.delta`.

    Args:
        images: of this rank.
        facts: of the images of all ranks.
        budget: what may be released.
        run_folder: where the first rank records what was released.
        device: where private networks are trained.
        ranks: the processes that share the work.

    Attributes:
        images: uint8 (n, H, W) or (n, H, W, 3), on the CPU.
    """

    def __init__(
        self,
        images: ImageSet,
        facts: PublicFacts,
        budget: Budget,
        run_folder: RunFolder,
        *,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.facts = facts
        self.budget = budget
        self.device = device
        self.ranks = ranks or Ranks()
        self.images = PrivateTensor(torch.from_numpy(np.ascontiguousarray(images.images)))
        self._labels = None if images.labels is None else PrivateTensor(torch.from_numpy(images.labels))
        self._folder = run_folder

    @contextmanager
    def charged(self, charge: Charge | None) -> Iterator[PrivateAccess]:
        """Charge all releases before the first one; after an orderly end or stop, charge those that were made.

        Args:
            charge: of the first rank; None on the others.

        Raises:
            PrivacyRefused: the data set would cost more than its limit; the run folder is removed if it is new.
        """
        if charge is None:
            yield self
            return
        try:
            charge.reserve(self._spent(None))
        except PrivacyRefused:
            self._folder.discard()
            raise
        try:
            yield self
        except (Stopped, LostRank, PrivacyRefused):
            charge.settle(self._spent(self.steps_taken()))
            raise
        charge.settle(self._spent(self.steps_taken()))

    @property
    def labels(self) -> PrivateTensor:
        """Class numbers, int64 (n,), on the CPU.

        Raises:
            InputError: the images are unlabelled.
        """
        if self._labels is None:
            raise InputError("private", "has no labels, and this needs them; use one sub-folder a class")
        return self._labels

    def steps_taken(self) -> dict[str, int]:
        """Of each release of the budget, the steps that were begun; a query is one step."""
        steps = {}
        for name in self.budget.names:
            saved = Checkpoint(self._folder.checkpoint(name)).load()
            steps[name] = 0 if saved is None else int(saved["step"])
        return steps

    def map(self, function: Rows, *tensors: PrivateTensor, title: str = "") -> PrivateTensor:
        """Apply a function of single examples; the result stays private.

        Args:
            function: see `Rows`.
            tensors: whose rows it gets.
            title: shown with the progress, if it is not empty.

        Raises:
            ValueError: the function mixes examples, as batch normalisation does.
            Stopped: a stop was requested.
        """
        return PrivateTensor(self._apply(function, tensors, title))

    def train(
        self,
        name: str,
        network: nn.Module,
        losses: Rows,
        data: Sequence[PrivateTensor],
        *,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        ema_decay: float | None = None,
        execution: Execution | None = None,
        between_steps: Callable[[int], None] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Release a network that is trained by DP-SGD, in place; the averaged weights are left in it.

        Formal guarantee: that of `PrivateMechanism`; optimiser, average, checkpoints and `between_steps` work on its
        results. A resumed run continues from the last checkpoint with fresh noise; later steps were never released.

        Args:
            name: of the release, which is DP-SGD.
            network: its parameters that require gradients are trained; all ranks start with the first rank's weights.
            losses: rows of `data` (n, ...) -> losses, float (n,); with multiplicity K each example has K rows in turn.
            data: what the losses need of each example.
            optimizer: of the trained parameters.
            scheduler: of its learning rate.
            ema_decay: of the average; None: none.
            execution: how it runs.
            between_steps: called after each step with the number of steps, such as a GAN's generator step.
            extra: other state for the checkpoints; see `Trainer`.

        Raises:
            PrivacyRefused: the budget does not list this release.
            InputError: the checkpoint belongs to another release.
            LostRank: another rank is gone; the state is saved, and a step that was begun counts.
            Stopped: a stop was requested; the same.
        """
        release, how, first = self._listed(name, "dp-sgd"), execution or Execution(), self.ranks.first
        network.eval()  # no layer of ours behaves otherwise in training; this makes sure
        trainer = Trainer(network, optimizer, scheduler, ema_decay=ema_decay, extra=extra)
        checkpoint = _ReleaseCheckpoint(self._folder, release, how.checkpoint_seconds) if first else None
        trainer.load_state_dict(
            self.ranks.broadcast_state((checkpoint.load() if checkpoint else None) or trainer.state_dict())
        )

        def losses_of(indices: Tensor) -> Tensor:
            return losses(*(tensor._rows[indices.to(tensor._rows.device)] for tensor in data))

        mechanism = PrivateMechanism(
            release,
            network,
            losses_of,
            physical_batch=how.physical_batch,
            autocast=how.autocast,
            steps_taken=trainer.steps_done,
            ranks=self.ranks,
            randomness=randomness_for(how.noise_source),
        )

        def backward(step: int) -> str | None:
            for parameter, gradient in zip(mechanism.parameters, mechanism.gradient(), strict=True):
                parameter.grad = gradient
            return self._progress_note(release, step + 1)

        steps = release.spec.steps
        try:
            trainer.run(steps, backward, title=name, checkpoint=checkpoint, between_steps=between_steps, shown=first)
        except (LostRank, PrivacyRefused, Stopped):
            # the step that was begun counts: other ranks may have seen its sum, or `between_steps` what came of it
            trainer.steps_done = mechanism.steps_taken
            if checkpoint is not None:
                checkpoint.save(trainer.state_dict())
            raise

    def count(self, name: str, predicate: Rows, *tensors: PrivateTensor) -> int:
        """Release how many examples satisfy a predicate, with noise and rounded to a whole number.

        Args:
            name: of the release, a count.
            predicate: rows -> bool (n,).
            tensors: whose rows it gets.

        Raises:
            PrivacyRefused: the budget does not list this release.
            ValueError: the predicate returns several values an example.
        """

        def total() -> Tensor:
            return self._one_each(predicate, tensors, name).bool().sum().double().view(1)

        # whole numbers hide the last digits of floating-point noise
        return round(self._query(name, "count", total).item())

    def mean(self, name: str, features: Rows, *tensors: PrivateTensor) -> Tensor:
        """Release the mean of features over all examples, with noise.

        Args:
            name: of the release, a mean; its sensitivity is the l2 norm to which each example's features are clipped.
            features: rows -> float (n, ...).
            tensors: whose rows it gets.

        Returns:
            The noisy sum of the clipped features over N, float64 (...), on the CPU.

        Raises:
            PrivacyRefused: the budget does not list this release.
        """
        release, shape = self._listed(name, "mean"), self._row_shape(features, tensors)

        def total() -> Tensor:
            rows = self._apply(features, tensors, name)
            return clipped_rows(rows, release.spec.sensitivity).sum(0)

        return (self._query(name, "mean", total) / self.facts.dataset_size).view(shape)

    def histogram(self, name: str, bins: int, function: Rows, *tensors: PrivateTensor) -> Tensor:
        """Release how many examples fall into each bin, with noise and rounded to whole numbers.

        Args:
            name: of the release, a histogram.
            bins: number of bins.
            function: rows -> int64 (n,), the bin of each example; outside of 0..bins-1 it falls into none.
            tensors: whose rows it gets.

        Returns:
            float64 (bins,), on the CPU.

        Raises:
            PrivacyRefused: the budget does not list this release.
            ValueError: the function returns several values an example.
        """

        def total() -> Tensor:
            found = self._one_each(function, tensors, name)
            return torch.bincount(found[(found >= 0) & (found < bins)], minlength=bins).double()

        return self._query(name, "histogram", total).round()

    def _query(self, name: str, kind: str, total: Callable[[], Tensor]) -> Tensor:
        """The noisy sum, or what an earlier run recorded of it."""
        release = self._listed(name, kind)
        checkpoint = _ReleaseCheckpoint(self._folder, release) if self.ranks.first else None
        saved = self.ranks.broadcast_state((checkpoint.load() if checkpoint else None) or {})
        if saved:
            recorded: Tensor = saved["result"]
            return recorded
        result = noisy_sum(total(), release, self.ranks)
        if checkpoint is not None:
            # before anything follows from it
            checkpoint.save({"step": 1, "result": result})
        return result

    def _apply(self, function: Rows, tensors: Sequence[PrivateTensor], title: str) -> Tensor:
        """All rows of a function's result, (n, ...)."""
        count, parts = len(self.images), []
        with torch.no_grad(), Progress(title, count, "image", shown=bool(title) and self.ranks.first) as progress:
            for start in range(0, count, BATCH):
                check_stop()
                rows = [tensor._rows[start : start + BATCH] for tensor in tensors]
                parts.append(function(*rows))
                if start == 0:
                    _check_rows(function, rows, parts[0])
                progress.advance(len(rows[0]))
            # normalisation layers refuse empty batches: a black image tells the shape
            return torch.cat(parts) if parts else function(*_black(tensors))[:0]

    def _one_each(self, function: Rows, tensors: Sequence[PrivateTensor], title: str) -> Tensor:
        """One value for each example, (n,): with more, an image would change a count by more than 1."""
        values = self._apply(function, tensors, title)
        if values.ndim != 1:
            raise ValueError(f"the function must return one value an example, not {tuple(values.shape[1:])}")
        return values

    def _row_shape(self, function: Rows, tensors: Sequence[PrivateTensor]) -> tuple[int, ...]:
        """The shape of one row of a function's result, which is public."""
        with torch.no_grad():
            return tuple(function(*_black(tensors)).shape[1:])

    def _listed(self, name: str, kind: str) -> Release:
        release = self.budget.release(name)
        if release.spec.kind != kind:
            raise PrivacyRefused(f"release '{name}' is a {release.spec.kind} in the budget, not a {kind}")
        return release

    def _spent(self, steps: Mapping[str, int] | None) -> list[Spent]:
        """Lines for the ledger: of each release so many steps, or all."""
        events = zip(self.budget.names, self.budget.events(steps), strict=True)
        return [Spent.of(name, event) for name, event in events]

    def _progress_note(self, release: Release, steps: int) -> str | None:
        if not self.ranks.first or steps % max(1, release.spec.steps // EPSILON_UPDATES):
            return None
        done = {name: other.spec.steps for name, other in zip(self.budget.names, self.budget.releases, strict=True)}
        # releases that come later in the budget are not yet made
        for later in self.budget.names[self.budget.names.index(release.name) + 1 :]:
            done[later] = 0
        done[release.name] = steps
        return f"epsilon {prv_epsilon(self.budget.events(done), self.budget.delta):.2f}"


class _ReleaseCheckpoint(Checkpoint):
    """The state of one release, with the numbers that it was made with."""

    def __init__(self, folder: RunFolder, release: Release, interval: float = 60.0) -> None:
        super().__init__(folder.checkpoint(release.name), interval)
        self._numbers = release.model_dump(mode="json")

    def save(self, state: dict[str, Any]) -> None:
        super().save(state | {"release": self._numbers})

    def load(self) -> dict[str, Any] | None:
        saved = super().load()
        if saved is not None and saved.pop("release", None) != self._numbers:
            raise InputError("resume", f"{self.path} was made with another plan; use the same epsilon, delta and data")
        return saved


def _black(tensors: Sequence[PrivateTensor]) -> list[Tensor]:
    """One row of zeros of each."""
    return [tensor._rows.new_zeros((1, *tensor._rows.shape[1:])) for tensor in tensors]


def _check_rows(function: Rows, rows: Sequence[Tensor], result: Tensor) -> None:
    """Compare the first row with what the function makes of it alone."""
    alone = function(*(part[:1] for part in rows))
    if result.ndim == 0 or len(result) != len(rows[0]) or alone.shape != (1, *result.shape[1:]):
        raise ValueError("the function must return one row an example")
    together = result[:1]
    if not alone.is_floating_point():
        return
    tolerance = SAME * max(1.0, float(together.abs().max())) if together.numel() else SAME
    if not torch.allclose(alone, together, rtol=0, atol=tolerance, equal_nan=True):
        raise ValueError("the function mixes examples: a row alone differs from the same row in a batch")
