"""Building a public bundle in its run folder: each component is made once, or reused from another bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

import torch

from rapid.bundle.components import Component, StoredComponent, component_hash, kind_of, save_component
from rapid.bundle.format import Bundle, Loadable, check_names
from rapid.files import replacing
from rapid.ranks import Ranks
from rapid.training import Checkpoint, RunFolder
from rapid.training.recipe import Recipe


class Made(Loadable, Component, Protocol):
    """A component class."""


MadeT = TypeVar("MadeT", bound=Made)


class BundleBuilder:
    """Collects the components of a public bundle while a method makes them.

    With several ranks, all of them make each component, and the first one writes it. A method whose functions share the
    work by `ranks` is faster; the others' work is done by each rank alone, and only that of the first counts.

    Args:
        run_folder: where they are written; all ranks see the same folder.
        images: hash of the public images, their labels and their division into sets; part of every recipe.
        device: where networks are trained.
        networks: a public bundle of the same images, whose components are reused if their recipes are the same; or
            trained networks of other images, which a method takes as they are (see `given`).
        ranks: the processes that make them together.

    Attributes:
        components: all components so far, by name.
        recipes: digests of their recipes, by name.
        given: trained networks of other images; None if the method trains its own.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        images: str,
        device: torch.device,
        networks: Bundle | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.images = images
        self.device = device
        self.components: dict[str, Component] = {}
        self.recipes: dict[str, str] = {}
        self._run_folder = run_folder
        self.given = networks if networks is not None and networks.config.kind == "networks" else None
        self._reuse = networks if self.given is None else None

    @property
    def out(self) -> Path:
        """The folder of the bundle."""
        return self._run_folder.out

    def make(self, name: str, kind: type[MadeT], recipe: Recipe, train: Callable[[Checkpoint], MadeT]) -> MadeT:
        """The component `name`: written by an earlier run, reused, or made by `train` and written.

        Args:
            name: its folder.
            kind: its class.
            recipe: all its inputs; `train` must not depend on anything else.
            train: makes it, and resumes from the checkpoint.

        Raises:
            RapidError: it has no proper name (`rapid.bundle.format.check_names`).
        """

        def write(folder: Path) -> None:
            # only the first rank's state is kept
            path = self._run_folder.checkpoint(name) if self.ranks.first else folder / "checkpoint.pt"
            made = train(Checkpoint(path))
            if self.ranks.first:
                made.save(folder)

        self.write(name, (kind.__module__, kind.__qualname__), recipe, write)
        if self.ranks.first:
            Checkpoint(self._run_folder.checkpoint(name)).remove()
        return kind.load(self.out / name)

    def write(self, name: str, kind: tuple[str, str], recipe: Recipe, write: Callable[[Path], None]) -> None:
        """Like `make`, for a component that writes its own folder.

        Args:
            name: its folder.
            kind: module and name of its class.
            recipe: all its inputs.
            write: writes it to a new folder; what other ranks than the first write is dropped.

        Raises:
            RapidError: it has no proper name (`rapid.bundle.format.check_names`).
        """
        check_names([name])
        folder = self.out / name
        if self.ranks.broadcast(not folder.is_dir()):
            found = self.ranks.first and self._reuse is not None and self._same_in(self._reuse, name, recipe)
            reused = self.ranks.broadcast(found)
            with self._target(folder) as target:
                if not reused:
                    write(target)
                elif self.ranks.first and self._reuse is not None:
                    self._reuse.stored(name).save(target)
            # the others go on when it is there
            self.ranks.broadcast(None)
        self.components[name] = StoredComponent(folder, kind)
        self.recipes[name] = recipe.digest

    @contextmanager
    def _target(self, folder: Path) -> Iterator[Path]:
        """Where this rank writes a component: only what the first rank writes becomes `folder`."""
        if self.ranks.first:
            with replacing(folder) as target:
                yield target
        else:
            with TemporaryDirectory() as scratch:
                yield Path(scratch) / folder.name

    def _same_in(self, other: Bundle, name: str, recipe: Recipe) -> bool:
        """Whether `other` has this component, made with exactly the components that are here.

        Equal recipes are not enough: another machine gets other weights from the same recipe.
        """
        made_with = all(other.config.components.get(part) == self.hash_of(part) for part in recipe.made_from)
        return other.config.recipes.get(name) == recipe.digest and made_with

    def keep(self, name: str, component: MadeT) -> MadeT:
        """Write a component that came with `given`, or was derived from it without training; its content is its recipe.

        Args:
            name: its folder.
            component: as loaded, or changed.

        Raises:
            RapidError: it has no proper name (`rapid.bundle.format.check_names`).
        """
        check_names([name])
        folder = self.out / name
        if self.ranks.broadcast(not folder.is_dir()):
            if self.ranks.first:
                save_component(component, folder)
            # the others go on when it is there
            self.ranks.broadcast(None)
        self.components[name] = StoredComponent(folder, kind_of(component))
        self.recipes[name] = self.hash_of(name)
        # what was written: new class embeddings may be random
        return type(component).load(folder)

    def hash_of(self, name: str) -> str:
        """Content hash of a finished component."""
        return component_hash(self.out / name)

    def add(self, name: str, component: Component) -> None:
        """Add a component that is quick to make; it is written with the bundle.

        Raises:
            RapidError: it has no proper name (`rapid.bundle.format.check_names`).
        """
        check_names([name])
        self.components[name] = component
