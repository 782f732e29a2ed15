"""The models that are served, by the names under which requests ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapid.bundle.card import privacy_in_words
from rapid.bundle.info import provenance
from rapid.errors import InputError
from rapid_server.schemas import ModelInfo

if TYPE_CHECKING:
    from rapid.methods.rapid.generator import Generator

PUBLIC = "This model was trained on public images alone: no private image had a part in it."


class Model:
    """A model and what is said of it in every answer.

    Attributes:
        name: under which it is asked for.
        classes: names of the classes; empty for an unconditional model.
        privacy: content of `privacy.json`; None for a public bundle.
        chunks: text that goes into each PNG; see `rapid.bundle.info.provenance`.
    """

    def __init__(self, name: str, generator: Generator) -> None:
        self.name = name
        self.classes = generator.classes
        self.privacy: dict[str, Any] | None = generator.privacy
        self.chunks = provenance(generator.bundle)
        self.image_shape = generator.image_shape
        self.sha256 = generator.bundle.digest
        self._generator = generator

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT in pixels."""
        return f"{self.image_shape[1]}x{self.image_shape[0]}"

    @property
    def info(self) -> ModelInfo:
        """What `GET /info` tells."""
        return ModelInfo(
            model=self.name,
            classes=list(self.classes),
            image_shape=list(self.image_shape),
            steps=self._generator.settings.steps,
            privacy=self.privacy,
            privacy_in_words=PUBLIC if self.privacy is None else privacy_in_words(self.privacy),
            sha256=self.sha256,
            bundle=self._generator.info,
        )

    def resolve(self, labels: Sequence[int | str]) -> list[int]:
        """Class indices of names or numbers; raises InputError."""
        return self._generator.resolve_labels(labels)

    def class_name(self, label: int | None) -> str | None:
        """The name of a class; None for a model without classes."""
        return None if label is None else self.classes[label]


class Catalogue:
    """All models; the first is used where a request names none."""

    def __init__(self, generators: Mapping[str, Generator]) -> None:
        self.models = {name: Model(name, generator) for name, generator in generators.items()}
        self.first = next(iter(self.models.values()))

    def find(self, name: str | None) -> Model:
        """The model of this name; raises InputError that lists those there are."""
        if name is None:
            return self.first
        if name not in self.models:
            raise InputError(f"model: unknown; there are {', '.join(self.models)}")
        return self.models[name]
