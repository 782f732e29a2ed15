"""Evaluation of a classifier on real test images: accuracy, calibration, and a confusion matrix as a picture.

Calibration: Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks (ICML 2017), Eq. 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import rapid
from rapid.data import ImageSet, load_images, tell
from rapid.data.classes import matched_labels
from rapid.errors import InputError
from rapid.evaluate.report import NOTICE
from rapid.evaluate.sets import describe
from rapid.evaluate.utility import standard_error
from rapid.files import replacing, write_json
from rapid.pictures import Pixels
from rapid.progress import Progress
from rapid.sampling.classifier import Classifier

BINS = 15
"""Of confidence, equally wide on (0, 1]."""
CELL = 34
"""Side of a cell of the confusion matrix, in pixels."""
MOST_NUMBERS = 26
"""Classes up to which cells show their counts, and have names beside them."""
PORTION = 1000
SMALLEST = 1e-12
"""Least probability of the right class in the log-likelihood, which is else infinite."""

Json = dict[str, Any]


@dataclass(frozen=True)
class ClassifierReport:
    """The results.

    Attributes:
        content: JSON-ready.
        confusion: picture of the confusion matrix, uint8 RGB.
    """

    content: Json
    confusion: Pixels

    def summary(self) -> list[str]:
        """The main results, one line each."""
        found, source = self.content, self.content["real"]["source"]
        return [
            f"accuracy on {source}: {found['accuracy']:.2%} (standard error {found['standard_error']:.2%})",
            f"expected calibration error: {found['calibration']['expected_error']:.2%}, mean confidence "
            f"{found['calibration']['mean_confidence']:.2%}",
        ]


def evaluate_classifier(model: Classifier, real: Path, label_column: str | None = None) -> ClassifierReport:
    """Classify real test images, and compare with their labels.

    Args:
        model: the classifier.
        real: labelled images; classes are matched by name.
        label_column: see `load_images`.

    Raises:
        InputError: images that cannot be read, without labels, or of a class that the model does not have.
    """
    images = load_images(real, "real", label_column=label_column, target=model.bundle.config.image)
    tell(images)
    truth = _labels(images, model.classes)
    found = np.empty((len(images), len(model.classes)), np.float32)
    with Progress("classifying", len(images), "image") as progress:
        for start in range(0, len(images), PORTION):
            found[start : start + PORTION] = model.probabilities(images.images[start : start + PORTION])
            progress.advance(len(found[start : start + PORTION]))
    content: Json = {
        "rapid": rapid.__version__,
        "notice": NOTICE,
        "model": {"name": model.bundle.name, "privacy": model.bundle.privacy},
        "real": describe(images),
        "classes": list(model.classes),
        **measure(found, truth, model.classes),
    }
    return ClassifierReport(content, confusion_picture(np.array(content["confusion"]), model.classes))


def measure(probabilities: NDArray[np.float32], truth: NDArray[np.int64], classes: Sequence[str]) -> Json:
    """Accuracy, log-likelihood, calibration and confusion counts, ready for JSON.

    Args:
        probabilities: of the classes, float32 (n, classes), n >= 1.
        truth: right classes, int64 (n,).
        classes: their names.

    Returns:
        `accuracy`, `standard_error` (of the test set's size alone), `accuracy_by_class` (of classes with images),
        `negative_log_likelihood` (nats, mean), `calibration` (see `calibration`), and `confusion`: a row for each right
        class, a column for each predicted one.
    """
    predicted = probabilities.argmax(1)
    right = predicted == truth
    accuracy = float(right.mean())
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(confusion, (truth, predicted), 1)
    likelihood = np.take_along_axis(probabilities, truth[:, None], 1).astype(np.float64)
    return {
        "accuracy": accuracy,
        "standard_error": standard_error(int(right.sum()), len(truth)),
        "accuracy_by_class": {
            name: float(right[truth == number].mean()) for number, name in enumerate(classes) if (truth == number).any()
        },
        "negative_log_likelihood": float(-np.log(likelihood.clip(SMALLEST)).mean()),
        "calibration": calibration(probabilities.max(1), right),
        "confusion": confusion.tolist(),
    }


def calibration(confidence: NDArray[np.floating[Any]], right: NDArray[np.bool_]) -> Json:
    """Expected calibration error: the mean over images of |accuracy - mean confidence| of the image's bin.

    Args:
        confidence: probability of the predicted class, in (0, 1], float (n,), n >= 1.
        right: whether the prediction is right, bool (n,).

    Returns:
        `expected_error`, `mean_confidence`, and `bins`: for each bin with images its upper end, its number of images,
        its mean confidence and its accuracy.
    """
    values = confidence.astype(np.float64)
    number = np.clip(np.ceil(values * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(number, minlength=BINS)
    sums, hits = (np.bincount(number, part, BINS) for part in (values, right.astype(np.float64)))
    bins = [
        {
            "up_to": (n + 1) / BINS,
            "images": int(counts[n]),
            "confidence": sums[n] / counts[n],
            "accuracy": hits[n] / counts[n],
        }
        for n in range(BINS)
        if counts[n]
    ]
    return {
        "expected_error": float(np.abs(hits - sums).sum() / len(values)),
        "mean_confidence": float(values.mean()),
        "bins": bins,
    }


def picture_beside(out: Path) -> Path:
    """Path of a report's picture of the confusion matrix."""
    return out.with_name(f"{out.stem}-confusion.png")


def write_classification(report: ClassifierReport, out: Path) -> None:
    """Write the picture and then the JSON file; each appears once it is complete."""
    with replacing(picture_beside(out)) as target:
        Image.fromarray(report.confusion).save(target)
    write_json(out, report.content)


def confusion_picture(counts: NDArray[np.int64], classes: Sequence[str]) -> Pixels:
    """Draw a confusion matrix: the darker a cell, the larger its share of its row; rows are right classes.

    Args:
        counts: int64 (classes, classes).
        classes: their names; with many of them, neither names nor counts are drawn.

    Returns:
        uint8 (height, width, 3).
    """
    few = len(classes) <= MOST_NUMBERS
    font, small = ImageFont.load_default(14), ImageFont.load_default(11)
    cell = CELL if few else max(4, 26 * CELL // len(classes))
    names = [_short(name) for name in classes] if few else [""] * len(classes)
    left = 40 + max(round(font.getlength(name)) for name in names)
    top, side = 56, cell * len(classes)
    sheet = Image.new("RGB", (max(left + side, 240) + 16, top + side + 16), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((8, 6), "rows: right class; columns: predicted", "black", font)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row, (name, line) in enumerate(zip(names, shares, strict=True)):
        y = top + row * cell
        draw.text((left - 8, y + cell // 2), name, "black", font, anchor="rm")
        for column, share in enumerate(line):
            x = left + column * cell
            shade = round(255 * (1 - share))
            draw.rectangle((x, y, x + cell - 1, y + cell - 1), fill=(shade, shade, 255 if share < 1 else 224))
            if few and counts[row, column]:
                words = _number(int(counts[row, column]))
                ink = "white" if share > 0.5 else "black"
                draw.text((x + cell // 2, y + cell // 2), words, ink, small, anchor="mm")
    for column, name in enumerate(names):
        # long names would overlap; they stand beside the rows
        draw.text((left + column * cell + cell // 2, top - 8), name[:4], "black", font, anchor="ms")
    return np.asarray(sheet)


def _labels(images: ImageSet, classes: Sequence[str]) -> NDArray[np.int64]:
    """The labels as indices into the classes of the model, int64 (n,)."""
    if images.labels is None:
        raise InputError("real", "has no labels, with which predictions are compared", images.source)
    return matched_labels(images, classes, "real", "the model")


def _short(name: str) -> str:
    line = " ".join(name.split())
    return line if len(line) <= 20 else line[:17] + "..."


def _number(count: int) -> str:
    """A count in at most four characters or so."""
    return str(count) if count < 10_000 else f"{count // 1000}k"
