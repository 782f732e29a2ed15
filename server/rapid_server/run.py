"""The process of `rapid serve`: takes the port, loads the models, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rapid.errors import InputError
from rapid_server import logs

if TYPE_CHECKING:
    from rapid_server.engine import Engine
    from rapid_server.settings import ServerSettings

_LOG = logging.getLogger(__name__)
_OTHER_FILES = 256


def serve(settings: ServerSettings) -> None:
    """Serve the bundles of the settings until SIGINT (Ctrl-C) or SIGTERM; port 0 is any free one.

    Prints one line, with the real port, when requests are taken; `/readyz` says when the models have made their first
    images. The port is taken before the models are loaded, and held: one in use is an error at once, not after a
    minute. Told to stop, the server takes no more requests, lets what runs end within `grace_seconds`, refuses the rest
    with 503, and returns; a second Ctrl-C does not wait.

    Raises InputError for a port or host that cannot be had and for whatever is wrong with the bundles.
    """
    try:
        import uvicorn

        from rapid_server.app import create_app
        from rapid_server.connections import uvicorn_config
    except ModuleNotFoundError as error:
        raise InputError(f"serve: {error.name} is not installed; pip install 'rapid[serve]'") from None

    with listen(settings.host, settings.port) as listener:
        from rapid.methods.rapid.generator import Generator

        logs.configure(settings.log_format)
        # in a thread that ends: OpenMP's threads of another that stays would slow down those of the engine
        with ThreadPoolExecutor(1) as opener:
            opened = [opener.submit(Generator.open, path, settings.device) for path in settings.models.values()]
            generators = dict(zip(settings.models, [one.result() for one in opened], strict=True))
        for line in settings.shown().splitlines():
            _LOG.info("setting %s", line)
        app = create_app(generators, settings)
        engine: Engine = app.state.engine
        serving = f"serving {', '.join(generators)} at {_url(settings.host, listener)}"

        class Server(uvicorn.Server):
            """uvicorn, but a signal is the ordinary end: exit 0, not death by that signal."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                print(serving, flush=True)

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                engine.drain()
                asyncio.get_running_loop().call_later(settings.grace_seconds, engine.stop)
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

        allow_files(settings.max_connections + _OTHER_FILES)
        try:
            Server(uvicorn_config(app, settings.max_connections, settings.grace_seconds)).run(sockets=[listener])
        finally:
            engine.close()


def listen(host: str, port: int) -> socket.socket:
    """Take the port: a listening socket. Raises InputError that says what to change if it cannot be had."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: choose one in 0..65535 (0: any free one)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise InputError(f"--host {host}: no such address; use 127.0.0.1, or 0.0.0.0 for all networks") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise InputError(_refusal(error, host, port)) from None
    return listener


def allow_files(count: int) -> None:
    """Let this process open so many files, and each connection is one, if the system's hard limit permits."""
    try:
        import resource
    except ModuleNotFoundError:
        return  # on Windows there is no such limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        _LOG.warning("at most %d files may be open (ulimit -n); %d connections may need more", wanted, count)


def _refusal(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"--port {port}: in use on {host}; choose another"
        case errno.EACCES:
            return f"--port {port}: not permitted on {host}; choose one above 1023"
        case errno.EADDRNOTAVAIL:
            return f"--host {host}: not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all networks"
        case _:
            return f"--port {port}: cannot be had on {host} ({error.strerror}); choose another"


def _url(host: str, listener: socket.socket) -> str:
    """The address to type, with the real port."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
