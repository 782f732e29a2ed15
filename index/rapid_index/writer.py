"""Writing a knowledge base: streamed to a hidden folder, moved into place when it is complete."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from .errors import KnowledgeBaseError
from .files import NpyFile, fsync, sha256
from .key_writer import KeyWriter
from .keys import LARGEST
from .manifest import KEYS, LABELS, MANIFEST, VALUES, IndexType, Layout, Manifest, explain


class KnowledgeBaseWriter:
    """Writes a knowledge base, batch by batch, in bounded memory.

    Values and labels go straight to disk, and so do the keys unless the index is ``hnsw``: see ``KeyWriter``. The
    writer is a context manager: the knowledge base appears at ``path``, complete and flushed to disk, when the block
    succeeds. If the block raises, nothing is left. A process that is killed leaves a hidden folder
    ``.NAME.partial-PID-...`` beside ``path``, which can be deleted.

        with KnowledgeBaseWriter(path, key_dim=64, value_shape=(4, 8, 8), k=600, v=200, timesteps=1000,
                                 networks={"encoder": sha256_of_encoder}) as writer:
            for keys, values, labels in batches:
                writer.append(keys, values, labels)

    Args:
        path: folder to create; it must not exist, but its parent must.
        key_dim: length d of a key.
        value_shape: shape of one value.
        k: diffusion step of the keys.
        v: diffusion step of the values, 1 <= v < k.
        timesteps: length T of the diffusion, k <= T.
        networks: sha256 (64 hex digits) of the networks that make the records, by name.
        index_type: ``flat`` (exact), ``hnsw`` or ``ivf``.

    Raises:
        ValueError: an argument is wrong; the message names it.
        KnowledgeBaseError: ``path`` exists, or its parent is missing.

    """

    def __init__(
        self,
        path: Path,
        *,
        key_dim: int,
        value_shape: tuple[int, ...],
        k: int,
        v: int,
        timesteps: int,
        networks: Mapping[str, str],
        index_type: IndexType = "flat",
    ) -> None:
        try:
            self._layout = Layout(
                key_dim=key_dim,
                value_shape=tuple(value_shape),
                k=k,
                v=v,
                timesteps=timesteps,
                networks=dict(networks),
                index_type=index_type,
            )
        except ValidationError as error:
            raise ValueError(explain(error)) from None
        self._path = Path(path).absolute()
        self._partial = self._path.with_name(f".{self._path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        self._keys = KeyWriter(index_type, key_dim)
        self._files: tuple[NpyFile, NpyFile] | None = None  # values and labels, while the block runs
        self._broken = False
        self._refuse_taken_path()
        if not self._path.parent.is_dir():
            raise KnowledgeBaseError(f"{self._path}: the folder {self._path.parent} does not exist: create it first")

    @property
    def size(self) -> int:
        """Number of records appended so far."""
        return self._keys.size

    def append(self, keys: NDArray[np.float32], values: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        """Append n records; row i of the three arrays is one record. All are checked before any is written.

        Args:
            keys: float32 (n, key_dim), |key| at most 1e15; n may be 0.
            values: float32 (n, *value_shape), finite.
            labels: int64 (n,), any numbers.

        Raises:
            ValueError: wrong shape, dtype or not finite; nothing is appended and the writer stays usable.
            RuntimeError: called outside the ``with`` block.
            OSError: the disk failed; the writer then refuses to commit.

        """
        if self._files is None:
            raise RuntimeError("append works inside the with block of a KnowledgeBaseWriter only")
        _check("keys", keys, np.float32, (self._layout.key_dim,))
        _check("values", values, np.float32, self._layout.value_shape)
        _check("labels", labels, np.int64, ())
        if not len(keys) == len(values) == len(labels):
            raise ValueError(f"keys, values and labels differ in length: {len(keys)}, {len(values)}, {len(labels)}")
        if not (np.abs(keys) <= LARGEST).all():
            raise ValueError(f"keys must be finite and at most {LARGEST:g} in size")
        if not np.isfinite(values).all():
            raise ValueError("values must be finite")
        broken_before, self._broken = self._broken, True
        self._files[0].append(values)
        self._files[1].append(labels)
        self._keys.add(keys)
        self._broken = broken_before

    def __enter__(self) -> Self:
        if self._broken or self._files is not None or self.size:
            raise RuntimeError("a KnowledgeBaseWriter writes one knowledge base: make another one")
        self._partial.mkdir()
        try:
            values = NpyFile(self._partial / VALUES, self._layout.value_shape, np.float32)
            self._files = values, NpyFile(self._partial / LABELS, (), np.int64)
            self._keys.begin(self._partial / KEYS)
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._clean_up()

    def _commit(self) -> None:
        """Complete the files, write the manifest, flush all to disk and move them into place.

        Raises:
            KnowledgeBaseError: no records, an earlier append failed, or the path has been created meanwhile.

        """
        if self._broken:
            raise KnowledgeBaseError(f"{self._path}: not written, because an append failed half-way: build it again")
        if not self.size:
            raise KnowledgeBaseError(f"{self._path}: not written, because no records were appended")
        for file in self._files or ():
            file.finish()
        self._keys.finish()
        paths = [self._partial / name for name in (KEYS, VALUES, LABELS)]
        manifest = Manifest(
            **self._layout.model_dump(),
            size=self.size,
            files={path.name: sha256(path) for path in paths},
            sizes={path.name: path.stat().st_size for path in paths},
        )
        paths.append(self._partial / MANIFEST)
        paths[-1].write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        for path in (*paths, self._partial):
            fsync(path)
        self._refuse_taken_path()
        self._partial.rename(self._path)
        fsync(self._path.parent)

    def _refuse_taken_path(self) -> None:
        if os.path.lexists(self._path):
            raise KnowledgeBaseError(f"{self._path}: exists, and is not overwritten: remove it or choose another path")

    def _clean_up(self) -> None:
        """Close what is open and remove the partial folder, if it has not been moved into place."""
        for file in self._files or ():
            with suppress(OSError):  # a full disk; unwritten data is discarded here anyway
                file.close()
        self._keys.close()
        self._files, self._broken = None, True
        shutil.rmtree(self._partial, ignore_errors=True)


def _check(name: str, array: NDArray[Any], dtype: type[np.generic], row_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``array`` is a numpy array of ``dtype`` and shape (n, *row_shape)."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} must be a numpy array of {np.dtype(dtype)}, not {found}")
    if array.ndim < 1 or array.shape[1:] != row_shape:
        expected = ", ".join(("n", *map(str, row_shape)))
        raise ValueError(f"{name} must have shape ({expected}), not {array.shape}")
