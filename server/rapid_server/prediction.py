"""`POST /predict`: the classes of images that a client sends, by a classifier."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from rapid.sampling.classifier import read_png
from rapid_server import responses, schemas
from rapid_server.device import answers
from rapid_server.engine import ClientFullError, EngineFailedError, EngineFullError, EngineStoppedError
from rapid_server.generation import STATUSES, client_of, read_body, while_connected
from rapid_server.models import Model, ModelRegistry
from rapid_server.problems import Refusal, problems

if TYPE_CHECKING:
    from rapid.sampling.classifier import Classifier

_LOG = logging.getLogger(__name__)
PORTION = 256
"""Images that are classified between two looks whether the result is still wanted."""
_RETRY_AFTER = 1
"""Seconds: classifying takes milliseconds an image."""
Pixels = NDArray[np.uint8]


class Predictor:
    """Runs classifiers in a thread of its own, one request after the other.

    Args:
        classifiers: models by name.
        max_queued: most images of all clients that wait or are being classified.
        max_client: the same for one client.

    Attributes:
        failed: whether the device of a classifier does not compute any more.
    """

    def __init__(self, classifiers: Mapping[str, Classifier], *, max_queued: int, max_client: int) -> None:
        self._classifiers = dict(classifiers)
        self._max_queued, self._max_client = max_queued, max_client
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stopped = False
        self._when_failed: Callable[[], None] = lambda: None
        self.failed = False
        self._thread = ThreadPoolExecutor(1, "rapid-predictor")

    async def predict(self, model: str, files: Sequence[bytes], client: str) -> NDArray[np.float32]:
        """Probability of each class, float32 (n, classes), of n PNG files.

        Raises:
            InputError: a file is not an image that the model takes; the field is "images", of several files
                "images[N]" with the place of the first bad one.
            EngineFullError: too many images wait; ClientFullError if they are this client's.
            EngineStoppedError: no more requests are accepted.
            EngineFailedError: the model failed; the traceback is in the log.
        """
        count = len(files)
        with self._lock:
            if self._stopped:
                raise EngineStoppedError
            own, total = self._held[client], self._held.total()
            if own + count > self._max_client:
                problem = f"{own} of your images are waiting, of at most {self._max_client}: ask for fewer, or later"
                raise ClientFullError(problem, _RETRY_AFTER)
            if total + count > self._max_queued:
                problem = f"{total} images are waiting, of at most {self._max_queued}: ask for fewer, or later"
                raise EngineFullError(problem, _RETRY_AFTER)
            self._held[client] += count
            gone = threading.Event()
            # within the lock: after `stop` the executor takes nothing
            future = self._thread.submit(self._run, self._classifiers[model], files, gone)
        # a request that was cancelled may still be running
        future.add_done_callback(lambda _: self._release(client, count))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            gone.set()
            if self._stopped:
                raise EngineStoppedError from None
            raise

    def when_failed(self, act: Callable[[], None]) -> None:
        """Call `act` when the device of a classifier does not compute any more; no later request can succeed then."""
        self._when_failed = act

    def stop(self) -> None:
        """Accept no more requests, and end those that wait or run with EngineStoppedError; return at once."""
        with self._lock:
            self._stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop, and wait until the thread has ended; may be called more than once."""
        self.stop()
        self._thread.shutdown(wait=True)

    def _run(self, classifier: Classifier, files: Sequence[bytes], gone: threading.Event) -> NDArray[np.float32]:
        form = classifier.bundle.config.image
        names = [f"images[{place}]" for place in range(len(files))] if len(files) > 1 else ["images"]
        found = []
        for start in range(0, len(files), PORTION):
            if self._stopped or gone.is_set():
                raise EngineStoppedError
            part = slice(start, start + PORTION)
            pairs = zip(names[part], files[part], strict=True)
            images = np.concatenate([read_png(content, form, name) for name, content in pairs])
            try:
                found.append(classifier.probabilities(images))
            except Exception:
                _LOG.exception("a prediction failed")
                if not answers(classifier.device):
                    self.failed = True
                    self._when_failed()
                raise EngineFailedError from None
        return np.concatenate(found)

    def _release(self, client: str, count: int) -> None:
        with self._lock:
            self._held[client] -= count
            if not self._held[client]:
                del self._held[client]


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
        sent = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if sent == responses.PNG:
            found, files = models.classifier(model), [await request.body()]
        else:
            body = await read_body(request, schemas.PredictRequest, limits, also=responses.PNG)
            found = models.classifier(model if body.model is None else body.model)
            files = await asyncio.to_thread(lambda: [_decoded(text, place) for place, text in enumerate(body.images)])
        request.scope.setdefault("state", {})["images"] = len(files)
        rows = await while_connected(request, predictor.predict(found.name, files, client_of(request)))
        return await asyncio.to_thread(_response, found, rows)

    return router


def _decoded(text: str, place: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(422, f"images[{place}]: should be a PNG file in base64", "images") from None


def _response(model: Model, probabilities: NDArray[np.float32]) -> Response:
    content = {
        "labels": [model.classes[number] for number in probabilities.argmax(1).tolist()],
        "probabilities": probabilities.tolist(),
        "classes": list(model.classes),
        "model": model.name,
        "privacy": model.privacy,
    }
    return Response(json.dumps(content), media_type=responses.JSON, headers=responses.model_headers(model))
