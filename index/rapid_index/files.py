"""Files on disk: growing ``.npy`` files, hashes, and writes that survive a power cut."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sha256(path: Path) -> str:
    """Hash of a file as 64 hex digits; read in blocks, never held in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NpyFile:
    """An ``.npy`` file that grows row by row, for ``np.load(path, mmap_mode="r")`` once it is closed.

    The header holds the number of rows, which is known only at the end: a header for 0 rows is written first and
    overwritten by ``finish``. numpy pads headers so that the first axis can grow in place.
    """

    def __init__(self, path: Path, row_shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self.rows = 0
        self._row_shape = row_shape
        self._dtype = np.dtype(dtype)
        self._file = path.open("xb")
        self._write_header()
        self._header_length = self._file.tell()

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows of shape (n, *row_shape) after the previous ones; only a non-contiguous array is copied."""
        if rows.dtype != self._dtype or rows.shape[1:] != self._row_shape:
            raise ValueError(
                f"rows must be {self._dtype} of shape (n, *{self._row_shape}), not {rows.dtype} {rows.shape}"
            )
        if len(rows):
            self._file.write(np.ascontiguousarray(rows).data)
        self.rows += len(rows)

    def finish(self) -> None:
        """Write the true header and flush; the file is complete afterwards."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._header_length:
            raise RuntimeError(f"{self._file.name}: numpy {np.__version__} left no room in the header of an .npy file")
        self._file.close()

    def _write_header(self) -> None:
        shape = (self.rows, *self._row_shape)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def close(self) -> None:
        """Close the file; it is unusable unless ``finish`` was called before."""
        self._file.close()
