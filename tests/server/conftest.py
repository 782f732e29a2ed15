from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from rapid.generate import Generator
from server.app import create_app
from server.run import listen

Serving = Callable[[FastAPI], AbstractContextManager[httpx.Client]]


@contextmanager
def _serving(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of `app`, over a real socket."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(app, lifespan="on", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
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
    return Generator.open(private_bundle, device="cpu")


@pytest.fixture(scope="session")
def client(generator: Generator) -> Iterator[httpx.Client]:
    """A client of a server of the private bundle; at most 300 images in one request."""
    with _serving(create_app(generator, max_count=300)) as client:
        yield client
