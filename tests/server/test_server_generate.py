"""POST /generate: what is asked, what is answered, and in which form."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests_support import assert_same_images

from rapid.methods import open_generator
from rapid.sampling.generate import generate
from rapid.sampling.generator import Generator

JSON = {"Content-Type": "application/json"}


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def ask(client: httpx.Client, accept: str | None = None, **body: Any) -> httpx.Response:
    return client.post("/generate", json=body, headers={} if accept is None else {"Accept": accept})


def test_json_answer(client: httpx.Client, generator: Generator) -> None:
    response = ask(client, count=3, labels=[7, "1", 0], seed=5)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert set(answer) == {"images", "labels", "entries", "soft_labels", "seed", "model", "privacy"}
    assert answer["labels"] == ["7", "1", "0"]
    assert answer["soft_labels"] is None
    assert answer["seed"] == 5
    assert answer["model"] == generator.bundle.path.name
    assert answer["privacy"] == generator.bundle.privacy
    assert answer["privacy"]["epsilon"] > 0
    expected = generate(generator, 3, labels=[7, 1, 0], seed=5)
    for text, image in zip(answer["images"], expected.images, strict=True):
        assert_same_images(pixels(base64.b64decode(text, validate=True)), image)


def test_without_labels_all_classes_in_turn(client: httpx.Client) -> None:
    assert ask(client, count=12).json()["labels"] == [*"012345678901"]
    assert ask(client, count=2, labels=None).json()["labels"] == ["0", "1"]


def test_a_fresh_seed_is_returned_and_gives_the_same_again(client: httpx.Client) -> None:
    first, other = ask(client, count=1), ask(client, count=1, seed=None)
    assert first.json()["seed"] != other.json()["seed"]
    assert first.headers["x-rapid-seed"] == str(first.json()["seed"])
    assert ask(client, count=1, seed=first.json()["seed"]).json()["images"] == first.json()["images"]


@pytest.mark.parametrize("accept", ["application/json", "image/png", "application/zip"])
def test_same_request_same_bytes(client: httpx.Client, accept: str) -> None:
    first = ask(client, accept, count=3, labels=[1, 2, 3], seed=2**63 - 1)
    again = ask(client, accept, count=3, labels=[1, 2, 3], seed=2**63 - 1)
    other = ask(client, accept, count=3, labels=[1, 2, 3], seed=0)
    assert first.status_code == again.status_code == other.status_code == 200
    assert first.content == again.content
    assert first.content != other.content


def test_one_png(client: httpx.Client, generator: Generator) -> None:
    response = ask(client, "image/png", count=1, labels=[4], seed=1)
    assert response.headers["content-type"] == "image/png"
    assert_same_images(pixels(response.content), generate(generator, 1, labels=[4], seed=1).images[0])


def test_a_grid_where_there_are_more(client: httpx.Client, generator: Generator) -> None:
    image = pixels(ask(client, "image/png", count=7, seed=1).content)
    height, width = generator.image_shape[:2]
    assert image.shape[0] >= 2 * height
    assert image.shape[1] >= 2 * width


def test_zip_of_pngs(client: httpx.Client, generator: Generator) -> None:
    response = ask(client, "application/zip", count=3, labels=[9, 9, 2], seed=8)
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.headers["content-type"] == "application/zip"
    assert response.headers["content-disposition"] == f'attachment; filename="{generator.bundle.path.name}-8.zip"'
    expected = generate(generator, 3, labels=[9, 9, 2], seed=8)
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["00000-9.png", "00001-9.png", "00002-2.png"]
        for name, image in zip(archive.namelist(), expected.images, strict=True):
            assert_same_images(pixels(archive.read(name)), image)


@pytest.mark.parametrize("accept", ["application/json", "image/png", "application/zip"])
def test_seed_and_privacy_in_headers(client: httpx.Client, generator: Generator, accept: str) -> None:
    headers = ask(client, accept, count=1, seed=3).headers
    assert headers["x-rapid-seed"] == "3"
    assert headers["x-rapid-model"] == generator.bundle.path.name
    assert generator.bundle.privacy is not None
    assert float(headers["x-rapid-epsilon"]) == generator.bundle.privacy["epsilon"]
    assert float(headers["x-rapid-delta"]) == generator.bundle.privacy["delta"]
    assert headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "given"),
    [
        ("*/*", "application/json"),
        ("image/*", "image/png"),
        ("application/json;q=0.2, application/zip", "application/zip"),
        ("text/html, image/png;q=0.9, */*;q=0.1", "image/png"),
    ],
)
def test_accept(client: httpx.Client, accept: str, given: str) -> None:
    assert ask(client, accept, count=1).headers["content-type"] == given


@pytest.mark.parametrize("accept", ["text/html", "image/jpeg", "application/json;q=0"])
def test_a_type_that_cannot_be_given(client: httpx.Client, accept: str) -> None:
    response = ask(client, accept, count=1)
    assert response.status_code == 406
    assert response.json() == {
        "detail": "Accept: can be application/json, image/png, application/zip, application/x-ndjson, text/event-stream"
    }


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "count"),
        ({"count": 0}, "count"),
        ({"count": -1}, "count"),
        ({"count": 301}, "count"),
        ({"count": 10**30}, "count"),
        ({"count": True}, "count"),
        ({"count": 1.0}, "count"),
        ({"count": "1"}, "count"),
        ({"count": None}, "count"),
        ({"count": [1]}, "count"),
        ({"count": 2, "labels": []}, "labels"),
        ({"count": 2, "labels": [1]}, "labels"),
        ({"count": 2, "labels": [1, 2, 3]}, "labels"),
        ({"count": 1, "labels": [10]}, "labels"),
        ({"count": 1, "labels": [-1]}, "labels"),
        ({"count": 1, "labels": [10**30]}, "labels"),
        ({"count": 1, "labels": ["cat"]}, "labels"),
        ({"count": 1, "labels": [""]}, "labels"),
        ({"count": 1, "labels": ["1" * 5000]}, "labels"),
        ({"count": 2, "labels": [1, True]}, "labels[1]"),
        ({"count": 1, "labels": [1.0]}, "labels[0]"),
        ({"count": 1, "labels": [None]}, "labels[0]"),
        ({"count": 1, "labels": [[1]]}, "labels[0]"),
        ({"count": 1, "labels": 1}, "labels"),
        ({"count": 1, "labels": "1"}, "labels"),
        ({"count": 1, "labels": {"0": 1}}, "labels"),
        ({"count": 1, "seed": -1}, "seed"),
        ({"count": 1, "seed": 2**63}, "seed"),
        ({"count": 1, "seed": 1.5}, "seed"),
        ({"count": 1, "seed": False}, "seed"),
        ({"count": 1, "seed": "7"}, "seed"),
        ({"count": 1, "cuont": 1}, "cuont"),
        ({"count": 1, "steps": 0}, "steps"),
        ({"count": 1, "steps": 201}, "steps"),
        ({"count": 1, "steps": "9"}, "steps"),
        ({"count": 1, "model": "other"}, "model"),
        ({"count": 1, "model": 3}, "model"),
        ([], "body"),
        (None, "body"),
        (3, "body"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_bad_request_names_its_field(client: httpx.Client, body: Any, field: str) -> None:
    response = client.post("/generate", json=body)
    assert response.status_code == 422, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"detail"}
    assert response.json()["detail"].startswith(field)


def test_several_wrong_fields_are_all_named(client: httpx.Client) -> None:
    detail = ask(client, count=0, seed=-1, extra=1).json()["detail"]
    assert "count: " in detail
    assert "seed: " in detail
    assert "extra: " in detail


def test_the_words_say_what_would_do(client: httpx.Client) -> None:
    assert ask(client, count=301).json()["detail"] == "count: should be at most 300"
    assert ask(client, count=3, labels=[1]).json()["detail"] == (
        "labels: should have one entry for each image: count is 3, entries are 1"
    )
    assert "cat" in ask(client, count=1, labels=["cat"]).json()["detail"]


def test_many_wrong_labels_are_not_all_repeated(client: httpx.Client) -> None:
    response = ask(client, count=300, labels=[None] * 300)
    assert response.status_code == 422
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nope",
        b"{'count': 1}",
        b'{"count": 1',
        b'{"count": NaN}',
        b'{"count": 1, "labels": ["\\ud800"]}',
        b"\xff\xfe",
        b"count=1",
        b"[" * 100_000,
        b'{"count": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_not_json(client: httpx.Client, content: bytes) -> None:
    response = client.post("/generate", content=content, headers=JSON)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(("body: ", "count: "))


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_form_on_a_foreign_page_cannot_ask(client: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = client.post("/generate", content=b'{"count": 1}', headers=headers)
    assert response.status_code == 422
    assert response.json() == {"detail": "body: should be JSON, sent with the header Content-Type: application/json"}


def test_content_type_may_have_a_charset(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/generate", content=b'{"count": 1}', headers=headers).status_code == 200


def test_a_public_model_has_no_privacy_to_state(application: Any, public_bundle: Path, serving: Any) -> None:
    generator = open_generator(public_bundle, "cpu")
    with serving(application({"public": generator})) as client:
        response = ask(client, count=2, seed=4)
        assert response.json()["privacy"] is None
        assert response.json()["labels"] == [generator.classes[0], generator.classes[1]]
        assert "x-rapid-epsilon" not in response.headers
        assert client.get("/info").json()["privacy"] is None
