"""Reading a knowledge base: search its keys, fetch values and labels of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptKnowledgeBase, ForeignKnowledgeBase
from .files import sha256
from .keys import KeyIndex, Neighbours
from .manifest import KEYS, LABELS, VALUES, Manifest


class KnowledgeBase:
    """A finished knowledge base on disk; read-only, usable from several threads.

    Keys are in memory (as part of the faiss index; those of ivf are mapped), labels too; values stay on disk and are
    read on demand.

        knowledge_base = KnowledgeBase.open(path, networks={"encoder": sha256_of_encoder})
        found = knowledge_base.search(queries)
        latents = knowledge_base.values(found.indices[:, 0])

    Edge cases:

        queries of 0 rows                 answers of 0 rows
        query with NaN or infinity        counts as 0 in these places; see ``KeyIndex`` for why
        more neighbours than records      ValueError
        index below 0 or beyond the end   ValueError

    Attributes:
        manifest: what it holds.
        labels: int64 (size,), not writable.

    """

    def __init__(
        self, manifest: Manifest, keys: KeyIndex, values: NDArray[np.float32], labels: NDArray[np.int64]
    ) -> None:
        self.manifest = manifest
        self.labels = labels
        self._keys = keys
        self._values = values

    @classmethod
    def open(cls, path: Path, networks: Mapping[str, str] | None = None, *, verify: bool = True) -> KnowledgeBase:
        """Open the knowledge base in the folder ``path``.

        Lengths and headers of all files are checked, and the hashes of keys and labels, which are read anyway: faiss is
        not safe on altered files.

        Args:
            path: the folder.
            networks: sha256 by name of the networks it will be used with; must match the manifest.
            verify: also read the values once and check their hash. They are by far the largest file, and plain numbers:
                altered ones are other values, and cannot crash the process.

        Raises:
            ForeignKnowledgeBase: it was made by other networks; the message says which.
            CorruptKnowledgeBase: a file is missing, truncated, altered, or does not fit the manifest.
            KnowledgeBaseError: unknown format, or faiss is not installed.

        """
        path = Path(path)
        manifest = Manifest.read(path)
        if networks is not None:
            _check_networks(path, manifest, networks)
        _check_files(path, manifest, verify)
        labels = _load(path / LABELS, np.int64, (manifest.size,))
        values = _load(path / VALUES, np.float32, (manifest.size, *manifest.value_shape), memory_map=True)
        return cls(manifest, KeyIndex.read(path / KEYS, manifest), values, labels)

    def __len__(self) -> int:
        """Number of records."""
        return self.manifest.size

    def search(self, queries: NDArray[np.float32], neighbours: int = 1, *, exact: bool = False) -> Neighbours:
        """Find the records with the nearest keys.

        The answer for a query does not depend on the other queries, and no value of a query makes it fail: see
        ``KeyIndex`` for these guarantees.

        Args:
            queries: float32 (n, key_dim); n may be 0.
            neighbours: m, records to find for each query, 1 <= m <= size.
            exact: compare with every key, whatever the index; much slower.

        Returns:
            ``Neighbours``: indices int64 (n, m) and distances float32 (n, m), squared l2, nearest first.

        Raises:
            ValueError: wrong shape, dtype or number of neighbours; the message names the argument.

        """
        return self._keys.search(queries, neighbours, exact=exact)

    def recall(self, queries: NDArray[np.float32], neighbours: int = 10) -> float:
        """Share of the nearest keys that ``search`` finds, as the mean over queries; 1 for ``flat``.

        Args:
            queries: float32 (n, key_dim), n >= 1, that are not among the keys.
            neighbours: how many are wanted of each, 1 <= neighbours <= size.

        Raises:
            ValueError: no queries, or as for ``search``.

        """
        if not len(queries):
            raise ValueError("queries must not be empty")
        found, wanted = (self.search(queries, neighbours, exact=exact).indices for exact in (False, True))
        hits = [np.isin(one, other).mean() for one, other in zip(wanted, found, strict=True)]
        return float(np.mean(hits))

    def flat_keys(self) -> NDArray[np.float32] | None:
        """The keys of a ``flat`` index, float32 (size, key_dim); None for the others. Not to be changed."""
        return self._keys.flat()

    def copy_index_to(self, move: Callable[[Any], Any]) -> None:
        """Search a copy of the faiss index, made by `move`, on another device; only for ``ivf``."""
        self._keys.copy_to(move)

    def values(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Fetch values, copied out of the memory map; only the rows asked for are read from disk.

        Args:
            indices: integers of any shape, each in 0..size-1.

        Returns:
            float32 (*indices.shape, *value_shape), free to be changed.

        Raises:
            ValueError: ``indices`` are not integers or out of range.

        """
        indices = np.asarray(indices)
        if not np.issubdtype(indices.dtype, np.integer):
            raise ValueError(f"indices must be integers, not {indices.dtype}")
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise ValueError(f"indices must be in 0..{len(self) - 1}, found {indices.min()}..{indices.max()}")
        return np.take(np.asarray(self._values), indices.astype(np.int64), axis=0)


def _check_networks(path: Path, manifest: Manifest, networks: Mapping[str, str]) -> None:
    for name in sorted({*manifest.networks, *networks}):
        made_by, given = manifest.networks.get(name, "none"), networks.get(name, "none")
        if made_by != given:
            raise ForeignKnowledgeBase(
                f"{path}: made by another network {name!r} (sha256 {made_by[:12]}, given {given[:12]}): "
                "use the networks it was made by, or build it again"
            )


def _check_files(path: Path, manifest: Manifest, verify: bool) -> None:
    """Check that all files are there at full length, and then their hashes, that of the values if ``verify``."""
    for name, expected in manifest.sizes.items():
        if not (path / name).is_file():
            raise CorruptKnowledgeBase(f"{path / name}: missing: copy the whole folder again or build it again")
        size = (path / name).stat().st_size
        if size != expected:
            raise CorruptKnowledgeBase(f"{path / name}: {size} bytes, not {expected}: copy it again or build it again")
    for name, digest in manifest.files.items():
        if (verify or name != VALUES) and sha256(path / name) != digest:
            raise CorruptKnowledgeBase(f"{path / name}: altered (its sha256 differs): copy it again or build it again")


def _load(path: Path, dtype: type[np.generic], shape: tuple[int, ...], memory_map: bool = False) -> NDArray[Any]:
    """Read or map an ``.npy`` file, read-only; CorruptKnowledgeBase unless it has this dtype and shape."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r" if memory_map else None, allow_pickle=False)
    except (ValueError, EOFError, SyntaxError) as error:
        raise CorruptKnowledgeBase(
            f"{path}: not an .npy file ({' '.join(str(error).split())}): build it again"
        ) from error
    if array.dtype != dtype or array.shape != shape:
        raise CorruptKnowledgeBase(
            f"{path}: holds {array.dtype} {array.shape}, the manifest says {np.dtype(dtype)} {shape}: build it again"
        )
    array.flags.writeable = False
    return array
