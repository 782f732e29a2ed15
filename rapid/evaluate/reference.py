"""The reference network: trained once on the real training images of an open set, and kept in a file.

Features of one network make the distances of different reports comparable, and it tells which class an image looks
like. The file has the weights as safetensors, and what the network is as metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

import rapid
from rapid.config.sections import ImageSettings
from rapid.data import fit_images, load_images, tell
from rapid.data.canvas import Canvas
from rapid.errors import DENIED, InputError
from rapid.evaluate.features import FeatureSpace
from rapid.evaluate.networks import CLASSIFIERS, build
from rapid.evaluate.sets import match_classes
from rapid.evaluate.training import predict, train_classifier
from rapid.files import check_folder, content_hash, replacing
from rapid.nn.storage import write_weights

SUFFIX = ".safetensors"
METADATA = "rapid"
SIDE = 16
"""The network takes images whose side is a multiple of it, so that those of generators that pad fit: 28 becomes 32."""
TRAINED_ON_REAL = (
    "Not private: the network is trained on the real images without noise, and no guarantee covers it. Share it only "
    "if they are open data."
)


class Facts(BaseModel):
    """What the file says of its network.

    Attributes:
        rapid: version that trained it.
        kind: a key of `networks.CLASSIFIERS`.
        size: side of the images that it takes.
        channels: 1 for grey images, 3 for RGB.
        classes: their names.
        epochs: passes over the training images, of which the best by a held-out tenth was kept.
        train_source: name of the real training images.
        train_images: their number.
        test_source: name of the real test images.
        test_images: their number.
        test_accuracy: on the real test images, in [0, 1].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    rapid: str
    kind: str
    size: int = Field(ge=4, le=4096)
    channels: Literal[1, 3]
    classes: tuple[str, ...] = Field(min_length=1)
    epochs: int
    train_source: str
    train_images: int
    test_source: str
    test_images: int
    test_accuracy: float


@dataclass(frozen=True)
class Reference:
    """A reference network, as read from its file.

    Attributes:
        facts: what it is.
        space: its features and probabilities.
        file: name of the file.
        sha256: of the file.
    """

    facts: Facts
    space: FeatureSpace
    file: str
    sha256: str

    def describe(self) -> dict[str, Any]:
        """For the report, ready for JSON."""
        return {"file": self.file, "sha256": self.sha256, **self.facts.model_dump(mode="json")}


def check_target(path: Path) -> None:
    """Refuse an unusable target before any work is done.

    Raises:
        InputError: another suffix, the name of a folder or of an earlier file, or a place where nothing can be written.
    """
    if path.suffix != SUFFIX:
        raise InputError("save_features", f"give a name that ends in {SUFFIX}", path)
    if path.is_dir():
        raise InputError("save_features", "is a folder; choose another name", path)
    if path.exists():
        raise InputError("save_features", "exists already; choose another name, or remove it first", path)
    check_folder(path.parent, "save_features", path)


def train_reference(
    target: Path,
    train_real: Path,
    real: Path,
    device: torch.device,
    *,
    open_data: bool,
    kind: str = "small",
    epochs: int,
    label_column: str | None = None,
) -> Facts:
    """Train a network on real training images without noise, test it once, and write it to `target`.

    Args:
        target: see `check_target`.
        train_real: real training images with labels, of open data.
        real: real test images with labels.
        device: where to train.
        open_data: the caller confirms that `train_real` is open data.
        kind: a key of `networks.CLASSIFIERS`.
        epochs: passes over the training images, at least 1.
        label_column: of both sets; see `load_images`.

    Raises:
        InputError: data that is not confirmed to be open, sets that cannot be read or do not fit together, or an
            unknown kind.
    """
    check_target(target)
    if not open_data:
        problem = "no privacy guarantee covers a network trained on real images; add --open-data if they are open data"
        raise InputError("train_real", problem, train_real)
    if kind not in CLASSIFIERS:
        raise InputError("classifiers", f"with --save-features name one of {','.join(CLASSIFIERS)}", kind)
    if epochs < 1:
        raise InputError("epochs", "must be at least 1", epochs)
    train = load_images(train_real, "train_real", label_column=label_column, target=Canvas(kept=None))
    side = max(train.images.shape[1:3])
    test = load_images(real, "real", label_column=label_column, target=Canvas(side, side, shrinks=False))
    match_classes(train, test, "train_real")
    for images in (train, test):
        tell(images)
    form = ImageSettings(size=-(-side // SIDE) * SIDE, channels=1 if train.channels == 1 else 3)
    train, test = fit_images(train, form, "train_real"), fit_images(test, form, "real")
    trained = train_classifier(kind, train, device, "reference network", epochs, field="train_real")
    right = predict(trained.network, test.images, device) == match_classes(train, test)
    facts = Facts(
        rapid=rapid.__version__, kind=kind, epochs=epochs,
        size=form.size, channels=form.channels, classes=train.classes,
        train_source=Path(train.source).name, train_images=len(train),
        test_source=Path(test.source).name, test_images=len(test), test_accuracy=float(np.mean(right)),
    )  # fmt: skip
    with replacing(target) as path:
        write_weights(trained.network, path, {METADATA: facts.model_dump_json()})
    return facts


def load_reference(path: Path, device: torch.device) -> Reference:
    """Read a reference network.

    Raises:
        InputError: the file is missing, damaged or another one.
    """
    try:
        # safetensors calls a file missing that may not be read
        with path.open("rb"), safe_open(path, "pt") as stored:
            facts = Facts.model_validate_json((stored.metadata() or {})[METADATA])
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
        network = build(facts.kind, facts.channels, facts.size, len(facts.classes), device, 0)
        network.load_state_dict(weights)
    except PermissionError:
        raise InputError("features", DENIED, path) from None
    except (OSError, SafetensorError, KeyError, ValidationError, RuntimeError):
        problem = "is missing, damaged or not a file of rapid evaluate --save-features"
        raise InputError("features", problem, path) from None
    digest = content_hash(path)
    words = (
        f"the penultimate layer ({network.head.in_features} numbers) of the reference network {path.name} (sha256 "
        f"{digest[:12]}): a {CLASSIFIERS[facts.kind].title} trained for {facts.epochs} epochs on real training images "
        f"({facts.train_source}, {facts.train_images:,} images, open data), right on {facts.test_accuracy:.2%} of "
        f"{facts.test_source}. Comparable between reports that use this file; not FID."
    )
    space = FeatureSpace(network.eval(), words, device, ImageSettings(size=facts.size, channels=facts.channels))
    return Reference(facts, space, path.name, digest)


def check_fit(reference: Reference, path: Path, form: ImageSettings) -> None:
    """Refuse images that the network cannot take.

    Args:
        reference: the network.
        path: of its file, for the message.
        form: of the images.

    Raises:
        InputError: other channels, or larger images.
    """
    facts = reference.facts
    if form.channels != facts.channels:
        names = {1: "grey", 3: "RGB"}
        problem = f"takes {names[facts.channels]} images, and these are {names[form.channels]}"
        raise InputError("features", f"{problem}; make one with --save-features from such images", path)
    if form.size > facts.size:
        problem = f"takes images of at most {facts.size}x{facts.size}, and these are {form.size}x{form.size}"
        raise InputError("features", f"{problem}; make one with --save-features from such images", path)
