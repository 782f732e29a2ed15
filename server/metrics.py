"""Numbers for Prometheus; each application has its own, so that several can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """What is counted: requests by path and status, images, and seconds of generation."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("rapid_requests", "HTTP requests answered", ["path", "status"], registry=self.registry)
        self.images = Counter("rapid_images", "Images made", registry=self.registry)
        self.seconds = Histogram(
            "rapid_generation_seconds",
            "Seconds in which the model made one request's images, without waiting",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def made(self, images: int, seconds: float) -> None:
        """Count one request whose images have been made."""
        self.images.inc(images)
        self.seconds.observe(seconds)

    def response(self) -> Response:
        """The text that Prometheus reads."""
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


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

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)
