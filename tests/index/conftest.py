# No __init__.py here: a package called index under tests/ would hide the one under test.
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rapid_index import KnowledgeBaseWriter

NETWORKS = {"autoencoder": "a" * 64, "denoiser": "d" * 64, "encoder": "e" * 64}
SETTINGS: dict[str, Any] = {"k": 600, "v": 200, "timesteps": 1000, "networks": NETWORKS}


@pytest.fixture
def settings() -> dict[str, Any]:
    return dict(SETTINGS)


@pytest.fixture
def networks() -> dict[str, str]:
    return dict(NETWORKS)


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """Writes a knowledge base of the given keys; value i is filled with i, label i is i % 10 unless given."""

    def write(path: Path, keys: Any, values: Any = None, labels: Any = None, batch: int = 1000, **changes: Any) -> Path:
        keys = np.asarray(keys, np.float32)
        if values is None:
            values = np.broadcast_to(np.arange(len(keys), dtype=np.float32)[:, None, None], (len(keys), 2, 3)).copy()
        labels = np.arange(len(keys), dtype=np.int64) % 10 if labels is None else labels
        options = {**SETTINGS, "key_dim": keys.shape[1], "value_shape": values.shape[1:], **changes}
        with KnowledgeBaseWriter(path, **options) as writer:
            for start in range(0, len(keys), batch):
                rows = slice(start, start + batch)
                writer.append(keys[rows], values[rows], labels[rows])
        return path

    return write


@pytest.fixture(scope="session")
def clusters() -> Callable[..., np.ndarray]:
    """Keys in well separated clusters, in random order."""

    def draw(count: int, dim: int, centres: int = 40, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        middle = 4 * rng.standard_normal((centres, dim))
        return (middle[rng.integers(0, centres, count)] + 0.3 * rng.standard_normal((count, dim))).astype(np.float32)

    return draw
