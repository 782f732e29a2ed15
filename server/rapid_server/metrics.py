"""Prometheus metrics; each application has its own registry, so that several can run in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from rapid_server.worker import Step

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1)


class Metrics:
    """The metrics of one application; an `Observer` of its engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("rapid_requests", "HTTP requests", ["path", "status"], registry=self.registry)
        self._rejections = Counter(
            "rapid_refusals", "Rejected requests: status 4xx or 503", ["status"], registry=self.registry
        )
        self._latency = Histogram(
            "rapid_request_seconds",
            "Seconds from a request to the last byte of its response",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._images = Counter("rapid_images", "Images made", ["model"], registry=self.registry)
        self._step = self._of_model("rapid_step_seconds", "Seconds per step: network calls, decoder, probe", _SECONDS)
        self._occupancy = self._of_model("rapid_batch_occupancy", "Rows of a step as a share of the batch", _SHARES)
        self._searches = self._of_model("rapid_retrieval_seconds", "Seconds of searches per step", _SECONDS)

    def watch_queue(self, length: Callable[[], int], seconds: Callable[[], float]) -> None:
        """Report `length()` as the number of images that are queued or being made, and `seconds()` as their time."""
        queue = Gauge("rapid_queue_images", "Images that are queued or being made", registry=self.registry)
        queue.set_function(length)
        work = Gauge("rapid_queue_seconds", "Estimated seconds to make the images of the queue", registry=self.registry)
        work.set_function(seconds)

    def stepped(self, model: str, batch: int, step: Step) -> None:
        """Record a step of the engine."""
        self._step.labels(model).observe(step.seconds)
        if step.rows:
            self._occupancy.labels(model).observe(step.rows / batch)
        self._images.labels(model).inc(sum(len(done) for _, done in step.images))
        if step.search_seconds:
            self._searches.labels(model).observe(step.search_seconds)

    def responded(self, path: str, status: int, seconds: float) -> None:
        """Record the response to a request."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)
        # a server that is not ready yet refuses nobody
        if path != "/readyz" and (400 <= status < 500 or status == 503):
            self._rejections.labels(str(status)).inc()

    def response(self) -> Response:
        """The metrics in the text format of Prometheus."""
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _of_model(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, description, ["model"], buckets=buckets, registry=self.registry)


class CountRequests:
    """ASGI middleware: counts every response under its route; paths without a route count as `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begin = time.perf_counter()
        status = 0

        async def track(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, track)
        finally:
            if status:
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.responded(path, status, time.perf_counter() - begin)
