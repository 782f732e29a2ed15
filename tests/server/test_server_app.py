"""The other endpoints, and how the server behaves when things happen at once or go wrong."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from rapid_server.app import STATIC
from tests_support import Fails, assert_same_images, numbers

from rapid.bundle.info import describe
from rapid.errors import InputError
from rapid.rounding import rounded_up
from rapid.sampling.generator import Generator


def pixels(png: str) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        return np.asarray(image).astype(int)


def test_health_and_readiness(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz"):
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"


def test_not_ready_once_stopped(application: Any, serving: Any) -> None:
    app = application()
    with serving(app) as client:
        assert client.get("/readyz").status_code == 200
        app.state.engine.stop()
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        response = client.post("/generate", json={"count": 1})
        assert (response.status_code, response.json()) == (503, {"detail": "the server is stopping"})


def test_info(client: httpx.Client, generator: Generator) -> None:
    info = client.get("/info").json()
    assert info["model"] == generator.bundle.path.name
    assert info["classes"] == [*"0123456789"]
    assert info["image_shape"] == [32, 32]
    assert info["max_count"] == 300
    assert info["privacy"] == generator.bundle.privacy
    assert info["bundle"] == describe(generator.bundle)
    assert info["sha256"] == generator.bundle.digest
    assert f"({rounded_up(generator.bundle.privacy['epsilon'])}, " in info["privacy_in_words"]
    assert [model["model"] for model in info["models"]] == [generator.bundle.path.name]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/generate", 405), ("POST", "/info", 405), ("GET", "/static/nothing", 404)],
)
def test_errors_are_json(client: httpx.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert isinstance(response.json()["detail"], str)
    if status == 405:
        allowed = response.headers["allow"]
        assert response.json() == {"detail": f"{method} is not allowed here; use {allowed}"}


def test_a_model_has_the_name_that_the_operator_gave_it(application: Any, generator: Generator, serving: Any) -> None:
    """That of its folder is not told."""
    with serving(application({"neutral": generator})) as client:
        info = client.get("/info").json()
        made = client.post("/generate", json={"count": 1}, headers={"Accept": "image/png"})
        assert info["model"] == info["bundle"]["name"] == made.headers["x-rapid-model"] == "neutral"
        text = Image.open(io.BytesIO(made.content)).text
        assert json.loads(text["rapid"])["model"] == "neutral"


def test_a_model_that_takes_more_steps_than_are_allowed_is_refused(application: Any, generator: Generator) -> None:
    least = f"the setting max_steps is 1: neutral takes {generator.steps} steps by default; allow as many"
    with pytest.raises(InputError, match=least):
        application({"neutral": generator}, max_steps=1)


def test_a_server_that_is_not_ready_refuses_nobody(application: Any, serving: Any) -> None:
    app = application()
    with serving(app) as client:
        app.state.engine.stop()
        assert client.get("/readyz").status_code == 503
        client.post("/generate", json={"count": 1})
        assert numbers(client)["rapid_refusals_total", "503"] == 1


@pytest.mark.parametrize("path", ["/", "/docs", "/static/page.js", "/healthz", "/nowhere"])
@pytest.mark.parametrize("asked", ["bytes=0-3", "bytes=9999999-", "bytes=a-b", "x=1-2"])
def test_parts_are_not_sent(client: httpx.Client, path: str, asked: str) -> None:
    """RFC 9110, 14.2: a server may ignore the header; a part that there is not would be an error of another form."""
    whole, part = client.get(path), client.get(path, headers={"Range": asked})
    assert (part.status_code, part.content) == (whole.status_code, whole.content)
    assert part.headers.get("accept-ranges", "none") == "none"


def test_no_file_but_the_static_ones(client: httpx.Client) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404


def test_metrics(application: Any, generator: Generator, serving: Any) -> None:
    with serving(application()) as client:
        client.post("/generate", json={"count": 3})
        client.post("/generate", json={"count": 2})
        client.post("/generate", json={"count": 0})
        client.get("/one/of/many/wrong/paths")
        found = numbers(client)
    assert found["rapid_requests_total", "/generate", "200"] == 2
    assert found["rapid_requests_total", "/generate", "422"] == 1
    assert found["rapid_requests_total", "other", "404"] == 1
    name = generator.bundle.path.name
    assert found["rapid_images_total", name] == 5
    assert found["rapid_refusals_total", "422"] == 1
    assert found["rapid_queue_images",] == found["rapid_queue_seconds",] == 0
    assert found["rapid_request_seconds_count", "/generate"] == 3
    steps = found["rapid_step_seconds_count", name]
    assert steps > 2
    assert found["rapid_step_seconds_sum", name] > 0
    assert found["rapid_batch_occupancy_count", name] > 0
    assert 0 < found["rapid_batch_occupancy_sum", name] <= steps
    assert found["rapid_retrieval_seconds_count", name] > 0


def test_two_apps_count_for_themselves(application: Any, generator: Generator, serving: Any) -> None:
    with serving(application()) as one, serving(application()) as other:
        one.post("/generate", json={"count": 1})
        assert numbers(one)["rapid_images_total", generator.bundle.path.name] == 1
        assert ("rapid_images_total", generator.bundle.path.name) not in numbers(other)


def test_the_event_loop_stays_free(client: httpx.Client) -> None:
    done = threading.Event()
    waits = []
    with ThreadPoolExecutor() as pool:
        long = pool.submit(client.post, "/generate", json={"count": 200, "seed": 1})
        long.add_done_callback(lambda _: done.set())
        while not done.is_set():
            start = time.perf_counter()
            assert client.get("/healthz").status_code == 200
            waits.append(time.perf_counter() - start)
        assert long.result().status_code == 200
    assert len(waits) >= 5
    assert sorted(waits)[len(waits) // 2] < 0.5


def test_requests_at_once_do_not_mix(client: httpx.Client) -> None:
    bodies = [{"count": 4, "labels": [n, n, n, n], "seed": n} for n in range(6)]

    def ask(body: dict[str, Any]) -> Any:
        response = client.post("/generate", json=body)
        assert response.status_code == 200
        return np.stack([pixels(image) for image in response.json()["images"]])

    alone = [ask(body) for body in bodies]
    for _ in range(3):
        with ThreadPoolExecutor(len(bodies)) as pool:
            found = list(pool.map(ask, bodies))
        for one, other in zip(found, alone, strict=True):
            assert_same_images(one, other)


def test_a_failure_inside_is_told_without_details(
    generator: Generator, application: Any, serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Fails(generator)
    with caplog.at_level(logging.ERROR), serving(application({"flaky": flaky})) as client:
        flaky.failing = True
        response = client.post("/generate", json={"count": 1})
        assert (response.status_code, response.json()) == (500, {"detail": "internal error"})
        flaky.failing = False
        assert client.post("/generate", json={"count": 1}).status_code == 200  # and the worker lives
        assert numbers(client)["rapid_requests_total", "/generate", "500"] == 1
        assert numbers(client)["rapid_images_total", "flaky"] == 1
    assert "/secret/path" in caplog.text  # the trace is in the log


def test_stopping_ends_what_runs_and_what_waits(application: Any, serving: Any) -> None:
    app = application()
    with serving(app) as client, ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, "/generate", json={"count": 1000})
        waiting = pool.submit(client.post, "/generate", json={"count": 1000})
        time.sleep(0.2)
        app.state.engine.stop()
        assert [running.result(60).status_code, waiting.result(60).status_code] == [503, 503]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    references = re.findall(r'(?:src|href)="([^"]+)"', response.text)
    assert references
    for reference in references:
        assert client.get(f"/{reference.removeprefix('./')}").status_code == 200, reference


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda file: file.name)
def test_nothing_is_loaded_from_elsewhere(client: httpx.Client, file: Path) -> None:
    assert client.get(f"/static/{file.name}").status_code == 200
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|[\"'(]//\w|@import", text)
    for module in re.findall(r'import .* from "([^"]+)"', text):
        assert (STATIC / module).is_file()


def test_labels_of_the_form_belong_to_something(client: httpx.Client) -> None:
    page = client.get("/").text
    identifiers = set(re.findall(r'id="([^"]+)"', page))
    for reference in re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', page):
        assert reference in identifiers


@pytest.mark.parametrize(("page", "script"), [("/", "page.js"), ("/docs", "docs.js")])
def test_the_scripts_use_elements_that_their_page_has(client: httpx.Client, page: str, script: str) -> None:
    identifiers = set(re.findall(r'id="([^"]+)"', client.get(page).text))
    modules, left = set(), {script}
    while left:
        text = (STATIC / (module := left.pop())).read_text(encoding="utf-8")
        modules.add(module)
        left |= set(re.findall(r'import .* from "\./([^"]+)"', text)) - modules
        used = set(re.findall(r'byId\("([^"]+)"\)', text))
        for several in re.findall(r"\[([^\]]*)\]\.map\(byId\)", text):
            used |= set(re.findall(r'"([^"]+)"', several))
        assert used <= identifiers, module
    assert script == "docs.js" or modules == {file.name for file in STATIC.glob("*.js")} - {"docs.js"}


def test_openapi_describes_the_contract(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    paths = {"/generate", "/predict", "/entries/{entry}", "/info", "/healthz", "/readyz", "/metrics"}
    common = {"/v1/images/generations", "/v1/models", "/v1/models/{model}"}
    assert set(description["paths"]) == paths | common
    operation = description["paths"]["/generate"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"count", "labels", "seed", "model", "steps", "soft_labels"}
    assert (body["properties"]["count"]["minimum"], body["properties"]["count"]["maximum"]) == (1, 300)
    assert body["additionalProperties"] is False
    streams = {"application/zip", "application/x-ndjson", "text/event-stream"}
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "image/png", *streams}
    assert set(operation["responses"]) == {"200", "401", "406", "408", "413", "422", "429", "500", "503"}
