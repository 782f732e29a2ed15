from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, sync_playwright
from rapid_server.app import create_app
from rapid_server.connections import TimeoutProtocol, uvicorn_config
from rapid_server.run import listen
from rapid_server.settings import ServerSettings
from tests_browser import NAMES, Visit, works
from tests_hostile import Served

from rapid.bundle import Bundle
from rapid.bundle.info import provenance
from rapid.methods import open_generator
from rapid.sampling.generator import Generator

Serving = Callable[..., AbstractContextManager[httpx.Client]]
Application = Callable[..., FastAPI]


@contextmanager
def _serving(app: FastAPI, max_connections: int = 2048) -> Iterator[httpx.Client]:
    """A client of `app`, over a real socket."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn_config(app, max_connections, 7.0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        engine = getattr(app.state, "engine", None)
        assert engine is None or engine.ready.wait(120)
        with httpx.Client(base_url=url, timeout=120) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(120)
        listener.close()
    where = sys._current_frames().get(thread.ident or 0)
    assert not thread.is_alive(), "".join(traceback.format_stack(where))


@pytest.fixture(scope="session")
def serving() -> Serving:
    return _serving


@pytest.fixture(scope="session")
def generator(private_bundle: Path) -> Generator:
    """Without the probe: a hardly trained one is undecided between classes, so that rounding would decide."""
    return open_generator(private_bundle, "cpu", ["generation.attempts=1"])


def settings_of(**changes: Any) -> ServerSettings:
    """Settings of a server, without the environment."""
    return ServerSettings(model=("model=/nowhere",), **changes)


@pytest.fixture
def built_on_synthetic(public_bundle: Path, private_bundle: Path, tmp_path: Path) -> Generator:
    """Of a public bundle, some of whose images a private model made."""
    config = json.loads((public_bundle / "config.json").read_text())
    config["public"]["origins"] = [json.loads(provenance(Bundle.open(private_bundle, "model"))["rapid"])]
    Bundle.open(public_bundle, "base").copy_to(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return open_generator(tmp_path / "base", "cpu", ["generation.attempts=1"])


@pytest.fixture(scope="session")
def application(generator: Generator) -> Application:
    """Makes an application of the private bundle, or of the models given, with the given settings."""

    def make(models: Mapping[str, Generator] | None = None, **changes: Any) -> FastAPI:
        return create_app(models or {generator.bundle.path.name: generator}, settings_of(**changes))

    return make


@pytest.fixture(scope="session")
def client(application: Application) -> Iterator[httpx.Client]:
    """A client of a server of the private bundle; at most 300 images in one request."""
    with _serving(application(max_count=300)) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium: that of the system, else Playwright's own."""
    found = next((path for name in NAMES if (path := shutil.which(name)) and works(path)), None)
    with sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium: apt-get install chromium, or python -m playwright install chromium")
        # as root, as in containers, Chromium wants no sandbox
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visit(browser: Browser) -> Visit:
    """Opens the page at a URL. Errors in the console and requests to other origins are found at the end."""

    @contextmanager
    def opened(url: str, *, errors: tuple[str, ...] = (), **options: Any) -> Iterator[Page]:
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(30_000)
        wrong: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type in {"error", "warning"} else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        yield page
        context.close()
        assert [line for line in wrong if not any(re.search(known, line) for known in errors)] == []
        origin = "/".join(url.split("/")[:3])
        assert [to for to in asked if not to.startswith((origin, f"blob:{origin}"))] == []

    return opened


@pytest.fixture(scope="module")
def url(client: httpx.Client) -> str:
    """Of a server of the private bundle; at most 300 images in one request."""
    return str(client.base_url)


@pytest.fixture(scope="module")
def served(application: Any, serving: Any) -> Iterator[Served]:
    app = application(batch=64, max_count=5000, max_client=12_000, max_queued=50_000)
    with pytest.MonkeyPatch.context() as patch, serving(app) as client:
        patch.setattr(TimeoutProtocol, "silent_seconds", 2.0)
        yield Served(app, client)


@pytest.fixture
def nothing_is_left(served: Served, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After each test the engine has nothing to do, others are served, and there is no trace in the log."""
    yield
    served.becomes_idle()
    served.serves_others()
    assert not [record for record in caplog.records if record.exc_info]
