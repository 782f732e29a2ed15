"""The evaluation report: what is measured, in which order, and where it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import rapid
from rapid.bundle.format import Bundle
from rapid.data import ImageSet, fit_images
from rapid.errors import InputError
from rapid.evaluate import features, training
from rapid.evaluate.copies import Closest, closest_picture, compare_with, decode_knowledge_base
from rapid.evaluate.features import train_feature_space
from rapid.evaluate.fidelity import NEIGHBOURS, Features, Neighbourhoods, frechet_distance, neighbourhoods
from rapid.evaluate.inception import inception_features, load_inception
from rapid.evaluate.networks import CLASSIFIERS
from rapid.evaluate.page import render
from rapid.evaluate.sets import Sets, describe, first_of_each_class, load_sets, match_classes
from rapid.evaluate.utility import measure_utility, protocol_in_words
from rapid.files import replacing, write_json
from rapid.pictures import Pixels, table
from rapid.progress import Progress

SAMPLES, ROWS = 12, 40
"""Images of each class, and most classes, in the picture of samples."""

NOTICE = (
    "Not private: these numbers are computed from the real images themselves, without noise. No guarantee of a private "
    "model covers them. Publish them only if the real images are open, or a test set that is public."
)

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes:
        synthetic: the images to be evaluated.
        real: real test images.
        train_real: real training images, for what perfection would give.
        open_data: the caller says that `train_real` is open data.
        public: public images, for the feature space and the search for copies.
        model: a bundle, to search its knowledge base for copies.
        inception: weights for the real FID.
        classifiers: names of `CLASSIFIERS`; empty for no utility.
        epochs: for each classifier.
    """

    synthetic: Path
    real: Path
    train_real: Path | None = None
    open_data: bool = False
    public: tuple[Path, ...] = ()
    model: Path | None = None
    inception: Path | None = None
    classifiers: tuple[str, ...] = tuple(CLASSIFIERS)
    epochs: int = training.EPOCHS


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        content: JSON-ready.
        samples: pictures by caption, uint8 RGB.
        closest: the picture of the closest pairs, uint8 RGB.
    """

    content: Json
    samples: dict[str, Pixels]
    closest: Pixels

    def summary(self) -> list[str]:
        """The main numbers, one line each."""
        content = self.content
        lines = []
        for name, found in (content["utility"] or {}).items():
            if name == "protocol":
                continue
            accuracies = [(network["network"], network["accuracy"]) for network in found["networks"].values()]
            if found["mean"] is not None:
                accuracies.append(("mean of the three", found["mean"]))
            lines += [
                f"accuracy on {content['real']['source']}, trained on {name} images: {accuracy:.2%} ({network})"
                for network, accuracy in accuracies
            ]
        found = content["fidelity"]["synthetic"]
        measures = ", ".join(f"{measure} {found[measure]:.3f}" for measure in Neighbourhoods._fields)
        lines.append(f"{measures}, Frechet distance {found['frechet']:.4g} (own features, not FID)")
        if content["fid"] is not None:
            lines.append(f"FID {content['fid']['synthetic']['fid']:.2f}")
        for found in content["copies"]:
            share, identical = found["nearer_than_real"], found["identical"]
            lines.append(
                f"nearer to the {found['reference']} than the nearest 1 % of real test images: {share:.2%} of the "
                f"synthetic images, {identical:,} identical"
            )
        return lines


def check_target(out: Path) -> None:
    """Refuse a target that cannot be written, before anything is computed.

    Raises:
        InputError: not a name that ends in .json, or a folder is in the way.
    """
    if out.suffix != ".json":
        raise InputError(f"--out {out}: give a name that ends in .json; the page and the picture lie beside it")
    for path in (out, *beside(out)):
        if path.is_dir():
            raise InputError(f"--out {out}: {path} is a folder; give another name")


def beside(out: Path) -> tuple[Path, Path]:
    """The page and the picture of the closest pairs that belong to a report."""
    return out.with_suffix(".html"), out.with_name(f"{out.stem}-closest.png")


def evaluate(request: Request, device: torch.device) -> Report:
    """Measure utility, fidelity, diversity and copies of synthetic images.

    Args:
        request: what to evaluate.
        device: where to compute.

    Raises:
        InputError: sets that cannot be read or do not fit together, an unknown classifier, real training images that
            are not said to be open data, or an optional package that is missing.
    """
    _check(request)
    # all that can be refused is refused before the long work
    bundle = None if request.model is None else Bundle.open(request.model, "--model")
    network = None if request.inception is None else load_inception(request.inception, device)
    side = 0 if bundle is None else bundle.settings.image.size
    sets = load_sets(request.synthetic, request.real, request.train_real, request.public, side)
    _check_sets(sets, request)
    if bundle is not None:
        bundle.knowledge_base()  # a damaged one is noticed here
    content: Json = {
        "rapid": rapid.__version__,
        "notice": NOTICE,
        "device": str(device),
        "image": {"size": sets.form.size, "channels": sets.form.channels},
        "synthetic": describe(sets.synthetic),
        "real": describe(sets.real),
        "train_real": None if sets.train_real is None else describe(sets.train_real),
        "public": [describe(images) for images in sets.public],
        "model": None if bundle is None else {"name": bundle.path.resolve().name, "privacy": bundle.privacy},
        "utility": _utility(sets, request, device) if request.classifiers else None,
        "fidelity": _fidelity(sets, request, device),
        "fid": None if network is None else _fid(network, sets, request, device),
    }
    content["copies"], closest = _copies(sets, bundle, device)
    return Report(content, _samples(sets), closest_picture(closest))


def write_report(report: Report, out: Path) -> None:
    """Write the picture, the page and, last, the JSON file; each appears when it is complete."""
    page, picture = beside(out)
    html = render(report.content, report.samples, report.closest)
    with replacing(picture) as target:
        Image.fromarray(report.closest).save(target)
    with replacing(page) as target:
        target.write_text(html, encoding="utf-8")
    write_json(out, report.content)


def _check(request: Request) -> None:
    if request.train_real is not None and not request.open_data:
        raise InputError(
            f"--train-real {request.train_real}: a report on the training images is covered by no privacy guarantee; "
            "add --open-data if they are open, or leave --train-real out"
        )
    unknown = [name for name in request.classifiers if name not in CLASSIFIERS]
    if unknown:
        raise InputError(f"--classifiers {unknown[0]}: unknown; choose all, none, or some of {','.join(CLASSIFIERS)}")
    if len(set(request.classifiers)) < len(request.classifiers):
        raise InputError(f"--classifiers {','.join(request.classifiers)}: names one twice")
    if request.epochs < 1:
        raise InputError(f"--epochs {request.epochs}: must be at least 1")


def _check_sets(sets: Sets, request: Request) -> None:
    given = [("--synthetic", sets.synthetic), ("--real", sets.real)]
    given += [] if sets.train_real is None else [("--train-real", sets.train_real)]
    given += [("--public", images) for images in sets.public]
    for argument, images in given:
        if len(images) <= NEIGHBOURS:
            raise InputError(f"{argument} {images.source}: {len(images)} images; give at least {NEIGHBOURS + 1}")
    if request.classifiers:
        match_classes(sets.synthetic, sets.real)
        if sets.train_real is not None:
            match_classes(sets.train_real, sets.real)
    if sets.real.labels is None and all(images.labels is None for images in sets.public):
        raise InputError(f"--real {sets.real.source}: has no labels, and so the features need labelled --public images")


def _utility(sets: Sets, request: Request, device: torch.device) -> Json:
    return {"protocol": protocol_in_words(request.epochs)} | {
        name: measure_utility(images, sets.real, device, name, request.classifiers, request.epochs)
        for name, images in _probed(sets).items()
    }


def _fidelity(sets: Sets, request: Request, device: torch.device) -> Json:
    space = train_feature_space(sets.public, sets.real, device, min(request.epochs, features.EPOCHS))
    real = space.extract(sets.real.images, "features, test")
    found: Json = {"features": space.words, "k": NEIGHBOURS}
    for name, images in _probed(sets).items():
        vectors = space.extract(images.images, f"features, {name}")
        with Progress(f"neighbours, {name}", 2 * len(real) + len(images), "image") as progress:
            measures = neighbourhoods(real, vectors, NEIGHBOURS, device, progress.advance)
        found[name] = {
            "images": len(images),
            "real_images": len(real),
            "frechet": frechet_distance(vectors, real),
            **measures._asdict(),
            "frechet_by_class": _frechet_by_class(images, vectors, sets.real, real),
        }
    return found


def _frechet_by_class(
    images: ImageSet, vectors: Features, real_images: ImageSet, real: Features
) -> dict[str, float | None] | None:
    """None without labels, and for a class with less than two images on a side."""
    if images.labels is None or real_images.labels is None:
        return None
    distances: dict[str, float | None] = {}
    for number, name in enumerate(real_images.classes):
        own = images.classes.index(name) if name in images.classes else -1
        made, true = vectors[images.labels == own], real[real_images.labels == number]
        distances[name] = frechet_distance(made, true) if min(len(made), len(true)) > 1 else None
    return distances


def _fid(network: torch.nn.Module, sets: Sets, request: Request, device: torch.device) -> Json:
    real = inception_features(network, sets.real.images, device, "inception, real")
    found: Json = {"weights": request.inception.name if request.inception else None}
    for name, images in _probed(sets).items():
        found[name] = {
            "fid": frechet_distance(inception_features(network, images.images, device, f"inception, {name}"), real),
            "images": len(images),
        }
    return found


def _probed(sets: Sets) -> dict[str, ImageSet]:
    """The sets that are held against the real test images; real training images show what perfection would give."""
    return {"synthetic": sets.synthetic} | ({} if sets.train_real is None else {"real": sets.train_real})


def _copies(sets: Sets, bundle: Bundle | None, device: torch.device) -> tuple[list[Json], list[Closest]]:
    references: dict[str, NDArray[np.uint8]] = {}
    if sets.public:
        references["public images"] = np.concatenate([images.images for images in sets.public])
    if bundle is not None:
        references["knowledge base"] = fit_images(decode_knowledge_base(bundle, device), sets.form, "--model").images
    if sets.train_real is not None:
        references["real training images"] = sets.train_real.images
    references["real test images"] = sets.real.images
    reports, closest = [], []
    for name, images in references.items():
        found, pairs = compare_with(
            name, sets.synthetic, images, sets.real.images, device, reference_is_real=images is sets.real.images
        )
        reports.append(found)
        closest.append(pairs)
    return reports, closest


def _samples(sets: Sets) -> dict[str, Pixels]:
    pictures = {}
    for name, images in (("synthetic", sets.synthetic), ("real test", sets.real)):
        rows: Sequence[tuple[str, NDArray[np.uint8]]] = first_of_each_class(images, SAMPLES)
        caption = f"{name} images: the first {SAMPLES} of each class" if rows[0][0] else f"the first {name} images"
        if len(rows) > ROWS:
            caption += f" (of {ROWS} of {len(rows)} classes)"
        pictures[caption] = table(rows[:ROWS])
    return pictures
