"""From a request to images: the one path that the command line and the evaluation take through a generator."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rapid.errors import InputError
from rapid.mapped import empty
from rapid.ranks import Ranks
from rapid.sampling.acceptance import AcceptanceRate, Tally
from rapid.sampling.generator import Sampler, Trajectories
from rapid.sampling.request import Request
from rapid.sampling.streams import MAX_SEED

MAX_COUNT = 10_000_000
"""Images in a request. Pixels of large ones are mapped from a file, but labels and places are held in memory."""
MAX_DIGITS = 9
"""Longer numbers name no class; int() refuses text of thousands of digits."""


@dataclass(frozen=True)
class Samples:
    """Generated images.

    Attributes:
        images: uint8, (N, H, W) grey or (N, H, W, 3) RGB.
        labels: int64 (N,), indices into the model's classes; None from an unconditional model.
        soft_labels: float32 (N, classes), the probabilities of the classes by the probe; None if not asked for.
        seed: the seed that makes the same images again.
        candidates: number of candidates that were made for them.
        tally: what the probe found in those that were offered; empty without a probe.
        calls: mean number of network calls an image; with a probe those of refused candidates count.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    soft_labels: NDArray[np.float32] | None
    seed: int
    candidates: int
    tally: Tally
    calls: float


def generate(
    generator: Sampler,
    count: int,
    labels: Sequence[int] | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    steps: int | None = None,
    *,
    soft_labels: bool = False,
    trajectories: Trajectories | None = None,
) -> Samples:
    """Make `count` images, `generator.batch_size` candidates at a time.

    An image depends on the seed, its place and the classes of the request, not on the batch size, except for rounding.

    Args:
        generator: the model.
        count: 1..MAX_COUNT.
        labels: `count` class indices; None takes all classes in turn.
        seed: 0..2^63 - 1; None draws one.
        progress: called with (images done, count) after each batch.
        steps: sampling steps, 1..generator.max_steps; None takes the generator's.
        soft_labels: keep the probabilities by the probe.
        trajectories: of the generator, for one call at a time. On a GPU, later calls with the same ones replay what was
            recorded. None makes new ones.

    Raises:
        InputError: an argument is out of range; see `make_request`. Or there is no probe for soft labels; the field is
            "soft_labels".
    """
    samples = generate_together(
        generator, Ranks(), count, labels, seed, progress, steps, soft_labels=soft_labels, trajectories=trajectories
    )
    assert samples is not None
    return samples


def generate_together(
    generator: Sampler,
    ranks: Ranks,
    count: int,
    labels: Sequence[int] | None = None,
    seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    steps: int | None = None,
    *,
    soft_labels: bool = False,
    trajectories: Trajectories | None = None,
) -> Samples | None:
    """As `generate`, by several ranks, which make one batch each at a time: the very batches that one rank makes.

    Which candidates a batch has can depend on how many of the batches before it were accepted. The ranks make the next
    batches as they would be if those before them changed nothing; one that turns out otherwise is made again.

    Args:
        generator: the model, the same on all ranks.
        ranks: the processes; the arguments of the first one count.
        count: 1..MAX_COUNT.
        labels: `count` class indices; None takes all classes in turn.
        seed: 0..2^63 - 1; None draws one.
        progress: called with (images done, count) after each batch, on the first rank.
        steps: sampling steps, 1..generator.max_steps; None takes the generator's.
        soft_labels: keep the probabilities by the probe.
        trajectories: as in `generate`, of this rank.

    Returns:
        The images on the first rank, None on all others.

    Raises:
        InputError: as `generate`.
        LostRank: another rank is gone.
    """

    def checked() -> Request | None:
        if not ranks.first:
            return None
        if soft_labels and not generator.probed:
            raise InputError("soft_labels", "the model has no probe; leave it out")
        return make_request(generator, count, labels, seed, steps)

    request = ranks.all_or_none(checked)
    trajectories = generator.trajectories() if trajectories is None else trajectories
    if request is None:
        while turn := ranks.broadcast(NO_BATCHES):
            ranks.gather(_make(generator, trajectories, turn[ranks.rank]) if ranks.rank < len(turn) else None)
        return None
    images = empty((count, *generator.image_shape))
    chances = empty((count, len(generator.classes)), np.float32) if soft_labels else None
    due = _draw(generator, request)
    while request.missing:
        turn = ranks.broadcast([due, *_ahead(generator, request, ranks.count - 1)])
        for batch, made in zip(turn, ranks.gather(_make(generator, trajectories, due)), strict=False):
            if not batch.same(due):
                break
            for accepted in request.offer(*made):
                images[accepted.place] = accepted.image
                if chances is not None:
                    chances[accepted.place] = accepted.probabilities
            if progress is not None:
                progress(count - request.missing, count)
            if not request.missing:
                break
            due = _draw(generator, request)
    ranks.broadcast(NO_BATCHES)
    calls = generator.calls(request.steps) * request.drawn / count
    return Samples(images, request.labels, chances, request.seed, request.drawn, request.tally, calls)


def make_request(
    generator: Sampler,
    count: int,
    labels: Sequence[int] | None = None,
    seed: int | None = None,
    steps: int | None = None,
    rate: AcceptanceRate | None = None,
) -> Request:
    """Check the arguments of a request, and make it.

    Args:
        generator: the model.
        count: 1..MAX_COUNT.
        labels: `count` class indices; None takes all classes in turn.
        seed: 0..2^63 - 1; None draws one.
        steps: sampling steps, 1..generator.max_steps; None takes the generator's.
        rate: acceptance rate of the model, if it is kept over several requests.

    Raises:
        InputError: an argument is out of range; the field is "count", "labels", "seed" or "steps".
    """
    check_count(count)
    if labels is not None and not generator.classes:
        raise InputError("labels", "the model has no classes; leave it out")
    if labels is not None and len(labels) != count:
        raise InputError("labels", f"{len(labels)} given for {count} images; give one for each")
    if steps is not None and not 1 <= steps <= generator.max_steps:
        raise InputError("steps", f"must lie in 1..{generator.max_steps}", steps)
    seed = secrets.randbits(53) if seed is None else seed
    check_seed(seed)
    chosen = None
    if generator.classes:
        chosen = np.asarray(np.arange(count) % len(generator.classes) if labels is None else labels, np.int64)
        if not 0 <= chosen.min() <= chosen.max() < len(generator.classes):
            raise InputError("labels", f"class indices must lie in 0..{len(generator.classes) - 1}")
    return Request(count, chosen, seed, generator.attempts, steps or generator.steps, rate, generator.confidence)


def check_whole(field: str, value: object) -> None:
    """Refuse what is no whole number.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(field, "must be a whole number", value)


def check_count(count: int) -> None:
    """Refuse a number of images that is none, or more than the bookkeeping of a request has memory for.

    Raises:
        InputError: not in 1..MAX_COUNT.
    """
    if count < 1:
        raise InputError("count", "must be at least 1", count)
    if count > MAX_COUNT:
        raise InputError("count", f"must be at most {MAX_COUNT:,}; make the rest with other seeds", count)


def check_seed(seed: int) -> None:
    """Refuse a seed that no stream has.

    Raises:
        InputError: not in 0..MAX_SEED.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InputError("seed", f"must lie in 0..{MAX_SEED}", seed)


def resolve_labels(classes: Sequence[str], labels: Sequence[int | str]) -> list[int]:
    """Class indices of class names or indices; text is a name first and a number second.

    Raises:
        InputError: a label that the model does not know; the field is "labels".
    """
    names = {name: number for number, name in enumerate(classes)}
    resolved = []
    for label in labels:
        text = str(label)
        if text in names and not isinstance(label, int | np.integer):
            resolved.append(names[text])
        elif text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) < len(classes):
            resolved.append(int(text))
        else:
            known = f"the model knows {', '.join(classes)}" if classes else "the model has no classes"
            raise InputError("labels", f"{'unknown' if text else 'names no class'}; {known}", text or None)
    return resolved


class _Batch(NamedTuple):
    """Candidates that one rank makes."""

    numbers: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    seed: int
    steps: int | None

    def same(self, other: _Batch) -> bool:
        """Whether both have the same candidates."""
        return np.array_equal(self.numbers, other.numbers)


NO_BATCHES: list[_Batch] = []
Made = tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32] | None]
"""Numbers of candidates, their images, and the probabilities of their classes; see `Request.offer`."""


def _draw(generator: Sampler, request: Request) -> _Batch:
    """The next batch of candidates."""
    return _Batch(*request.draw(generator.batch_size), request.seed, request.steps)


def _ahead(generator: Sampler, request: Request, count: int) -> list[_Batch]:
    """At most so many batches, as they would follow if those in flight changed nothing."""
    drawn = request.preview(generator.batch_size, count)
    return [_Batch(numbers, labels, request.seed, request.steps) for numbers, labels in drawn if len(numbers)]


def _make(generator: Sampler, trajectories: Trajectories, batch: _Batch) -> Made:
    """Make the candidates of a batch."""
    rows = trajectories.begin(batch.seed, batch.numbers, batch.labels, batch.steps)
    number_of = dict(zip(rows.tolist(), batch.numbers.tolist(), strict=True))
    made: list[Made] = []
    try:
        while number_of:
            finished = trajectories.advance(np.fromiter(number_of, np.int64))
            if len(finished.rows):
                numbers = np.array([number_of.pop(row) for row in finished.rows.tolist()])
                made.append((numbers, *generator.finish(finished.latents)))
    finally:
        # of a call that is stopped
        trajectories.drop(np.fromiter(number_of, np.int64))
    labelled = [probabilities for *_, probabilities in made if probabilities is not None]
    numbers, images = (np.concatenate([one[place] for one in made]) for place in (0, 1))
    return numbers, images, np.concatenate(labelled) if labelled else None
