"""The public stage from images to a finished public bundle; what is done is not done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from rapid.public.judge import train_judge
from rapid.public.knowledge_base import build_knowledge_base
from rapid.public.networks import encode_views, train_autoencoder, train_denoiser, train_encoder
from rapid.public.retrieval import measure_retrieval
from rapid.public.views import Views
from rapid.workspace import Workspace

Network = TypeVar("Network", Autoencoder, Denoiser, Judge, TrajectoryEncoder)


def build_public_bundle(
    paths: Sequence[Path], out: Path, settings: Settings, device: torch.device, *, resume: bool
) -> Bundle:
    """Train the three networks on D_pre and D_ref, build the knowledge base, and write the bundle `out`.

    Args:
        paths: public image sets; several are joined and their classes kept apart.
        out: new folder, or with `resume` one that an earlier run with the same images and settings began.
        settings: the public sections are used; the others are recorded as the bundle's defaults.
        device: where to train.
        resume: go on with what `out` holds.

    Returns:
        The finished bundle.

    Raises:
        InputError: bad images, or an `out` that holds something else.
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
    sources = np.repeat(np.arange(len(sets)), [len(part) for part in sets])
    # how private training and sampling go is not decided here
    used = settings.model_dump(mode="json", include=set(PUBLIC_SECTIONS))
    plan = {"settings": used, "public": data.model_dump(mode="json")}
    with Workspace.enter(out, "build-kb", plan, resume=resume) as workspace:
        if is_finished(out):
            return _with_prints(Bundle.open(out, "--out", "public"), images)
        return _build(images, data, sources, (pre, reference), workspace, settings, device)


def _build(
    images: ImageSet,
    data: PublicData,
    sources: NDArray[np.int64],
    split: tuple[NDArray[np.int64], NDArray[np.int64]],
    workspace: Workspace,
    settings: Settings,
    device: torch.device,
) -> Bundle:
    """Run all steps that an earlier run has not done, and finish the bundle."""
    out = workspace.out
    hashes, retrieval = _train_and_build(images, sources, split, workspace, settings, device)
    config = BundleConfig(
        kind="public",
        settings=settings,
        classes=images.classes,
        public=data,
        networks=hashes,
        prints=_write_prints(out, images),
        retrieval=retrieval,
    )
    (out / "README.md").write_text(public_card(config), encoding="utf-8")
    write_config(out, config)
    workspace.leave()
    return Bundle.open(out, "--out", "public")


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


def _train_and_build(
    images: ImageSet,
    sources: NDArray[np.int64],
    split: tuple[NDArray[np.int64], NDArray[np.int64]],
    workspace: Workspace,
    settings: Settings,
    device: torch.device,
) -> tuple[dict[str, str], RetrievalAccuracy | None]:
    """Run the steps; returns the content hashes of the networks, and how well retrieval works if there are labels."""
    pre, reference = split
    num_classes = len(images.classes)
    # without labels every image has the null class
    all_labels = images.labels if images.labels is not None else np.full(len(images), num_classes, np.int64)
    with replacing(workspace.out / "split.npz") as target, target.open("wb") as stream:
        np.savez(stream, pre_training=pre, reference=reference)

    def step(name: str, kind: type[Network], train: Callable[[Path], Network]) -> Network:
        folder = workspace.out / name
        if not folder.is_dir():
            model = train(workspace.checkpoint(name))
            with replacing(folder) as target:
                model.save(target)
            workspace.checkpoint(name).unlink(missing_ok=True)
        return kind.load(folder).to(device)

    def views(part: NDArray[np.int64], count: int) -> Views:
        return Views(images.images[part], sources[part], count, settings.views.augment, device)

    shown = views(pre, settings.views.training)
    autoencoder = step("autoencoder", Autoencoder, lambda path: train_autoencoder(settings, shown, device, path))

    def denoiser_from(path: Path) -> Denoiser:
        latents = encode_views(autoencoder, shown)
        labels = torch.from_numpy(all_labels[pre[shown.rows]]).to(device)
        return train_denoiser(settings, latents, labels, num_classes, path)

    denoiser = step("denoiser", Denoiser, denoiser_from)
    encoder = step(
        "encoder",
        TrajectoryEncoder,
        lambda path: train_encoder(settings, images.images[reference], autoencoder, denoiser, device, path),
    )
    hashes = {name: content_hash(workspace.out / name) for name in ("autoencoder", "denoiser", "encoder")}
    if settings.judge.enabled and images.labels is not None:
        step(
            "judge",
            Judge,
            lambda path: train_judge(settings, images.images[pre], all_labels[pre], num_classes, device, path),
        )
    if not (workspace.out / "knowledge_base").is_dir():
        build_knowledge_base(
            workspace.out / "knowledge_base",
            settings,
            views(reference, settings.views.reference),
            all_labels[reference],
            (autoencoder, denoiser, encoder),
            hashes,
            device,
        )
    retrieval = None
    if images.labels is not None:
        models = (autoencoder, denoiser, encoder)
        entries = KnowledgeBase.open(workspace.out / "knowledge_base", hashes)
        retrieval = measure_retrieval(settings, images.images[pre], all_labels[pre], models, entries, device)
    judge = workspace.out / "judge"
    return hashes | ({"judge": content_hash(judge)} if judge.is_dir() else {}), retrieval
