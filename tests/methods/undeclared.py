"""A method of another package whose public stage has settings, and which does not say that a bundle fixes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from methods.toy.class_means import ClassMeans, ClassMeansSettings, Means
from pydantic import Field

from rapid.bundle import Bundle, Component
from rapid.bundle.builder import BundleBuilder
from rapid.config.sections import Section
from rapid.dp import PrivateAccess
from rapid.methods.base import BaseUse, Description, PublicImages
from rapid.training.recipe import Recipe


class FeatureSettings(Section):
    """What the public stage makes."""

    count: int = Field(4, ge=1)


class UndeclaredSettings(ClassMeansSettings):
    """Those of class means, and of its public stage."""

    method: Literal["undeclared"] = "undeclared"
    features: FeatureSettings = FeatureSettings()


class FeatureRecipe(Recipe):
    features: FeatureSettings


class Undeclared(ClassMeans):
    """See `rapid.methods.base.Method`."""

    name: ClassVar[str] = "undeclared"
    settings: ClassVar[Any] = UndeclaredSettings
    has_public_stage = True
    base: ClassVar[BaseUse] = "required"

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: Any) -> Description:
        recipe = FeatureRecipe(images=builder.images, features=settings.features)
        builder.make("features", Means, recipe, lambda _: Means({"shape": [settings.features.count]}))
        return Description("Features.\n")

    def train_private(self, access: PrivateAccess, base: Bundle | None, settings: Any) -> Mapping[str, Component]:
        assert base is not None
        return {**super().train_private(access, base, settings), "features": base.stored("features")}


METHOD = Undeclared()
