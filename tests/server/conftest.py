from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from rapid_server.app import create_app
from rapid_server.connections import uvicorn_config
from rapid_server.run import listen
from rapid_server.settings import ServerSettings

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
        thread.join(60)
        listener.close()
    assert not thread.is_alive()


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
