"""Lines of `metadata.jsonl`, by which Hugging Face's `imagefolder` knows the class of each image of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

METADATA = "metadata.jsonl"
"""Name of the file."""
SOFT_LABELS = "soft_labels"
"""Name of the object, array or column with the probabilities of the classes."""


def metadata_line(file_name: str, label: str, classes: Sequence[str], chances: NDArray[np.float32] | None) -> str:
    """A line of `metadata.jsonl`.

    Args:
        file_name: of the image, from the folder of `metadata.jsonl` on, with slashes.
        label: name of its class.
        classes: class names.
        chances: probabilities of the classes, float32 (classes,); None if they are not written.
    """
    line: dict[str, Any] = {"file_name": file_name, "label": label}
    if chances is not None:
        # the shortest text of the same float32
        line[SOFT_LABELS] = {name: float(str(chance)) for name, chance in zip(classes, chances, strict=True)}
    return json.dumps(line, ensure_ascii=False) + "\n"
