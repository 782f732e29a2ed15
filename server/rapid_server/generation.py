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
from rapid_server.catalogue import Catalogue, Model
from rapid_server.engine import Engine, Job
from rapid_server.failures import problems
from rapid_server.line import Made

COLLECTED: dict[str, Callable[[Model, Job, list[Made]], Response]] = {
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
REFUSALS = {
    401: "No token, or an unknown one",
    408: "The body did not arrive in time",
    413: "The body is too large",
    422: "A bad request; `detail` names the field",
    429: "Too many of your own images are waiting; `Retry-After` says when to come again",
    500: "Failed inside",
    503: "Too many images are waiting (`Retry-After`), or the server is stopping",
}


def generation_router(catalogue: Catalogue, engine: Engine, limits: schemas.Limits) -> APIRouter:
    """`POST /generate`, and the same in the common form of image services."""
    router = APIRouter()
    _add_generate(router, catalogue, engine, limits)
    _add_images(router, catalogue, engine, limits)
    return router


def _add_generate(router: APIRouter, catalogue: Catalogue, engine: Engine, limits: schemas.Limits) -> None:
    offered = (*COLLECTED, *STREAMED)
    schema = schemas.request_schema(schemas.GenerateRequest, limits)

    @router.post(
        "/generate",
        summary="Make images",
        description=f"At most {limits.max_count} at once. By `Accept` as JSON, as one PNG (a grid where `count` > 1), "
        "or while they are made: as a zip of PNGs, as JSON lines or as server-sent events. The seed, epsilon and delta "
        "are also in the headers `X-Rapid-...`, and each PNG says in a text chunk where it comes from.",
        response_model=schemas.GenerateResponse,
        responses={
            200: {
                "content": {
                    kind: {} if kind == responses.EVENTS else {"schema": {"type": "string"}} for kind in offered[1:]
                }
            },
            **problems(REFUSALS | {406: "No type that `Accept` takes"}),
        },
        openapi_extra={"requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}},
    )
    async def generate(request: Request) -> Response:
        media_type = negotiate.choose(",".join(request.headers.getlist("accept")), offered)
        if media_type is None:
            raise HTTPException(406, "Accept: can be " + ", ".join(offered))
        asked = await _read(request, schemas.GenerateRequest, limits)
        model = catalogue.find(asked.model)
        labels = None if asked.labels is None else model.resolve(asked.labels)
        job = engine.submit(model.name, asked.count, labels, asked.seed, asked.steps, client=_client(request))
        _note(request, job)
        if media_type in COLLECTED:
            made = await _collect(request, job)
            return await asyncio.to_thread(COLLECTED[media_type], model, job, made)
        # what stands between must not hold the stream back
        head = responses.headers(model, job) | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if media_type == responses.ZIP:
            head["Content-Disposition"] = f'attachment; filename="{responses.zip_name(model, job)}"'
        return StreamingResponse(_in_turn(STREAMED[media_type](model, job)), 200, head, media_type)


def _add_images(router: APIRouter, catalogue: Catalogue, engine: Engine, limits: schemas.Limits) -> None:
    schema = schemas.request_schema(schemas.ImagesRequest, limits)

    @router.post(
        "/v1/images/generations",
        summary="Make images, for clients of the common form",
        description="`prompt` is the name of a class. Fields that are not known are passed over.",
        response_model=schemas.ImagesResponse,
        responses=problems(REFUSALS),
        openapi_extra={"requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}},
    )
    async def generations(request: Request) -> Response:
        asked = await _read(request, schemas.ImagesRequest, limits)
        model = catalogue.find(asked.model)
        if asked.size not in (None, "auto", model.size):
            raise InputError(f"size: the images of {model.name} are {model.size}; ask for that, or for auto")
        count = asked.n or 1
        labels = None
        if asked.prompt.strip() not in ANY_CLASS:
            try:
                labels = model.resolve([asked.prompt.strip()]) * count
            except InputError as error:
                raise InputError(str(error).replace("--labels", "prompt", 1)) from None
        job = engine.submit(model.name, count, labels, asked.seed, client=_client(request))
        _note(request, job)
        made = await _collect(request, job)
        return await asyncio.to_thread(_images_answer, model, job, made)


def _images_answer(model: Model, job: Job, made: list[Made]) -> Response:
    names = responses.class_names(model, job)
    content = schemas.ImagesResponse(
        created=int(time.time()),
        data=[
            schemas.OneImage(b64_json=responses.base64_png(model, one.image), revised_prompt=names[one.place])
            for one in made
        ],
        size=model.size,
        model=model.name,
        seed=job.order.seed,
        privacy=model.privacy,
    )
    return Response(content.model_dump_json(), media_type=responses.JSON, headers=responses.headers(model, job))


class EndJobs:
    """ASGI middleware: with its answer, whatever became of that, a job is at its end.

    Not before the answer has left: its images count as long as they are in memory.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; end its job, if it has one."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body") and not message.get("more_body", False):
                # whoever sends waits until what was sent before has left
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, receive, sending if scope["type"] == "http" else send)
        finally:
            job: Job | None = scope.get("state", {}).pop(_JOB, None)
            if job is not None:
                job.cancel()


def _note(request: Request, job: Job) -> None:
    state = request.scope.setdefault("state", {})
    state["images"], state[_JOB] = job.order.count, job


async def _collect(request: Request, job: Job) -> list[Made]:
    """All images in the order of their places; nothing is made any more once the client has gone."""

    async def collected() -> list[Made]:
        return sorted([one async for batch in job for one in batch], key=lambda one: one.place)

    made, gone = asyncio.create_task(collected()), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ClientDisconnect
        return made.result()
    finally:
        made.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _in_turn(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass a stream on; between two images, many of which may be waiting, others have their turn."""
    async with aclosing(stream) as parts:  # type: ignore[type-var]
        async for part in parts:
            yield part
            await asyncio.sleep(0)


async def _read(request: Request, kind: type[schemas.Request], limits: schemas.Limits) -> schemas.Request:
    """Check the body. Anything but the JSON type is refused: a form on a foreign page cannot send that one."""
    sent = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if sent != responses.JSON:
        raise HTTPException(422, "body: should be JSON, sent with the header Content-Type: application/json")
    try:
        return schemas.parse_request(kind, await request.body(), limits)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def _client(request: Request) -> str:
    """Whose images they are: the name that goes with the token, or the address."""
    state: dict[str, Any] = request.scope.get("state", {})
    return str(state.get("client") or (request.client.host if request.client else "unknown"))
