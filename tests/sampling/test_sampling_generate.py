"""Generating through the protocol alone: arguments, labels, batches, acceptance, with a generator in closed form."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests_ranks import on_threads
from torch import Tensor

from rapid.bundle import Bundle
from rapid.errors import InputError
from rapid.ranks import Ranks
from rapid.sampling.generate import Samples, generate, generate_together, make_request, resolve_labels
from rapid.sampling.generator import Finished
from rapid.sampling.streams import make_streams, normal


class Countdown:
    """Rows that take 1 + number % calls calls; the image holds label, number and the first bits of its noise."""

    search_seconds = 0.0

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self.rows: dict[int, list[Any]] = {}
        self.largest = 0

    def begin(
        self, seeds: int | NDArray[np.int64], numbers: NDArray[np.int64], labels: Any, steps: int | None = None
    ) -> NDArray[np.int64]:
        first = max(self.rows, default=-1) + 1
        rows = np.arange(first, first + len(numbers))
        labels = [0] * len(rows) if labels is None else labels.tolist()
        for row, number, label, stream in zip(rows, numbers, labels, make_streams(seeds, numbers), strict=True):
            self.rows[int(row)] = [1 + int(number) % self._calls, int(number), label, stream]
        return rows

    def advance(self, rows: NDArray[np.int64]) -> Finished:
        self.largest = max(self.largest, len(rows))
        for row in rows.tolist():
            self.rows[row][0] -= 1
        done = [row for row in rows.tolist() if not self.rows[row][0]]
        noise = [normal([stream], ())[0] for *_, stream in (self.rows[row] for row in done)]
        latents = [
            [self.rows[row][2], self.rows[row][1], 64 + 16 * float(z)] for row, z in zip(done, noise, strict=True)
        ]
        for row in done:
            del self.rows[row]
        return Finished(np.array(done, np.int64), torch.tensor(latents).view(-1, 1, 3), np.full(len(done), -1))

    def drop(self, rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            del self.rows[row]


class Closed:
    """A probe that accepts every candidate whose number is a multiple of `attempts`."""

    latent_shape = image_shape = (1, 3)
    steps, max_steps, records, confidence = 3, 5, 0, 0.0
    bundle: Bundle

    def __init__(self, classes: int = 3, attempts: int = 1, batch_size: int = 8, calls: int = 3) -> None:
        self.classes = tuple(f"c{number}" for number in range(classes))
        self.attempts, self.batch_size, self._calls = attempts, batch_size, calls
        self.made: list[Countdown] = []

    def calls(self, steps: int | None = None) -> int:
        return self._calls

    def trajectories(self) -> Countdown:
        self.made.append(Countdown(self._calls))
        return self.made[-1]

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        return latents.clamp(0, 255).byte().numpy()

    @property
    def probed(self) -> bool:
        return self.attempts > 1

    def label(self, images: NDArray[np.uint8]) -> NDArray[np.float32] | None:
        if not self.probed:
            return None
        right = images[:, 0, 1] % self.attempts == 0
        label = np.where(right, images[:, 0, 0], (images[:, 0, 0] + 1) % len(self.classes))
        return np.eye(len(self.classes), dtype=np.float32)[label]

    def finish(self, latents: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        images = self.decode(latents)
        return images, self.label(images)

    def record_images(self, records: NDArray[np.int64]) -> NDArray[np.uint8]:
        raise InputError("record", "there is none")


class Mixing(Closed):
    """An image also depends on the other images of its batch, as rounding makes it."""

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        images = super().decode(latents)
        images[:, 0, 2] = images[:, 0, 1].astype(np.int64).sum() % 251
        return images


class Failing(Closed):
    """Fails when images are made for the third time."""

    finished = 0

    def finish(self, latents: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        self.finished += 1
        if self.finished == 3:
            raise KeyboardInterrupt
        return super().finish(latents)


def test_the_same_trajectories_serve_several_calls_also_after_one_that_was_stopped() -> None:
    generator = Failing()
    kept = generator.trajectories()
    with pytest.raises(KeyboardInterrupt):
        generate(generator, 20, seed=5, trajectories=kept)
    assert not kept.rows
    expected = generate(Closed(), 20, seed=5)
    for _ in range(2):
        np.testing.assert_array_equal(generate(generator, 20, seed=5, trajectories=kept).images, expected.images)
    assert generator.made == [kept]


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(2, 4),
    count=st.integers(1, 90),
    batch=st.integers(1, 20),
    attempts=st.integers(1, 3),
    wanted=st.lists(st.integers(0, 2), min_size=90, max_size=90),
)
def test_several_ranks_make_the_very_batches_of_one(
    ranks: int, count: int, batch: int, attempts: int, wanted: list[int]
) -> None:
    def made(rank: Ranks) -> Samples | None:
        generator = Mixing(attempts=attempts, batch_size=batch, calls=1)
        return generate_together(generator, rank, count, wanted[:count], seed=5)

    alone = made(Ranks())
    first, *others = on_threads(ranks, made)
    assert alone is not None
    assert first is not None
    assert others == [None] * (ranks - 1)
    np.testing.assert_array_equal(first.images, alone.images)


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 40), batch=st.integers(1, 9), attempts=st.integers(2, 4), ranks=st.integers(1, 3))
def test_soft_labels_are_those_of_the_images(count: int, batch: int, attempts: int, ranks: int) -> None:
    """Of accepted candidates and of those from the reserve, in any batches."""
    generator = Closed(attempts=attempts, batch_size=batch)
    first, *_ = on_threads(ranks, lambda rank: generate_together(generator, rank, count, seed=5, soft_labels=True))
    assert first is not None
    np.testing.assert_array_equal(first.soft_labels, generator.label(first.images))
    assert generate(generator, count, seed=5).soft_labels is None


def test_without_a_probe_there_are_no_soft_labels() -> None:
    def failed(rank: Ranks) -> bool:
        with pytest.raises(InputError, match="the model has no probe; leave"):
            generate_together(Closed(), rank, 1, soft_labels=True)
        return True

    assert on_threads(2, failed) == [True, True]


def test_a_bad_request_fails_on_all_ranks_and_is_told_once() -> None:
    def failed(rank: Ranks) -> bool:
        with pytest.raises(InputError, match="count 0: must be at least 1") as caught:
            generate_together(Closed(), rank, 0)
        return caught.value.reported

    assert on_threads(2, failed) == [False, True]


@settings(deadline=None)
@given(count=st.integers(1, 60), batch=st.integers(1, 20), calls=st.integers(1, 5), seed=st.integers(0, 2**63 - 1))
def test_batches_change_nothing(count: int, batch: int, calls: int, seed: int) -> None:
    generator = Closed(batch_size=batch, calls=calls)
    found = generate(generator, count, seed=seed)
    assert found.labels is not None
    assert found.labels.tolist() == [number % 3 for number in range(count)] == found.images[:, 0, 0].tolist()
    assert found.images[:, 0, 1].tolist() == list(range(count))
    expected = 64 + 16 * np.array([normal(make_streams(seed, np.array([n])), ())[0] for n in range(count)])
    assert found.images[:, 0, 2].tolist() == expected.clip(0, 255).astype(np.uint8).tolist()
    assert generator.made[0].largest == min(batch, count)
    assert not generator.made[0].rows


def test_the_probe_accepts() -> None:
    """The images of class 0 are the candidates whose numbers are even: all are drawn for it."""
    found = generate(Closed(attempts=2, batch_size=4), 6, [0] * 6, seed=1)
    assert found.images[:, 0, 1].tolist() == [0, 2, 4, 6, 8, 10]


class Unsure(Closed):
    """Every second candidate is surely of its class, the others are only likely to be."""

    confidence = 0.9

    def label(self, images: NDArray[np.uint8]) -> NDArray[np.float32] | None:
        found = np.eye(len(self.classes), dtype=np.float32)[images[:, 0, 0]]
        return np.where(images[:, 0, 1, None] % 2 == 0, found, 0.6 * found + np.float32(0.2))


def test_what_the_probe_is_not_sure_of_is_not_accepted() -> None:
    found = generate(Unsure(classes=2, attempts=4, batch_size=4), 3, [0] * 3, seed=1)
    assert found.images[:, 0, 1].tolist() == [0, 2, 4]


def test_without_classes() -> None:
    found = generate(Closed(classes=0), 5)
    assert found.labels is None
    assert found.images[:, 0, 1].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="labels: the model has no classes"):
        generate(Closed(classes=0), 1, [0])


def test_a_drawn_seed_makes_the_same_images_again() -> None:
    first, other = generate(Closed(), 7), generate(Closed(), 7)
    assert first.seed != other.seed
    again = generate(Closed(batch_size=2), 7, seed=first.seed)
    np.testing.assert_array_equal(again.images, first.images)


def test_many_images_are_mapped_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(Closed(), 50, seed=3).images
    monkeypatch.setattr("rapid.mapped.LARGE", expected.nbytes - 1)
    found = generate(Closed(), 50, seed=3).images
    assert isinstance(found.base, mmap.mmap)
    np.testing.assert_array_equal(found, expected)


def test_progress_after_each_batch() -> None:
    seen: list[tuple[int, int]] = []
    generate(Closed(batch_size=5), 12, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(5, 12), (10, 12), (12, 12)]


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"count": 0}, "count", "count 0: must be at least 1"),
        ({"count": -1}, "count", "count -1: must be at least 1"),
        ({"count": 10**7 + 1}, "count", "count 10000001: must be at most 10,000,000; make the rest with other seeds"),
        ({"count": 3, "labels": [1]}, "labels", "labels: 1 given for 3 images; give one for each"),
        ({"count": 2, "labels": [0, 3]}, "labels", "labels: class indices must lie in 0..2"),
        ({"count": 2, "labels": [-1, 0]}, "labels", "labels: class indices must lie in 0..2"),
        ({"count": 1, "seed": -1}, "seed", f"seed -1: must lie in 0..{2**63 - 1}"),
        ({"count": 1, "seed": 2**63}, "seed", f"seed {2**63}: must lie in 0..{2**63 - 1}"),
        ({"count": 1, "steps": 0}, "steps", "steps 0: must lie in 1..5"),
        ({"count": 1, "steps": 6}, "steps", "steps 6: must lie in 1..5"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_request(Closed(), **arguments)
    assert (caught.value.field, str(caught.value)) == (field, message)


def test_defaults_of_a_request() -> None:
    request = make_request(Closed(), 4)
    assert request.labels is not None
    assert (request.labels.tolist(), request.steps) == ([0, 1, 2, 0], 3)
    assert make_request(Closed(), 4, steps=5, seed=2**63 - 1).steps == 5


def test_labels_are_names_first_and_numbers_second() -> None:
    assert resolve_labels([*"0123456789"], ["3", 4, "0"]) == [3, 4, 0]
    classes = ("one", "0", "2")
    assert resolve_labels(classes, ["0", 0, "one", "2", 1]) == [1, 0, 0, 2, 1]
    # those of numpy are numbers, too
    assert resolve_labels(classes, list(np.array([0, 1]))) == [0, 1]
    for bad in ("11", "x", "-1", "", "9" * 5000):
        with pytest.raises(InputError, match="the model knows one, 0, 2"):
            resolve_labels(classes, [bad])
    with pytest.raises(InputError, match="labels x: unknown; the model has no classes"):
        resolve_labels((), ["x"])


def test_streams_are_independent_of_each_other() -> None:
    both = normal(make_streams(np.array([5, 6]), np.array([0, 3])), (2, 2))
    np.testing.assert_array_equal(both[1:], normal(make_streams(6, np.array([3])), (2, 2)))
    assert (both[0] != both[1]).all()
    assert normal([], (2, 2)).shape == (0, 2, 2)
    assert make_streams(1, np.zeros(0, np.int64)) == []
