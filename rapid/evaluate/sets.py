"""The sets of images that an evaluation compares, brought to one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.errors import InputError
from rapid.evaluate.training import labels_of


@dataclass(frozen=True)
class Sets:
    """All of one size and colour mode.

    Attributes:
        form: size and channels: the largest side of all images, the colour of the synthetic ones.
        synthetic: to be evaluated.
        real: test images.
        train_real: real training images, on open data only.
        public: public images, each set apart.
    """

    form: ImageSettings
    synthetic: ImageSet
    real: ImageSet
    train_real: ImageSet | None
    public: tuple[ImageSet, ...]


def load_sets(
    synthetic: Path, real: Path, train_real: Path | None, public: Sequence[Path], model_size: int = 0
) -> Sets:
    """Read the sets and pad them with black to the size of the largest; no image is scaled.

    Args:
        synthetic: path of the images to be evaluated; they fix whether all become grey or RGB.
        real: path of the test images.
        train_real: path of the real training images.
        public: paths of the public images.
        model_size: side of the images of a bundle that takes part; 0 if there is none.

    Raises:
        InputError: a set that cannot be read, or images that are too small.
    """
    made, test = load_images(synthetic, "--synthetic"), load_images(real, "--real")
    training = None if train_real is None else load_images(train_real, "--train-real")
    others = [load_images(path, "--public") for path in public]
    sides = [side for s in (made, test, training, *others) if s is not None for side in s.images.shape[1:3]]
    size = max(*sides, model_size)
    if size < 4:
        raise InputError(
            f"--synthetic {synthetic}: images of less than 4x4 pixels cannot be evaluated; give larger ones"
        )
    form = ImageSettings(size=size, channels=1 if made.channels == 1 else 3)
    return Sets(
        form,
        fit_images(made, form, "--synthetic"),
        fit_images(test, form, "--real"),
        None if training is None else fit_images(training, form, "--train-real"),
        tuple(fit_images(images, form, "--public") for images in others),
    )


def match_classes(train: ImageSet, test: ImageSet) -> NDArray[np.int64]:
    """Labels of `test`, (N,), as indices into the classes of `train`; classes are matched by name.

    Raises:
        InputError: unlabelled sets, or images of a class that `train` does not have.
    """
    labels = labels_of(test)
    labels_of(train)
    index = {name: number for number, name in enumerate(train.classes)}
    missing = [name for number, name in enumerate(test.classes) if name not in index and (labels == number).any()]
    if missing:
        raise InputError(
            f"{test.source}: {train.source} has no class '{missing[0]}' (it has {', '.join(train.classes[:20])}); "
            "classes are matched by name"
        )
    return np.array([index.get(name, -1) for name in test.classes], np.int64)[labels]


def first_of_each_class(images: ImageSet, count: int) -> list[tuple[str, NDArray[np.uint8]]]:
    """Name and first `count` images of every class that has any; of an unlabelled set, of the whole."""
    if images.labels is None:
        return [("", images.images[:count])]
    rows = [(name, images.images[images.labels == number][:count]) for number, name in enumerate(images.classes)]
    return [(name, row) for name, row in rows if len(row)]


def describe(images: ImageSet) -> dict[str, object]:
    """What the report says of a set: its name, how many images, and how many of each class."""
    counts = None
    if images.labels is not None:
        numbers = np.bincount(images.labels, minlength=len(images.classes)).tolist()
        counts = dict(zip(images.classes, numbers, strict=True))
    return {"source": Path(images.source).name, "images": len(images), "classes": counts}
