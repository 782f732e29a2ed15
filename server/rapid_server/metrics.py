"""Numbers for Prometheus; each application has its own, so that several can live in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from rapid_server.line import Step

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1)


class Metrics:
    """What is counted and measured; the engine tells it of each step."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("rapid_requests", "HTTP requests answered", ["path", "status"], registry=self.registry)
        self._refusals = Counter(
            "rapid_refusals", "Requests refused: status 4xx or 503", ["status"], registry=self.registry
        )
        self._latency = Histogram(
            "rapid_request_seconds",
            "Seconds from a request to the last byte of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._images = Counter("rapid_images", "Images made", ["model"], registry=self.registry)
        self._step = self._of_model("rapid_step_seconds", "Seconds of a step: denoising, decoding, judging", _SECONDS)
        self._occupancy = self._of_model("rapid_batch_occupancy", "Rows of a step, as a share of the batch", _SHARES)
        self._retrieval = self._of_model("rapid_retrieval_seconds", "Seconds of searches in a step", _SECONDS)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Tell how many images wait or are being made, whenever somebody asks."""
        queue = Gauge("rapid_queue_images", "Images that wait or are being made", registry=self.registry)
        queue.set_function(length)

    def stepped(self, model: str, batch: int, step: Step) -> None:
        """Count a step of the engine."""
        self._step.labels(model).observe(step.seconds)
        if step.rows:
            self._occupancy.labels(model).observe(step.rows / batch)
        self._images.labels(model).inc(sum(len(made) for _, made in step.made))
        if step.retrieval_seconds:
            self._retrieval.labels(model).observe(step.retrieval_seconds)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)
        if 400 <= status < 500 or status == 503:
            self._refusals.labels(str(status)).inc()

    def response(self) -> Response:
        """The text that Prometheus reads."""
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _of_model(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, words, ["model"], buckets=buckets, registry=self.registry)


class CountRequests:
    """ASGI middleware: counts every answer under the route that gave it; paths without a route count as `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begin = time.perf_counter()
        status = 0

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            if status:
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.answered(path, status, time.perf_counter() - begin)
