"""Recipes: what a component is made from, as a hash."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

import rapid.methods.rapid.public_stage  # noqa: F401 - defines the recipes
from rapid.config.sections import ImageSettings, Training
from rapid.training.recipe import Recipe

SHA256 = 64


class Network(Recipe):
    image: ImageSettings = ImageSettings()
    training: Training = Training()


def test_the_digest_is_that_of_the_content() -> None:
    digest = Network(images="a", made_from={"x": "1", "y": "2"}).digest
    assert len(digest) == SHA256
    assert digest == Network(images="a", made_from={"y": "2", "x": "1"}).digest
    # a default that is written down is no other recipe
    assert digest == Network(images="a", made_from={"x": "1", "y": "2"}, training=Training(steps=1000)).digest


@pytest.mark.parametrize(
    "other",
    [
        Network(images="b", made_from={"x": "1"}),
        Network(images="a"),
        Network(images="a", made_from={"x": "2"}),
        Network(images="a", made_from={"y": "1"}),
        Network(images="a", made_from={"x": "1"}, training=Training(steps=999)),
        Network(images="a", made_from={"x": "1"}, image=ImageSettings(size=28)),
    ],
)
def test_any_other_content_is_another_recipe(other: Network) -> None:
    assert other.digest != Network(images="a", made_from={"x": "1"}).digest


def test_recipes_of_the_same_content_never_collide_between_classes() -> None:
    """Not even those of two methods that chose the same name for a class."""

    def another(module: str) -> type[Recipe]:
        return type("Network", (Network,), {"__module__": module})

    kinds = [Network, another("rapid.methods.one"), another("rapid.methods.other"), *recipes(Recipe)]
    kinds = list(dict.fromkeys(kinds))
    contents = [kind.model_construct(images="a", made_from={}) for kind in kinds]
    assert len({content.digest for content in contents}) == len(kinds) > 5


def recipes(kind: type[Recipe]) -> Iterator[type[Recipe]]:
    """All classes of recipes that are defined."""
    for own in kind.__subclasses__():
        yield own
        yield from recipes(own)


def test_a_recipe_is_frozen_and_takes_nothing_unknown() -> None:
    recipe = Network(images="a")
    with pytest.raises(ValidationError):
        recipe.images = "b"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Network(images="a", seed=1)  # type: ignore[call-arg]
