"""The format of a bundle: `config.json`, `model_index.json`, a folder for each component, `privacy.json`, a card.

    config.json       settings, classes, public data, and the hash of every component; written last
    model_index.json  module and class of every component, in the form of diffusers
    NAME/             one component
    privacy.json      the privacy statement; only in private bundles
    README.md         the model card

This module knows no method: its name and its settings are data.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

import rapid
from rapid.bundle.components import (
    MANIFEST,
    Component,
    StoredComponent,
    component_hash,
    copy_component,
    kind_of,
    listed_files,
    read_json,
    save_component,
)
from rapid.config.sections import ImageSettings, MethodSettings
from rapid.data.origin import Origin
from rapid.errors import DENIED, InputError, RapidError
from rapid.files import content_hash, replacing, write_json

CONFIG, INDEX, PRIVACY, CARD = "config.json", "model_index.json", "privacy.json", "README.md"
FORMAT: Literal[2] = 2
PIPELINE = "RapidPipeline"
"""The class of `rapid.interop.pipeline` that opens a bundle for users of diffusers."""
Kind = Literal["public", "private", "networks"]
"""`networks` holds trained public networks alone, for the public stage of other images."""
WRITERS: dict[Kind, str] = {"public": "build-kb", "private": "train-private", "networks": "scripts/export-networks"}
Settings = TypeVar("Settings", bound=MethodSettings)


class Loadable(Protocol):
    """A component class."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A saved component; raises InputError if files are missing or damaged."""


Loaded = TypeVar("Loaded", bound=Loadable)


NAME = r"[A-Za-z0-9_-]+"
ComponentName = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]
"""A name is a folder of the bundle: it leads nowhere else, and is none of the bundle's files, which have a dot."""
CHECKPOINTS = "checkpoints"
"""The folder beside the components that holds the state of the run."""


class PublicData(BaseModel):
    """Training data of the public stage.

    Attributes:
        sources: names of the image sets.
        classes: of all sets.
        pre_training: number of images that trained the networks.
        reference: number of other images, such as those of a knowledge base.
        fingerprint: sha256 of pixels and labels.
        origins: the private models that made some of the images, with the guarantees that these still have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: tuple[str, ...]
    classes: tuple[str, ...]
    pre_training: int
    reference: int
    fingerprint: str
    origins: tuple[Origin, ...] = ()


class BundleConfig(BaseModel):
    """Content of `config.json`.

    Attributes:
        kind: public, private, or trained networks alone.
        method: name of the method that made it.
        rapid: version.
        settings: of the method, ready for JSON.
        image: the form of the images.
        classes: of the images that the model generates or classifies.
        public: training data of the public stage; None for a method without one.
        components: hash of each component, by name.
        recipes: hash of the recipe of each component of the public stage; see `rapid.training.recipe`.
        facts: further facts that the method reports, ready for JSON; shown by `rapid info`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = FORMAT
    kind: Kind
    method: str
    rapid: str = rapid.__version__
    settings: dict[str, Any]
    image: ImageSettings
    classes: tuple[str, ...]
    public: PublicData | None
    components: dict[ComponentName, str] = {}
    recipes: dict[str, str] = {}
    facts: dict[str, Any] = {}


class Bundle:
    """An opened bundle. Components are loaded on demand."""

    def __init__(
        self, path: Path, config: BundleConfig, index: dict[str, tuple[str, str]], privacy: dict[str, Any] | None
    ) -> None:
        self.path = path
        self.config = config
        self.privacy = privacy
        self._index = index

    @classmethod
    def open(cls, path: Path, field: str, *kinds: Kind) -> Bundle:
        """Open a finished bundle and check its components against their recorded hashes.

        Of a component with a manifest only that is hashed here. Its class checks the rest, all but what is too large to
        be read each time: see `verify`.

        Args:
            path: the folder.
            field: the argument that named it, for messages.
            kinds: those that are expected; none: public or private.

        Raises:
            InputError: missing, unfinished, damaged, of another version, or of another kind.
        """
        config = _read_config(path, field)
        if not kinds and config.kind == "networks":
            problem = "holds networks alone; give them to build-kb (--networks), and then the bundle that it writes"
            raise InputError(field, problem, path)
        if kinds and config.kind not in kinds:
            kind = kinds[0]
            problem = f"is a {config.kind} bundle, expected a {kind} one; give the folder that {WRITERS[kind]} wrote"
            raise InputError(field, problem, path)
        for name, expected in config.components.items():
            try:
                same = (path / name).is_dir() and component_hash(path / name) == expected
            except PermissionError as error:
                raise InputError(field, DENIED, error.filename) from None
            if not same:
                problem = f"{name}/ is missing or not the one that the bundle was written with; copy the bundle again"
                raise InputError(field, problem, path)
        privacy = read_json(path / PRIVACY, field) if config.kind == "private" else None
        return cls(path, config, _read_index(path / INDEX, config.components, field), privacy)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().name

    @property
    def written(self) -> int:
        """When this copy of the bundle was written, in seconds since 1970."""
        return int((self.path / CONFIG).stat().st_mtime)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for an unconditional model."""
        return self.config.classes

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The private models that made some of the public images."""
        return () if self.config.public is None else self.config.public.origins

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W) or (H, W, 3)."""
        return self.config.image.shape

    @property
    def digest(self) -> str:
        """sha256 (hex) of `config.json`, which has the hashes of all components, and `privacy.json` if private."""
        files = [CONFIG, *([PRIVACY] if self.config.kind == "private" else [])]
        return hashlib.sha256(b"\0".join((self.path / file).read_bytes() for file in files)).hexdigest()

    def settings_as(self, kind: type[Settings]) -> Settings:
        """The settings, as an object of the method's settings class.

        Raises:
            InputError: they are damaged or of another version of rapid.
        """
        try:
            return kind.model_validate(self.config.settings)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            problem = f"is damaged or of another version of rapid than {rapid.__version__} (its setting {where})"
            raise InputError("", f"{self.path}: {CONFIG} {problem}") from None

    def has(self, name: str) -> bool:
        """Whether there is a component of this name."""
        return name in self.config.components

    def component(self, name: str, kind: type[Loaded]) -> Loaded:
        """Load a component.

        Raises:
            InputError: there is none of this name, or its files are damaged.
        """
        if not self.has(name):
            raise InputError("", f"{self.path}: has no component {name}/; give a bundle of the right method and kind")
        return kind.load(self.path / name)

    def verify(self) -> int:
        """Read the files that components' manifests name, and check their hashes.

        Returns:
            Bytes that were read.

        Raises:
            InputError: a file is missing or was altered.
        """
        total = 0
        for name in self.config.components:
            manifest = self.path / name / MANIFEST
            if not manifest.is_file():
                # hashed when the bundle was opened
                continue
            for file, expected in listed_files(manifest).items():
                path = self.path / name / file
                try:
                    same = content_hash(path) == expected
                    total += path.stat().st_size
                except OSError:
                    same = False
                if not same:
                    raise InputError("", f"{path}: is missing or was altered; copy the bundle again")
        return total

    def copy_to(self, path: Path) -> None:
        """Copy all that belongs to the bundle to a new folder; not `checkpoints/`, the state of its run.

        Raises:
            InputError: the folder is a file or not empty, or a file of the bundle was altered.
        """
        if path.is_file() or (path.is_dir() and (path.is_mount() or any(path.iterdir()))):
            raise InputError("", f"{path}: is not empty, or a mount point; choose another folder")
        # links are followed: what they lead to must be what the bundle was written with
        self.verify()
        files = [CONFIG, INDEX, CARD, *([PRIVACY] if self.config.kind == "private" else [])]
        with replacing(path) as target:
            target.mkdir()
            for file in files:
                shutil.copyfile(self.path / file, target / file)
            for name in self.config.components:
                copy_component(self.path / name, target / name, shutil.copyfile)

    def stored(self, name: str) -> StoredComponent:
        """A component as stored here, for reuse in another bundle."""
        return StoredComponent(self.path / name, self._index[name])


def write_bundle(
    path: Path,
    config: BundleConfig,
    components: Mapping[str, Component],
    *,
    card: str,
    privacy: Mapping[str, Any] | None = None,
) -> Bundle:
    """Write what a bundle lacks; `config.json` is written last and marks it as finished.

    Nothing is written or removed if a component has no proper name.

    Args:
        path: the folder. Components of a public bundle that exist there are not written again. Those of a private one
            are: what is there may be of an earlier attempt, whose noise the statement does not count.
        config: without the hashes of the components, which are added.
        components: by name.
        card: Markdown.
        privacy: content of `privacy.json` of a private bundle.

    Raises:
        RapidError: see `check_names`.
    """
    check_names(components)
    for name, component in components.items():
        if privacy is not None and (path / name).is_dir():
            shutil.rmtree(path / name)
        if not (path / name).is_dir():
            save_component(component, path / name)
    index: dict[str, Any] = {"_class_name": PIPELINE, "_rapid_version": rapid.__version__}
    index |= {name: list(kind_of(component)) for name, component in components.items()}
    write_json(path / INDEX, index)
    if privacy is not None:
        write_json(path / PRIVACY, dict(privacy))
    with replacing(path / CARD) as target:
        target.write_text(card, encoding="utf-8")
    hashes = {name: component_hash(path / name) for name in components}
    finished = BundleConfig.model_validate(config.model_dump() | {"components": hashes})
    write_json(path / CONFIG, finished.model_dump(mode="json"))
    return Bundle.open(path, "out", config.kind)


def check_names(names: Iterable[object]) -> None:
    """Refuse names of components that are no folders of their own within a bundle.

    Raises:
        RapidError: a name leads elsewhere, or to the state of the run.
    """
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise RapidError(f"a component is named {name!r}; use letters, digits, - and _ alone, without dots")
        # some file systems do not tell capitals from small letters
        if name.lower() == CHECKPOINTS:
            raise RapidError(f"a component is named {name!r}, as the folder with the state of the run")


def is_finished(path: Path) -> bool:
    """Whether `path` holds a finished bundle."""
    return (path / CONFIG).is_file()


def _read_config(path: Path, field: str) -> BundleConfig:
    if not path.is_dir():
        raise InputError(field, "is not a folder; give one that build-kb or train-private wrote", path)
    if not is_finished(path):
        unfinished = (path / CHECKPOINTS).is_dir()
        reason = "is not finished; rerun its command with --resume" if unfinished else f"is no bundle (no {CONFIG})"
        raise InputError(field, reason, path)
    content = read_json(path / CONFIG, field)
    if content.get("format") != FORMAT:
        made = f"rapid {content['rapid']}" if "rapid" in content else "another version of rapid"
        problem = f"was made by {made}, whose format this version does not read; make it again with build-kb"
        raise InputError(field, problem, path)
    try:
        return BundleConfig.model_validate(content)
    except ValidationError:
        raise InputError(field, f"{CONFIG} is damaged or of another version of rapid", path) from None


def _read_index(path: Path, components: Mapping[str, str], field: str) -> dict[str, tuple[str, str]]:
    """Module and name of the class of each component."""
    content = read_json(path, field)
    found = {}
    for name in components:
        kind = content.get(name)
        if not (isinstance(kind, list) and len(kind) == 2):
            raise InputError(field, "is damaged; copy the bundle again", path)
        found[name] = str(kind[0]), str(kind[1])
    return found
