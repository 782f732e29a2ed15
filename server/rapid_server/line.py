"""One model at work: its orders, and the rows that make their images."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from rapid.methods.rapid.trajectories import Trajectories
from rapid_server.schedule import Costs, Load, Turns, largest_peer, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from rapid.methods.rapid.generator import Generator
    from rapid.sampling.request import Order

_LOG = logging.getLogger(__name__)

LONGEST_STEP = 0.1
"""Seconds: whoever comes waits for the step that runs. Where one row takes nearly as long, twice the time of one row:
on a machine that is busy when the server starts, most of a step is waiting, whatever its rows."""
MEASUREMENTS = 5
"""Of a step of each size: the shortest is what it costs, if something else runs on the machine;"""
MEASURE_SECONDS = 1.0
"""but no more of them when they have taken so long."""
MOST_ROWS = 1024
DECODER_ROWS = 32
"""Latents wait for others until there are so many, for fewer take the decoder longer each;"""
DECODER_WAIT = 2
"""for this number of steps at most, and not where few are under way."""


class Made(NamedTuple):
    """An image that is done."""

    place: int
    image: NDArray[np.uint8]
    """(H, W) or (H, W, 3)."""
    entry: int
    """The knowledge base's entry from which it began; -1 if it began with noise."""


class Step(NamedTuple):
    """What a step did."""

    rows: int
    seconds: float
    retrieval_seconds: float
    made: list[tuple[Order, list[Made]]]


class _Arrived(NamedTuple):
    """A candidate whose latent waits for the decoder."""

    number: int
    latent: Tensor
    step: int


class _Progress:
    """What is under way for an order."""

    def __init__(self, step: int) -> None:
        self.served = self.decoded = step
        """The steps in which rows of it, and latents, last had a part."""
        self.rows: dict[int, int] = {}
        """Number of the candidate in each row, the oldest first."""
        self.arrived: deque[_Arrived] = deque()
        self.entries: dict[int, int] = {}


class _Portion(NamedTuple):
    """What an order may do in a step."""

    order: Order
    progress: _Progress
    rows: int
    """That many candidates take a network call."""
    latents: int
    """At most so many are decoded."""


class Line:
    """Makes the images of many orders, all candidates of a step in one batch; not for several threads.

    A step takes some rows one network call further (see `schedule.share`) and decodes some of those that arrived: of
    a large order beside small ones no more than belong to its rows in the step. New candidates join at any step
    and leave when they arrive.

    Args:
        generator: the model.
        batch: most rows of a step; None: what `measure` finds.
    """

    def __init__(self, generator: Generator, batch: int | None = None) -> None:
        self.generator = generator
        self.batch = batch or 1
        self._fixed = batch is not None
        self._costs = Costs([1], [1.0])
        self._calls = generator.route().calls
        self.clear()

    @property
    def busy(self) -> bool:
        """Whether there are orders."""
        return bool(self._orders)

    @property
    def orders(self) -> set[Order]:
        """Those that are there."""
        return set(self._orders)

    def clear(self) -> None:
        """Forget all orders and rows."""
        self._trajectories = Trajectories(self.generator)
        self._orders: dict[Order, _Progress] = {}
        self._turns = Turns()
        self._steps = 0

    def measure(self) -> None:
        """Make an image, and find out what steps cost; the line has no orders yet."""
        self.generator.generate(1, seed=0)
        most = self.batch if self._fixed else MOST_ROWS
        labels = np.zeros(most, np.int64) if self.generator.classes else None
        sizes: list[int] = []
        seconds: list[float] = []
        for size in [2**power for power in range(most.bit_length())]:
            rows = self._trajectories.begin(0, np.arange(size), None if labels is None else labels[:size])
            found: list[float] = []
            decoded: list[float] = []
            latents = torch.zeros(-(-size // self._calls), *self.generator.bundle.settings.latent_shape)
            for _ in range(min(MEASUREMENTS, self._calls)):
                if sum(found) > MEASURE_SECONDS:
                    break
                begin = time.perf_counter()
                arrived = self._trajectories.advance(rows)
                # on a GPU the time is known when the result is there
                arrived.latents.sum().item()
                middle = time.perf_counter()
                self.generator.probe(self.generator.decode(latents.to(self.generator.device)))
                decoded.append(time.perf_counter() - middle)
                found.append(middle - begin)
            if not len(arrived.rows):
                self._trajectories.drop(rows)
            sizes.append(size)
            # so many arrive in a step, on average
            seconds.append(min(found) + min(decoded) * size / (self._calls * len(latents)))
            longest = max(LONGEST_STEP, 2 * seconds[0])
            if seconds[-1] > longest:
                break
        self._costs = Costs(sizes, seconds)
        if not self._fixed:
            self.batch = self._costs.best_batch(longest)
        milliseconds = ", ".join(f"{size}: {1e3 * one:.0f}" for size, one in zip(sizes, seconds, strict=True))
        _LOG.info("batch %d; milliseconds of a step by its rows: %s", self.batch, milliseconds)

    def add(self, order: Order) -> None:
        """Take an order, if it is not yet there."""
        if order not in self._orders:
            self._orders[order] = _Progress(self._steps)

    def remove(self, order: Order) -> None:
        """Forget an order, if it is still there; its rows are free at once."""
        progress = self._orders.pop(order, None)
        if progress is not None and progress.rows:
            self._trajectories.drop(np.array(list(progress.rows)))

    def step(self) -> Step:
        """Take one step. Orders that are complete with it are removed."""
        begin, searched = time.perf_counter(), self._trajectories.retrieval_seconds
        portions = self._portions()
        rows = self._advance(portions)
        made = self._decode(portions)
        for order, placed in made:
            if not order.missing:
                self.remove(order)
            elif placed:
                self._drop_what_does_not_count(order)
        return Step(rows, time.perf_counter() - begin, self._trajectories.retrieval_seconds - searched, made)

    def _drop_what_does_not_count(self, order: Order) -> None:
        """Candidates of classes that are full need not be made to the end."""
        progress = self._orders[order]
        rows = [row for row, number in progress.rows.items() if not order.needs(number)]
        for row in rows:
            order.abandon(progress.rows.pop(row))
        self._trajectories.drop(np.array(rows, np.int64))

    def _portions(self) -> list[_Portion]:
        """What each order may do in this step, the first ones first."""
        orders = list(self._orders.items())
        loads, full = [], []
        for order, progress in orders:
            # what is begun is ended: no more arrive than the decoder takes
            full.append(len(progress.arrived) >= 2 * self.batch)
            rows = 0 if full[-1] else len(progress.rows) + order.wants
            loads.append(Load(order.missing, rows or len(progress.arrived), progress.served))
        self._steps += 1
        plain = share(loads, self.batch, self._costs)
        granted_all = self._turns.correct(loads, plain, self.batch, self._costs)
        turn, bound = granted_all != plain, largest_peer(loads)
        portions = []
        for (order, progress), load, held_up, granted in zip(orders, loads, full, granted_all, strict=True):
            if granted:
                progress.served = self._steps
            latents = self._latents(self.batch if granted and (turn or load.missing <= bound) else granted)
            portions.append(_Portion(order, progress, 0 if held_up else granted, latents))
        # the decoder's: the smallest orders first, and in the turn of the others who waited longest
        return sorted(portions, key=lambda one: one.progress.decoded if turn else one.order.missing)

    def _latents(self, rows: int) -> int:
        """How many latents may be decoded with so many rows: twice as many as arrive, for they come in crowds."""
        return -(-2 * rows // self._calls)

    def _advance(self, portions: Sequence[_Portion]) -> int:
        """Take some rows one network call further; returns how many."""
        new: dict[int | None, list[_Portion]] = {}
        for portion in portions:
            if portion.rows > len(portion.progress.rows):
                new.setdefault(portion.order.steps, []).append(portion)
        for steps, together in new.items():
            self._begin(together, steps)
        rows = np.array([row for one in portions for row in islice(one.progress.rows, one.rows)], np.int64)
        if not len(rows):
            return 0
        arrived = self._trajectories.advance(rows)
        owners = {row: portion.progress for portion in portions for row in portion.progress.rows}
        for row, latent, entry in zip(arrived.rows.tolist(), arrived.latents, arrived.entries.tolist(), strict=True):
            progress = owners[row]
            number = progress.rows.pop(row)
            progress.arrived.append(_Arrived(number, latent, self._steps))
            progress.entries[number] = entry
        return len(rows)

    def _begin(self, portions: Sequence[_Portion], steps: int | None) -> None:
        """Draw the candidates that are granted and not yet under way, of orders with so many steps: all at once."""
        drawn = [one.order.draw(one.rows - len(one.progress.rows)) for one in portions]
        numbers = np.concatenate([some for some, _ in drawn])
        seeds = np.repeat(np.array([one.order.seed for one in portions]), [len(some) for some, _ in drawn])
        classes = [labels for _, labels in drawn if labels is not None]
        rows = self._trajectories.begin(seeds, numbers, np.concatenate(classes) if classes else None, steps).tolist()
        for one, (some, _) in zip(portions, drawn, strict=True):
            own, rows = rows[: len(some)], rows[len(some) :]
            one.progress.rows |= dict(zip(own, some.tolist(), strict=True))

    def _decode(self, portions: Sequence[_Portion]) -> list[tuple[Order, list[Made]]]:
        """Decode some of the latents that wait."""
        waiting = [portion for portion in portions if portion.progress.arrived and portion.latents]
        under_way = sum(len(portion.progress.rows) for portion in portions)
        if sum(len(one.progress.arrived) for one in waiting) < min(DECODER_ROWS, under_way // 4) and all(
            self._steps - one.progress.arrived[0].step < DECODER_WAIT for one in waiting
        ):
            return []
        left = self._latents(self.batch)
        batch: list[tuple[Order, _Progress, list[_Arrived]]] = []
        for order, progress, _, latents in waiting:
            taken = [progress.arrived.popleft() for _ in range(min(left, latents, len(progress.arrived)))]
            left -= len(taken)
            if taken:
                progress.decoded = self._steps
                batch.append((order, progress, taken))
        if not batch:
            return []
        images = self.generator.decode(torch.stack([one.latent for _, _, taken in batch for one in taken]))
        seen = self.generator.probe(images)
        made, first = [], 0
        for order, progress, taken in batch:
            part = slice(first, first + len(taken))
            numbers = np.array([one.number for one in taken])
            placed = order.offer(numbers, images[part], None if seen is None else seen[part])
            made.append((order, [Made(one.place, one.image, progress.entries[one.candidate]) for one in placed]))
            first = part.stop
        return made
