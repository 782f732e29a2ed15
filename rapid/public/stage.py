"""The public stage from images to a finished public bundle; what is done is not done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from index import KnowledgeBase, KnowledgeBaseError, load_faiss
from rapid.bundle import PRINTS, Bundle, BundleConfig, PublicData, RetrievalAccuracy, is_finished, write_config
from rapid.card import public_card
from rapid.config import PUBLIC_SECTIONS, Settings
from rapid.data import ImageSet, fit_images, join, load_images, split_indices
from rapid.errors import InputError
from rapid.files import content_hash, replacing
from rapid.models import Autoencoder, Denoiser, Judge, TrajectoryEncoder
from rapid.prints import prints
from rapid.public.donor import Donor
from rapid.public.judge import train_judge
from rapid.public.knowledge_base import build_knowledge_base
from rapid.public.networks import encode_views, train_autoencoder, train_denoiser, train_encoder
from rapid.public.retrieval import measure_retrieval
from rapid.public.views import Views
from rapid.workspace import Workspace

Network = TypeVar("Network", Autoencoder, Denoiser, Judge, TrajectoryEncoder)
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
    workspace: Workspace
    settings: Settings
    device: torch.device
    donor: Donor | None = None

    def build(self, data: PublicData) -> Bundle:
        """Run all steps that an earlier run has not done, and finish the bundle."""
        self.write_split()
        models = self.make_models()
        hashes = {name: self.hash_of(name) for name in ("autoencoder", "denoiser", "encoder")}
        judged = self.make_judge()
        self.make_knowledge_base(models, hashes)
        config = BundleConfig(
            kind="public",
            settings=self.settings,
            classes=self.images.classes,
            public=data,
            networks=hashes | ({"judge": self.hash_of("judge")} if judged else {}),
            retrieval=self.retrieval_accuracy(models, hashes),
            prints=_write_prints(self.workspace.out, self.images),
        )
        (self.workspace.out / "README.md").write_text(public_card(config), encoding="utf-8")
        write_config(self.workspace.out, config)
        self.workspace.leave()
        return Bundle.open(self.workspace.out, "--out", "public")

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of all images, int64 (N,); without labels every image has the null class."""
        if self.images.labels is not None:
            return self.images.labels
        return np.full(len(self.images), len(self.images.classes), np.int64)

    def views(self, part: NDArray[np.int64], count: int) -> Views:
        """Views of D_pre or D_ref."""
        return Views(self.images.images[part], self.sources[part], count, self.settings.views.augment, self.device)

    def hash_of(self, name: str) -> str:
        """Content hash of a network that was written."""
        return content_hash(self.workspace.out / name)

    def write_split(self) -> None:
        """Record which images are in which part."""
        with replacing(self.workspace.out / "split.npz") as target, target.open("wb") as stream:
            np.savez(stream, pre_training=self.pre, reference=self.reference)

    def network(self, name: str, kind: type[Network], train: Callable[[Path], Network]) -> Network:
        """The network in `name/`; `train` makes it, from the file of its training state, if it is not there."""
        folder = self.workspace.out / name
        if not folder.is_dir() and (self.donor is None or not self.donor.give(name, self.settings, folder)):
            model = train(self.workspace.checkpoint(name))
            with replacing(folder) as target:
                model.save(target)
            self.workspace.checkpoint(name).unlink(missing_ok=True)
        return kind.load(folder).to(self.device)

    def make_models(self) -> Models:
        """The three networks, in the order in which each needs those before."""
        settings, device = self.settings, self.device
        shown = self.views(self.pre, settings.views.training)
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

    def make_judge(self) -> bool:
        """Write `judge/`, if one is wanted and can be trained; returns whether."""
        if not self.settings.judge.enabled or self.images.labels is None:
            return False

        def judge_from(path: Path) -> Judge:
            images, labels = self.images.images[self.pre], self.labels[self.pre]
            return train_judge(self.settings, images, labels, len(self.images.classes), self.device, path)

        self.network("judge", Judge, judge_from)
        return True

    def make_knowledge_base(self, models: Models, hashes: dict[str, str]) -> None:
        """Write `knowledge_base/`; `hashes` are those of `models`."""
        folder = self.workspace.out / "knowledge_base"
        if folder.is_dir():
            return
        shown = self.views(self.reference, self.settings.views.reference)
        labels = self.labels[self.reference]
        build_knowledge_base(folder, self.settings, shown, labels, models, hashes, self.device)

    def retrieval_accuracy(self, models: Models, hashes: dict[str, str]) -> RetrievalAccuracy | None:
        """How well retrieval works; None without labels."""
        if self.images.labels is None:
            return None
        images, labels = self.images.images[self.pre], self.labels[self.pre]
        entries = KnowledgeBase.open(self.workspace.out / "knowledge_base", hashes)
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
    with Workspace.enter(out, "build-kb", {"settings": used, "public": told}, resume=resume) as workspace:
        if is_finished(out):
            return _with_prints(Bundle.open(out, "--out", "public"), images)
        return _Run(images, sources, pre, reference, workspace, settings, device, donor).build(data)


def _write_prints(out: Path, images: ImageSet) -> str:
    """Write the prints of all public images, D_pre and D_ref, as they are; returns the file's hash."""
    with replacing(out / PRINTS) as target:
        np.save(target, prints(images.images))
    return content_hash(out / PRINTS)


def _with_prints(bundle: Bundle, images: ImageSet) -> Bundle:
    """The finished bundle; one of an earlier version, which had no prints, gets them."""
    if bundle.config.prints is not None:
        return bundle
    config = bundle.config.model_copy(update={"prints": _write_prints(bundle.path, images)})
    (bundle.path / "README.md").write_text(public_card(config), encoding="utf-8")
    write_config(bundle.path, config)
    return Bundle.open(bundle.path, "--out", "public")
