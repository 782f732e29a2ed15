"""The small real image sets that ship with rapid; samples/README.md lists their sources."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal


def sample_path(name: Literal["letters", "digits"]) -> Path:
    """Path of a bundled `.npz`: `letters` (10,000 handwritten letters A to M) or `digits` (10,000 MNIST digits)."""
    return Path(str(resources.files("rapid") / "data" / "samples" / f"{name}.npz"))
