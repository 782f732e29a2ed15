"""The models that are served, by name, with their descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapid.bundle.card import privacy_in_words
from rapid.bundle.info import describe, provenance
from rapid.errors import InputError
from rapid.sampling.generate import resolve_labels
from rapid_server.schemas import ModelInfo

if TYPE_CHECKING:
    from rapid.sampling.generator import Generator

PUBLIC = "This model was trained on public images alone: no private image had a part in it."


class Model:
    """A model, as responses describe it.

    Args:
        name: by which requests select it.
        generator: the model itself.

    Attributes:
        name: as given.
        classes: names of the classes; empty for an unconditional model.
        image_shape: (H, W) or (H, W, 3).
        privacy: content of `privacy.json`; None for a public bundle.
        sha256: digest of the bundle, in hexadecimal.
        created: when this copy of the bundle was written, in seconds since 1970.
        provenance: text chunks of each PNG; see `rapid.bundle.info.provenance`.
        info: response of `GET /info`.
    """

    def __init__(self, name: str, generator: Generator) -> None:
        self.name = name
        self.classes = generator.classes
        self.image_shape = generator.image_shape
        self.privacy: dict[str, Any] | None = generator.bundle.privacy
        self.sha256 = generator.bundle.digest
        self.created = generator.bundle.written
        self.provenance = provenance(generator.bundle)
        self.info = ModelInfo(
            model=name,
            classes=list(self.classes),
            image_shape=list(self.image_shape),
            steps=generator.steps,
            privacy=self.privacy,
            privacy_in_words=PUBLIC if self.privacy is None else privacy_in_words(self.privacy),
            sha256=self.sha256,
            bundle=describe(generator.bundle),
        )

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT in pixels."""
        return f"{self.image_shape[1]}x{self.image_shape[0]}"

    def resolve(self, labels: Sequence[int | str]) -> list[int]:
        """Class indices of names or numbers; raises InputError with the field "labels"."""
        return resolve_labels(self.classes, labels)


class ModelRegistry:
    """All models by name, in `models`; `default` is the first, which requests get that name none."""

    def __init__(self, generators: Mapping[str, Generator]) -> None:
        self.models = {name: Model(name, generator) for name, generator in generators.items()}
        self.default = next(iter(self.models.values()))

    def find(self, name: str | None) -> Model:
        """The model of this name, or the default; raises InputError with the field "model" if there is none."""
        if name is None:
            return self.default
        if name not in self.models:
            raise InputError("model", f"unknown; there are {', '.join(self.models)}")
        return self.models[name]
