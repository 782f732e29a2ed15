"""A method of another package with a mistake of its author, which `mistake` chooses; without one it is class means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from methods.toy.class_means import ClassMeans, ClassMeansSettings, Means

from rapid.bundle import Bundle, Component
from rapid.dp import PrivateAccess, PublicFacts, QuerySpec
from rapid.dp.budget import Budget
from rapid.methods.base import Description

NAME = "mistaken"


def install(site: Path, name: str = NAME, entry: str = f"{NAME} = methods.mistaken:METHOD") -> None:
    """Make it, or another package with an entry point for a method, an installed one of a folder on the path."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rapid.methods]\n{entry}\n")


class MistakenSettings(ClassMeansSettings):
    """Those of class means, and the mistake."""

    method: Literal["mistaken"] = "mistaken"
    mistake: str = ""


class Mistaken(ClassMeans):
    """See `rapid.methods.base.Method`."""

    name: ClassVar[str] = NAME
    settings: ClassVar[Any] = MistakenSettings
    mended = False
    notes: Any = ()

    def releases(self, settings: Any, facts: PublicFacts, base: Bundle | None) -> Any:
        (means,) = super().releases(settings, facts, base)
        size = facts.dataset_size
        count = QuerySpec(name="count", kind="count", title="a count", share=0.1, dataset_size=size)
        planned: dict[str, Any] = {
            "returns none": None,
            "returns words": ["means"],
            "no releases": [],
            "two without a share": [means, count.model_copy(update={"share": None})],
            "all with a share": [count],
            "one name twice": [means, count.model_copy(update={"name": "means"})],
            "the name of the score": [means, count.model_copy(update={"name": "tuning-score"})],
            "twice the images": [means.model_copy(update={"dataset_size": 2 * size})],
            "half the images": [means.model_copy(update={"dataset_size": size // 2})],
            "other images for one": [means, count.model_copy(update={"dataset_size": size + 1})],
            "skips a release": [means, count],
        }
        return planned.get(settings.mistake, [means])

    def train_private(self, access: PrivateAccess, base: Bundle | None, settings: Any) -> Any:
        components: Mapping[str, Component] = {"means": Means({"shape": [1]})}
        if self.mended or settings.mistake != "releases nothing":
            components = super().train_private(access, base, settings)
        (made,) = components.values()
        if self.mended:
            return components
        given: dict[str, Any] = {
            "gives none": None,
            "gives no components": {},
            "gives a tensor": {"means": torch.zeros(3)},
            "gives a plain module": {"means": made, "more": torch.nn.Linear(2, 2)},
            "leads elsewhere": {"means": made, "../neighbour": made},
            "names the checkpoints": {"means": made, "checkpoints": made},
        }
        return given.get(settings.mistake, components)

    def describe_private(self, settings: Any, base: Bundle | None, budget: Budget) -> Any:
        if settings.mistake == "fails to describe":
            raise KeyError("author")
        described: dict[str, Any] = {
            "describes none": None,
            "describes a tensor": Description("Means.\n", {"mean": torch.zeros(2)}),
        }
        return described.get(settings.mistake, super().describe_private(settings, base, budget))

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Any:
        return self.notes


METHOD = Mistaken()
