"""A public bundle that grows: what is made once, what is taken over, and which settings each component depends on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import numpy as np
import pytest
import torch
from pydantic.fields import FieldInfo

from rapid.bundle import Bundle, BundleConfig, PublicData, Thumbnails, write_bundle
from rapid.bundle.builder import BundleBuilder
from rapid.bundle.networks import check_same_images, open_networks
from rapid.config.sections import ImageSettings, Section
from rapid.data import fit_images, load_images
from rapid.errors import InputError, Stopped
from rapid.methods.base import PublicImages
from rapid.methods.rapid.public_stage import train_public
from rapid.methods.rapid.settings import RapidSettings
from rapid.training import Checkpoint, RunFolder
from rapid.training.recipe import Recipe

CPU = torch.device("cpu")
FINGERPRINT = "images"


class Note:
    """A component of one line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "note.txt").write_text(self.text)

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls((folder / "note.txt").read_text())


class NoteRecipe(Recipe):
    length: int = 1


class Workshop:
    """Makes notes in a folder, and counts how often each was made."""

    made: ClassVar[list[str]] = []

    def __init__(self, out: Path, reuse: Bundle | None = None) -> None:
        self.builder = BundleBuilder(RunFolder(out), FINGERPRINT, CPU, reuse)
        self.made = []

    def make(self, name: str, text: str, **recipe: Any) -> Note:
        def train(checkpoint: Checkpoint) -> Note:
            self.made.append(name)
            checkpoint.save({"step": 1})
            return Note(text)

        return self.builder.make(name, Note, NoteRecipe(images=FINGERPRINT, **recipe), train)

    def finish(self) -> Bundle:
        config = BundleConfig(
            kind="public",
            method="rapid",
            settings={},
            image=ImageSettings(),
            classes=(),
            public=PublicData(sources=("x",), classes=(), pre_training=1, reference=1, fingerprint=FINGERPRINT),
            recipes=self.builder.recipes,
        )
        return write_bundle(self.builder.out, config, self.builder.components, card="")


@pytest.fixture
def other(tmp_path: Path) -> Bundle:
    """A finished bundle of two notes, the second made with the first."""
    shop = Workshop(tmp_path / "other")
    shop.make("first", "one")
    shop.make("second", "two", made_from={"first": shop.builder.recipes["first"]})
    return shop.finish()


def test_a_component_is_made_once(tmp_path: Path) -> None:
    shop = Workshop(tmp_path / "out")
    assert shop.make("first", "one").text == "one"
    assert shop.made == ["first"]
    # its training state is gone, and so it is written
    assert not RunFolder(tmp_path / "out").checkpoint("first").exists()
    again = Workshop(tmp_path / "out")
    assert again.make("first", "other").text == "one"
    assert again.made == []
    assert again.builder.recipes == shop.builder.recipes
    assert again.builder.hash_of("first") == again.finish().config.components["first"]


def test_a_component_that_is_not_finished_is_made_again(tmp_path: Path) -> None:
    shop = Workshop(tmp_path / "out")

    def stop(checkpoint: Checkpoint) -> Note:
        checkpoint.save({"step": 1})
        raise Stopped("stopped")

    with pytest.raises(Stopped):
        shop.builder.make("first", Note, NoteRecipe(images=FINGERPRINT), stop)
    assert not (tmp_path / "out" / "first").exists()
    assert not list((tmp_path / "out").glob(".*"))
    # and goes on from its training state
    states = []

    def resume(checkpoint: Checkpoint) -> Note:
        states.append(checkpoint.load())
        return Note("one")

    Workshop(tmp_path / "out").builder.make("first", Note, NoteRecipe(images=FINGERPRINT), resume)
    assert states == [{"step": 1}]


def test_the_same_recipe_is_taken_over(tmp_path: Path, other: Bundle) -> None:
    shop = Workshop(tmp_path / "out", other)
    assert shop.make("first", "new").text == "one"
    assert shop.make("second", "new", made_from={"first": shop.builder.recipes["first"]}).text == "two"
    assert shop.made == []
    assert shop.finish().config.components == other.config.components


@pytest.mark.parametrize("recipe", [{"length": 2}, {"made_from": {"first": "x"}}, {}])
def test_another_recipe_is_made(tmp_path: Path, other: Bundle, recipe: dict[str, Any]) -> None:
    shop = Workshop(tmp_path / "out", other)
    assert shop.make("second", "new", **recipe).text == "new"
    assert shop.make("third", "new").text == "new"
    assert shop.made == ["second", "third"]


def test_what_was_made_with_another_component_of_the_same_recipe_is_made(tmp_path: Path, other: Bundle) -> None:
    """Another machine makes other weights of a recipe: the recipes alone do not tell that components fit together."""
    alone = Workshop(tmp_path / "out")
    alone.make("first", "one, but for rounding")
    shop = Workshop(tmp_path / "out", other)
    assert shop.make("first", "new").text == "one, but for rounding"
    assert shop.make("second", "new", made_from={"first": shop.builder.recipes["first"]}).text == "new"


def test_quick_components_are_written_with_the_bundle(tmp_path: Path) -> None:
    shop = Workshop(tmp_path / "out")
    shop.builder.add("thumbnails", Thumbnails(np.zeros((1, 256), np.uint8)))
    assert not (tmp_path / "out" / "thumbnails").exists()
    bundle = shop.finish()
    assert bundle.component("thumbnails", Thumbnails).rows.shape == (1, 256)
    assert "thumbnails" not in bundle.config.recipes


def test_only_a_public_bundle_of_the_same_images_is_reused(other: Bundle, private_bundle: Path, tmp_path: Path) -> None:
    opened = open_networks(other.path)
    assert opened.config == other.config
    check_same_images(opened, FINGERPRINT)
    with pytest.raises(InputError, match=r"^networks .*was trained on other images"):
        check_same_images(opened, "others")
    with pytest.raises(InputError, match=r"^networks .*is a private bundle"):
        open_networks(private_bundle)
    with pytest.raises(InputError, match=r"^networks "):
        open_networks(tmp_path / "nowhere")


AUTOENCODER = ("image", "split", "augmentations.training", "augmentations.augment", "autoencoder")
DENOISER = (*AUTOENCODER, "schedule", "denoiser")
ENCODER = (*DENOISER, "encoder", "retrieval.k")
DEPENDS = {
    "autoencoder": AUTOENCODER,
    "denoiser": DENOISER,
    "encoder": ENCODER,
    "probe": ("image", "split", "probe"),
    "subspace": (*AUTOENCODER, "subspace"),
    "knowledge_base": (*ENCODER, "augmentations.reference", "knowledge_base", "retrieval.v"),
}
"""The settings that decide how each component of RAPID comes out: sections, or single settings."""
OTHERWISE: dict[str, Any] = {
    "private.distillation.guidance": 1.5,
    "method": None,  # there is no other
    "image.size": 40,
    "autoencoder.patch": 4,
    "autoencoder.multipliers": (1, 1, 2),
    "autoencoder.attention": (8,),
    "denoiser.channels": 16,
    "denoiser.multipliers": None,  # as long as attention, so both change in "denoiser.attention"
    "denoiser.attention": (False,),
    "denoiser.heads": 1,
    "probe.enabled": None,  # there is no probe then
    "retrieval.enabled": None,  # there is no knowledge base then: see test_cli_without_retrieval
    "private.start": 300,
    "private.trainable": ("*bias",),
    "generation.start": 200,
    "private.distillation.sampling": {"steps": 10},
    "private.distillation.least_accepted": None,  # 0 with rounds after DP-SGD
    "generation.clip_range": 2.0,
}
"""Other values, where one cannot be made up from the type; None: there is none."""


def leaves(section: Section, name: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Every setting with its value, by its dotted name."""
    for field, info in type(section).model_fields.items():
        value, inner = getattr(section, field), f"{name}.{field}" if name else field
        if isinstance(value, Section):
            yield from leaves(value, inner)
        else:
            yield inner, value, info


def another(name: str, value: Any, info: FieldInfo) -> Any:
    """Another value of a setting; None if there is none."""
    if name in OTHERWISE:
        return OTHERWISE[name]
    if get_origin(info.annotation) is Literal:
        return next(choice for choice in get_args(info.annotation) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.9 if value else 0.1
    if isinstance(value, str):
        return value + "x"
    raise AssertionError(f"{name}: say in OTHERWISE what else it can be than {value!r}")


def changed(settings: RapidSettings, name: str, value: Any) -> RapidSettings:
    tree = settings.model_dump()
    *sections, leaf = name.split(".")
    part = tree
    for section in sections:
        part = part[section]
    part[leaf] = value
    return RapidSettings.model_validate(tree)


@pytest.fixture(scope="module")
def recipes_of(
    public_bundle: Path, letters: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[RapidSettings], dict[str, str]]:
    """The recipes of all components, by settings: those of a run that finds all components made."""
    out = tmp_path_factory.mktemp("recipes") / "out"
    shutil.copytree(public_bundle, out)
    images = fit_images(load_images(letters, "public"), tiny_settings.image, "public")
    public = PublicImages(images, np.zeros(len(images), np.int64))

    def found(settings: RapidSettings) -> dict[str, str]:
        builder = BundleBuilder(RunFolder(out), FINGERPRINT, CPU)
        train_public(builder, public, settings)
        return builder.recipes

    return found


def test_a_component_is_made_again_if_and_only_if_a_setting_of_its_recipe_changed(
    recipes_of: Callable[[RapidSettings], dict[str, str]], tiny_settings: RapidSettings
) -> None:
    before = recipes_of(tiny_settings)
    assert before.keys() == DEPENDS.keys()
    assert recipes_of(tiny_settings) == before
    tried = 0
    for name, value, info in leaves(tiny_settings):
        other_value = another(name, value, info)
        if other_value is None:
            continue
        assert other_value != value, name
        after = recipes_of(changed(tiny_settings, name, other_value))
        remade = {component for component in before if after[component] != before[component]}
        expected = {
            component
            for component, settings in DEPENDS.items()
            if any(name == setting or name.startswith(f"{setting}.") for setting in settings)
        }
        assert remade == expected, name
        tried += 1
    assert tried > 90


def test_without_a_probe_the_others_are_the_same(
    recipes_of: Callable[[RapidSettings], dict[str, str]], tiny_settings: RapidSettings
) -> None:
    before = recipes_of(tiny_settings)
    after = recipes_of(changed(tiny_settings, "probe.enabled", False))
    assert after == {name: digest for name, digest in before.items() if name != "probe"}


def test_other_images_are_another_recipe(
    recipes_of: Callable[[RapidSettings], dict[str, str]], tiny_settings: RapidSettings
) -> None:
    recipe = NoteRecipe(images=FINGERPRINT)
    assert recipe.digest != NoteRecipe(images="others").digest
    # no two components share a recipe
    assert len(set(recipes_of(tiny_settings).values())) == len(DEPENDS)
