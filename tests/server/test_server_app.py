"""The other endpoints, and how the server behaves when things happen at once or go wrong."""

from __future__ import annotations

import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rapid.generate import Generator, Samples
from server.app import STATIC, create_app


class FailsFirst:
    """A real generator whose first call fails."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, *args: Any, **kwargs: Any) -> Samples:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("out of memory in /secret/path")
        return self._generator.generate(*args, **kwargs)


def numbers(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics under its name and the values of its labels."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_health_and_readiness(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz"):
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"


def test_not_ready_once_stopped(generator: Generator, serving: Any) -> None:
    app = create_app(generator)
    with serving(app) as client:
        assert client.get("/readyz").status_code == 200
        app.state.worker.stop()
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        response = client.post("/generate", json={"count": 1})
        assert (response.status_code, response.json()) == (503, {"detail": "the server is stopping"})


def test_info(client: httpx.Client, generator: Generator) -> None:
    info = client.get("/info").json()
    assert info["model"] == generator.name
    assert info["classes"] == [*"0123456789"]
    assert info["image_shape"] == [32, 32]
    assert info["max_count"] == 300
    assert info["privacy"] == generator.privacy
    assert info["bundle"] == generator.info


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/generate", 405), ("POST", "/info", 405), ("GET", "/static/nothing", 404)],
)
def test_errors_are_json(client: httpx.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert isinstance(response.json()["detail"], str)


def test_no_file_but_the_static_ones(client: httpx.Client) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404


def test_metrics(generator: Generator, serving: Any) -> None:
    with serving(create_app(generator)) as client:
        client.post("/generate", json={"count": 3})
        client.post("/generate", json={"count": 2})
        client.post("/generate", json={"count": 0})
        client.get("/one/of/many/wrong/paths")
        found = numbers(client)
    assert found["rapid_requests_total", "/generate", "200"] == 2
    assert found["rapid_requests_total", "/generate", "422"] == 1
    assert found["rapid_requests_total", "other", "404"] == 1
    assert found["rapid_images_total",] == 5
    assert found["rapid_generation_seconds_count",] == 2
    assert found["rapid_generation_seconds_sum",] > 0


def test_two_apps_count_for_themselves(generator: Generator, serving: Any) -> None:
    with serving(create_app(generator)) as one, serving(create_app(generator)) as other:
        one.post("/generate", json={"count": 1})
        assert numbers(one)["rapid_images_total",] == 1
        assert numbers(other)["rapid_images_total",] == 0


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

    def ask(body: dict[str, Any]) -> bytes:
        response = client.post("/generate", json=body)
        assert response.status_code == 200
        return response.content

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(ask, bodies)) == alone


def test_a_failure_inside_is_told_without_details(
    generator: Generator, serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), serving(create_app(FailsFirst(generator))) as client:  # type: ignore[arg-type]
        response = client.post("/generate", json={"count": 1})
        assert (response.status_code, response.json()) == (500, {"detail": "internal error"})
        assert client.post("/generate", json={"count": 1}).status_code == 200  # and the worker lives
        assert numbers(client)["rapid_requests_total", "/generate", "500"] == 1
        assert numbers(client)["rapid_images_total",] == 1
    assert "/secret/path" in caplog.text  # the trace is in the log


def test_stopping_ends_what_runs_and_what_waits(generator: Generator, serving: Any) -> None:
    app = create_app(generator)
    with serving(app) as client, ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, "/generate", json={"count": 1000})
        waiting = pool.submit(client.post, "/generate", json={"count": 1000})
        time.sleep(0.2)
        app.state.worker.stop()
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


def test_the_script_uses_elements_that_the_page_has(client: httpx.Client) -> None:
    identifiers = set(re.findall(r'id="([^"]+)"', client.get("/").text))
    script = client.get("/static/page.js").text
    assert set(re.findall(r'byId\("([^"]+)"\)', script)) <= identifiers


def test_openapi_describes_the_contract(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    assert set(description["paths"]) == {"/generate", "/info", "/healthz", "/readyz", "/metrics"}
    operation = description["paths"]["/generate"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"count", "labels", "seed"}
    assert (body["properties"]["count"]["minimum"], body["properties"]["count"]["maximum"]) == (1, 300)
    assert body["additionalProperties"] is False
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "image/png", "application/zip"}
    assert set(operation["responses"]) == {"200", "406", "422", "500", "503"}
