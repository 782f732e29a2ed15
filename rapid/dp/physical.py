"""`private.physical_batch=auto`: as many draws at a time as fit in memory, measured on black images.

Shapes, the network and free memory decide. No private row is read. Free memory is not wholly public: private images
were read before, and what large originals took may not be free again. The physical batch changes the order in which
numbers are added, and so the last bits of a sum before its noise, as the other images of a batch do; the margin for
rounding is for both (`rapid.dp.gradients.forms.ROUNDING_MARGIN`). It also changes how long a step takes, even with
padded batches. If people are the units, how many images they have takes memory, too, so
`rapid.stages.setup.check_pieces` refuses it.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rapid.dp.gradients import BookKeeper
from rapid.dp.objective import as_objective
from rapid.dp.releases import DpSgdSpec
from rapid.dp.rows import PrivateTensor, Rows, black
from rapid.recording import records

SHARE = 0.6
"""Of the free memory; the rest is for fragments, for choices of algorithms that depend on the size, and for others."""
LARGEST, LARGEST_ON_CPU = 4096, 512
"""Draws at a time beyond which nothing becomes faster; on CPUs caches are what fills up first."""
FEW, MORE = 1, 4
"""Examples of the two measurements; memory is taken to grow linearly."""


def measured_physical_batch(
    network: nn.Module,
    losses: Rows,
    data: Sequence[PrivateTensor],
    spec: DpSgdSpec,
    *,
    autocast: bool = False,
) -> int:
    """Draws at a time for a training.

    Args:
        network: the network that is trained, on its device.
        losses: as for `PrivateAccess.train`.
        data: only shapes and dtypes are used.
        spec: of the release.
        autocast: as for `PrivateMechanism`.
    """
    with warnings.catch_warnings():
        # the mechanism warns of slow layers
        warnings.simplefilter("ignore")
        keeper = BookKeeper(network)
    device = keeper.parameters[0].device

    objective = as_objective(losses)

    def step(examples: int) -> None:
        prepared = objective.prepare(*black(data, examples * spec.multiplicity))
        keeper.clipped_sum(
            lambda: objective.computed(prepared, device, autocast=autocast),
            examples,
            spec.clip_norm,
            multiplicity=spec.multiplicity,
        )

    if device.type == "cuda":
        # recordings of earlier trainings
        gc.collect()
        torch.cuda.empty_cache()

    step(FEW)  # what is allocated once, such as workspaces, does not count
    # recorded kernels keep their memory while a batch of another size is computed without them
    held = 2 if objective.recordable and keeper.recordable and records(device) else 1
    return fitting_batch(
        lambda examples: peak_bytes(lambda: step(examples), device),
        available_bytes(device) // held,
        spec.multiplicity,
        LARGEST_ON_CPU if device.type == "cpu" else LARGEST,
    )


def fitting_batch(peak: Callable[[int], int], available: int, multiplicity: int, largest: int) -> int:
    """The largest power of two of draws that fits, at least 1.

    Args:
        peak: examples at a time -> bytes.
        available: bytes that are free.
        multiplicity: draws of an example.
        largest: most draws.
    """
    few, more = peak(FEW), peak(MORE)
    each = max(1.0, (more - few) / (MORE - FEW))
    usable = SHARE * available - max(0.0, few - FEW * each)
    # a part of one example's draws at a time where not all of them fit
    draws = int(multiplicity * usable / each)
    return 1 << (max(1, min(draws, largest)).bit_length() - 1)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Largest sum of tensors that `run` allocates."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        most: int = torch.cuda.max_memory_allocated(device) - before
        return most
    allocations = _Allocations()
    with allocations:
        run()
    return allocations.most


class _Allocations(TorchDispatchMode):
    """Adds up the memory of tensors while they live; torch's profiler could, but writes to the terminal.

    Attributes:
        most: bytes, the largest sum so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            # a view of what was there before adds nothing
            if (key := storage._cdata) not in given and key not in self._alive:
                self._alive[key] = weakref.ref(storage, partial(self._freed, key, storage.nbytes()))
                self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        return result

    def _freed(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self._now -= size


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still take: of the device, or of the machine or container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if (file := Path("/proc/meminfo")).exists():
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(0, free)
