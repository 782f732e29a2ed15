"""Bundles: a folder with networks, knowledge base and settings that belong together, checked by content hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from rapid_index import KnowledgeBase, KnowledgeBaseError

import rapid
from rapid.config.sections import Settings
from rapid.errors import InputError
from rapid.files import content_hash, write_json
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe

CONFIG = "config.json"
PRIVACY = "privacy.json"
THUMBNAILS = "thumbnails.npy"
Kind = Literal["public", "private"]


class PublicData(BaseModel):
    """What the public stage was trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: tuple[str, ...]
    classes: tuple[str, ...]
    pre_training: int
    reference: int
    fingerprint: str


class RetrievalAccuracy(BaseModel):
    """How often the neighbours of public queries have the class of the query, measured by `build-kb`.

    Attributes:
        queries: number of images of D_pre, none of which is in the knowledge base.
        top1: share whose nearest neighbour has its class.
        top5: share with its class among the five nearest.
        chance: what drawing an entry at random would give for top1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queries: int
    top1: float
    top5: float
    chance: float


class BundleConfig(BaseModel):
    """Content of `config.json`.

    `networks` holds the sha256 of each network's folder. In a private bundle `denoiser` is the privately trained one,
    and `public_denoiser` the one that makes queries and that the knowledge base was built with. `thumbnails` is the
    sha256 of `thumbnails.npy`, which only public bundles have; `retrieval` is told of labelled public images.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    kind: Kind
    rapid: str = rapid.__version__
    settings: Settings
    classes: tuple[str, ...]
    public: PublicData
    networks: dict[str, str]
    thumbnails: str | None = None
    retrieval: RetrievalAccuracy | None = None


class Bundle:
    """An opened bundle. Networks are loaded when asked for."""

    def __init__(self, path: Path, config: BundleConfig, privacy: dict[str, Any] | None) -> None:
        self.path = path
        self.config = config
        self.privacy = privacy

    @classmethod
    def open(cls, path: Path, argument: str, kind: Kind | None = None) -> Bundle:
        """Open a finished bundle and check that its parts belong together.

        Args:
            path: the folder.
            argument: the command-line argument that named it, for messages.
            kind: what is expected, if it matters.

        Raises:
            InputError: missing, unfinished, damaged, or of the other kind.
        """
        config = _read_config(path, argument)
        if kind is not None and config.kind != kind:
            hint = {
                "public": "give the folder that build-kb wrote",
                "private": "give the folder that train-private wrote",
            }[kind]
            raise InputError(f"{argument} {path}: is a {config.kind} bundle, expected a {kind} one; {hint}")
        for name, expected in config.networks.items():
            if not (path / name).is_dir() or content_hash(path / name) != expected:
                raise InputError(
                    f"{argument} {path}: {name}/ is missing or not the one that the bundle was written with; "
                    "copy the bundle again"
                )
        privacy = _read_json(path / PRIVACY, argument) if config.kind == "private" else None
        return cls(path, config, privacy)

    @property
    def settings(self) -> Settings:
        """The settings that the bundle was made with."""
        return self.config.settings

    @property
    def digest(self) -> str:
        """sha256 (hex) of all that the bundle says of itself, with the hashes of its networks and knowledge base."""
        files = [CONFIG, "knowledge_base/manifest.json", *([PRIVACY] if self.config.kind == "private" else [])]
        return hashlib.sha256(b"\0".join((self.path / file).read_bytes() for file in files)).hexdigest()

    def autoencoder(self) -> Autoencoder:
        """The autoencoder, in evaluation mode."""
        return Autoencoder.load(self.path / "autoencoder")

    def denoiser(self) -> Denoiser:
        """The denoiser that samples: of a private bundle, the privately trained one."""
        return Denoiser.load(self.path / "denoiser")

    def public_denoiser(self) -> Denoiser:
        """The denoiser that was trained on public images only, and makes the queries."""
        return Denoiser.load(self.path / ("public_denoiser" if self.config.kind == "private" else "denoiser"))

    def encoder(self) -> TrajectoryEncoder:
        """The trajectory encoder."""
        return TrajectoryEncoder.load(self.path / "encoder")

    def probe(self) -> Probe | None:
        """The probe, if there is one: with a trained linear layer in a private bundle, without in a public one."""
        return Probe.load(self.path / "probe") if "probe" in self.config.networks else None

    def knowledge_base(self) -> KnowledgeBase:
        """The knowledge base.

        Raises:
            InputError: missing, damaged, or made by other networks.
        """
        networks = knowledge_base_networks(self.config)
        try:
            return KnowledgeBase.open(self.path / "knowledge_base", networks)
        except KnowledgeBaseError as error:
            raise InputError(f"{self.path / 'knowledge_base'}: {error}") from None

    def thumbnails(self) -> NDArray[np.uint8]:
        """The thumbnails of all public images, uint8 (M, 256), of a public bundle; memory-mapped.

        Raises:
            InputError: missing or damaged.
        """
        path = self.path / THUMBNAILS
        if self.config.thumbnails is None:
            raise InputError(
                f"{self.path}: has no {THUMBNAILS}: an earlier version of rapid made it; finish it by build-kb "
                "--resume with the same images and settings, or do without the check: --set private.overlap.share=0"
            )
        if not path.is_file() or content_hash(path) != self.config.thumbnails:
            raise InputError(f"{path}: is missing or not the one that the bundle was written with; copy it again")
        stored: NDArray[np.uint8] = np.load(path, mmap_mode="r")
        return stored


def knowledge_base_networks(config: BundleConfig) -> dict[str, str]:
    """The networks that must have made the knowledge base of a bundle: name to content hash."""
    public_denoiser = "public_denoiser" if config.kind == "private" else "denoiser"
    names = {"autoencoder": "autoencoder", "denoiser": public_denoiser, "encoder": "encoder"}
    return {role: config.networks[folder] for role, folder in names.items()}


def write_config(path: Path, config: BundleConfig) -> None:
    """Write `config.json`, the last file of a bundle: with it the bundle counts as finished."""
    write_json(path / CONFIG, config.model_dump(mode="json"))


def is_finished(path: Path) -> bool:
    """Whether `path` holds a finished bundle."""
    return (path / CONFIG).is_file()


def _read_config(path: Path, argument: str) -> BundleConfig:
    if not path.is_dir():
        raise InputError(f"{argument} {path}: is not a folder; give one that build-kb or train-private wrote")
    if not is_finished(path):
        unfinished = (path / "checkpoints").is_dir()
        reason = "is not finished; run its command again with --resume" if unfinished else f"is no bundle (no {CONFIG})"
        raise InputError(f"{argument} {path}: {reason}")
    try:
        return BundleConfig.model_validate(_read_json(path / CONFIG, argument))
    except ValidationError:
        raise InputError(f"{argument} {path}: {CONFIG} is damaged or of another version of rapid") from None


def _read_json(path: Path, argument: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{argument} {path}: is missing or damaged; copy the bundle again") from None
    if not isinstance(content, dict):
        raise InputError(f"{argument} {path}: is damaged; copy the bundle again")
    return content
