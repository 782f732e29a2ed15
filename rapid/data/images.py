"""Reading an image set from a path, whatever its format."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from rapid.data.canvas import Target
from rapid.data.classes import checked
from rapid.data.image_set import ImageSet
from rapid.data.readers import FORMATS, find_reader
from rapid.data.readers.source import Source
from rapid.data.units import PeopleFrom
from rapid.errors import InputError

STDERR = 2
"""Its file descriptor."""


def load_images(
    path: Path,
    field: str,
    classes: Sequence[str] | None = None,
    *,
    show_paths: bool = True,
    people: PeopleFrom | None = None,
    label_column: str | None = None,
    target: Target = None,
    digests: bool = False,
    soft_labels: bool = False,
) -> ImageSet:
    """Read images from a folder, an `.npz`, a table of labels, Parquet files or tars; see `rapid.data.readers`.

    Images are brought to 8-bit grey or RGB (`rapid.data.readers.form`), and then to the form `target`, each by itself
    while it is decoded: they may differ in size and colour mode, and the originals are not kept. Sets larger than
    `rapid.mapped.LARGE` bytes are mapped from a scratch file (`rapid.mapped.scratch_in`), or from an `.npz` itself if
    it is not compressed. A sub-folder without images, like a name in a list of class names that no label has, is a
    class without images.

    Args:
        path: the set.
        field: name of the argument that gave the path, such as "public"; for messages.
        classes: declared class names, whose order numbers them. Names of the set must be among them; labels without
            names are their numbers. Default: those of the set.
        show_paths: name files, and what is wrong in them, in messages, and note what was done to the images and where
            they come from. False for private images.
        people: where the set says whose image each is; default: every image is a unit of its own.
        label_column: column of the labels, in formats that have columns; "none": the images are unlabelled. Default:
            see `rapid.data.readers.columns`.
        target: the form of a model, or a canvas, whose form depends on the images. Default: images stay as they are,
            and must have one size and colour mode.
        digests: hash the images as they are stored, for `ImageSet.digests`.
        soft_labels: read the probabilities of the classes, which the set must have.

    Raises:
        InputError: nothing there, no images, unreadable images, images that do not fit `target`, wrong types, a label
            that is missing or not among `classes`, images without a person where `people` is given, or soft labels
            that are missing or no probabilities, or are read together with `classes`.
        Stopped: a stop was requested.
    """
    if not path.exists():
        raise InputError(field, f"does not exist; give {FORMATS}", path)
    if classes is not None:
        checked(classes, "classes")
        if soft_labels:
            raise InputError("soft_labels", "their order is that of the set's classes; leave out them or the classes")
    names = None if classes is None else tuple(classes)
    source = Source(path, field, show_paths, names, people, label_column, target, digests, soft_labels)
    with nullcontext() if show_paths else _quiet():
        found = find_reader(source)(source)
    if classes is not None and found.labels is None:
        raise InputError(field, "has no labels, so there are no classes to declare; leave out --classes", path)
    if soft_labels and found.soft_labels is None:
        raise InputError(field, "has no soft labels; make images by rapid generate --soft-labels", path)
    if found.labels is not None and any(not _is_text(name) for name in found.labels.names):
        problem = "has a class whose name is not UTF-8; rename its folder or its labels"
        raise InputError(field, problem, path)
    return ImageSet(
        found.images,
        None if found.labels is None else found.labels.numbers,
        () if found.labels is None else found.labels.names,
        source=str(path),
        declared=found.labels is None or found.labels.declared,
        units=found.units,
        notes=found.notes if show_paths else (),
        origins=found.origins if show_paths else (),
        stored=found.stored,
        digests=found.digests,
        soft_labels=found.soft_labels,
    )


def tell(images: ImageSet) -> None:
    """Say in one line on stderr what was done to images when they were read, if anything; nothing of private ones."""
    if images.notes and images.stored is not None:
        colours = "grey" if images.stored.channels == 1 else "RGB"
        done = "; ".join(images.notes)
        print(f"rapid: {images.source}: 8-bit {colours} of {images.stored.sizes}; {done}", file=sys.stderr, flush=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of libraries, which tell about single files.

    libtiff describes damage on stderr, past Python, even of images that it can read.
    """
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        # there may be no stderr
        with suppress(OSError):
            before = os.dup(STDERR)
            stack.callback(os.close, before)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nowhere)
            os.dup2(nowhere, STDERR)
            stack.callback(os.dup2, before, STDERR)
        yield


def _is_text(name: str) -> bool:
    """Whether a name can be written into files: that of a folder may be bytes of another encoding."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
