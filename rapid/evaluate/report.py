"""The evaluation report: which measures, in which order, and where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import rapid
from rapid.data import ImageSet, fit_images, tell
from rapid.errors import InputError
from rapid.evaluate import features, training
from rapid.evaluate.agreement import measure_agreement
from rapid.evaluate.comparisons import compared_sets
from rapid.evaluate.copies import Closest, closest_picture, compare_with, decode_records
from rapid.evaluate.distances import measure_fid, measure_fidelity
from rapid.evaluate.features import FeatureSpace, train_feature_space
from rapid.evaluate.fidelity import NEIGHBOURS, Neighbourhoods
from rapid.evaluate.inception import load_inception
from rapid.evaluate.networks import CLASSIFIERS
from rapid.evaluate.page import render
from rapid.evaluate.reference import check_fit, load_reference
from rapid.evaluate.sets import Sets, describe, first_of_each_class, load_sets, match_classes
from rapid.evaluate.utility import measure_utility, protocol_in_words
from rapid.files import check_folder, replacing, write_json
from rapid.mapped import joined
from rapid.pictures import Pixels, one_line, table
from rapid.sampling.generator import Generator

SAMPLES, ROWS = 12, 40
"""Images per class, and the largest number of classes, in the picture of samples."""

NOTICE = (
    "Not private: these numbers are computed from the real images without noise, and the guarantee of a private model "
    "does not cover them. Publish them only if the real images are open data or a public test set."
)

TRAINED_ON = {
    "synthetic": "synthetic images",
    "synthetic_soft": "synthetic images with soft labels",
    "real": "real images",
}
"""The sets that classifiers are trained on, by their keys in the report."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes:
        synthetic: the images to evaluate.
        real: real test images.
        train_real: real training images, which show what a perfect generator would achieve.
        open_data: the caller confirms that `train_real` is open data.
        public: public images, for the feature space and the search for copies.
        features: file of a reference network, whose features are taken instead, and which measures label agreement.
        inception: weights of pytorch-fid's Inception network, for FID, Inception Score, precision and recall.
        classifiers: names in `CLASSIFIERS`; empty skips the utility.
        epochs: for each classifier.
        ensemble: networks of each kind, whose ensemble is tested as well if there are several.
        label_column: of `real` and `train_real`, if they have columns.
        soft_labels: also train the classifiers on the soft labels of `synthetic`.
    """

    synthetic: Path
    real: Path
    train_real: Path | None = None
    open_data: bool = False
    public: tuple[Path, ...] = ()
    features: Path | None = None
    inception: Path | None = None
    classifiers: tuple[str, ...] = tuple(CLASSIFIERS)
    epochs: int = training.EPOCHS
    ensemble: int = 1
    label_column: str | None = None
    soft_labels: bool = False


@dataclass(frozen=True)
class Report:
    """The results.

    Attributes:
        content: JSON-ready.
        samples: pictures of samples by caption, uint8 RGB.
        closest: picture of the closest pairs, uint8 RGB.
    """

    content: Json
    samples: dict[str, Pixels]
    closest: Pixels

    def summary(self) -> list[str]:
        """The main results, one line each."""
        content = self.content
        lines = []
        for name, found in (content["utility"] or {}).items():
            if name == "protocol":
                continue
            accuracies = [(network["network"], network["accuracy"]) for network in found["networks"].values()]
            if found["mean"] is not None:
                accuracies.append(("mean of the three", found["mean"]))
            for network in found["networks"].values():
                if (ensemble := network.get("ensemble")) is not None:
                    accuracies.append((f"ensemble of {ensemble['members']} {network['network']}", ensemble["accuracy"]))
            if len(found["networks"]) > 1:
                words = f"{_in_words(found['selected'])}: the best on held-out {TRAINED_ON[name]}"
                accuracies.append((words, found["selected"]["accuracy"]))
            lines += [
                f"accuracy on {content['real']['source']}, trained on {TRAINED_ON[name]}: {accuracy:.2%} ({network})"
                for network, accuracy in accuracies
            ]
            if len(found["networks"]) > 1:
                lines.append(_choice(name, found))
        lines += _likeness(content["fidelity"])
        if (agreement := content["agreement"]) is not None:
            named = (("synthetic", agreement["synthetic"]), ("real test", agreement["real"]))
            shares = ", ".join(
                f"{found['agreed']:.2%} of the {name} images, sure of {found['sure']:.2%}"
                for name, found in named
                if found is not None
            )
            lines.append(f"taken for their label by the network of {content['fidelity']['network']['file']}: {shares}")
        lines += [] if content["fid"] is None else _fid_lines(content["fid"])
        for found in content["copies"]:
            share = found["nearer_than_real"]
            of_all = (
                "not computed, as there are too few real ones"
                if share is None
                else f"{share:.2%} of the synthetic images"
            )
            lines.append(
                f"nearer to the {found['reference']} than the nearest 1 % of real test images: {of_all}; "
                f"{found['identical']:,} identical"
            )
        return lines


def _in_words(classifier: Json) -> str:
    network: str = classifier["network"]
    return network if classifier["members"] == 1 else f"ensemble of {classifier['members']} {network}"


def _choice(name: str, found: Json) -> str:
    """How well held-out images choose a classifier."""
    correlation = found["rank_correlation"]
    shown = "" if correlation is None else f"; rank correlation {correlation:.2f} over {len(found['networks'])} kinds"
    return (
        f"regret of the choice by held-out {TRAINED_ON[name]}: {100 * found['regret']:.2f} points below the best "
        f"({_in_words(found['best'])}){shown}"
    )


def _likeness(fidelity: Json) -> list[str]:
    found, network = fidelity["synthetic"], fidelity["network"]
    measures = ", ".join(f"{measure} {found[measure]:.3f}" for measure in Neighbourhoods._fields)
    whose = "own features" if network is None else f"features of {network['file']}"
    lines = [f"{measures}, Frechet distance {found['frechet']:.4g} ({whose}, not FID)"]
    if floors := {name: title for name, title in fidelity["sets"].items() if name != "synthetic"}:
        words = ", ".join(f"{title} {fidelity[name]['frechet']:.4g}" for name, title in floors.items())
        lines.append(f"for comparison, the Frechet distance of {words}")
    return lines


def _fid_lines(fid: Json) -> list[str]:
    against = f"against {fid['reference_images']:,} {fid['reference']}"
    return [
        f"FID {fid[name]['fid']:.2f}, Inception Score {fid[name]['inception_score']:.3f}, precision "
        f"{fid[name]['precision']:.3f}, recall {fid[name]['recall']:.3f} of {title} {against}"
        for name, title in fid["sets"].items()
    ]


def check_target(out: Path, others: Sequence[Path] | None = None) -> None:
    """Refuse an unusable target before any work is done.

    Args:
        out: the report.
        others: what is written beside it; default: see `beside`.

    Raises:
        InputError: the name does not end in .json, a file to write or a folder of its name is there already, or nothing
            can be written there.
    """
    if out.suffix != ".json":
        problem = "give a name that ends in .json; the page and the picture are written next to it"
        raise InputError("out", problem, out)
    for path in (out, *(beside(out) if others is None else others)):
        if path.is_dir():
            raise InputError("out", f"{path} is a folder; choose another name", out)
        if path.exists():
            what = "exists already" if path == out else f"{path} exists already"
            raise InputError("out", f"{what}; choose another name, or remove it first", out)
    check_folder(out.parent, "out", out)


def beside(out: Path) -> tuple[Path, Path]:
    """Paths of a report's page and of its picture of the closest pairs."""
    return out.with_suffix(".html"), out.with_name(f"{out.stem}-closest.png")


def evaluate(request: Request, device: torch.device, model: Generator | None = None) -> Report:
    """Measure utility, fidelity and diversity of synthetic images, and search for copies.

    Args:
        request: what to evaluate.
        device: where to compute.
        model: the generator of the images, to search its knowledge base for copies and report its privacy.

    Raises:
        InputError: sets that cannot be read or do not fit together, an unknown classifier, real training images that
            are not confirmed to be open data, or a missing optional package.
    """
    _check(request)
    # everything that can be refused is refused before the long work
    network = None if request.inception is None else load_inception(request.inception, device)
    reference = None if request.features is None else load_reference(request.features, device)
    form = None if model is None else model.bundle.config.image
    sets = load_sets(
        request.synthetic,
        request.real,
        request.train_real,
        request.public,
        form,
        label_column=request.label_column,
        soft_labels=request.soft_labels,
    )
    _check_sets(sets, request)
    if reference is not None and request.features is not None:
        check_fit(reference, request.features, sets.form)
    for images in (sets.synthetic, sets.real, sets.train_real, *sets.public):
        if images is not None:
            tell(images)
    agreement = None if reference is None else measure_agreement(reference, sets.synthetic, sets.real)
    content: Json = {
        "rapid": rapid.__version__,
        "notice": NOTICE,
        "device": str(device),
        "image": {"size": sets.form.size, "channels": sets.form.channels},
        "synthetic": describe(sets.synthetic),
        "real": describe(sets.real),
        "train_real": None if sets.train_real is None else describe(sets.train_real),
        "public": [describe(images) for images in sets.public],
        "model": None if model is None else {"name": model.bundle.name, "privacy": model.bundle.privacy},
        "utility": _utility(sets, request, device) if request.classifiers else None,
    }
    space = _feature_space(sets, request, device) if reference is None else reference.space
    content["fidelity"] = measure_fidelity(space, compared_sets(sets, model, device), sets.real, device)
    content["fidelity"]["network"] = None if reference is None else reference.describe()
    content["agreement"] = agreement
    content["fid"] = None
    if network is not None and request.inception is not None:
        content["fid"] = measure_fid(network, request.inception, sets, model, device)
    content["copies"], closest = _copies(sets, model, device)
    return Report(content, _samples(sets), closest_picture(closest))


def write_report(report: Report, out: Path) -> None:
    """Write the picture, the page and finally the JSON file; each appears once it is complete."""
    page, picture = beside(out)
    html = render(report.content, report.samples, report.closest)
    with replacing(picture) as target:
        Image.fromarray(report.closest).save(target)
    with replacing(page) as target:
        target.write_text(html, encoding="utf-8")
    write_json(out, report.content)


def _check(request: Request) -> None:
    if request.train_real is not None and not request.open_data:
        problem = "no privacy guarantee covers a report on training images; add --open-data if they are open data"
        raise InputError("train_real", problem, request.train_real)
    unknown = [name for name in request.classifiers if name not in CLASSIFIERS]
    if unknown:
        raise InputError("classifiers", f"unknown; choose all, none, or some of {','.join(CLASSIFIERS)}", unknown[0])
    if len(set(request.classifiers)) < len(request.classifiers):
        raise InputError("classifiers", "names one twice", ",".join(request.classifiers))
    if request.epochs < 1:
        raise InputError("epochs", "must be at least 1", request.epochs)
    if request.soft_labels and not request.classifiers:
        raise InputError("soft_labels", "is for classifiers; leave it out with --classifiers none")
    if request.ensemble < 1:
        raise InputError("ensemble", "must be at least 1", request.ensemble)


def _check_sets(sets: Sets, request: Request) -> None:
    given = [("synthetic", sets.synthetic), ("real", sets.real)]
    given += [] if sets.train_real is None else [("train_real", sets.train_real)]
    given += [("public", images) for images in sets.public]
    for field, images in given:
        if len(images) <= NEIGHBOURS:
            raise InputError(field, f"{len(images)} images; give at least {NEIGHBOURS + 1}", images.source)
    if request.classifiers:
        match_classes(sets.synthetic, sets.real, "synthetic")
        if sets.train_real is not None:
            match_classes(sets.train_real, sets.real, "train_real")
    if request.features is None and sets.real.labels is None and all(images.labels is None for images in sets.public):
        raise InputError(
            "real",
            "has no labels, so the feature network needs labelled --public images, or --features",
            sets.real.source,
        )


def _utility(sets: Sets, request: Request, device: torch.device) -> Json:
    trained = {"synthetic": replace(sets.synthetic, soft_labels=None)}
    if request.soft_labels:
        trained["synthetic_soft"] = sets.synthetic
    if sets.train_real is not None:
        trained["real"] = sets.train_real
    protocol = protocol_in_words(request.epochs, request.ensemble, soft_labels=request.soft_labels)
    return {"protocol": protocol} | {
        name: measure_utility(
            images, sets.real, device, TRAINED_ON[name], request.classifiers, request.epochs, request.ensemble
        )
        for name, images in trained.items()
    }


def _feature_space(sets: Sets, request: Request, device: torch.device) -> FeatureSpace:
    return train_feature_space(sets.public, sets.real, device, min(request.epochs, features.EPOCHS))


def _copies(sets: Sets, model: Generator | None, device: torch.device) -> tuple[list[Json], list[Closest]]:
    references: dict[str, NDArray[np.uint8]] = {}
    if sets.public:
        public = [images.images for images in sets.public]
        references["public images"] = public[0] if len(public) == 1 else joined(public)
    if model is not None and model.records:
        decoded = ImageSet(decode_records(model), None, ())
        references["knowledge base"] = fit_images(decoded, sets.form, "model").images
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
        rows = first_of_each_class(images, SAMPLES)
        caption = f"{name} images: the first {SAMPLES} of each class" if rows[0][0] else f"the first {name} images"
        if len(rows) > ROWS:
            caption += f" ({ROWS} of {len(rows)} classes)"
        pictures[caption] = table([(one_line(name), row) for name, row in rows[:ROWS]])
    return pictures
