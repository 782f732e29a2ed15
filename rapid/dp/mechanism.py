"""The private mechanism: Poisson batches, clipped sums, Gaussian noise, and a count of the steps that are spent."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial

from torch import Tensor, nn

from rapid.dp.correlation import Correlation, coefficients, deal
from rapid.dp.gradients import BookKeeper
from rapid.dp.objective import Objective, as_objective
from rapid.dp.padding import PaddedBatch, pad, padded_size
from rapid.dp.randomness import Randomness
from rapid.dp.recorded_sum import RecordedSum
from rapid.dp.releases import DpSgdSpec, Release
from rapid.errors import PrivacyRefused
from rapid.ranks import Ranks
from rapid.recording import records

Losses = Callable[[Tensor], Tensor]
"""indices int64 (rows,) of private examples -> their losses, float (rows,), each a function of its own example alone.

A repeated index asks for as many losses, each with its own draws of noise, timestep or augmentation. The network must
preserve the order of rows, and the draws must come from secret randomness.
"""


class PrivateMechanism:
    """Noisy clipped gradients of any module and any per-example loss.

    Formal guarantee: all results of `gradient` together, at most `spec.steps`, are described by `release.event()`:
    each call is the Gaussian mechanism with sensitivity clip_norm and standard deviation noise_multiplier * clip_norm
    on a Poisson sample of rate sample_rate. Everything that `losses` does with an example (retrieval included) happens
    before the clipping. Sums are float64; the noisy sum is rounded to a public grid (see `rapid.dp.noise`), and only
    then it becomes float32. The guarantee holds for any number of ranks: independent samples of the ranks' parts form a
    sample of the whole, the sums add up, and each element of the sum gets its noise from exactly one rank. With a band
    the noise is correlated: `rapid.dp.correlation` has the guarantee.

    | case                     | what happens                                              |
    |--------------------------|-----------------------------------------------------------|
    | no example is drawn      | noise alone is returned, and the step counts              |
    | non-finite gradient      | the example counts as zero                                |
    | more steps than planned  | PrivacyRefused, before any example is read                |
    | padded batches           | the same sums: the padding counts as zero                 |

    Args:
        release: the public numbers and the noise, of kind "dp-sgd".
        network: parameters that require gradients at construction are trained; the same on all ranks.
        losses: see `Losses`; its indices are positions in this rank's part, `ranks.part(dataset_size)`. The second part
            of an `Objective` is recorded on a GPU, unless its network has a layer without a rule.
        physical_batch: losses in memory at a time; changes what is released by rounding alone.
        autocast: run the network in bfloat16; norms, sums and noise stay float64.
        steps_taken: steps of an earlier run that this one resumes; with a band, whole rounds.
        ranks: the processes that share the work.
        randomness: of batches and noise, by default the stream cipher.
        pad_batches: compute as many gradients in each step, whatever is drawn; see `rapid.dp.padding`.

    Raises:
        ValueError: the release is a query, or `steps_taken` ends within a round.
    """

    def __init__(
        self,
        release: Release,
        network: nn.Module,
        losses: Losses | Objective,
        *,
        physical_batch: int,
        autocast: bool = False,
        steps_taken: int = 0,
        ranks: Ranks | None = None,
        randomness: Randomness | None = None,
        pad_batches: bool = False,
    ) -> None:
        if not isinstance(release.spec, DpSgdSpec):
            raise ValueError(f"release '{release.name}' is a {release.spec.kind}, not dp-sgd")
        self.release = release
        self._spec = release.spec
        self._steps_taken = steps_taken
        self._keeper = BookKeeper(network)
        self._device = self._keeper.parameters[0].device
        self._objective = as_objective(losses)
        self._physical_batch = physical_batch
        self._autocast = autocast
        self._ranks = ranks or Ranks()
        self._examples = len(self._ranks.part(self._spec.dataset_size))
        # with a band one group of several is drawn from
        self._group = math.ceil(self._examples / self._spec.band)
        self._randomness = randomness or Randomness()
        self._pad_batches = pad_batches
        self._recorded = self._recording() if records(self._device) else None
        self._correlation: Correlation | None = None
        if (band := self._spec.band) > 1:
            if self._spec.round_end(steps_taken) != steps_taken:
                raise ValueError(f"{steps_taken} steps are no whole rounds of {band}")
            # the first rank's: on another kind of CPU they may differ in the last digit
            self._correlation = Correlation(self._ranks.broadcast(coefficients(band, self._spec.steps)))
            self._groups = deal(self._examples, band, self._randomness)

    @property
    def steps_taken(self) -> int:
        """Steps that were begun, including those of earlier runs; all of them are spent."""
        return self._steps_taken

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order in which `gradient` returns their gradients."""
        return self._keeper.parameters

    def gradient(self) -> list[Tensor]:
        """One step: (sum of clipped gradients + noise) / expected batch, float32, one tensor per parameter.

        Raises:
            PrivacyRefused: all planned steps are taken.
            LostRank: another rank is gone.
        """
        if self._steps_taken >= self._spec.steps:
            raise PrivacyRefused(f"all {self._spec.steps} planned steps are taken; another would exceed the budget")
        self._steps_taken += 1
        batch = self._draw_batch()
        total = self._clipped_sum(*self._padded(batch)) if self._fixed_pieces else self._clipped_sum(batch)
        # the whole sum first: it is rounded together with its noise
        self._ranks.all_reduce(total)
        if self._correlation is not None:
            total = self._correlation.encode(total)
        self._add_noise(total)
        # exact: each number is zero on all ranks but one
        self._ranks.all_reduce(total)
        if self._correlation is not None:
            total = self._correlation.decode(total)
        return self._keeper.split(total.div_(self._spec.expected_batch).float())

    def _draw_batch(self) -> Tensor:
        """Poisson sample of this rank's part: each position independently with probability sample_rate; int64 (n,).

        With a band, of the group whose turn it is.
        """
        drawn = self._randomness.uniform(self._examples) <= self._spec.sample_rate
        if self._correlation is not None:
            drawn &= self._groups == (self._steps_taken - 1) % self._spec.band
        return drawn.nonzero().flatten()

    @property
    def _fixed_pieces(self) -> bool:
        """Whether all pieces have one size. In bfloat16 an example's gradient depends on it by more than the margin."""
        return self._pad_batches or self._autocast

    def _padded(self, indices: Tensor) -> PaddedBatch:
        """The batch with its padding: to whole pieces, and with `pad_batches` to a size that does not tell its own."""
        size = padded_size(self._group, self._spec.sample_rate, self._piece) if self._pad_batches else 0
        return pad(indices, self._examples, size, self._piece, self._randomness)

    @cached_property
    def _piece(self) -> int:
        """Examples whose gradients are computed at a time; in bfloat16 no more than a batch ever has."""
        most = padded_size(self._group, self._spec.sample_rate, 1) if self._autocast else self._physical_batch
        return max(1, min(most, self._physical_batch // self._spec.multiplicity))

    def _clipped_sum(self, indices: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Sum of the clipped gradients of examples, each the mean of its draws, over physical pieces.

        Private: it has no noise yet.

        Args:
            indices: int64 (n,), on the CPU.
            drawn: bool (n,), false for examples that add nothing; by default all count.

        Returns:
            float64, all parameters in one vector.
        """
        total: list[Tensor] = []

        def whole() -> Tensor:
            # not before the first backward pass, whose memory is free again by then
            if not total:
                total.append(self._keeper.empty_sum())
            return total[0]

        draws, clip_norm = self._spec.multiplicity, self._spec.clip_norm
        pieces = indices.split(self._piece)
        # None spares the book-keeper a copy of all rows, which hides from the clock which of them are padding
        counts = [None] * len(pieces) if drawn is None else drawn.split(self._piece)
        for piece, counted in zip(pieces, counts, strict=True):
            rows = piece.repeat_interleave(draws)
            if len(piece) == 0:
                continue
            if self._recorded is not None:
                added = self._recorded.clipped_sum(piece, counted)
                whole().add_(added)
            elif draws <= self._physical_batch:
                self._keeper.clipped_sum(
                    partial(self._run, rows),
                    len(piece),
                    clip_norm,
                    multiplicity=draws,
                    counted=counted,
                    into=lambda: self._keeper.split(whole()),
                )
            else:
                runs = [(partial(self._run, part), len(part)) for part in rows.split(self._physical_batch)]
                self._keeper.clipped_one(
                    runs, clip_norm, multiplicity=draws, counted=counted, into=lambda: self._keeper.split(whole())
                )
        return whole()

    def _add_noise(self, total: Tensor) -> None:
        """Add noise to this rank's share of the sum, in place, and set the rest to zero: one share for each rank."""
        shares = total.tensor_split(self._ranks.count)
        self._randomness.add_noise(shares[self._ranks.rank], self.release.noise_stddev)
        for rank, share in enumerate(shares):
            if rank != self._ranks.rank:
                share.zero_()

    def _recording(self) -> RecordedSum | None:
        """What replays the sums; None if losses or book-keeper need the host in each step."""
        if self._spec.multiplicity > self._physical_batch:
            return None
        if not (self._objective.recordable and self._keeper.recordable):
            return None
        return RecordedSum(
            self._keeper,
            self._objective,
            self._spec,
            piece=self._piece,
            examples=self._examples,
            randomness=self._randomness,
            autocast=self._autocast,
        )

    def _run(self, indices: Tensor) -> Tensor:
        prepared = self._objective.prepare(indices)
        return self._objective.computed(prepared, self._device, autocast=self._autocast)
