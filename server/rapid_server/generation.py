"""The endpoints that make images."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rapid.errors import InputError
from rapid_server import negotiate, responses, schemas
from rapid_server.engine import Engine, Job
from rapid_server.exception_handlers import problems
from rapid_server.models import Model, ModelRegistry
from rapid_server.worker import ImageDone

COLLECTED: dict[str, Callable[[Model, Job, list[ImageDone]], Response]] = {
    responses.JSON: responses.as_json,
    responses.PNG: responses.as_png,
}
STREAMED: dict[str, Callable[[Model, Job], AsyncIterator[bytes]]] = {
    responses.ZIP: responses.as_zip,
    responses.LINES: responses.as_lines,
    responses.EVENTS: responses.as_events,
}
ANY_CLASS = ("", "any")
_JOB = "job"
STATUSES = {
    401: "No token, or an unknown one",
    408: "The body did not arrive in time",
    413: "The body is too large",
    422: "Invalid request; `detail` names the field",
    429: "Too many of your images are waiting; `Retry-After` says when to try again",
    500: "Internal error",
    503: "Too many images are waiting (`Retry-After`), or the server is stopping",
}


def generation_router(models: ModelRegistry, engine: Engine, limits: schemas.Limits) -> APIRouter:
    """`POST /generate`, and `POST /v1/images/generations` in the form of common image services."""
    router = APIRouter()
    _add_generate(router, models, engine, limits)
    _add_images(router, models, engine, limits)
    return router


def _add_generate(router: APIRouter, models: ModelRegistry, engine: Engine, limits: schemas.Limits) -> None:
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
        body = await _read(request, schemas.GenerateRequest, limits)
        model = models.find(body.model)
        labels = None if body.labels is None else model.resolve(body.labels)
        job = engine.submit(model.name, body.count, labels, body.seed, body.steps, client=_client(request))
        _attach(request, job)
        if media_type in COLLECTED:
            images = await _collect(request, job)
            return await asyncio.to_thread(COLLECTED[media_type], model, job, images)
        # proxies must neither store nor buffer the stream
        head = responses.headers(model, job) | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if media_type == responses.ZIP:
            head["Content-Disposition"] = f'attachment; filename="{responses.zip_name(model, job)}"'
        return StreamingResponse(_yielding(STREAMED[media_type](model, job)), 200, head, media_type)


def _add_images(router: APIRouter, models: ModelRegistry, engine: Engine, limits: schemas.Limits) -> None:
    schema = schemas.request_schema(schemas.ImagesRequest, limits)

    @router.post(
        "/v1/images/generations",
        summary="Generate images, for clients of common image services",
        description="`prompt` is the name of a class. Unknown fields are ignored.",
        response_model=schemas.ImagesResponse,
        responses=problems(STATUSES),
        openapi_extra={"requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}},
    )
    async def generations(request: Request) -> Response:
        body = await _read(request, schemas.ImagesRequest, limits)
        model = models.find(body.model)
        if body.size not in (None, "auto", model.size):
            raise InputError("size", f"the images of {model.name} are {model.size}; ask for that, or for auto")
        count = body.n or 1
        labels = None
        if body.prompt.strip() not in ANY_CLASS:
            try:
                labels = model.resolve([body.prompt.strip()]) * count
            except InputError as error:
                raise InputError("prompt", error.problem, error.value) from None
        job = engine.submit(model.name, count, labels, body.seed, client=_client(request))
        _attach(request, job)
        images = await _collect(request, job)
        return await asyncio.to_thread(_images_response, model, job, images)


def _images_response(model: Model, job: Job, images: list[ImageDone]) -> Response:
    names = responses.class_names(model, job)
    content = schemas.ImagesResponse(
        created=int(time.time()),
        data=[
            schemas.OneImage(b64_json=responses.base64_png(model, one.image), revised_prompt=names[one.place])
            for one in images
        ],
        size=model.size,
        model=model.name,
        seed=job.request.seed,
        privacy=model.privacy,
    )
    return Response(content.model_dump_json(), media_type=responses.JSON, headers=responses.headers(model, job))


class EndJobs:
    """ASGI middleware: cancels the job of a request when the response is over, complete or not.

    Not earlier: until the response has left, its images are in memory, and count.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; cancel its job, if it has one."""

        async def send_in_two(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body") and not message.get("more_body", False):
                # a second message waits until the first has left
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, receive, send_in_two if scope["type"] == "http" else send)
        finally:
            job: Job | None = scope.get("state", {}).pop(_JOB, None)
            if job is not None:
                job.cancel()


def _attach(request: Request, job: Job) -> None:
    """Attach a job to its request: for the log, and for `EndJobs`."""
    state = request.scope.setdefault("state", {})
    state["images"], state[_JOB] = job.request.count, job


async def _collect(request: Request, job: Job) -> list[ImageDone]:
    """All images in the order of their places; raises ClientDisconnect as soon as the client disconnects."""

    async def collect() -> list[ImageDone]:
        return sorted([one async for batch in job for one in batch], key=lambda one: one.place)

    images, gone = asyncio.create_task(collect()), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({images, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not images.done():
            raise ClientDisconnect
        return images.result()
    finally:
        images.cancel()
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


async def _read(request: Request, kind: type[schemas.Request], limits: schemas.Limits) -> schemas.Request:
    """Parse the body. Other content types than JSON are rejected: forms on other sites' pages can send only those."""
    sent = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if sent != responses.JSON:
        raise HTTPException(422, "body: should be JSON, sent with the header Content-Type: application/json")
    try:
        return schemas.parse_request(kind, await request.body(), limits)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def _client(request: Request) -> str:
    """Whose images these are: the client's name by its token, or its address."""
    state: dict[str, Any] = request.scope.get("state", {})
    return str(state.get("client") or (request.client.host if request.client else "unknown"))
