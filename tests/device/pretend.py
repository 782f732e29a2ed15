"""A device for tests that have no GPU: its tensors say that they are on `DEVICE`, and hold their numbers on the CPU.

It follows CUDA's rules of mixing, so that a tensor on the wrong device raises an error here as it would there, and it
counts kernels and synchronisations. It says nothing of time or of rounding. It is torch's PrivateUse1 backend: autograd
and autocast treat it as an accelerator. Naming that backend is for the whole process, so `install` is called only in
processes of their own (see `device.child`).
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import torch

# imported here, because the first backward pass would import it in the thread of the device, and wait for itself
import torch._dynamo
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "pretend"
ROOT = Path(__file__).parents[2]
OWN = tuple(str(ROOT / folder) for folder in ("rapid", "index", "server"))

SYNCHRONISING = {
    "_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "histc", "_linalg_check_errors",
}  # fmt: skip
"""Operations whose result the host waits for."""
WITHOUT_KERNEL = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh",
    "_unsafe_view", "resize_", "set_", "_local_scalar_dense",
}  # fmt: skip
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
FACTORIES = (
    "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace", "randperm",
    "randperm.generator", "tril_indices", "triu_indices",
)  # fmt: skip
"""Made as a whole: torch's own kernels would resize an empty tensor, which a wrapper cannot follow."""
IN_BFLOAT16 = ("linear", "conv2d", "matmul", "bmm", "addmm", "mm", "baddbmm", "scaled_dot_product_attention")
"""What autocast runs in bfloat16 here; on CUDA it is more."""


class WrongDeviceError(RuntimeError):
    """Tensors of several devices in one operation."""


@dataclass
class Counts:
    """What was done on the device.

    Attributes:
        kernels: number of kernels by operation.
        waits: how often the host waited, by reason and by the line of the project that waited.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        parts = (("kernels", self.kernels), ("waits", self.waits))
        return "\n".join(f"{title}: {c.total()}: {c.most_common(40)}" for title, c in parts)


_counting: list[Counts] = []


@contextmanager
def counting() -> Iterator[Counts]:
    """Count within the block, in all threads."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


class PretendTensor(Tensor):
    """A tensor on the device.

    Attributes:
        held: the same numbers, on the CPU.
    """

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
        )
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, operation: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})

    def __repr__(self) -> str:
        return f"PretendTensor({self.held!r})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # as a tensor of CUDA that is loaded with map_location="cpu"
        return self.held.detach().__reduce_ex__(protocol)

    def numpy(self, *args: Any, **kwargs: Any) -> Never:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy; use Tensor.cpu() first")

    def __array__(self, *args: Any, **kwargs: Any) -> Never:
        self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()


class _Module:
    """What torch asks a backend for, as `torch.pretend`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_libraries: list[torch.library.Library] = []
_broken: list[bool] = []


def break_down() -> None:
    """From now on every operation on the device fails, as after an illegal access to a GPU's memory."""
    _broken.append(True)


def install() -> torch.device:
    """Make the device known to torch, for the rest of the process, and return it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    torch.tensor = _tensor
    # optimisers use the operations on lists only for types that they know
    _foreach_supported_types.append(PretendTensor)
    everything = torch.library.Library("_", "IMPL", "PrivateUse1")
    everything.fallback(lambda operation, *args, **kwargs: _run(operation, args, kwargs))
    factories = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in FACTORIES:
        operation = _overload(name)
        factories.impl(name, lambda *args, _operation=operation, **kwargs: _run(_operation, args, kwargs))
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in IN_BFLOAT16:
        casts.impl(name, _in_bfloat16(_overload(name)))
    _libraries.extend((everything, factories, autocast, casts))
    return torch.device(NAME, 0)


_tensor_of_torch = torch.tensor


def _tensor(data: Any, *, device: torch.device | str | None = None, **options: Any) -> Tensor:
    """`torch.tensor`, which would move its result past the dispatcher."""
    made = _tensor_of_torch(data, **options)
    return made if device is None else made.to(device)


def _overload(name: str) -> OpOverload:
    base, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(aten, base), overload or "default")
    return found


def _in_bfloat16(operation: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(torch.bfloat16) if floating else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _run(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check, count, and run an operation on what the tensors hold."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    on = [one for one in tensors if isinstance(one, PretendTensor)]
    chosen = kwargs.get("device")
    here = bool(on) if chosen is None else torch.device(chosen).type == NAME
    if _broken and (on or here):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    _check(operation, args, kwargs, tensors, here)
    if _counting:
        _count(operation, args, kwargs, on, here)
    inner = dict(kwargs)
    if chosen is not None:
        inner["device"] = torch.device("cpu")
    inner.pop("pin_memory", None)
    out = operation(*tree_map(_held, args), **tree_map(_held, inner))
    if not here:
        return out
    out = tree_map(lambda one: PretendTensor(one) if type(one) is Tensor else one, out)
    if on and any(returned.alias_info is not None for returned in operation._schema.returns):
        return return_and_correct_aliasing(operation, args, kwargs, out)
    return out


def _held(value: Any) -> Any:
    return value.held if isinstance(value, PretendTensor) else value


def _name(operation: OpOverload) -> str:
    return str(operation._schema.name).split("::")[1]


def _is_view(operation: OpOverload) -> bool:
    returns = operation._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _check(
    operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], here: bool
) -> None:
    """CUDA's rules: all tensors on the device, except copies, indices, and numbers of pointwise operations."""
    name = _name(operation)
    if here and isinstance(kwargs.get("generator"), torch.Generator):
        raise WrongDeviceError(f"{name}: a generator of the CPU cannot draw on {NAME}")
    off = [one for one in tensors if not isinstance(one, PretendTensor)]
    if not off or len(off) == len(tensors) or name in ("copy_", "_to_copy"):
        return
    target = args[0] if args else None
    if name in INDEXING:
        values = args[2:3]
        if isinstance(target, PretendTensor) and not any(_is_array_of_cpu(value) for value in values):
            return
    elif torch.Tag.pointwise in operation.tags or name.startswith("_foreach"):
        # a CPU's number may join, but a CPU's tensor is never written to
        first = tree_leaves(target)[0]
        if not any(_is_array_of_cpu(one) for one in off) and not (operation._schema.is_mutable and first in _ids(off)):
            return
    found = [(tuple(one.shape), str(one.dtype), one.device.type) for one in tensors]
    raise WrongDeviceError(f"{name}: expected all tensors on the same device, found {found}")


def _is_array_of_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, PretendTensor) and value.dim() > 0


class _ids:  # noqa: N801
    """Membership by identity: comparing tensors would compute."""

    def __init__(self, values: list[Tensor]) -> None:
        self._values = {id(value) for value in values}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._values


def _count(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], on: list[Tensor], here: bool) -> None:
    name, reason = _name(operation), ""
    if name == "_to_copy" and bool(on) != here:
        reason = "copy to the host" if on else "copy to the device"
    elif name == "copy_" and isinstance(args[0], PretendTensor) != isinstance(args[1], PretendTensor):
        reason = "copy to the device" if isinstance(args[0], PretendTensor) else "copy to the host"
    elif name in INDEXING and on:
        indices = [one for one in args[1] if one is not None]
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
            reason = "index by a mask"
        elif any(not isinstance(one, PretendTensor) for one in indices):
            reason = "index of the host"
    elif on and (name in SYNCHRONISING or operation is aten.repeat_interleave.Tensor):
        reason = name
    copied = reason.startswith("copy")
    launched = here and bool(on) and not copied and name not in WITHOUT_KERNEL and not _is_view(operation)
    launched |= here and not on and name.split("_")[0] in {"arange", "eye", "linspace", "randperm", "triu", "tril"}
    for counts in _counting:
        with counts.lock:
            if launched:
                counts.kernels[name] += 1
            if reason:
                counts.waits[f"{reason} @ {_site()}"] += 1


def _site() -> str:
    """The innermost line of the project on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(OWN):
            return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
    return "elsewhere"
