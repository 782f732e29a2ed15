"""Float32 that keeps all of its digits: torch's settings for shorter products, switched off for the time of a block.

On GPUs convolutions take the ten bits of TF32 by default; a caller can choose as much for matrix products, and bfloat16
on CPUs. That is too coarse for what must not depend on the batch: sums of clipped gradients, and images of a seed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

EXACT = "ieee"
_BACKENDS, _OPERATIONS = ("cuda", "mkldnn"), ("matmul", "conv", "rnn")
_SETTINGS = (
    ("generic", "all"),
    *((backend, "all") for backend in _BACKENDS),
    *((backend, operation) for backend in _BACKENDS for operation in _OPERATIONS),
)
"""From the general to the special one: a setting that is "none" takes the value of the one before it."""
_ERRORS = {"tf32": 2.0**-10, "bf16": 2.0**-7}

_lock = threading.Lock()
_inside = 0
_changed: list[tuple[tuple[str, str], str]] = []


@contextmanager
def exact_float32() -> Iterator[None]:
    """Within the block, products of float32 are computed in float32, whichever of torch's settings the caller has used.

    Also a decorator. The settings are those of the process: with several threads within such blocks, they come back
    when the last one leaves.
    """
    global _inside  # noqa: PLW0603 - the settings are of the process, too
    with _lock:
        _inside += 1
        for setting in _SETTINGS:
            # what follows a setting that was changed before it is exact by now, and stays as it is
            if (value := _precision(*setting)) != EXACT:
                _changed.append((setting, value))
                torch._C._set_fp32_precision_setter(*setting, EXACT)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            while not _inside and _changed:
                setting, value = _changed.pop()
                torch._C._set_fp32_precision_setter(*setting, value)


def float32_error(device: torch.device) -> float:
    """The relative error of a product of float32 on a device, by torch's settings now."""
    backend = "mkldnn" if device.type == "cpu" else "cuda"
    found = {_precision(backend, operation) for operation in _OPERATIONS}
    return max(_ERRORS.get(value, torch.finfo(torch.float32).eps) for value in found)


def _precision(backend: str, operation: str) -> str:
    # not by `torch.backends`: it has no name for the setting of all of mkldnn
    value: str = torch._C._get_fp32_precision_getter(backend, operation)
    return value
