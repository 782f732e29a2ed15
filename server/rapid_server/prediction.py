"""`POST /predict`: the classes of images that a client sends, by a classifier."""

from __future__ import annotations

import asyncio
import base64
import binascii

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from rapid_server import responses, schemas
from rapid_server.generation import STATUSES, attach, client_of, raw_body, read_body, while_connected
from rapid_server.models import Model, ModelRegistry
from rapid_server.predictor import Prediction, Predictor
from rapid_server.problems import Refusal, problems


def prediction_router(models: ModelRegistry, predictor: Predictor, limits: schemas.Limits) -> APIRouter:
    """`POST /predict`."""
    router = APIRouter()
    schema = schemas.predict_schema(limits)

    @router.post(
        "/predict",
        summary="Classify images",
        description=f"At most {limits.max_count} per request: JSON with PNG files in base64, or a single PNG as the "
        "body (Content-Type: image/png), for the first classifier or that of the query `?model=NAME`.",
        response_model=schemas.PredictResponse,
        responses=problems(STATUSES),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    responses.JSON: {"schema": schema},
                    responses.PNG: {"schema": {"type": "string", "format": "binary"}},
                },
            }
        },
    )
    async def predict(request: Request, model: str | None = None) -> Response:
        found, prediction = await submitted(request, model)
        attach(request, prediction, prediction.count)
        rows = await while_connected(request, prediction.probabilities())
        return await asyncio.to_thread(_response, found, rows)

    async def submitted(request: Request, model: str | None) -> tuple[Model, Prediction]:
        # when this returns, only the predictor has the files, and lets go of them when it has read them
        sent = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if sent == responses.PNG:
            found, files = models.classifier(model), [await raw_body(request)]
        else:
            body = await read_body(request, schemas.PredictRequest, limits, also=responses.PNG)
            found = models.classifier(model if body.model is None else body.model)
            files = await asyncio.to_thread(lambda: [_decoded(text, place) for place, text in enumerate(body.images)])
        return found, predictor.submit(found.name, files, client_of(request))

    return router


def _decoded(text: str, place: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(422, f"images[{place}]: should be a PNG file in base64", "images") from None


def _response(model: Model, probabilities: NDArray[np.float32]) -> Response:
    content = {
        "labels": [model.classes[number] for number in probabilities.argmax(1).tolist()],
        "classes": list(model.classes),
        "model": model.name,
        "privacy": model.privacy,
    }
    text = responses.json_with_rows(content, "probabilities", (row.tolist() for row in probabilities))
    return Response(text, media_type=responses.JSON, headers=responses.model_headers(model))
