"""Access to private images: methods use them only through `PrivateAccess`.

It owns the images of this process, the budget, the charge in the ledger and the record of what was released. It refuses
a release that the budget does not list, and never repeats a release: a resumed run gets the recorded result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rapid.data import ImageSet
from rapid.data.units import ONE_IMAGE, ONE_PERSON
from rapid.dp.attempts import Attempt
from rapid.dp.budget import Budget
from rapid.dp.execution import Execution
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.objective import Selected, as_objective
from rapid.dp.physical import measured_physical_batch
from rapid.dp.progress import EpsilonSoFar
from rapid.dp.queries import noisy_sum
from rapid.dp.randomness import Randomness, randomness_for
from rapid.dp.rehearsal import rehearse
from rapid.dp.release_checkpoint import ReleaseCheckpoint
from rapid.dp.releases import DpSgdSpec, Release
from rapid.dp.rows import PrivateTensor, Rows, applied, apply, apply_scalar, row_shape, take
from rapid.dp.spending import Charge
from rapid.dp.units import Units
from rapid.errors import InputError, LostRank, PrivacyRefused, Stopped
from rapid.ranks import Ranks
from rapid.training import Checkpoint, RunFolder, Trainer
from rapid.training.optimizers import set_gradients


@dataclass(frozen=True)
class PublicFacts:
    """Public facts about the private images.

    Attributes:
        dataset_size: N, the number of units: images, or people. How many images people have is not public.
        classes: names; empty for unlabelled images.
        image_shape: (H, W) or (H, W, 3).
        unit: of the guarantee, "one image" or "one person".
    """

    dataset_size: int
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]
    unit: str = ONE_IMAGE

    @classmethod
    def of(cls, images: ImageSet) -> PublicFacts:
        """The public facts of an image set."""
        return cls(
            images.unit_count,
            images.classes if images.labels is not None else (),
            images.images.shape[1:],
            ONE_IMAGE if images.units is None else ONE_PERSON,
        )


class PrivateAccess:
    """Private images and the operations that are allowed on them.

    Formal guarantee: only results of `train`, `count`, `mean` and `histogram` leave this object. Each is a release of
    the budget, so together they spend at most `budget.epsilon` at `budget.delta`. If the images have `units`, a person
    with all their images is what is drawn, clipped and counted (see `rapid.dp.units`).

    Args:
        images: of this rank: all images of its units, `ranks.part(facts.dataset_size)`.
        facts: of the images of all ranks.
        budget: what may be released.
        run_folder: where the first rank records what was released.
        device: where private networks are trained.
        ranks: the processes that share the work.

    Attributes:
        images: uint8 (n, H, W) or (n, H, W, 3), on the CPU.
        draws: secret randomness for draws within losses, such as timesteps.
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
        self.draws = Randomness()
        self.images = PrivateTensor(torch.from_numpy(np.ascontiguousarray(images.images)))
        self._labels = None if images.labels is None else PrivateTensor(torch.from_numpy(images.labels))
        self._units = Units(None if images.units is None else torch.from_numpy(images.units))
        # the progress would tell how many images people have
        self._shown = self.ranks.first and not self._units.people
        self._folder = run_folder
        self._attempt: Attempt | None = None
        self._made: set[str] = set()

    @contextmanager
    def charged(self, charge: Charge | None) -> Iterator[PrivateAccess]:
        """Charge all that may be released from here on, before it is; after an orderly end or stop, what was.

        What counts is what this process does, not what the run folder holds: see `rapid.dp.attempts`.

        Args:
            charge: of the first rank; None on the others.

        Raises:
            PrivacyRefused: the limit of the data set would be exceeded; the run folder is removed if it is new.
            InputError: a checkpoint belongs to another release or another data set.
        """
        if charge is None:
            yield self
            return
        releases = self.budget.releases
        try:
            starts = {release.name: ReleaseCheckpoint(self._folder, release).found() for release in releases}
            attempt = self._attempt = charge.begin(releases, starts)
        except PrivacyRefused:
            self._folder.discard()
            raise
        try:
            yield self
        except (Stopped, LostRank, PrivacyRefused):
            attempt.settle()
            raise
        attempt.settle()

    @property
    def labels(self) -> PrivateTensor:
        """Class numbers, int64 (n,), on the CPU.

        Raises:
            InputError: the images are unlabelled.
        """
        if self._labels is None:
            raise InputError("private", "has no labels, and this needs them; use one sub-folder per class")
        return self._labels

    def steps_taken(self) -> dict[str, int]:
        """Number of steps in the checkpoint of each release of the budget; a query is one step."""
        steps = {}
        for name in self.budget.names:
            saved = Checkpoint(self._folder.checkpoint(name)).load()
            steps[name] = 0 if saved is None else int(saved["step"])
        return steps

    def post_processing(self, name: str) -> Checkpoint:
        """Where the first rank can save the state of a training that sees nothing but results of releases."""
        if name in self.budget.names:
            raise PrivacyRefused(f"'{name}' is a release of the budget; post-processing needs another name")
        if self._attempt is not None:
            self._attempt.note()
        return Checkpoint(self._folder.checkpoint(name))

    def map(self, function: Rows, *tensors: PrivateTensor, title: str = "", decides: bool = False) -> PrivateTensor:
        """Apply a function of single examples; the result stays private.

        Args:
            function: see `Rows`.
            tensors: their rows are the arguments of the function.
            title: shown with the progress, if it is not empty; nothing is shown if people are the units.
            decides: whether a vote or a count hangs on which numbers of a row are larger, or nearly. With people as
                units it must not hang on last bits, which move with the other rows: each is computed by itself.

        Raises:
            ValueError: the function mixes examples, as batch normalisation does.
            Stopped: a stop was requested.
        """
        alone = decides and self._units.people
        return PrivateTensor(apply(function, tensors, title=title, shown=self._shown, alone=alone))

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
        """Train a network by DP-SGD, in place, and release it; the averaged weights are left in it.

        Formal guarantee: as for `PrivateMechanism`; optimiser, average, checkpoints, `before_update` and
        `between_steps` only use its results. A resumed run continues from the last checkpoint with fresh noise; later
        steps were never released.

        Args:
            name: of the release, a DP-SGD training.
            trainer: a new trainer; the parameters of its network that require gradients are trained. All ranks start
                with the first rank's state.
            losses: rows of `data` (n, ...) -> losses, float (n,); with multiplicity K, K consecutive rows per example.
                An `Objective` is faster on a GPU.
                If people are the units, each row is a random image of the person, drawn independently.
            data: the inputs of the losses, one row per image.
            execution: how it runs.
            before_update: called in each step when the noisy gradients are in `.grad`, before the optimiser reads them;
                may add gradients of public losses, such as those of a GAN's fake images.
            between_steps: called after each step with the number of steps, such as a GAN's generator step.

        Raises:
            PrivacyRefused: the budget does not list this release.
            InputError: the checkpoint belongs to another release.
            UnsupportedLayer, ValueError: a rehearsal failed, and no step was taken; see `rapid.dp.rehearsal`.
            LostRank: another rank is gone; the state is saved, and a step that was begun counts.
            Stopped: a stop was requested; as for LostRank.
        """
        release, how, first = self._asked(name, "dp-sgd"), execution or Execution(), self.ranks.first
        trainer.network.eval()  # our layers behave the same in both modes; this makes sure
        checkpoint = ReleaseCheckpoint(self._folder, release, how.checkpoint_seconds, self._attempt) if first else None
        trainer.load_state_dict(
            self.ranks.broadcast_state((checkpoint.load() if checkpoint else None) or trainer.state_dict())
        )
        if trainer.steps_done < release.spec.steps:
            self._rehearse(trainer, losses, data, release)
        mechanism = self._mechanism(release, trainer, losses, data, how)
        spent = EpsilonSoFar(self.budget)

        def backward(step: int) -> str | None:
            if self._attempt is not None:
                self._attempt.begin(name, step + 1)
            set_gradients(mechanism.parameters, mechanism.gradient())
            return spent.note(release, step + 1) if first else None

        try:
            with _before_updates(trainer, before_update):
                trainer.run(
                    release.spec.steps,
                    backward,
                    title=name,
                    checkpoint=checkpoint,
                    between_steps=between_steps,
                    shown=first,
                    pause_every=release.spec.band,
                )
        except (LostRank, PrivacyRefused, Stopped):
            # a step that was begun counts: other ranks may have seen its sum, or `between_steps` its result; and a
            # correlation that was cut off goes on with the next round
            trainer.steps_done = release.spec.round_end(mechanism.steps_taken)
            if checkpoint is not None:
                checkpoint.save(trainer.state_dict())
            raise

    def _rehearse(self, trainer: Trainer, losses: Rows, data: Sequence[PrivateTensor], release: Release) -> None:
        rehearse(trainer.network, losses, data, release.spec)

    def _mechanism(
        self, release: Release, trainer: Trainer, losses: Rows, data: Sequence[PrivateTensor], how: Execution
    ) -> PrivateMechanism:
        """What makes the noisy gradients of a training, from the step on to which the trainer has come."""
        assert isinstance(release.spec, DpSgdSpec)
        physical_batch = how.physical_batch or measured_physical_batch(
            trainer.network, losses, data, release.spec, autocast=how.autocast
        )
        secret = Randomness()
        return PrivateMechanism(
            release,
            trainer.network,
            Selected(as_objective(losses), lambda indices: take(data, self._units.draw(indices, secret))),
            physical_batch=physical_batch,
            autocast=how.autocast,
            steps_taken=trainer.steps_done,
            ranks=self.ranks,
            randomness=randomness_for(how.noise_source),
            pad_batches=how.pad_batches,
        )

    def count(self, name: str, predicate: Rows, *tensors: PrivateTensor) -> int:
        """Release how many examples satisfy a predicate, with noise and rounded to a whole number.

        People are counted if one of their images satisfies it.

        Args:
            name: of the release, a count.
            predicate: rows -> bool (n,).
            tensors: their rows are the arguments of the function.

        Raises:
            PrivacyRefused: the budget does not list this release.
            ValueError: the predicate returns several values per example.
        """

        def total() -> Tensor:
            return self._units.number(apply_scalar(predicate, tensors, title=name, shown=self._shown))

        # whole numbers hide the last digits of floating-point noise
        return round(self._query(name, "count", total).item())

    def mean(self, name: str, features: Rows, *tensors: PrivateTensor) -> Tensor:
        """Release the mean of features over all examples, with noise.

        A person's features are the mean of those of their images.

        Args:
            name: of the release, a mean; its sensitivity is the l2 norm to which each example's features are clipped.
            features: rows -> float (n, ...).
            tensors: their rows are the arguments of the function.

        Returns:
            The noisy sum of the clipped features over N, float64 (...), on the CPU.

        Raises:
            PrivacyRefused: the budget does not list this release.
            ValueError: the features of examples have several shapes.
        """
        release, shape = self._listed(name, "mean"), row_shape(features, tensors)

        def total() -> Tensor:
            rows = applied(features, tensors, title=name, shown=self._shown, shape=shape)
            return self._units.clipped_sum(rows, release.spec.sensitivity)

        return (self._query(name, "mean", total) / self.facts.dataset_size).view(shape)

    def histogram(self, name: str, bins: int, function: Rows, *tensors: PrivateTensor) -> Tensor:
        """Release how many examples fall into each bin, with noise and rounded to whole numbers.

        A person has one vote, which their images share.

        Args:
            name: of the release, a histogram.
            bins: number of bins.
            function: rows -> int64 (n,), the bin of each example; bins outside 0..bins-1 are not counted.
            tensors: their rows are the arguments of the function.

        Returns:
            float64 (bins,), on the CPU.

        Raises:
            PrivacyRefused: the budget does not list this release.
            ValueError: the function returns several values per example.
        """

        def total() -> Tensor:
            return self._units.votes(apply_scalar(function, tensors, title=name, shown=self._shown), bins)

        return self._query(name, "histogram", total).round()

    def _query(self, name: str, kind: str, total: Callable[[], Tensor]) -> Tensor:
        """The noisy sum, or the result that an earlier run recorded."""
        release = self._asked(name, kind)
        checkpoint = ReleaseCheckpoint(self._folder, release, attempt=self._attempt) if self.ranks.first else None
        saved = self.ranks.broadcast_state((checkpoint.load() if checkpoint else None) or {})
        if saved:
            return saved["result"]  # type: ignore[no-any-return]
        exact = total()
        if self._attempt is not None:
            self._attempt.begin(name, 1)
        result = noisy_sum(exact, release, self.ranks)
        if checkpoint is not None:
            # before anything depends on it
            checkpoint.save({"step": 1, "result": result})
        return result

    def _asked(self, name: str, kind: str) -> Release:
        """The release, which is made once: a second time, by another function, it would be the first result again."""
        release = self._listed(name, kind)
        if name in self._made:
            raise PrivacyRefused(f"release '{name}' was made already; list a release of its own for each")
        self._made.add(name)
        return release

    def _listed(self, name: str, kind: str) -> Release:
        release = self.budget.release(name)
        if release.spec.kind != kind:
            raise PrivacyRefused(f"release '{name}' is a {release.spec.kind} in the budget, not a {kind}")
        return release


@contextmanager
def _before_updates(trainer: Trainer, function: Callable[[], None] | None) -> Iterator[None]:
    """Within the block, a function is called before each update, if there is one.

    By a hook of the optimiser, so that an audit, whose hook is older, sees the gradients before they are added to.
    """

    def update(*_: object) -> None:
        if function is not None:
            function()

    hook = trainer.optimizer.register_step_pre_hook(update)
    try:
        yield
    finally:
        hook.remove()
