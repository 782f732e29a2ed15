"""`POST /generate`, and what every endpoint that makes images needs: body, job, images."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid.errors import InputError
from rapid_server import negotiate, responses, schemas
from rapid_server.encoder import Encoder
from rapid_server.engine import Engine
from rapid_server.job import Job
from rapid_server.models import Model, ModelRegistry
from rapid_server.problems import Refusal, problems
from rapid_server.worker import ImageDone

Result = TypeVar("Result")

COLLECTED: dict[str, Callable[[responses.Reply, list[ImageDone]], Awaitable[Response]]] = {
    responses.JSON: responses.as_json,
    responses.PNG: responses.as_png,
}
STREAMED: dict[str, Callable[[responses.Reply], AsyncIterator[bytes]]] = {
    responses.ZIP: responses.as_zip,
    responses.LINES: responses.as_lines,
    responses.EVENTS: responses.as_events,
}
WITH_SOFT_LABELS = (responses.JSON, responses.ZIP, responses.LINES, responses.EVENTS)
_WORK = "work"
STATUSES = {
    401: "No token, or an unknown one",
    408: "The body did not arrive in time",
    413: "The body is too large",
    422: "Invalid request; `detail` names the field",
    429: "Too many of your images are waiting; `Retry-After` says when to try again",
    500: "Internal error",
    503: "Too many images are waiting (`Retry-After`), or the server is stopping",
}


class Work(Protocol):
    """What a request has the models do."""

    def cancel(self) -> None:
        """End it, and forget its images."""
        ...


def generation_router(models: ModelRegistry, engine: Engine, encoder: Encoder, limits: schemas.Limits) -> APIRouter:
    """`POST /generate`."""
    router = APIRouter()
    offered = (*COLLECTED, *STREAMED)
    schema = schemas.request_schema(schemas.GenerateRequest, limits)

    @router.post(
        "/generate",
        summary="Generate images",
        description=f"At most {limits.max_count} per request. `Accept` selects the format: JSON, one PNG (a grid where "
        "`count` > 1), or a stream while the images are made: a zip of PNGs, JSON lines or server-sent events. Seed, "
        "epsilon and delta are also in the headers `X-Rapid-...`, and each PNG states its provenance in a text chunk.",
        response_model=schemas.GenerateResponse,
        responses={
            200: {
                "content": {
                    kind: {} if kind == responses.EVENTS else {"schema": {"type": "string"}} for kind in offered[1:]
                }
            },
            **problems(STATUSES | {406: "`Accept` allows none of the available types"}),
        },
        openapi_extra={"requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}},
    )
    async def generate(request: Request) -> Response:
        media_type = negotiate.choose(",".join(request.headers.getlist("accept")), offered)
        if media_type is None:
            raise HTTPException(406, "Accept: can be " + ", ".join(offered))
        body = await read_body(request, schemas.GenerateRequest, limits)
        model = models.generator(body.model)
        if body.soft_labels:
            _check_soft_labels(model, media_type)
        labels = None if body.labels is None else model.resolve(body.labels)
        model.check_count(body.count, "count")
        client = client_of(request)
        job = engine.submit(model.name, body.count, labels, body.seed, body.steps, client=client, weight=model.weight)
        attach(request, job, body.count)
        reply = responses.Reply(encoder, model, job, body.soft_labels)
        if media_type in COLLECTED:
            images = await collect(request, job)
            return await COLLECTED[media_type](reply, images)
        # proxies must neither store nor buffer the stream
        head = responses.headers(model, job) | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if media_type == responses.ZIP:
            head["Content-Disposition"] = f'attachment; filename="{responses.zip_name(model, job)}"'
        return StreamingResponse(_yielding(STREAMED[media_type](reply)), 200, head, media_type)

    return router


def _check_soft_labels(model: Model, media_type: str) -> None:
    """Raise InputError if there are none, or the response has no room for them."""
    if not model.probed:
        raise InputError("soft_labels", f"{model.name} has no probe; leave it out")
    if media_type not in WITH_SOFT_LABELS:
        raise InputError("soft_labels", f"{media_type} has none; send Accept: {' or '.join(WITH_SOFT_LABELS)}")


class EndJobs:
    """ASGI middleware: cancels the work of a request when the response is over, complete or not.

    Not earlier: until the response has left, its images are in memory, and count.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; cancel its work, if it has any."""

        async def send_in_two(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body") and not message.get("more_body", False):
                # a second message waits until the first has left
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, receive, send_in_two if scope["type"] == "http" else send)
        finally:
            work: Work | None = scope.get("state", {}).pop(_WORK, None)
            if work is not None:
                work.cancel()


def attach(request: Request, work: Work, images: int) -> None:
    """Attach its work to a request, and the number of its images: for the log, and for `EndJobs`."""
    state = request.scope.setdefault("state", {})
    state["images"], state[_WORK] = images, work


async def collect(request: Request, job: Job) -> list[ImageDone]:
    """All images in the order of their places; raises ClientDisconnect as soon as the client disconnects."""

    async def gather() -> list[ImageDone]:
        return sorted([one async for batch in job for one in batch], key=lambda one: one.place)

    return await while_connected(request, gather())


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work for a client, which is cancelled if the client disconnects.

    Args:
        request: the client's; its body was read.
        work: a coroutine.

    Raises:
        ClientDisconnect: it did.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    # nobody else asks how it ended if the client disconnects first
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _yielding(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass a stream on, and let other tasks run between two images, as many may be ready at once."""
    async with aclosing(stream) as parts:  # type: ignore[type-var]
        async for part in parts:
            yield part
            await asyncio.sleep(0)


async def read_body(
    request: Request, kind: type[schemas.Request], limits: schemas.Limits, also: str = ""
) -> schemas.Request:
    """Parse the body.

    Other content types than JSON are rejected: forms on pages of other sites can send only those. `also` names a type
    that the endpoint takes otherwise; for the message.

    Raises:
        Refusal: not JSON, or an invalid request.
    """
    sent = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if sent != responses.JSON:
        other = f", or have the type {also}" if also else ""
        raise Refusal(422, f"body: should be JSON, sent with the header Content-Type: application/json{other}")
    try:
        return schemas.parse_request(kind, await raw_body(request), limits)
    except schemas.InvalidRequest as error:
        raise Refusal(422, str(error), error.field) from None


async def raw_body(request: Request) -> bytes:
    """The body, which the request does not keep, unlike that of `Request.body`; call it once."""
    return b"".join([piece async for piece in request.stream()])


def client_of(request: Request) -> str:
    """Whose images these are: the client's name by its token, or its address."""
    state: dict[str, Any] = request.scope.get("state", {})
    return str(state.get("client") or (request.client.host if request.client else "unknown"))
