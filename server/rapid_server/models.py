"""The models that are served, by name, with their descriptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapid.bundle.card import privacy_in_words, public_in_words
from rapid.bundle.info import describe, provenance
from rapid.errors import InputError
from rapid.sampling.classifier import Classifier
from rapid.sampling.generate import resolve_labels
from rapid_server.schemas import Limits, ModelInfo

if TYPE_CHECKING:
    from rapid.bundle import Bundle
    from rapid.sampling.generator import Generator


class Model:
    """A model, as responses describe it.

    Args:
        name: by which requests select it.
        served: the model itself.
        limits: of the server.

    Attributes:
        name: as given.
        classifies: whether it is a classifier.
        probed: whether a probe knows the probabilities of the classes of each image.
        classes: names of the classes; empty for an unconditional model.
        image_shape: (H, W) or (H, W, 3).
        weight: as how many images one counts, by its bytes; no more than a request may have.
        max_count: most images in one request.
        privacy: content of `privacy.json`; None for a public bundle.
        sha256: digest of the bundle, in hexadecimal.
        created: when this copy of the bundle was written, in seconds since 1970.
        provenance: text chunks of each PNG; see `rapid.bundle.info.provenance`.
        info: response of `GET /info`.
    """

    def __init__(self, name: str, served: Generator | Classifier, limits: Limits) -> None:
        self.name = name
        self.classifies = isinstance(served, Classifier)
        self.probed = not isinstance(served, Classifier) and served.probed
        self.classes = served.classes
        self.image_shape = served.image_shape
        # what a classifier gets are files, whose bytes are limited
        needed = 1 if self.classifies else math.ceil(math.prod(self.image_shape) / limits.image_bytes)
        self.weight = min(needed, limits.max_count)
        self.max_count = limits.max_count // self.weight
        self.privacy: dict[str, Any] | None = served.bundle.privacy
        self.sha256 = served.bundle.digest
        self.created = served.bundle.written
        # the folder of the bundle has a name for the operator, not for clients
        self.provenance = provenance(served.bundle, name)
        if not isinstance(served, Classifier) and served.steps > limits.max_steps:
            least = f"{name} takes {served.steps} steps by default; allow as many"
            raise InputError("", f"the setting max_steps is {limits.max_steps}: {least}")
        self.info = ModelInfo(
            model=name,
            classes=list(self.classes),
            image_shape=list(self.image_shape),
            task="classification" if self.classifies else "generation",
            max_count=self.max_count,
            steps=0 if isinstance(served, Classifier) else served.steps,
            max_steps=0 if isinstance(served, Classifier) else min(served.max_steps, limits.max_steps),
            privacy=self.privacy,
            privacy_in_words=_in_words(served.bundle),
            sha256=self.sha256,
            bundle=describe(served.bundle) | {"name": name},
        )

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT in pixels."""
        return f"{self.image_shape[1]}x{self.image_shape[0]}"

    def check_count(self, count: int, field: str) -> None:
        """Raise InputError with this field if a request may not have so many images of this size."""
        if count > self.max_count:
            raise InputError(
                field, f"should be at most {self.max_count}, because images of {self.name} are {self.size}"
            )

    def resolve(self, labels: Sequence[int | str]) -> list[int]:
        """Class indices of names or numbers; raises InputError with the field "labels"."""
        return resolve_labels(self.classes, labels)


def _in_words(bundle: Bundle) -> str:
    """What is promised about private images."""
    if bundle.privacy is not None:
        return privacy_in_words(bundle.privacy)
    assert bundle.config.public is not None
    return public_in_words(bundle.config.public)


class ModelRegistry:
    """All models by name, in `models`, within the limits of a request; `default` is the first.

    Requests that name none get the first that fits.
    """

    def __init__(self, served: Mapping[str, Generator | Classifier], limits: Limits) -> None:
        self.models = {name: Model(name, one, limits) for name, one in served.items()}
        self.default = next(iter(self.models.values()))

    @property
    def generators(self) -> dict[str, Model]:
        """Those that make images."""
        return {name: model for name, model in self.models.items() if not model.classifies}

    def generator(self, name: str | None) -> Model:
        """The generator of this name, or the first one; raises InputError with the field "model" if there is none."""
        return self._find(name, classifies=False)

    def classifier(self, name: str | None) -> Model:
        """The classifier of this name, or the first one; raises InputError with the field "model" if there is none."""
        return self._find(name, classifies=True)

    def _find(self, name: str | None, *, classifies: bool) -> Model:
        if name is not None and name not in self.models:
            raise InputError("model", f"unknown; there are {', '.join(self.models)}")
        asked = self.models.values() if name is None else [self.models[name]]
        found = next((model for model in asked if model.classifies == classifies), None)
        if found is None:
            wanted = "makes images and classifies none; use POST /generate"
            if not classifies:
                wanted = "is a classifier, which makes no images; use POST /predict"
            raise InputError("model", f"{name or self.default.name} {wanted}")
        return found
