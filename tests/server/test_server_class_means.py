"""A second implementation of the sampling protocol behind the server: class means, one call an image, no records."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from rapid_server.engine import Engine
from rapid_server.worker import Worker
from tests_support import numbers

from rapid.bundle import Bundle
from rapid.data import load_images
from rapid.errors import InputError
from rapid.sampling.generate import generate
from rapid.sampling.generator import Finished


class Rows:
    """Candidates that wait for their only call."""

    search_seconds = 0.0

    def __init__(self, means: NDArray[np.float32]) -> None:
        self._means = means
        self._waiting: dict[int, tuple[tuple[int, int], int]] = {}
        self._free = 0

    def begin(
        self,
        seeds: int | NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        steps: int | None = None,
    ) -> NDArray[np.int64]:
        assert labels is not None
        rows = np.arange(self._free, self._free + len(numbers))
        self._free += len(rows)
        keys = zip(np.broadcast_to(seeds, len(rows)).tolist(), numbers.tolist(), strict=True)
        self._waiting |= dict(zip(rows.tolist(), zip(keys, labels.tolist(), strict=True), strict=True))
        return rows

    def advance(self, rows: NDArray[np.int64]) -> Finished:
        waiting = [self._waiting.pop(row) for row in rows.tolist()]
        noise = [np.random.default_rng(key).normal(0, 8, self._means.shape[1:]) for key, _ in waiting]
        latents = self._means[[label for _, label in waiting]] + np.stack(noise)
        return Finished(rows, torch.from_numpy(latents.astype(np.float32)), np.full(len(rows), -1))

    def drop(self, rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            del self._waiting[row]


class ClassMeans:
    """The mean image of a class with noise on it."""

    steps = max_steps = attempts = 1
    confidence = 0.0
    batch_size = 64
    records = 0
    probed = False

    def __init__(self, bundle: Bundle, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.bundle, self.classes = bundle, bundle.classes
        self._means = np.stack([images[labels == label].mean(0) for label in range(len(self.classes))])
        self.image_shape = self.latent_shape = images.shape[1:]

    def calls(self, steps: int | None = None) -> int:
        return 1

    def trajectories(self) -> Rows:
        return Rows(self._means)

    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        return latents.round().clamp(0, 255).byte().numpy()

    def label(self, images: NDArray[np.uint8]) -> None:
        return None

    def finish(self, latents: torch.Tensor) -> tuple[NDArray[np.uint8], None]:
        return self.decode(latents), None

    def record_images(self, records: NDArray[np.int64]) -> NDArray[np.uint8]:
        raise InputError("record", "the method has no knowledge base", records[0])


@pytest.fixture(scope="module")
def means(private_bundle: Path, digits: Path) -> ClassMeans:
    images = load_images(digits, "private")
    assert images.labels is not None
    return ClassMeans(Bundle.open(private_bundle, "model"), images.images, images.labels)


@pytest.fixture(scope="module")
def served(means: ClassMeans, application: Any, serving: Any) -> Iterator[httpx.Client]:
    with serving(application({"means": means})) as client:
        yield client


def pixels(image: str) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(base64.b64decode(image))) as opened:
        return np.asarray(opened)


def test_generate_and_server_make_the_same_images(means: ClassMeans, served: httpx.Client) -> None:
    labels = [number * 7 % 10 for number in range(150)]
    expected = generate(means, 150, labels, seed=3)
    answer = served.post("/generate", json={"count": 150, "labels": labels, "seed": 3}).json()
    np.testing.assert_array_equal([pixels(image) for image in answer["images"]], expected.images)
    assert answer["labels"] == [str(label) for label in labels]
    assert answer["entries"] == [None] * 150
    assert abs(expected.images[0].astype(float) - means._means[0]).mean() < 8


def test_one_call_takes_one_step(served: httpx.Client) -> None:
    info = served.get("/info").json()
    assert (info["steps"], info["model"]) == (1, "means")
    response = served.post("/generate", json={"count": 1, "steps": 2})
    assert (response.status_code, response.json()) == (422, {"detail": "steps 2: must lie in 1..1"})
    assert served.post("/generate", json={"count": 1, "steps": 1}).status_code == 200
    assert ("rapid_retrieval_seconds_count", "means") not in numbers(served)


def test_there_are_no_soft_labels(served: httpx.Client) -> None:
    response = served.post("/generate", json={"count": 1, "soft_labels": True})
    assert (response.status_code, response.json()) == (422, {"detail": "soft_labels: means has no probe; leave it out"})


def test_there_are_no_records(served: httpx.Client) -> None:
    response = served.get("/entries/0")
    assert (response.status_code, response.json()) == (422, {"detail": "entry 0: the method has no knowledge base"})


@pytest.mark.parametrize("batch", [1, 7, None])
def test_requests_share_a_worker(means: ClassMeans, batch: int | None) -> None:
    worker = Worker(means, batch)
    worker.measure()
    requests = [worker.make_request(count, seed=count) for count in (1, 30, 5)]
    found: dict[int, dict[int, NDArray[np.uint8]]] = {request.seed: {} for request in requests}
    for request in requests:
        worker.add(request)
    while worker.busy:
        step = worker.step()
        assert step.rows <= worker.batch
        for request, images in step.images:
            found[request.seed] |= {one.place: one.image for one in images}
    for request in requests:
        expected = generate(means, request.count, seed=request.seed).images
        np.testing.assert_array_equal([found[request.seed][place] for place in range(request.count)], expected)


def test_cancelled_in_the_engine(means: ClassMeans) -> None:
    async def work() -> None:
        job = engine.submit("means", 5000)
        await anext(aiter(job))
        job.cancel()
        images = [one async for batch in engine.submit("means", 40) for one in batch]
        assert sorted(one.place for one in images) == list(range(40))

    engine = Engine({"means": means}, batch=16)
    try:
        assert engine.ready.wait(30)
        asyncio.run(work())
    finally:
        engine.close()
