"""A public bundle that grows in its run folder: each component is made once, or taken over from another bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from rapid.bundle.components import Component, StoredComponent, component_hash
from rapid.bundle.format import Bundle, Loadable
from rapid.errors import InputError
from rapid.files import replacing
from rapid.training import Checkpoint, RunFolder
from rapid.training.recipe import Recipe


class Made(Loadable, Component, Protocol):
    """A class of components."""


MadeT = TypeVar("MadeT", bound=Made)


class BundleBuilder:
    """The components of a public bundle, as a method makes them one after the other.

    Args:
        run_folder: where they are written.
        images: hash of the public images, their labels and the way they are divided; part of every recipe.
        device: where networks are trained.
        reuse: a finished public bundle; its components are taken over where their recipes are the same.

    Attributes:
        components: what was made, by name.
        recipes: the recipe's digest of each.
    """

    def __init__(self, run_folder: RunFolder, images: str, device: torch.device, reuse: Bundle | None = None) -> None:
        self.images = images
        self.device = device
        self.components: dict[str, Component] = {}
        self.recipes: dict[str, str] = {}
        self._run_folder = run_folder
        self._reuse = reuse

    @property
    def out(self) -> Path:
        """The folder of the bundle."""
        return self._run_folder.out

    def make(self, name: str, kind: type[MadeT], recipe: Recipe, train: Callable[[Checkpoint], MadeT]) -> MadeT:
        """The component `name`: as an earlier run wrote it, taken over, or made by `train` and written.

        Args:
            name: its folder.
            kind: its class.
            recipe: all that it is made from; `train` must not depend on anything else.
            train: makes it, and resumes from the checkpoint.
        """

        def write(folder: Path) -> None:
            train(checkpoint).save(folder)

        checkpoint = Checkpoint(self._run_folder.checkpoint(name))
        self.write(name, (kind.__module__, kind.__qualname__), recipe, write)
        checkpoint.remove()
        return kind.load(self.out / name)

    def write(self, name: str, kind: tuple[str, str], recipe: Recipe, write: Callable[[Path], None]) -> None:
        """The same for a component that writes its own folder.

        Args:
            name: its folder.
            kind: module and name of its class.
            recipe: all that it is made from.
            write: writes it to a new folder.
        """
        folder = self.out / name
        if not folder.is_dir():
            with replacing(folder) as target:
                if self._reuse is not None and self._same_in(self._reuse, name, recipe):
                    self._reuse.stored(name).save(target)
                else:
                    write(target)
        self.components[name] = StoredComponent(folder, kind)
        self.recipes[name] = recipe.digest

    def _same_in(self, other: Bundle, name: str, recipe: Recipe) -> bool:
        """Whether `other` has this component, made with the very components that are here.

        Not only by the same recipes: another machine makes other weights of a recipe.
        """
        made_with = all(other.config.components.get(part) == self.hash_of(part) for part in recipe.made_from)
        return other.config.recipes.get(name) == recipe.digest and made_with

    def hash_of(self, name: str) -> str:
        """Content hash of a component that was made."""
        return component_hash(self.out / name)

    def add(self, name: str, component: Component) -> None:
        """Add a component that is quick to make; it is written with the bundle."""
        self.components[name] = component


def open_reused(path: Path, fingerprint: str) -> Bundle:
    """The bundle whose components may be reused.

    Raises:
        InputError: no public bundle, or one of other images.
    """
    bundle = Bundle.open(path, "networks", "public")
    if bundle.config.public is None or bundle.config.public.fingerprint != fingerprint:
        raise InputError("networks", "was trained on other images; give the same --public, or leave it out", path)
    return bundle
