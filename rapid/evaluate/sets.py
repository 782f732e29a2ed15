"""The image sets that an evaluation compares, converted to one size and colour mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.data.canvas import Canvas
from rapid.data.classes import matched_labels
from rapid.errors import InputError
from rapid.evaluate.training import labels_of


@dataclass(frozen=True)
class Sets:
    """Image sets of one size and colour mode.

    Attributes:
        real_size: longest side of the real images, the training ones if there are any, once scaled and before padding.
        form: the size is the longest side of the synthetic images or the model's, the colour mode that of the former.
        synthetic: the images to evaluate.
        real: real test images.
        train_real: real training images, open data only.
        public: the public sets.
    """

    real_size: int
    form: ImageSettings
    synthetic: ImageSet
    real: ImageSet
    train_real: ImageSet | None
    public: tuple[ImageSet, ...]


def load_sets(
    synthetic: Path,
    real: Path,
    train_real: Path | None,
    public: Sequence[Path],
    model: ImageSettings | None = None,
    label_column: str | None = None,
    *,
    soft_labels: bool = False,
) -> Sets:
    """Read the sets, and bring all images to the size of the synthetic ones, or of the model.

    Smaller images are padded with black. A set with larger images, or with several sizes, is scaled down with its
    aspect ratio kept. If the model distorts images (`image.fit=resize`), all are scaled to its size as it does.

    Args:
        synthetic: path of the images to evaluate; they decide whether all sets become grey or RGB.
        real: path of the real test images.
        train_real: path of the real training images.
        public: paths of the public sets.
        model: form of the model's images; None without a model.
        label_column: of `real` and `train_real`; see `load_images`.
        soft_labels: read those of `synthetic`, too.

    Raises:
        InputError: a set cannot be read, or its images are too small.
    """
    samples = load_images(synthetic, "synthetic", target=Canvas(kept=None), soft_labels=soft_labels)
    size = max(*samples.images.shape[1:3], 0 if model is None else model.size)
    distorted = model is not None and model.fit == "resize"
    # in one step: an image that is padded or scaled twice is another one
    canvas = Canvas(size, size, "resize" if distorted else "contain", shrinks=False)
    test = load_images(real, "real", label_column=label_column, target=canvas)
    training = None
    if train_real is not None:
        training = load_images(train_real, "train_real", label_column=label_column, target=canvas)
    others = [load_images(path, "public", target=canvas) for path in public]
    if size < 4:
        raise InputError("synthetic", "images smaller than 4x4 pixels cannot be evaluated; give larger ones", synthetic)
    # larger ones have been scaled down
    fit: Literal["resize", "pad"] = "resize" if distorted else "pad"
    form = ImageSettings(size=size, channels=1 if samples.channels == 1 else 3, fit=fit)
    stored = (training or test).stored
    assert stored is not None
    return Sets(
        min(size, stored.side),
        form,
        fit_images(samples, form, "synthetic"),
        fit_images(test, form, "real"),
        None if training is None else fit_images(training, form, "train_real"),
        tuple(fit_images(images, form, "public") for images in others),
    )


def match_classes(train: ImageSet, test: ImageSet, field: str = "") -> NDArray[np.int64]:
    """Labels of `test`, int64 (N,), as indices into the classes of `train`; classes are matched by name.

    Args:
        train: on which a classifier is trained.
        test: the real images that it is tested on.
        field: name of the argument that gave `train`; for messages.

    Raises:
        InputError: a set is unlabelled, or `test` has images of a class that `train` does not have.
    """
    labels_of(test, "real")
    labels_of(train, field)
    return matched_labels(test, train.classes, "real", train.source)


def first_of_each_class(images: ImageSet, count: int) -> list[tuple[str, NDArray[np.uint8]]]:
    """Name and first `count` images of each class with images; an unlabelled set counts as one class without a name."""
    if images.labels is None:
        return [("", images.images[:count])]
    rows = [(name, images.images[images.labels == number][:count]) for number, name in enumerate(images.classes)]
    return [(name, row) for name, row in rows if len(row)]


def describe(images: ImageSet) -> dict[str, object]:
    """Description of a set for the report: name, number of images, and number of images of each class."""
    counts = None
    if images.labels is not None:
        numbers = np.bincount(images.labels, minlength=len(images.classes)).tolist()
        counts = dict(zip(images.classes, numbers, strict=True))
    return {"source": Path(images.source).name, "images": len(images), "classes": counts}
