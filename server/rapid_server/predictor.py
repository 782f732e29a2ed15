"""The predictor: the thread that classifies images, and the requests that wait for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rapid.errors import RapidError
from rapid.sampling.classifier import read_png
from rapid_server.device import answers
from rapid_server.engine import ClientFullError, EngineFailedError, EngineFullError, EngineStoppedError
from rapid_server.fair_queue import FairQueue

if TYPE_CHECKING:
    from rapid.sampling.classifier import Classifier

_LOG = logging.getLogger(__name__)
PORTION = 256
"""Images of a request that are classified at a time, at most,"""
PORTION_SECONDS = 0.1
"""and no more are read after this time: then it is the turn of another client."""
_RETRY_AFTER = 1
"""Seconds: classifying takes milliseconds an image."""
Probabilities = NDArray[np.float32]


@dataclass(eq=False)
class Prediction:
    """A request in the predictor.

    Attributes:
        classifier: the model.
        files: PNG files.
        client: who sent them.
        end: tells the predictor that it is over.
        future: of the probabilities.
        count: number of files.
        place: of the next file.
        found: probabilities of the files before it.
        over: whether `cancel` was called.
    """

    classifier: Classifier
    files: Sequence[bytes]
    client: str
    end: Callable[[Prediction], None]
    future: Future[Probabilities] = field(default_factory=Future)
    count: int = field(init=False)
    place: int = 0
    found: list[Probabilities] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.count = len(self.files)

    async def probabilities(self) -> Probabilities:
        """Probability of each class, float32 (n, classes), of n files.

        Raises:
            InputError: a file is not an image that the model takes; the field is "images", of several files
                "images[N]" with the place of the first bad one.
            EngineStoppedError: the predictor was told to stop.
            EngineFailedError: the model failed; the traceback is in the log.
        """
        return await asyncio.wrap_future(self.future)

    def cancel(self) -> None:
        """End the request. Call it also when the response has left: until then its images count."""
        self.end(self)


class Predictor:
    """Runs classifiers in a thread of its own. Clients take turns, with a portion of a request each.

    Args:
        classifiers: models by name.
        max_queued: most images of all clients that wait, are being classified, or whose response has not left.
        max_client: the same for one client.

    Attributes:
        failed: whether the device of a classifier does not compute any more.
    """

    def __init__(self, classifiers: Mapping[str, Classifier], *, max_queued: int, max_client: int) -> None:
        self._classifiers = dict(classifiers)
        self._max_queued, self._max_client = max_queued, max_client
        self._waiting: FairQueue[Prediction] = FairQueue()
        # those that count: they wait, run, or have a response that has not left
        self._open: set[Prediction] = set()
        self._running: Prediction | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._when_failed: Callable[[], None] = lambda: None
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="rapid-predictor", daemon=True)
        self._thread.start()

    def submit(self, model: str, files: Sequence[bytes], client: str) -> Prediction:
        """Queue PNG files.

        Raises:
            EngineFullError: too many images wait; ClientFullError if they are this client's.
            EngineStoppedError: no more requests are accepted.
        """
        prediction, count = Prediction(self._classifiers[model], files, client, self._forget), len(files)
        with self._changed:
            if self._stopped:
                raise EngineStoppedError
            own = sum(one.count for one in self._open if one.client == client)
            total = sum(one.count for one in self._open)
            if own + count > self._max_client:
                problem = f"{own} of your images are waiting, of at most {self._max_client}: ask for fewer, or later"
                raise ClientFullError(problem, _RETRY_AFTER)
            if total + count > self._max_queued:
                problem = f"{total} images are waiting, of at most {self._max_queued}: ask for fewer, or later"
                raise EngineFullError(problem, _RETRY_AFTER)
            self._open.add(prediction)
            self._waiting.put(client, prediction)
            self._changed.notify()
        return prediction

    def when_failed(self, act: Callable[[], None]) -> None:
        """Call `act` when the device of a classifier does not compute any more; no later request can succeed then."""
        self._when_failed = act

    def stop(self) -> None:
        """Accept no more requests, and end those that wait or run with EngineStoppedError; return at once."""
        with self._changed:
            self._stopped = True
            waiting = self._waiting.clear()
            self._changed.notify()
        for prediction in waiting:
            _end(prediction, EngineStoppedError())

    def close(self) -> None:
        """Stop, and wait until the thread has ended; may be called more than once."""
        self.stop()
        self._thread.join()

    def _forget(self, prediction: Prediction) -> None:
        """A request is over; one that runs counts until the thread has seen it."""
        with self._changed:
            prediction.over = True
            if prediction is not self._running:
                self._waiting.remove(prediction.client, prediction)
                self._open.discard(prediction)

    def _run(self) -> None:
        while (prediction := self._next()) is not None:
            try:
                ended: Probabilities | Exception | None = self._advance(prediction)
            except Exception as error:
                if not isinstance(error, RapidError):
                    _LOG.exception("a prediction failed")
                ended = error
            with self._changed:
                self._running = None
                if self._stopped and ended is None:
                    ended = EngineStoppedError()
                if prediction.over:
                    self._open.discard(prediction)
                elif ended is None:
                    self._waiting.put_back(prediction.client, prediction)
            # not before: who waits may then send more
            if ended is not None:
                _end(prediction, ended)

    def _next(self) -> Prediction | None:
        """Wait for a request; None means stop."""
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            _, self._running = self._waiting.take()
            return self._running

    def _advance(self, prediction: Prediction) -> Probabilities | None:
        """Classify a portion of a request; return the probabilities of all its images if that was the last one."""
        start, images = time.monotonic(), list[NDArray[np.uint8]]()
        form = prediction.classifier.bundle.config.image
        while prediction.place < prediction.count and len(images) < PORTION:
            if self._stopped or prediction.over:
                raise EngineStoppedError
            name = f"images[{prediction.place}]" if prediction.count > 1 else "images"
            images.append(read_png(prediction.files[prediction.place], form, name))
            prediction.place += 1
            if time.monotonic() - start > PORTION_SECONDS:
                break
        prediction.found.append(self._classified(prediction.classifier, np.concatenate(images)))
        return np.concatenate(prediction.found) if prediction.place == prediction.count else None

    def _classified(self, classifier: Classifier, images: NDArray[np.uint8]) -> Probabilities:
        try:
            found = classifier.probabilities(images)
        except Exception:
            _LOG.exception("a prediction failed")
            if not answers(classifier.device):
                self.failed = True
                self._when_failed()
            raise EngineFailedError from None
        if not np.isfinite(found).all():
            _LOG.error("a prediction failed: the classifier's probabilities are not finite")
            raise EngineFailedError
        return found


def _end(prediction: Prediction, ended: Probabilities | Exception) -> None:
    """Tell who waits; nobody does if the client has gone. From here on only the number of its images counts."""
    prediction.files = ()
    with suppress(InvalidStateError):
        if isinstance(ended, Exception):
            prediction.future.set_exception(ended)
        else:
            prediction.future.set_result(ended)
