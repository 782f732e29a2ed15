"""Rows of private examples, and functions that are applied to them one example at a time, in full float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rapid import mapped
from rapid.errors import PrivacyRefused
from rapid.precision import exact_float32
from rapid.progress import Progress
from rapid.stopping import check_stop

Rows = Callable[..., Tensor]
"""(rows of each private tensor, (n, ...)) -> (n, ...): row i depends only on row i of each tensor."""
BATCH = 500
SAME = 1e-3
"""Tolerance between a row computed alone and the same row in a batch, relative to the largest number."""
MIXES = "mixes examples: a row alone differs from the same row in a batch"


class PrivateTensor:
    """One row for each private image of this process; only `rapid.dp` reads the rows."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        # without their number, which is private if people are the units
        return f"PrivateTensor(rows of {tuple(self._rows.shape[1:])})"

    def __reduce__(self) -> str:
        raise PrivacyRefused("private rows cannot be pickled")


def take(tensors: Sequence[PrivateTensor], indices: Tensor) -> list[Tensor]:
    """Some rows of each tensor; indices int64 (n,), on any device. Private."""
    mapped.release()
    return [tensor._rows[indices.to(tensor._rows.device)] for tensor in tensors]


def apply(
    function: Rows, tensors: Sequence[PrivateTensor], *, title: str = "", shown: bool = True, alone: bool = False
) -> Tensor:
    """All rows of a function's result, (n, ...), at once; see `applied`. Private."""
    result = mapped.Rows(len(tensors[0]))
    for found in applied(function, tensors, title=title, shown=shown, alone=alone):
        result.append(found)
    return result.all


def applied(
    function: Rows,
    tensors: Sequence[PrivateTensor],
    *,
    title: str = "",
    shown: bool = True,
    alone: bool = False,
    shape: tuple[int, ...] | None = None,
) -> Iterator[Tensor]:
    """The rows of a function's result, (m, ...) at a time, in their order. Private.

    Args:
        function: see `Rows`.
        tensors: their rows are the arguments of the function; at least one, all with n rows. If n is 0, there is one
            part without rows.
        title: shown with the progress; if it is empty, no progress is shown.
        shown: whether this process shows progress.
        alone: compute each row by itself, so that its last bits do not depend on which rows there are; slow.
        shape: of a row of the result, if it is known.

    Raises:
        ValueError: the function mixes examples, as batch normalisation does, or does not return one row per example, or
            rows of another shape.
        Stopped: a stop was requested.
    """
    count, together = len(tensors[0]), 1 if alone else BATCH
    if not count:
        # normalisation layers reject empty batches, so a black image gives the shape
        yield _computed(function, black(tensors))[:0]
    with Progress(title, count, "image", shown=shown and bool(title)) as progress:
        for start in range(0, count, together):
            check_stop()
            rows = [tensor._rows[start : start + together] for tensor in tensors]
            found = _computed(function, rows)
            if start == 0:
                check_rows(function, rows, found)
            if shape is not None and found.shape[1:] != shape:
                # without the shapes, which may tell of the images
                raise ValueError("the function must return rows of the same shape for all images, also a black one")
            yield found
            mapped.release()
            progress.advance(len(rows[0]))


def apply_scalar(function: Rows, tensors: Sequence[PrivateTensor], *, title: str = "", shown: bool = True) -> Tensor:
    """One value per example, (n,): with several, one image could change a count by more than 1; see `apply`."""
    values = apply(function, tensors, title=title, shown=shown)
    if values.ndim != 1:
        raise ValueError(f"the function must return one value per example, not {tuple(values.shape[1:])}")
    return values


def row_shape(function: Rows, tensors: Sequence[PrivateTensor]) -> tuple[int, ...]:
    """The shape of one row of a function's result; public, because it is computed from a black image."""
    return tuple(_computed(function, black(tensors)).shape[1:])


def black(tensors: Sequence[PrivateTensor], count: int = 1) -> list[Tensor]:
    """Rows of zeros for each tensor, (count, ...); public."""
    return [tensor._rows.new_zeros((count, *tensor._rows.shape[1:])) for tensor in tensors]


@torch.no_grad()
@exact_float32()
def _computed(function: Rows, rows: Sequence[Tensor]) -> Tensor:
    return function(*rows)


def random_rows(tensors: Sequence[PrivateTensor], count: int) -> list[Tensor]:
    """Rows for each tensor, (count, ...): random numbers, and zeros where they are labels or positions; public."""
    generator = torch.Generator().manual_seed(0)
    rows = black(tensors, count)
    for one in rows:
        if one.is_floating_point():
            one.copy_(torch.randn(one.shape, generator=generator))
        elif one.dtype == torch.uint8:
            one.copy_(torch.randint(0, 256, one.shape, generator=generator))
    return rows


def check_rows(function: Rows, rows: Sequence[Tensor], result: Tensor, name: str = "function") -> None:
    """Check that the function gives the same result for the first, the last and a middle row alone as in the batch.

    Args:
        function: see `Rows`.
        rows: its arguments, n >= 1 rows each.
        result: what it returned for them.
        name: of the function in messages.

    Raises:
        ValueError: it mixes examples, or does not return one row per example.
    """
    if result.ndim == 0 or len(result) != len(rows[0]):
        raise ValueError(f"the {name} must return one row per example")
    # some mixing leaves the first row as it is, such as differences from it, or sums up to each row
    for number in sorted({0, len(result) // 2, len(result) - 1}):
        alone = _computed(function, [part[number : number + 1] for part in rows])
        together = result[number : number + 1]
        if alone.shape != together.shape:
            raise ValueError(f"the {name} must return one row per example, of the same shape for all")
        if not alike(alone, together):
            raise ValueError(f"the {name} {MIXES}")


def alike(alone: Tensor, together: Tensor) -> bool:
    """Whether what a function returned for a row alone and for the same row in a batch, (1, ...) each, is the same."""
    if alone.shape != together.shape or not alone.is_floating_point():
        return torch.equal(alone, together)
    tolerance = SAME * max(1.0, float(together.abs().max())) if together.numel() else SAME
    return torch.allclose(alone, together, rtol=0, atol=tolerance, equal_nan=True)
