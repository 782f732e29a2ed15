"""The process of `rapid serve`: takes the port, loads the models, serves until a signal."""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rapid.errors import InputError, RapidError
from rapid_server import logs

if TYPE_CHECKING:
    from pathlib import Path

    import uvicorn

    from rapid.sampling.classifier import Classifier
    from rapid.sampling.generator import Generator
    from rapid_server.engine import Engine
    from rapid_server.predictor import Predictor
    from rapid_server.settings import ServerSettings

_LOG = logging.getLogger(__name__)
HOSTS = "use 127.0.0.1, or 0.0.0.0 for all networks"
OTHER_FILES = 256
"""Open files besides connections: bundles, libraries, logs."""


def serve(settings: ServerSettings) -> None:
    """Serve the bundles of the settings until SIGINT (Ctrl-C) or SIGTERM.

    Prints one line with the real port when it accepts requests; `/readyz` responds 200 when the models have made their
    first images. The port is taken before the models are loaded, so that one in use is an error at once. After a signal
    the server accepts no more requests, lets running ones finish within `grace_seconds`, rejects the rest with 503, and
    returns; after a second Ctrl-C it does not wait. The content of knowledge bases is read and checked once, while the
    server serves; if one was altered, or the engine fails, as with a GPU that does not answer any more, the server ends
    in the same way, and raises.

    Raises:
        InputError: the port or host cannot be used, or something is wrong with a bundle.
        RapidError: the engine failed.
    """
    try:
        # a missing library is told before the port is taken
        importlib.import_module("rapid_server.app")
    except ModuleNotFoundError as error:
        raise InputError("", f"rapid serve needs {error.name}: pip install -e '.[serve]' in rapid's clone") from None

    with listen(settings.host, settings.port) as listener:
        logs.configure(settings.log_format)
        models = _opened(settings)
        for line in settings.shown().splitlines():
            _LOG.info("setting %s", line)
        serve_models(models, settings, listener)


def serve_models(
    models: Mapping[str, Generator | Classifier], settings: ServerSettings, listener: socket.socket
) -> None:
    """As `serve`, with models that are opened and a port that is taken."""
    from rapid_server.app import create_app
    from rapid_server.connections import uvicorn_config

    app = create_app(models, settings)
    engine: Engine = app.state.engine
    allow_files(settings.max_connections + OTHER_FILES)
    server = _server(
        uvicorn_config(app, settings.max_connections, settings.grace_seconds),
        engine,
        app.state.predictor,
        settings.grace_seconds,
        f"serving {', '.join(models)} at {_url(settings.host, listener)}",
    )
    altered = _verify(models, server)
    _end_with(engine, app.state.predictor, server)
    try:
        server.run(sockets=[listener])
    finally:
        engine.close()
    if altered:
        raise altered[0]
    if engine.failed or app.state.predictor.failed:
        raise RapidError("the models cannot be run any more (see the log): start the server again")


def _opened(settings: ServerSettings) -> dict[str, Generator | Classifier]:
    """The models by name."""
    from rapid.methods import open_model
    from rapid.sampling.classifier import Classifier

    def opened_and_tried(path: Path) -> Generator | Classifier:
        model = open_model(path, settings.device)
        # generators make an image when the engine measures them
        black = np.zeros((1, *model.image_shape), np.uint8)
        if isinstance(model, Classifier) and not np.isfinite(model.probabilities(black)).all():
            raise InputError("model", "gives probabilities that are not finite; train again", path)
        return model

    # in a thread that ends, and its OpenMP threads with it: they would slow down those of the engine
    with ThreadPoolExecutor(1) as opener:
        opened = [opener.submit(opened_and_tried, path) for path in settings.models.values()]
        return dict(zip(settings.models, [one.result() for one in opened], strict=True))


def _server(
    config: uvicorn.Config, engine: Engine, predictor: Predictor, grace_seconds: float, serving: str
) -> uvicorn.Server:
    """What serves the application; prints the line `serving` when it accepts requests."""
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn, except that a signal is a normal end: exit code 0, not death by that signal."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(serving, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.drain()
            for one in (engine, predictor):
                asyncio.get_running_loop().call_later(grace_seconds, one.stop)
            await super().shutdown(sockets)

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            handlers = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for sig, handler in handlers.items():
                    signal.signal(sig, handler)

    return Server(config)


def _verify(models: Mapping[str, Generator | Classifier], server: uvicorn.Server) -> list[InputError]:
    """Read the large files of the bundles in a thread; if one was altered, stop the server and add why to the list."""
    altered: list[InputError] = []

    def verify() -> None:
        try:
            for model in models.values():
                model.bundle.verify()
        except InputError as error:
            altered.append(error)
            server.should_exit = True

    # large knowledge bases take minutes to read: meanwhile the models are served
    threading.Thread(target=verify, name="verify", daemon=True).start()
    return altered


def _end_with(engine: Engine, predictor: Predictor, server: uvicorn.Server) -> None:
    """Stop the server when the models have failed, so that whoever watches the process starts it again."""

    def end() -> None:
        server.should_exit = True

    def watch() -> None:
        engine.wait()
        if engine.failed:
            end()

    predictor.when_failed(end)
    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Args:
        host: name or address of an interface.
        port: 0 is any free one.

    Raises:
        InputError: the address cannot be used; the field is "host" or "port".
    """
    if not 0 <= port <= 65535:
        raise InputError("port", "choose one in 0..65535 (0: any free one)", port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise InputError("host", f"no such address; {HOSTS}", host) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from None
    return listener


def allow_files(count: int) -> None:
    """Raise the limit of open files, of which each connection is one, to `count` or the system's hard limit."""
    try:
        import resource
    except ModuleNotFoundError:
        # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        _LOG.warning("the limit of open files is %d (ulimit -n); up to %d may be needed", wanted, count)


def _bind_error(error: OSError, host: str, port: int) -> InputError:
    match error.errno:
        case errno.EADDRINUSE:
            return InputError("port", f"in use on {host}; choose another", port)
        case errno.EACCES:
            return InputError("port", f"not permitted on {host}; choose one above 1023", port)
        case errno.EADDRNOTAVAIL:
            return InputError("host", f"not an address of this machine; {HOSTS}", host)
        case _:
            return InputError("port", f"cannot be used on {host} ({error.strerror}); choose another", port)


def _url(host: str, listener: socket.socket) -> str:
    """The URL for a browser, with the real port."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
