"""Which sets are compared with real images: the synthetic ones, and the floors beside them.

A floor is what the same measure says of images that no generator made: other real images, real images that went
through the autoencoder of a model, which are the best that its decoder can do, and public images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rapid.data import ImageSet, fit_images, to_uint8, to_unit_range
from rapid.evaluate.sets import Sets
from rapid.mapped import blocks, empty, taken
from rapid.nn.autoencoder import Autoencoder
from rapid.progress import Progress
from rapid.runtime import place
from rapid.sampling.generator import Generator

SEED = 0
"""Of the choice among the images of a larger set."""
AUTOENCODER = "autoencoder"
"""Name of the component of a bundle."""
PORTION = 250


class Compared(NamedTuple):
    """A set that is compared with real images."""

    title: str
    images: ImageSet


def compared_sets(
    sets: Sets, model: Generator | None, device: torch.device, *, against_training: bool = False
) -> dict[str, Compared]:
    """The synthetic images, and the floors that can be measured, each with at most as many images.

    All measures depend on the number of images, so larger sets are thinned at random, always in the same way.

    Args:
        sets: the images.
        model: the generator; its autoencoder gives a floor, if it has one whose images are as large as those compared.
        device: where the autoencoder computes.
        against_training: the sets will be compared with the real training images, not with the test images.

    Returns:
        By name: `synthetic`; `real`, the other real set; `autoencoder`, that set, or the one compared with if there is
        no other, encoded and decoded; `public`, all public sets together, without labels.
    """
    count = len(sets.synthetic)
    found = {"synthetic": Compared("synthetic images", sets.synthetic)}
    other, words = (sets.real, "real test images") if against_training else (sets.train_real, "real training images")
    if other is not None:
        other = thinned([other], count)
        found["real"] = Compared(words, other)
    source = (other, words) if other is not None else (thinned([sets.real], count), "the same real test images")
    if (rebuilt := through_autoencoder(source[0], sets, model, device)) is not None:
        found["autoencoder"] = Compared(f"{source[1]} through the autoencoder", rebuilt)
    if sets.public:
        found["public"] = Compared("public images", replace(thinned(sets.public, count), labels=None, classes=()))
    return found


def thinned(sets: Sequence[ImageSet], count: int) -> ImageSet:
    """At most `count` images of sets of one form, chosen at random; several sets lose their labels."""
    total = sum(map(len, sets))
    if total <= count and len(sets) == 1:
        return sets[0]
    rows = choose(total, count)
    if len(sets) == 1:
        labels = None if sets[0].labels is None else sets[0].labels[rows]
        return replace(sets[0], images=taken(sets[0].images, rows), labels=labels, units=None)
    starts = np.cumsum([0, *map(len, sets)])
    parts = [
        images.images[rows[(rows >= start) & (rows < start + len(images))] - start]
        for images, start in zip(sets, starts[:-1], strict=True)
    ]
    return ImageSet(np.concatenate(parts), None, (), ", ".join(images.source for images in sets))


def choose(total: int, count: int) -> NDArray[np.int64]:
    """At most `count` of `total` rows, without repetition, ascending; always the same ones."""
    rows: NDArray[np.int64] = np.sort(np.random.default_rng(SEED).choice(total, min(total, count), replace=False))
    return rows


def through_autoencoder(images: ImageSet, sets: Sets, model: Generator | None, device: torch.device) -> ImageSet | None:
    """The images encoded and decoded; None without an autoencoder, or if its images are of another size."""
    if model is None or not model.bundle.has(AUTOENCODER) or model.bundle.config.image.size != sets.form.size:
        return None
    autoencoder = place(model.bundle.component(AUTOENCODER, Autoencoder), device)
    pixels = fit_images(images, model.bundle.config.image, "real").images
    rebuilt = empty(pixels.shape)
    done = 0
    with Progress("through the autoencoder", len(pixels), "image") as progress:
        for block in blocks(pixels):
            for start in range(0, len(block), PORTION):
                part = to_unit_range(block[start : start + PORTION], device)
                rebuilt[done : done + len(part)] = to_uint8(autoencoder.decode(autoencoder.encode(part)))
                done += len(part)
                progress.advance(len(part))
    return fit_images(replace(images, images=rebuilt), sets.form, "model")
