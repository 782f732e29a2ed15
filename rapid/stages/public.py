"""The public stage: public images in, a public bundle out. It does not depend on private images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid.bundle import Bundle, BundleConfig, PublicData, is_finished, write_bundle
from rapid.bundle.builder import BundleBuilder
from rapid.bundle.card import public_card
from rapid.bundle.networks import check_same_images
from rapid.config.sections import ImageSettings, MethodSettings
from rapid.data import ImageSet, fit_images, join, load_images
from rapid.errors import InputError
from rapid.mapped import scratch_in
from rapid.methods import find_method
from rapid.methods.base import PublicImages
from rapid.stages.automatic import AutomaticChoice
from rapid.training import RunFolder


def build_public_bundle(
    paths: Sequence[Path],
    out: Path,
    settings: MethodSettings | AutomaticChoice,
    device: torch.device,
    *,
    resume: bool,
    networks: Bundle | None = None,
    label_column: str | None = None,
) -> Bundle:
    """Run the public stage of a method and write the bundle `out`.

    Args:
        paths: public image sets; several are joined and their classes kept apart.
        out: new folder, or with `resume` the folder of an earlier run with the same images and settings.
        settings: the public sections are used; the others are recorded as the bundle's defaults. Or a request that the
            method chooses them by the images.
        device: where to train.
        resume: continue the run in `out`.
        networks: a public bundle of the same images, whose components with the same recipe are reused; or networks
            alone, which are not trained further, with settings that fit them (`networks_settings`).
        label_column: see `load_images`.

    Raises:
        InputError: bad images, an `out` that holds something else, a public bundle `networks` of other images or of
            another method, or a method without a public stage.
        Stopped: a stop was requested; the state is saved.
    """
    method = find_method(settings.method)
    if not method.has_public_stage:
        raise InputError("method", "has no public stage; start with train-private", method.name)
    with scratch_in(out):
        loaded = [load_images(path, "public", label_column=label_column) for path in paths]
        if isinstance(settings, AutomaticChoice):
            settings = settings.public_settings(loaded, out, device)
        sets = [_fitted(path, part, settings.image) for path, part in zip(paths, loaded, strict=True)]
        del loaded  # may be large
        images = join(sets, "public")
    names = tuple(name for part in sets for name in part.classes)
    sources = np.repeat(np.arange(len(sets)), [len(part) for part in sets])
    # augmented images are drawn from each set alike, so the division into sets matters
    fingerprint = f"{images.fingerprint()}-{len(sets)}"
    if networks is not None:
        check_same_images(networks, fingerprint)
    # settings of private training and sampling are not fixed here
    used = settings.model_dump(mode="json", include={"method", *settings.public_sections})
    manifest: dict[str, Any] = {
        "settings": used,
        "public": {"sources": [path.name for path in paths], "classes": images.classes, "images": fingerprint},
    }
    if networks is not None and networks.config.kind == "networks":
        manifest["networks"] = networks.digest
    with RunFolder.enter(out, "build-kb", manifest, resume=resume) as run_folder, scratch_in(out):
        if is_finished(out):
            return Bundle.open(out, "out", "public")
        builder = BundleBuilder(run_folder, fingerprint, device, networks)
        found = method.train_public(builder, PublicImages(images, sources, names), settings)
        config = BundleConfig(
            kind="public",
            method=method.name,
            settings=settings.model_dump(mode="json"),
            image=settings.image,
            classes=images.classes,
            public=PublicData(
                sources=tuple(path.name for path in paths),
                classes=images.classes,
                pre_training=found.pre_training,
                reference=found.reference,
                fingerprint=fingerprint,
            ),
            recipes=builder.recipes,
            facts=found.facts | ({"findings": list(found.findings)} if found.findings else {}),
        )
        bundle = write_bundle(out, config, builder.components, card=public_card(config, found.about))
        run_folder.leave()
        return bundle


def _fitted(path: Path, images: ImageSet, form: ImageSettings) -> ImageSet:
    """Bring a public set to the form of the model, and say in one line what was done to its images."""
    notes = list(images.notes)
    if form.channels == 1 and images.channels == 3:
        notes.append("colours are dropped (image.channels=1)")
    if notes:
        height, width = images.images.shape[1:3]
        colours = "grey" if images.channels == 1 else "RGB"
        print(f"rapid: {path}: 8-bit {colours} of {width}x{height}; {'; '.join(notes)}", file=sys.stderr, flush=True)
    return fit_images(images, form, "public")
