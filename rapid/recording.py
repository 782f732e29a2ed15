"""Work on a GPU that is recorded once and replayed (CUDA graphs).

The host needs some microseconds to start each kernel. A small network has hundreds of kernels that take less time than
that, and the GPU waits. A recording starts all of them at once, with the same results.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

Results = Sequence[Tensor]
Work = Callable[[], Results]
Capture = Callable[[Work], Work]
"""Records work without doing it, and returns what does it, with results at the same places each time."""
OFF = "RAPID_CUDA_GRAPHS"
"""Environment variable: 0 switches recordings off."""
SIZES = 4
"""Sizes of batches between one power of two and the next; at most a quarter of a batch is padding."""
MOST_DROPS = 3
"""How often recordings make room for what does not fit beside them, until nothing is recorded any more."""


class Recorder:
    """Calls a function of tensors; on a GPU its kernels are recorded when arguments of a shape come for a second time.

    A function that cannot be recorded, say because it waits for the GPU, is called each time instead.

    Args:
        function: of tensors to new tensors; it changes nothing, and keeps nothing of its owner alive. It may use other
            tensors, such as weights, which must stay where they are and outlive the recorder; they may change in place.
            By the shapes of its arguments it always does the same: it reads no number on the host, draws none there,
            and copies nothing from there.
        device: of all tensors; none but a CUDA device is recorded.
        capture: how, for tests; by default as a CUDA graph.
    """

    def __init__(self, function: Callable[..., Results], device: torch.device, capture: Capture | None = None) -> None:
        self._function = function
        self._device = device
        self._graphs = capture is None and records(device)
        self._capture = cuda_graphs(device) if self._graphs else capture
        self._held: dict[tuple[object, ...], tuple[Results, Work] | None] = {}
        self._dropped = 0

    @property
    def recordings(self) -> int:
        """How many shapes are replayed."""
        return sum(held is not None for held in self._held.values())

    def __call__(self, *arguments: Tensor) -> Results:
        """The results of the function, tensors of their own."""
        if self._capture is None or any(argument.device != self._device for argument in arguments):
            return self._function(*arguments)
        key = tuple((argument.shape, argument.dtype) for argument in arguments)
        try:
            return self._results(key, arguments)
        except torch.OutOfMemoryError:
            if not self.recordings:
                raise
        # what is recorded makes room
        self.forget()
        return self._function(*arguments)

    def _results(self, key: tuple[object, ...], arguments: Sequence[Tensor]) -> Results:
        if key not in self._held:
            # what is made once, such as workspaces and tables, is made now
            result = self._function(*arguments)
            self._held[key] = None
            return result
        if (held := self._held[key] or self._recorded(arguments)) is None:
            return self._function(*arguments)
        self._held[key] = held
        places, replay = held
        for place, argument in zip(places, arguments, strict=True):
            place.copy_(argument)
        # their places are written anew by the next call
        return [result.clone() for result in replay()]

    def _recorded(self, arguments: Sequence[Tensor]) -> tuple[Results, Work] | None:
        """Places of arguments, and what computes the results of what lies there; None from the first failure on."""
        assert self._capture is not None
        places = [argument.clone() for argument in arguments]
        try:
            return places, self._capture(lambda: self._function(*places))
        except torch.OutOfMemoryError:
            # without sizes, which may depend on what is private
            reason, crowded = "there is too little memory on the device", self.recordings > 0
        except RuntimeError as error:
            # without numbers, for the same reason
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            reason, crowded = re.sub(r"\d+", "_", first), False
        self.forget()
        if not crowded:
            self._capture = None
            warnings.warn(f"kernels are not recorded, which is slower: {reason}", stacklevel=5)
        return None

    def forget(self) -> None:
        """Drop all recordings; what is recorded later has memory of its own, but not again and again."""
        self._held.clear()
        self._dropped += 1
        if self._graphs:
            torch.cuda.empty_cache()
            self._capture = cuda_graphs(self._device)
        if self._dropped > MOST_DROPS:
            self._capture = None


def records(device: torch.device) -> bool:
    """Whether work on this device is recorded: on CUDA devices, unless the environment says RAPID_CUDA_GRAPHS=0."""
    return device.type == "cuda" and os.environ.get(OFF, "1") != "0"


def padded_rows(count: int) -> int:
    """The size to which a batch of `count` rows, at least 1, is padded, so that few sizes are recorded."""
    step = max(1, (1 << (count - 1).bit_length()) // (2 * SIZES))
    return -(-count // step) * step


def cuda_graphs(device: torch.device) -> Capture:
    """Capture as CUDA graphs that share their memory: they never run at a time, and results are copied at once."""
    pool, stream = torch.cuda.graph_pool_handle(), _stream(device)

    def capture(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            # the outer block brings the stream back if the inner one fails
            torch.cuda.stream(torch.cuda.current_stream(device)),
            # other threads may use the device meanwhile
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            results = work()

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    return capture


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings on a device: each stream would keep workspaces of its own."""
    return torch.cuda.Stream(device)
