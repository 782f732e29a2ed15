"""The endpoints under `/v1`, in the form of the OpenAI API: its clients work with `base_url="http://HOST:PORT/v1"`."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rapid.errors import InputError
from rapid_server import responses, schemas
from rapid_server.encoder import Encoder
from rapid_server.engine import Engine
from rapid_server.generation import STATUSES, attach, client_of, collect, read_body
from rapid_server.job import Job
from rapid_server.models import Model, ModelRegistry
from rapid_server.problems import OPENAI_PREFIX, Refusal, openai_problems
from rapid_server.worker import ImageDone

ANY_CLASS = ("", "any")
_MISSING = {404: "No such model"}


def openai_router(models: ModelRegistry, engine: Engine, encoder: Encoder, limits: schemas.Limits) -> APIRouter:
    """`POST /v1/images/generations`, `GET /v1/models` and `GET /v1/models/{model}`."""
    router = APIRouter(prefix=OPENAI_PREFIX)
    _add_models(router, models)
    _add_images(router, models, engine, encoder, limits)
    return router


def _add_models(router: APIRouter, models: ModelRegistry) -> None:
    entries = {name: _entry(model) for name, model in models.generators.items()}

    @router.get(
        "/models", summary="The models, for clients of the OpenAI API", responses=openai_problems({401: "No token"})
    )
    async def list_models() -> schemas.OpenAIModels:
        return schemas.OpenAIModels(data=list(entries.values()))

    # a name may have slashes
    @router.get(
        "/models/{model:path}",
        summary="One of the models, for clients of the OpenAI API",
        responses=openai_problems({401: "No token", 422: "Invalid request"} | _MISSING),
    )
    async def retrieve_model(model: str) -> schemas.OpenAIModel:
        return entries[_find(models, model).name]


def _add_images(
    router: APIRouter, models: ModelRegistry, engine: Engine, encoder: Encoder, limits: schemas.Limits
) -> None:
    schema = schemas.request_schema(schemas.ImagesRequest, limits)

    @router.post(
        "/images/generations",
        summary="Generate images, for clients of the OpenAI API",
        description="`prompt` is the name of a class. Unknown fields are ignored.",
        response_model=schemas.ImagesResponse,
        responses=openai_problems(STATUSES | {422: "Invalid request; `param` names the field"} | _MISSING),
        openapi_extra={"requestBody": {"required": True, "content": {responses.JSON: {"schema": schema}}}},
    )
    async def generations(request: Request) -> Response:
        body = await read_body(request, schemas.ImagesRequest, limits)
        model = _find(models, body.model)
        if body.size not in (None, "auto", model.size):
            raise InputError("size", f"the images of {model.name} are {model.size}; ask for that, or for auto")
        count = body.n or 1
        model.check_count(count, "n")
        labels = None
        if body.prompt.strip() not in ANY_CLASS:
            try:
                labels = model.resolve([body.prompt.strip()]) * count
            except InputError as error:
                raise InputError("prompt", error.problem, error.value) from None
        job = engine.submit(model.name, count, labels, body.seed, client=client_of(request), weight=model.weight)
        attach(request, job, count)
        images = await collect(request, job)
        contents = await responses.base64_pngs(encoder, model, images)
        return await asyncio.to_thread(_images_response, model, job, images, contents)


def _find(models: ModelRegistry, name: str | None) -> Model:
    """The model of this name, or the default; raises Refusal, as the OpenAI API does, if there is none."""
    try:
        return models.generator(name)
    except InputError as error:
        raise Refusal(404, error.describe("model"), "model", "model_not_found") from None


def _entry(model: Model) -> schemas.OpenAIModel:
    return schemas.OpenAIModel(id=model.name, created=model.created, classes=list(model.classes), size=model.size)


def _images_response(model: Model, job: Job, images: list[ImageDone], contents: list[str]) -> Response:
    names = responses.class_names(model, job)
    content = schemas.ImagesResponse(
        created=int(time.time()),
        data=[
            schemas.OneImage(b64_json=content, revised_prompt=names[one.place])
            for one, content in zip(images, contents, strict=True)
        ],
        size=model.size,
        model=model.name,
        seed=job.request.seed,
        privacy=model.privacy,
    )
    return Response(content.model_dump_json(), media_type=responses.JSON, headers=responses.headers(model, job))
