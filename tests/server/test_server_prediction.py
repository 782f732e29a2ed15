"""`POST /predict` over a real socket, beside a model that makes images and alone."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from rapid_server.app import create_app
from rapid_server.connections import PROBE_SECONDS
from rapid_server.engine import ClientFullError, EngineFailedError, EngineFullError, EngineStoppedError
from rapid_server.predictor import PORTION, Predictor
from rapid_server.responses import json_with_rows
from rapid_server.settings import ServerSettings

from rapid.config.sections import ImageSettings
from rapid.data import load_images
from rapid.errors import InputError
from rapid.methods import open_classifier
from rapid.pictures import encode_png
from rapid.sampling.classifier import Classifier, read_png
from rapid.sampling.generator import Generator

Serving = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="module")
def classifier(classifier_bundle: Path) -> Classifier:
    return open_classifier(classifier_bundle, "cpu")


@pytest.fixture(scope="module")
def files(digits: Path) -> list[bytes]:
    return [encode_png(image) for image in load_images(digits, "data").images[:5]]


def coded(files: list[bytes]) -> list[str]:
    return [base64.b64encode(one).decode() for one in files]


@pytest.fixture(scope="module")
def both(serving: Serving, generator: Generator, classifier: Classifier) -> Iterator[httpx.Client]:
    """A server of a model that makes images, and a classifier; at most 8 images in a request."""
    settings = ServerSettings(model=("model=/nowhere",), max_count=8, max_body_bytes=20_000)
    with serving(create_app({"maker": generator, "judge": classifier}, settings)) as client:
        yield client


def test_images_are_classified(both: httpx.Client, classifier: Classifier, files: list[bytes], digits: Path) -> None:
    answer = both.post("/predict", json={"images": coded(files)})
    assert answer.status_code == 200
    assert answer.headers["x-rapid-model"] == "judge"
    assert float(answer.headers["x-rapid-epsilon"]) <= 8
    found = answer.json()
    images = np.pad(load_images(digits, "data").images[:5], ((0, 0), (2, 2), (2, 2)))
    np.testing.assert_allclose(found["probabilities"], classifier.probabilities(images), atol=1e-6)
    assert found["classes"] == list("0123456789")
    assert found["labels"] == [str(np.argmax(row)) for row in found["probabilities"]]
    assert found["privacy"]["method"] == "dp-classifier"
    one = both.post("/predict?model=judge", content=files[2], headers={"content-type": "image/png"}).json()
    np.testing.assert_allclose(one["probabilities"], found["probabilities"][2:3], atol=1e-6)


def test_an_answer_with_many_classes_is_the_json_of_all(both: httpx.Client) -> None:
    """Rows are encoded one by one; a number that is not finite is an error, as elsewhere."""
    content: dict[str, Any] = {"labels": ["a"], "model": 'm"', "privacy": None}
    for rows in ([], [[0.25]], np.random.default_rng(0).random((7, 300)).tolist()):
        text = json_with_rows(content, "probabilities", iter(rows))
        assert json.loads(text) == content | {"probabilities": rows}
    with pytest.raises(ValueError, match="JSON"):
        json_with_rows(content, "rows", [[math.nan]])


def test_wrong_requests_are_told_what_is_wrong(both: httpx.Client, files: list[bytes]) -> None:
    good = coded(files)
    cases = [
        ({"images": good, "model": "maker"}, "model: maker makes images and classifies none; use POST /generate"),
        ({"images": good, "model": "other"}, "model: unknown"),
        ({"images": []}, "images"),
        ({"images": [good[0], "?"]}, "images[1]: should be a PNG file in base64"),
        ({"images": [base64.b64encode(b"GIF89a").decode()]}, "images: should be a PNG file"),
        ({"images": [base64.b64encode(files[0][:60]).decode()]}, "images: "),
        ({"images": [base64.b64encode(encode_png(np.zeros((33, 20), np.uint8))).decode()]}, "images: is 20x33 pixels"),
        ({"images": [*good[:2], base64.b64encode(b"GIF89a").decode()]}, "images[2]: should be a PNG file"),
        ({"images": good * 2}, "images: should have at most 8 entries"),
        ({"images": good, "count": 1}, "count: is not a known field"),
        ([1], "body: should be a JSON object"),
    ]
    for body, words in cases:
        answer = both.post("/predict", json=body)
        assert answer.status_code == 422, body
        assert answer.json()["detail"].startswith(words)
    answer = both.post("/predict", content=b"images=1", headers={"content-type": "text/plain"})
    assert answer.status_code == 422
    assert "or have the type image/png" in answer.json()["detail"]
    assert both.post("/predict", content=b"x" * 20_001, headers={"content-type": "image/png"}).status_code == 413


def test_classifiers_make_no_images(both: httpx.Client) -> None:
    answer = both.post("/generate", json={"count": 1, "model": "judge"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "model: judge is a classifier, which makes no images; use POST /predict"
    assert both.post("/generate", json={"count": 1}).status_code == 200
    assert both.get("/entries/0?model=judge").status_code == 422
    assert [one["id"] for one in both.get("/v1/models").json()["data"]] == ["maker"]
    assert both.post("/v1/images/generations", json={"model": "judge"}).status_code == 404
    tasks = {one["model"]: one["task"] for one in both.get("/info").json()["models"]}
    assert tasks == {"maker": "generation", "judge": "classification"}


def test_a_classifier_is_served_alone(serving: Serving, classifier: Classifier, files: list[bytes]) -> None:
    settings = ServerSettings(model=("model=/nowhere",))
    with serving(create_app({"judge": classifier}, settings)) as client:
        assert client.get("/readyz").status_code == 200
        assert client.get("/info").json()["task"] == "classification"
        assert len(client.post("/predict", json={"images": coded(files)}).json()["labels"]) == 5
        answer = client.post("/generate", json={"count": 1})
        assert answer.status_code == 422
        assert "judge is a classifier" in answer.json()["detail"]


class Slow:
    """A real classifier that waits for `go` before each answer, and fails while `failing`."""

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        self.bundle, self.classes, self.image_shape = classifier.bundle, classifier.classes, classifier.image_shape
        self.device = classifier.device
        self.go, self.failing, self.calls, self.images = threading.Event(), False, 0, 0

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.calls += 1
        self.images += len(images)
        assert self.go.wait(60)
        if self.failing:
            raise RuntimeError("out of memory in /secret/path")
        return self._classifier.probabilities(images)


async def classified(predictor: Predictor, files: list[bytes], client: str) -> NDArray[np.float32]:
    """As a request does it."""
    prediction = predictor.submit("judge", files, client)
    try:
        return await prediction.probabilities()
    finally:
        prediction.cancel()


def test_queues_are_bounded(classifier: Classifier, files: list[bytes]) -> None:
    slow = Slow(classifier)
    predictor = Predictor({"judge": slow}, max_queued=6, max_client=4)

    async def use() -> None:
        first = asyncio.create_task(classified(predictor, files[:3], "a"))
        await asyncio.sleep(0)
        with pytest.raises(ClientFullError):
            await classified(predictor, files[:2], "a")
        second = asyncio.create_task(classified(predictor, files[:3], "b"))
        await asyncio.sleep(0)
        with pytest.raises(EngineFullError, match="6 images are waiting"):
            await classified(predictor, files[:1], "c")
        slow.go.set()
        assert (await first).shape == (await second).shape == (3, 10)
        assert len(await classified(predictor, files[:4], "a")) == 4
        # until the response has left its images count
        sending = predictor.submit("judge", files[:3], "a")
        await sending.probabilities()
        with pytest.raises(ClientFullError, match="3 of your images"):
            await classified(predictor, files[:2], "a")
        sending.cancel()
        assert len(await classified(predictor, files[:4], "a")) == 4
        slow.failing = True
        with pytest.raises(EngineFailedError):
            await classified(predictor, files[:1], "a")
        predictor.close()
        with pytest.raises(EngineStoppedError):
            await classified(predictor, files[:1], "a")

    asyncio.run(use())


def test_clients_take_turns(classifier: Classifier, files: list[bytes]) -> None:
    """A single image waits for a portion of another client's request, not for all of them."""
    slow = Slow(classifier)
    predictor = Predictor({"judge": slow}, max_queued=5000, max_client=5000)

    async def use() -> None:
        ended = list[str]()

        async def note(files: list[bytes], client: str) -> None:
            await classified(predictor, files, client)
            ended.append(client)

        many = [asyncio.create_task(note(files[:1] * 3 * PORTION, "a")) for _ in range(2)]
        await asyncio.sleep(0.2)
        one = asyncio.create_task(note(files[:1], "b"))
        gone = asyncio.create_task(note(files[:1] * 2 * PORTION, "c"))
        await asyncio.sleep(0.2)
        gone.cancel()
        await asyncio.sleep(0.2)
        calls = slow.calls
        slow.go.set()
        await one
        assert slow.calls <= calls + 2
        await asyncio.gather(*many)
        assert ended == ["b", "a", "a"]

    asyncio.run(use())
    predictor.close()


def test_probabilities_that_are_not_finite_are_a_failure(
    serving: Serving, classifier: Classifier, files: list[bytes]
) -> None:
    class Diverged(Slow):
        def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
            return np.full((len(images), 10), np.nan, np.float32)

    with serving(create_app({"judge": Diverged(classifier)}, ServerSettings(model=("model=/nowhere",)))) as client:
        answer = client.post("/predict", json={"images": coded(files)})
        assert (answer.status_code, answer.json()) == (500, {"detail": "internal error"})


def test_a_device_that_computes_no_more_ends_the_server(classifier: Classifier, files: list[bytes]) -> None:
    """A failure alone does not; the meta device, which holds no numbers, stands for a GPU that is lost."""
    slow, ended = Slow(classifier), threading.Event()
    slow.go.set()
    slow.failing = True
    predictor = Predictor({"judge": slow}, max_queued=6, max_client=4)
    predictor.when_failed(ended.set)

    async def use() -> None:
        for device, lost in ((torch.device("cpu"), False), (torch.device("meta"), True)):
            slow.device = device
            with pytest.raises(EngineFailedError):
                await classified(predictor, files[:1], "a")
            assert predictor.failed == ended.is_set() == lost

    asyncio.run(use())
    predictor.close()


def test_a_stop_ends_what_runs_and_what_waits(classifier: Classifier, files: list[bytes]) -> None:
    slow = Slow(classifier)
    predictor = Predictor({"judge": slow}, max_queued=5000, max_client=5000)

    async def use() -> None:
        running, waiting = (
            asyncio.create_task(classified(predictor, files[:1] * count, "a")) for count in (2 * PORTION, 1)
        )
        await asyncio.sleep(0.2)
        predictor.stop()
        # at once, while the other still runs
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(waiting, 10)
        assert not running.done()
        slow.go.set()
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(running, 10)
        predictor.close()

    asyncio.run(use())


def test_a_client_that_goes_holds_up_nobody(serving: Serving, classifier: Classifier, files: list[bytes]) -> None:
    slow = Slow(classifier)
    app = create_app(
        {"judge": slow},
        ServerSettings(model=("model=/nowhere",), max_count=1000, max_client=1500, max_body_bytes=10**7),
    )
    with serving(app) as client:
        many = {"images": coded(files[:1]) * 1000}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/predict", json=many, timeout=1)
        assert client.post("/predict", json=many, timeout=5).status_code == 429
        # until it is known whether the client has gone, or has closed its sending side only
        time.sleep(3 * PROBE_SECONDS)
        # the portion that runs is the last one
        slow.go.set()
        end = time.monotonic() + 20
        while client.post("/predict", json=many).status_code == 429:
            assert time.monotonic() < end
        assert slow.images <= PORTION + 1000
        assert client.post("/predict", json={"images": coded(files)}, timeout=20).status_code == 200


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels in a few kilobytes, whose header alone should be read."""
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def test_large_images_are_refused_before_they_are_decoded() -> None:
    content = bomb(4000)
    # cut off after the header, so that decoding would fail in another way
    for fit, words in (("pad", "at most 32x32"), ("resize", "at most 2048x2048")):
        with pytest.raises(InputError, match=words):
            read_png(content[:60] + zlib.compress(b""), ImageSettings(fit=fit), "images")
    assert read_png(bomb(2048), ImageSettings(fit="resize"), "images").shape == (1, 32, 32)
    colour = encode_png(np.full((5, 5, 3), 200, np.uint8))
    assert read_png(colour, ImageSettings(channels=1), "images")[0, 16, 16] == 200
    assert read_png(colour, ImageSettings(channels=3), "images").shape == (1, 32, 32, 3)
