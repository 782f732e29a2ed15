"""The public stage: public images in, a public bundle out. It does not depend on private images."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid.bundle import Bundle, BundleConfig, PublicData, is_finished, write_bundle
from rapid.bundle.builder import BundleBuilder
from rapid.bundle.card import public_card
from rapid.bundle.networks import check_same_images
from rapid.config.sections import ImageSettings, MethodSettings
from rapid.data import ImageSet, fit_images, join, load_images, tell
from rapid.data.origin import Origin, listed, union
from rapid.errors import InputError
from rapid.mapped import scratch_in
from rapid.methods import find_method
from rapid.methods.base import Description, Method, PublicImages
from rapid.places import check_outside
from rapid.progress import hidden
from rapid.ranks import Ranks
from rapid.stages.automatic import AutomaticChoice
from rapid.training import RunFolder

Json = dict[str, Any]


@dataclass(frozen=True)
class _Prepared:
    """Inputs that were read and checked before anything is written."""

    settings: MethodSettings
    public: PublicImages
    sources: tuple[str, ...]
    """Names of the sets."""
    fingerprint: str
    """Of all images and their division into sets."""
    origins: tuple[Origin, ...]
    """The private models that made some of them."""
    manifest: Json
    """The request: what the run folder is bound to, ready for JSON."""
    remembered: Json
    """Settings that were chosen for later stages, for a run that is resumed; ready for JSON, too."""


def build_public_bundle(
    paths: Sequence[Path],
    out: Path,
    settings: MethodSettings | AutomaticChoice,
    device: torch.device,
    *,
    resume: bool,
    networks: Bundle | None = None,
    label_column: str | None = None,
    ranks: Ranks | None = None,
) -> Bundle:
    """Run the public stage of a method and write the bundle `out`.

    The bundle does not depend on the number of ranks, except for the rounding of sums. A run can be resumed with
    another number.

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
        ranks: the processes that share the work; all get the same arguments, and the first one writes `out`, a folder
            that all of them see.

    Raises:
        InputError: bad images, an `out` that holds something else, a public bundle `networks` of other images or of
            another method, or a method without a public stage.
        LostRank: another rank is gone; the last saved state remains.
        Stopped: a stop was requested; the state is saved.
    """
    ranks = ranks or Ranks()

    def check() -> None:
        for path in paths:
            check_outside(out, path, "public")
        RunFolder(out).check(resume=resume)

    ranks.all_or_none(lambda: check() if ranks.first else None)
    with nullcontext() if ranks.first else hidden():
        return _build(paths, out, settings, device, resume, networks, label_column, ranks)


def _build(
    paths: Sequence[Path],
    out: Path,
    settings: MethodSettings | AutomaticChoice,
    device: torch.device,
    resume: bool,
    networks: Bundle | None,
    label_column: str | None,
    ranks: Ranks,
) -> Bundle:
    ranks.agree("--device", device.type.encode())
    method = ranks.all_or_none(lambda: find_method(settings.method))
    if not method.has_public_stage:
        error = InputError("method", "has no public stage; start with train-private", method.name)
        error.reported = not ranks.first
        raise error
    with scratch_in(out):
        asked = _prepare(paths, out, settings, device, networks, label_column, ranks)
    ranks.agree("--public or the settings", json.dumps(asked.manifest, sort_keys=True).encode())
    with ExitStack() as stack:

        def enter() -> RunFolder:
            if ranks.first:
                entered = RunFolder.enter(out, "build-kb", asked.manifest, resume=resume, remembered=asked.remembered)
                return stack.enter_context(entered)
            return RunFolder(out)

        run_folder = ranks.all_or_none(enter)
        stack.enter_context(scratch_in(out))
        if not ranks.broadcast(is_finished(out)):
            ranks.all_or_none(lambda: _same_folder(run_folder))
            builder = BundleBuilder(run_folder, asked.fingerprint, device, networks, ranks)
            _make(method, asked, builder, run_folder)
        return Bundle.open(out, "out", "public")


def _make(method: Method[Any], asked: _Prepared, builder: BundleBuilder, run_folder: RunFolder) -> None:
    """Let the method make the components, and write the bundle."""
    public, ranks = asked.public, builder.ranks
    found = method.train_public(builder, public, asked.settings)
    data = PublicData(
        sources=asked.sources,
        classes=public.images.classes,
        pre_training=found.pre_training,
        reference=found.reference,
        fingerprint=asked.fingerprint,
        origins=asked.origins,
    )
    config = _config(asked.settings, data, builder, found)
    if ranks.first:
        write_bundle(run_folder.out, config, builder.components, card=public_card(config, found.about))
        run_folder.leave()
    # the others open it when it is there
    ranks.broadcast(None)


def _config(settings: MethodSettings, data: PublicData, builder: BundleBuilder, found: Description) -> BundleConfig:
    """The content of `config.json`."""
    return BundleConfig(
        kind="public",
        method=settings.method,
        settings=settings.model_dump(mode="json"),
        image=settings.image,
        classes=data.classes,
        public=data,
        recipes=builder.recipes,
        facts=found.facts
        | ({"findings": list(found.findings)} if found.findings else {})
        | ({} if builder.given is None else {"networks": {"name": builder.given.name, "sha256": builder.given.digest}}),
    )


def _prepare(
    paths: Sequence[Path],
    out: Path,
    settings: MethodSettings | AutomaticChoice,
    device: torch.device,
    networks: Bundle | None,
    label_column: str | None,
    ranks: Ranks,
) -> _Prepared:
    """Read and check everything before anything is written."""
    chosen, sets = _read(paths, out, settings, device, label_column, ranks)
    images = join(sets, "public")
    # augmented images are drawn from each set alike, so the division into sets matters
    fingerprint = f"{images.fingerprint()}-{len(sets)}"
    ranks.all_or_none(lambda: None if networks is None else check_same_images(networks, fingerprint))
    # settings of private training and sampling are not fixed here
    used = chosen.model_dump(mode="json", include={"method", *chosen.fixed_sections()})
    later = chosen.model_dump(mode="json", exclude=set(used)) if isinstance(settings, AutomaticChoice) else {}
    manifest: Json = {
        "settings": used,
        "public": {"sources": [path.name for path in paths], "classes": images.classes, "images": fingerprint},
    }
    if networks is not None and networks.config.kind == "networks":
        manifest["networks"] = networks.digest
    return _Prepared(
        settings=chosen,
        public=PublicImages(
            images,
            np.repeat(np.arange(len(sets)), [len(part) for part in sets]),
            tuple(name for part in sets for name in part.classes),
        ),
        sources=tuple(path.name for path in paths),
        fingerprint=fingerprint,
        # the same images may be given in a form that does not say so any more
        origins=union(images.origins, () if networks is None else networks.origins),
        manifest=manifest,
        remembered=later,
    )


def _read(
    paths: Sequence[Path],
    out: Path,
    settings: MethodSettings | AutomaticChoice,
    device: torch.device,
    label_column: str | None,
    ranks: Ranks,
) -> tuple[MethodSettings, list[ImageSet]]:
    """The settings, which the first rank chooses if they are to be chosen, and the sets in the form of the model."""
    target = settings.canvas() if isinstance(settings, AutomaticChoice) else settings.image
    loaded = ranks.all_or_none(
        lambda: [load_images(path, "public", label_column=label_column, target=target) for path in paths]
    )
    if isinstance(settings, AutomaticChoice):
        choice = settings
        # chosen by measured times, which differ from process to process
        mine = ranks.all_or_none(
            lambda: choice.public_settings(loaded, out, device, ranks.count) if ranks.first else None
        )
        broadcast = ranks.broadcast(mine)
        assert broadcast is not None
        settings = broadcast
    form = settings.image
    return settings, ranks.all_or_none(
        lambda: [_fitted(path, part, form, told=ranks.first) for path, part in zip(paths, loaded, strict=True)]
    )


def _same_folder(run_folder: RunFolder) -> None:
    if run_folder.earlier() is None:
        raise InputError(
            "out", "is not the same folder for all processes; give one that all of them see", run_folder.out
        )


def _fitted(path: Path, images: ImageSet, form: ImageSettings, *, told: bool) -> ImageSet:
    """Bring a public set to the form of the model, if it was read before that was chosen.

    If `told`, one line says what was done to its images, and one which private models made them.
    """
    if told:
        tell(images)
    if images.origins and told:
        guarantee = "these guarantees" if len(images.origins) > 1 else "that guarantee"
        words = f"synthetic images of {listed(images.origins)}; what is built on them falls under {guarantee}"
        print(f"rapid: {path}: {words}", file=sys.stderr, flush=True)
    return fit_images(images, form, "public")
