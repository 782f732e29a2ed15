"""Large images count as several, so that the limits on images also bound the memory that they need."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rapid_server.engine import ClientFullError, Engine, EngineFullError
from rapid_server.models import Model
from rapid_server.schemas import Limits

from rapid.methods import open_classifier
from rapid.sampling.generator import Generator


def model(served: Any, max_count: int, image_bytes: int) -> Model:
    return Model("m", served, Limits(max_count=max_count, max_steps=1000, image_bytes=image_bytes))


@pytest.mark.parametrize(
    ("max_count", "image_bytes", "weight", "most"),
    # the images have 32x32 bytes
    [(10_000, 12_288, 1, 10_000), (10_000, 1024, 1, 10_000), (10_000, 1023, 2, 5000), (33, 100, 11, 3), (4, 1, 4, 1)],
)
def test_how_many_images_a_request_may_have(
    generator: Generator, max_count: int, image_bytes: int, weight: int, most: int
) -> None:
    found = model(generator, max_count, image_bytes)
    assert (found.weight, found.max_count, found.info.max_count) == (weight, most, most)


def test_images_that_are_sent_to_a_classifier_count_one(classifier_bundle: Path) -> None:
    """Their files lie in memory, whose bytes have limits of their own."""
    found = model(open_classifier(classifier_bundle, "cpu"), 33, 100)
    assert (found.weight, found.max_count) == (1, 33)


def test_a_request_for_too_many_is_told_how_many_there_may_be(
    application: Any, serving: Any, generator: Generator
) -> None:
    with serving(application(max_count=33, max_client=33, image_bytes=100)) as client:
        info = client.get("/info").json()
        assert (info["max_count"], [one["max_count"] for one in info["models"]]) == (33, [3])
        reason = f"should be at most 3, because images of {generator.bundle.path.name} are 32x32"
        response = client.post("/generate", json={"count": 4})
        assert (response.status_code, response.json()) == (422, {"detail": f"count: {reason}"})
        response = client.post("/v1/images/generations", json={"n": 4})
        assert (response.status_code, response.json()["error"]["message"]) == (422, f"n: {reason}")
        for path, field in (("/generate", "count"), ("/v1/images/generations", "n")):
            assert client.post(path, json={field: 3}).status_code == 200
        # what is over, by the limit of all models
        assert client.post("/generate", json={"count": 34}).json() == {"detail": "count: should be at most 33"}


def test_images_that_wait_count_by_their_size(generator: Generator) -> None:
    async def work() -> None:
        job = engine.submit("a", 3, client="x", weight=11)
        assert job.held == 33
        with pytest.raises(ClientFullError, match=r"^33 of your images are waiting, of at most 40 \(each of a counts"):
            engine.submit("a", 1, client="x", weight=11)
        small = engine.submit("a", 7, client="x")
        with pytest.raises(EngineFullError, match=r"^40 images are waiting, of at most 50 \(each of a counts as 11\):"):
            engine.submit("a", 1, client="y", weight=11)
        small.cancel()
        job.sent = 1
        assert job.held == 22
        for one in (job, engine.submit("a", 1, client="x", weight=11)):
            one.cancel()

    engine = Engine({"a": generator}, batch=4, max_client=40, max_queued=50)
    try:
        asyncio.run(work())
    finally:
        engine.close()
