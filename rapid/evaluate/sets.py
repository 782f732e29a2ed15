"""The sets of images that an evaluation compares, brought to one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rapid.config import ImageSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.errors import InputError
from rapid.evaluate.training import labels_of


@dataclass(frozen=True)
class Sets:
    """All of one size and colour mode.

    Attributes:
        form: size and channels: the largest side of the synthetic and real images, the colour of the synthetic ones.
        synthetic: to be judged.
        real: test images.
        train_real: real training images, on open data only.
        public: public images, each set apart.
    """

    form: ImageSettings
    synthetic: ImageSet
    real: ImageSet
    train_real: ImageSet | None
    public: tuple[ImageSet, ...]


def load_sets(synthetic: Path, real: Path, train_real: Path | None, public: Sequence[Path]) -> Sets:
    """Read the sets and pad them with black to one size; no image is scaled.

    Raises:
        InputError: a set that cannot be read, or public or training images larger than the others.
    """
    made, test = load_images(synthetic, "--synthetic"), load_images(real, "--real")
    size = max(*made.images.shape[1:3], *test.images.shape[1:3])
    if size < 4:
        raise InputError(f"--synthetic {synthetic}: images of less than 4x4 pixels cannot be judged; give larger ones")
    form = ImageSettings(size=size, channels=1 if made.channels == 1 else 3)
    return Sets(
        form,
        bring_to_form(made, form, "--synthetic"),
        bring_to_form(test, form, "--real"),
        None if train_real is None else bring_to_form(load_images(train_real, "--train-real"), form, "--train-real"),
        tuple(bring_to_form(load_images(path, "--public"), form, "--public") for path in public),
    )


def bring_to_form(images: ImageSet, form: ImageSettings, argument: str) -> ImageSet:
    """The set padded to S x S, in the channels of `form`.

    Raises:
        InputError: images larger than S.
    """
    height, width = images.images.shape[1:3]
    if max(height, width) > form.size:
        raise InputError(
            f"{argument} {images.source}: images of {width}x{height} are larger than the synthetic and real ones "
            f"({form.size}x{form.size}); bring them to one size first"
        )
    return fit_images(images, form, argument)


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


def of_class(images: ImageSet, name: str) -> ImageSet:
    """The images of one class, as an unlabelled set; empty if there are none."""
    chosen = labels_of(images) == (images.classes.index(name) if name in images.classes else -1)
    return replace(images, images=images.images[chosen], labels=None, classes=())


def describe(images: ImageSet) -> dict[str, object]:
    """What the report says of a set: its name, how many images, and how many of each class."""
    counts = None
    if images.labels is not None:
        numbers = np.bincount(images.labels, minlength=len(images.classes)).tolist()
        counts = dict(zip(images.classes, numbers, strict=True))
    return {"source": Path(images.source).name, "images": len(images), "classes": counts}
