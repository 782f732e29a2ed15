"""Images as they are made: JSON lines, server-sent events, zip; clients that go away; provenance."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests_support import assert_same_images, numbers

from rapid.data import load_images
from rapid.methods import open_generator
from rapid.sampling.generate import generate
from rapid.sampling.generator import Generator


def pixels(png: str | bytes) -> np.ndarray:
    content = base64.b64decode(png, validate=True) if isinstance(png, str) else png
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image).astype(int)


def lines(client: httpx.Client, accept: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/generate", json=body, headers={"Accept": accept}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(accept)
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-rapid-seed"] == str(body["seed"])
        text = response.read().decode()
    if accept == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/event-stream"])
def test_each_image_as_it_is_made(client: httpx.Client, generator: Generator, accept: str) -> None:
    start, *images, end = lines(client, accept, count=40, seed=3, labels=[4, 5, 6, 7] * 10)
    model = {"model": generator.bundle.path.name, "privacy": generator.bundle.privacy}
    assert start == {"type": "start", "seed": 3, "count": 40} | model
    assert end == {"type": "end", "count": 40}
    assert [image["done"] for image in images] == list(range(1, 41))
    assert sorted(image["index"] for image in images) == list(range(40))
    expected = generate(generator, 40, [4, 5, 6, 7] * 10, 3).images
    for image in images:
        assert image["count"] == 40
        assert image["label"] == str(4 + image["index"] % 4)
        assert_same_images(pixels(image["image"]), expected[image["index"]])


def test_the_first_images_come_before_the_last_are_made(application: Any, serving: Any) -> None:
    headers = {"Accept": "application/x-ndjson"}
    with (
        serving(application(batch=16)) as client,
        client.stream("POST", "/generate", json={"count": 300}, headers=headers) as response,
    ):
        begin = time.monotonic()
        arrived = [time.monotonic() - begin for _ in response.iter_lines()]
    assert len(arrived) == 302
    assert arrived[1] < 0.5 * arrived[-1]


def test_a_zip_is_streamed_in_order(client: httpx.Client, generator: Generator) -> None:
    response = client.post("/generate", json={"count": 60, "seed": 5}, headers={"Accept": "application/zip"})
    expected = generate(generator, 60, seed=5).images
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"{number:05d}-{number % 10}.png" for number in range(60)]
        for name, image in zip(archive.namelist(), expected, strict=True):
            assert_same_images(pixels(archive.read(name)), image)


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson", "application/zip"])
def test_a_client_that_goes_away_frees_its_rows(application: Any, serving: Any, accept: str) -> None:
    # many: they must not be made before the client is gone
    app = application(max_queued=50_000, max_client=50_000, max_count=50_000)
    body = {"count": 50_000}
    with serving(app) as client:
        if accept == "application/json":
            with pytest.raises(httpx.ReadTimeout):
                client.post("/generate", json=body, headers={"Accept": accept}, timeout=0.3)
        else:
            with client.stream("POST", "/generate", json=body, headers={"Accept": accept}) as response:
                next(response.iter_raw())
        begin = time.monotonic()
        while not app.state.engine.idle:
            assert time.monotonic() - begin < 10
            time.sleep(0.01)
        # and others are served
        assert client.post("/generate", json={"count": 1}).status_code == 200


def test_too_many_images_are_refused_for_now(application: Any, serving: Any) -> None:
    app = application(max_queued=1000, max_client=1000, max_count=1000)
    with serving(app) as client, ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, "/generate", json={"count": 600})
        while app.state.engine.idle:
            time.sleep(0.005)
        response = client.post("/generate", json={"count": 600})
        # of one client: all of them are this address
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 3600
        assert "600" in response.json()["detail"] or "images" in response.json()["detail"]
        assert client.post("/generate", json={"count": 1}).status_code == 200
        assert running.result().status_code == 200


def test_stopping_ends_a_stream_with_an_error(application: Any, serving: Any) -> None:
    app = application()
    with serving(app) as client:
        headers = {"Accept": "application/x-ndjson"}
        with client.stream("POST", "/generate", json={"count": 5000}, headers=headers) as response:
            found = response.iter_lines()
            assert json.loads(next(found))["type"] == "start"
            threading.Thread(target=app.state.engine.stop).start()
            *_, last = found
    assert json.loads(last) == {"type": "error", "detail": "the server is stopping"}


def test_every_png_says_where_it_comes_from(client: httpx.Client, generator: Generator) -> None:
    bodies = {"image/png": {"count": 1}, "application/json": {"count": 2}}
    found = [client.post("/generate", json=bodies["image/png"], headers={"Accept": "image/png"}).content]
    found += map(base64.b64decode, client.post("/generate", json={"count": 2}).json()["images"])
    answer = client.post("/generate", json={"count": 2}, headers={"Accept": "application/zip"})
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        found += [archive.read(name) for name in archive.namelist()]
    assert len(found) == 5
    assert generator.bundle.privacy is not None
    for content in found:
        with Image.open(io.BytesIO(content)) as image:
            text = json.loads(image.text["rapid"])  # type: ignore[attr-defined]
        assert text["synthetic"] is True
        assert text["epsilon"] == generator.bundle.privacy["epsilon"]
        assert text["delta"] == generator.bundle.privacy["delta"]
        assert text["sha256"] == generator.bundle.digest == answer.headers["x-rapid-sha256"]


def test_steps(application: Any, serving: Any, generator: Generator, private_bundle: Path) -> None:
    """More or fewer network calls, and the default is the model's own."""
    found, rows = [], []
    with serving(application(batch=8)) as client:
        before = 0.0
        for more in ({}, {"steps": generator.steps}, {"steps": 2}):
            answer = client.post("/generate", json={"count": 2, "labels": [3, 4], "seed": 1} | more).json()
            found.append(np.stack([pixels(image) for image in answer["images"]]))
            after = numbers(client)["rapid_batch_occupancy_sum", generator.bundle.path.name]
            rows.append(round((after - before) * 8))
            before = after
    assert_same_images(found[0], found[1])
    few = open_generator(private_bundle, "cpu", ["generation.attempts=1", "generation.steps=2"])
    assert_same_images(found[2], generate(few, 2, [3, 4], 1).images)
    assert rows == [2 * generator.calls(steps) for steps in (None, None, 2)]
    assert rows[2] < rows[0]


def test_the_entries_that_images_began_from(client: httpx.Client, generator: Generator) -> None:
    answer = client.post("/generate", json={"count": 3, "seed": 2}).json()
    for entry in answer["entries"]:
        response = client.get(f"/entries/{entry}")
        assert response.headers["content-type"] == "image/png"
        np.testing.assert_array_equal(pixels(response.content), generator.record_images(np.array([entry]))[0])
    for bad, words in ((10**6, "entry"), (-1, "entry"), ("x", "entry"), ("0?model=other", "model")):
        response = client.get(f"/entries/{bad}")
        assert response.status_code == 422
        assert response.json()["detail"].startswith(words)


def test_a_public_model_names_the_private_ones_behind_it(
    application: Any, built_on_synthetic: Generator, private_bundle: Path, serving: Any
) -> None:
    with serving(application({"base": built_on_synthetic})) as client:
        info = client.get("/info").json()
        png = client.post("/generate", json={"count": 1}, headers={"accept": "image/png"}).content
    assert info["privacy"] is None
    assert "made by the private model 'private' (rapid, epsilon 10" in info["privacy_in_words"]
    told = json.loads((private_bundle / "privacy.json").read_text())
    with Image.open(io.BytesIO(png)) as image:
        (behind,) = json.loads(image.text["rapid"])["made_from"]  # type: ignore[attr-defined]
    assert [behind[name] for name in ("epsilon", "delta")] == [told["epsilon"], told["delta"]]


def test_several_models(application: Any, generator: Generator, public_bundle: Path, serving: Any) -> None:
    public = open_generator(public_bundle, "cpu")
    with serving(application({"private": generator, "public": public})) as client:
        info = client.get("/info").json()
        assert info["model"] == "private"
        assert [model["model"] for model in info["models"]] == ["private", "public"]
        assert [model["privacy"] is None for model in info["models"]] == [False, True]
        assert "public images alone" in info["models"][1]["privacy_in_words"]
        with ThreadPoolExecutor() as pool:
            bodies = [{"count": 20, "seed": 1, "model": name} for name in ("private", "public", None)]
            private, other, first = (
                answer.json() for answer in pool.map(lambda body: client.post("/generate", json=body), bodies)
            )
    assert (private["model"], other["model"], first["model"]) == ("private", "public", "private")
    assert other["privacy"] is None
    assert other["labels"][:2] == [public.classes[0], public.classes[1]]
    for text, image in zip(other["images"], generate(public, 20, seed=1).images, strict=True):
        assert_same_images(pixels(text), image)
    for text, again in zip(private["images"], first["images"], strict=True):
        assert_same_images(pixels(text), pixels(again))


def test_the_common_form(client: httpx.Client, generator: Generator) -> None:
    url = "/v1/images/generations"
    answer = client.post(
        url,
        json={"prompt": "7", "n": 3, "size": "32x32", "response_format": "b64_json", "seed": 4, "quality": "hd"},
    )
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["seed"] == 4
    assert content["size"] == "32x32"
    assert abs(content["created"] - time.time()) < 60
    expected = generate(generator, 3, [7, 7, 7], 4).images
    for one, image in zip(content["data"], expected, strict=True):
        assert one["revised_prompt"] == "7"
        assert_same_images(pixels(one["b64_json"]), image)
    every = client.post(url, json={"prompt": "any", "n": 3}).json()["data"]
    assert [one["revised_prompt"] for one in every] == ["0", "1", "2"]
    assert len(client.post(url, json={"prompt": "1"}).json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a cat"}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "7", "n": 0}, "n"),
        ({"prompt": "7", "n": 301}, "n"),
        ({"prompt": "7", "size": "1024x1024"}, "size"),
        ({"prompt": "7", "response_format": "url"}, "response_format"),
        ({"prompt": "7", "stream": True}, "stream"),
        ({"prompt": "7", "stream": 0}, "stream"),
    ],
)
def test_the_common_form_refuses_what_it_cannot_do(client: httpx.Client, body: Any, field: str) -> None:
    response = client.post("/v1/images/generations", json=body)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["message"].startswith(field)
    assert error["param"] == field


def test_the_probe_chooses(application: Any, private_bundle: Path, serving: Any) -> None:
    """What it takes for the wanted class is there, and else as many candidates as may be were tried."""
    probed = open_generator(private_bundle, "cpu")
    found = probed.label(generate(probed, 1, [0], seed=5).images)
    assert found is not None
    # the probe of a bundle that was hardly trained sees the same class in everything
    label = int(found.argmax())
    with serving(application({"probed": probed})) as client:
        taken = client.post("/generate", json={"count": 20, "seed": 5, "labels": [label] * 20}).json()
        filled = client.post("/generate", json={"count": 4, "seed": 5, "labels": [label - 1] * 4}).json()
    expected = generate(probed, 20, [label] * 20, 5).images
    for text, image in zip(taken["images"], expected, strict=True):
        assert_same_images(pixels(text), image)
    assert len(filled["images"]) == 4


def test_a_zip_with_soft_labels_is_an_image_set(
    application: Any, private_bundle: Path, serving: Any, tmp_path: Path
) -> None:
    probed = open_generator(private_bundle, "cpu")
    expected = generate(probed, 40, seed=9)
    asked = {"count": 40, "seed": 9}
    with serving(application({"probed": probed})) as client:
        plain, with_them = (
            client.post("/generate", json=asked | {"soft_labels": soft}, headers={"Accept": "application/zip"}).content
            for soft in (False, True)
        )
    with zipfile.ZipFile(io.BytesIO(with_them)) as archive, zipfile.ZipFile(io.BytesIO(plain)) as without:
        assert archive.namelist() == [*without.namelist(), "metadata.jsonl"]
        assert all(archive.read(name) == without.read(name) for name in without.namelist())
        archive.extractall(tmp_path / "unpacked")
    found = load_images(tmp_path / "unpacked", "synthetic", soft_labels=True)
    assert_same_images(found.images[:], expected.images)
    assert found.labels is not None
    assert found.soft_labels is not None
    names = [probed.classes[label] for label in expected.labels]
    assert [found.classes[label] for label in found.labels] == names
    order = [found.classes.index(name) for name in probed.classes]
    np.testing.assert_allclose(found.soft_labels[:, order], probed.label(found.images[:]), atol=1e-5)


def test_soft_labels(application: Any, private_bundle: Path, serving: Any) -> None:
    """Those of the command line, in each form that has room for them."""
    probed = open_generator(private_bundle, "cpu")
    asked = {"count": 5, "seed": 9, "soft_labels": True}
    expected = generate(probed, 5, seed=9).images
    with serving(application({"probed": probed})) as client:
        collected = client.post("/generate", json=asked).json()
        found = np.stack([pixels(text) for text in collected["images"]]).astype(np.uint8)
        assert_same_images(found, expected)
        np.testing.assert_allclose(collected["soft_labels"], probed.label(found), atol=1e-5)
        with_lines = client.post("/generate", json=asked, headers={"Accept": "application/x-ndjson"}).text.splitlines()
        images = sorted(map(json.loads, with_lines[1:-1]), key=lambda one: one["index"])
        assert [one["soft_label"] for one in images] == collected["soft_labels"]
        assert client.post("/generate", json={"count": 1, "seed": 9}).json()["soft_labels"] is None
        refused = client.post("/generate", json=asked, headers={"Accept": "image/png"})
        assert refused.status_code == 422
        assert refused.json()["detail"].startswith("soft_labels: image/png has none; send Accept: application/json")
        assert client.post("/generate", json=asked | {"soft_labels": 1}).status_code == 422
