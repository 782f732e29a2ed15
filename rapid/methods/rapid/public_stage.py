"""The public stage from images to a finished public bundle; what is done is not done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBase, KnowledgeBaseError, load_faiss

from rapid.bundle.card import public_card
from rapid.bundle.format import (
    THUMBNAILS,
    Bundle,
    BundleConfig,
    PublicData,
    RetrievalAccuracy,
    is_finished,
    write_config,
)
from rapid.config.sections import PUBLIC_SECTIONS, Settings
from rapid.data import ImageSet, fit_images, join, load_images, split_indices
from rapid.data.augmented import AugmentedImages
from rapid.data.thumbnails import thumbnails
from rapid.errors import InputError
from rapid.files import content_hash, replacing
from rapid.methods.rapid.knowledge_base import build_knowledge_base
from rapid.methods.rapid.networks import encode_views, train_autoencoder, train_denoiser, train_encoder
from rapid.methods.rapid.retrieval import measure_retrieval
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.features import train_probe
from rapid.probe.network import Probe
from rapid.training.reuse import Donor
from rapid.training.run_folder import RunFolder

Network = TypeVar("Network", Autoencoder, Denoiser, Probe, TrajectoryEncoder)
Models = tuple[Autoencoder, Denoiser, TrajectoryEncoder]


@dataclass(frozen=True)
class _Run:
    """What the steps of a public stage share.

    Attributes:
        images: N public images.
        sources: number of the public set from which each came, int64 (N,).
        pre: places of D_pre among the images, int64.
        reference: places of D_ref.
        donor: has networks that need not be trained again.
    """

    images: ImageSet
    sources: NDArray[np.int64]
    pre: NDArray[np.int64]
    reference: NDArray[np.int64]
    run_folder: RunFolder
    settings: Settings
    device: torch.device
    donor: Donor | None = None

    def build(self, data: PublicData) -> Bundle:
        """Run all steps that an earlier run has not done, and finish the bundle."""
        self.write_split()
        models = self.make_models()
        hashes = {name: self.hash_of(name) for name in ("autoencoder", "denoiser", "encoder")}
        probed = self.make_probe()
        self.make_knowledge_base(models, hashes)
        config = BundleConfig(
            kind="public",
            settings=self.settings,
            classes=self.images.classes,
            public=data,
            networks=hashes | ({"probe": self.hash_of("probe")} if probed else {}),
            retrieval=self.retrieval_accuracy(models, hashes),
            thumbnails=_write_thumbnails(self.run_folder.out, self.images),
        )
        (self.run_folder.out / "README.md").write_text(public_card(config), encoding="utf-8")
        write_config(self.run_folder.out, config)
        self.run_folder.leave()
        return Bundle.open(self.run_folder.out, "--out", "public")

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of all images, int64 (N,); without labels every image has the null class."""
        if self.images.labels is not None:
            return self.images.labels
        return np.full(len(self.images), len(self.images.classes), np.int64)

    def views(self, part: NDArray[np.int64], count: int) -> AugmentedImages:
        """AugmentedImages of D_pre or D_ref."""
        return AugmentedImages(
            self.images.images[part], self.sources[part], count, self.settings.augmentations.augment, self.device
        )

    def hash_of(self, name: str) -> str:
        """Content hash of a network that was written."""
        return content_hash(self.run_folder.out / name)

    def write_split(self) -> None:
        """Record which images are in which part."""
        with replacing(self.run_folder.out / "split.npz") as target, target.open("wb") as stream:
            np.savez(stream, pre_training=self.pre, reference=self.reference)

    def network(self, name: str, kind: type[Network], train: Callable[[Path], Network]) -> Network:
        """The network in `name/`; `train` makes it, from the file of its training state, if it is not there."""
        folder = self.run_folder.out / name
        if not folder.is_dir() and (self.donor is None or not self.donor.give(name, self.settings, folder)):
            model = train(self.run_folder.checkpoint(name))
            with replacing(folder) as target:
                model.save(target)
            self.run_folder.checkpoint(name).unlink(missing_ok=True)
        return kind.load(folder).to(self.device)

    def make_models(self) -> Models:
        """The three networks, in the order in which each needs those before."""
        settings, device = self.settings, self.device
        shown = self.views(self.pre, settings.augmentations.training)
        autoencoder = self.network(
            "autoencoder", Autoencoder, lambda path: train_autoencoder(settings, shown, device, path)
        )

        def denoiser_from(path: Path) -> Denoiser:
            latents = encode_views(autoencoder, shown)
            labels = torch.from_numpy(self.labels[self.pre[shown.rows]]).to(device)
            return train_denoiser(settings, latents, labels, len(self.images.classes), path)

        denoiser = self.network("denoiser", Denoiser, denoiser_from)
        encoder = self.network(
            "encoder",
            TrajectoryEncoder,
            lambda path: train_encoder(
                settings, self.images.images[self.reference], autoencoder, denoiser, device, path
            ),
        )
        return autoencoder, denoiser, encoder

    def make_probe(self) -> bool:
        """Write `probe/`, if one is wanted and can be trained; returns whether."""
        if not self.settings.probe.enabled or self.images.labels is None:
            return False

        def probe_from(path: Path) -> Probe:
            images, labels = self.images.images[self.pre], self.labels[self.pre]
            return train_probe(self.settings, images, labels, len(self.images.classes), self.device, path)

        self.network("probe", Probe, probe_from)
        return True

    def make_knowledge_base(self, models: Models, hashes: dict[str, str]) -> None:
        """Write `knowledge_base/`; `hashes` are those of `models`."""
        folder = self.run_folder.out / "knowledge_base"
        if folder.is_dir():
            return
        shown = self.views(self.reference, self.settings.augmentations.reference)
        labels = self.labels[self.reference]
        build_knowledge_base(folder, self.settings, shown, labels, models, hashes, self.device)

    def retrieval_accuracy(self, models: Models, hashes: dict[str, str]) -> RetrievalAccuracy | None:
        """How well retrieval works; None without labels."""
        if self.images.labels is None:
            return None
        images, labels = self.images.images[self.pre], self.labels[self.pre]
        entries = KnowledgeBase.open(self.run_folder.out / "knowledge_base", hashes)
        return measure_retrieval(self.settings, images, labels, models, entries, self.device)


def build_public_bundle(
    paths: Sequence[Path],
    out: Path,
    settings: Settings,
    device: torch.device,
    *,
    resume: bool,
    networks: Path | None = None,
) -> Bundle:
    """Train the three networks on D_pre and D_ref, build the knowledge base, and write the bundle `out`.

    Args:
        paths: public image sets; several are joined and their classes kept apart.
        out: new folder, or with `resume` one that an earlier run with the same images and settings began.
        settings: the public sections are used; the others are recorded as the bundle's defaults.
        device: where to train.
        resume: go on with what `out` holds.
        networks: a finished bundle of the same images; what `settings` would train as it is there is taken from it.

    Returns:
        The finished bundle.

    Raises:
        InputError: bad images, an `out` that holds something else, or `networks` of other images.
    """
    try:
        # now, not after half an hour of training
        load_faiss()
    except KnowledgeBaseError as error:
        raise InputError(str(error)) from None
    sets = [fit_images(load_images(path, "--public"), settings.image, f"--public {path}") for path in paths]
    images = join(sets, "--public")
    pre, reference = split_indices(len(images), settings.split)
    data = PublicData(
        sources=tuple(path.name for path in paths),
        classes=images.classes,
        pre_training=len(pre),
        reference=len(reference),
        fingerprint=images.fingerprint(),
    )
    donor = None if networks is None else Donor(networks, data)
    sources = np.repeat(np.arange(len(sets)), [len(part) for part in sets])
    # how private training and sampling go is not decided here
    used, told = settings.model_dump(mode="json", include=set(PUBLIC_SECTIONS)), data.model_dump(mode="json")
    with RunFolder.enter(out, "build-kb", {"settings": used, "public": told}, resume=resume) as run_folder:
        if is_finished(out):
            return _with_thumbnails(Bundle.open(out, "--out", "public"), images)
        return _Run(images, sources, pre, reference, run_folder, settings, device, donor).build(data)


def _write_thumbnails(out: Path, images: ImageSet) -> str:
    """Write the thumbnails of all public images, D_pre and D_ref, as they are; returns the file's hash."""
    with replacing(out / THUMBNAILS) as target:
        np.save(target, thumbnails(images.images))
    return content_hash(out / THUMBNAILS)


def _with_thumbnails(bundle: Bundle, images: ImageSet) -> Bundle:
    """The finished bundle; one of an earlier version, which had no thumbnails, gets them."""
    if bundle.config.thumbnails is not None:
        return bundle
    config = bundle.config.model_copy(update={"thumbnails": _write_thumbnails(bundle.path, images)})
    (bundle.path / "README.md").write_text(public_card(config), encoding="utf-8")
    write_config(bundle.path, config)
    return Bundle.open(bundle.path, "--out", "public")
