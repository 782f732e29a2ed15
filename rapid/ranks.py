"""The processes that share one command: `torchrun` starts them and assigns each its rank."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rapid.errors import InputError, LostRank, RapidError, Stopped
from rapid.stopping import check_stop, stop_requested

Item = TypeVar("Item")
Result = TypeVar("Result")
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives up."""
LONG_TIMEOUT = timedelta(hours=2)
"""For trainings: while the others wait, the first rank alone chooses settings, writes the index of a knowledge base, or
warms up and distils a denoiser."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable of torch: the process waits for each operation of NCCL, and an operation that fails raises."""


@dataclass(frozen=True)
class Ranks:
    """One process among `count` that run the same program; a single one by default.

    Attributes:
        rank: 0 writes files and shows progress.
        count: number of processes.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    @contextmanager
    def join(cls, device: torch.device, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
        """The ranks that torchrun started (RANK, WORLD_SIZE in the environment), over gloo on CPUs and nccl on GPUs.

        Args:
            device: where this rank computes.
            timeout: how long a rank waits for the others; longer than anything that one of them does alone.

        Raises:
            LostRank: the other ranks did not join.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            yield cls()
            return
        nccl, lost = device.type == "cuda", False
        if nccl:
            # so that an operation that fails raises an error here; else torch ends the process from another thread
            os.environ.setdefault(BLOCKING_WAIT, "1")
        with _contact():
            dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", timeout=timeout)
        try:
            yield cls(dist.get_rank(), count)
        except LostRank:
            lost = True
            raise
        finally:
            # NCCL would wait for the rank that is gone, and the process ends anyway
            if not (nccl and lost):
                dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def part(self, size: int) -> range:
        """The examples of 0..size-1 that belong to this rank: every `count`-th."""
        return range(self.rank, size, self.count)

    @property
    def rows(self) -> slice:
        """The same of the rows of a batch of any size, to index it with."""
        return slice(self.rank, None, self.count)

    def weight(self, size: int) -> float:
        """Share of the rows of a batch that are this rank's; the shares of all ranks add up to 1."""
        return len(self.part(size)) / size

    def of_all(self, own: Tensor, size: int) -> Tensor:
        """All `size` rows of a batch, (size, ...), of which this rank computed `own`, those of `rows`.

        Gradients flow into `own` alone. If the ranks add up the gradients of a function of the result, they have those
        of the whole batch.

        Raises:
            LostRank: another rank is gone.
        """
        if self.count == 1:
            return own
        whole = own.new_zeros(size, *own.shape[1:])
        whole[self.rows] = own.detach()
        self.all_reduce(whole)
        whole[self.rows] = own
        return whole

    def in_turn(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """Results of `work` for each item, in the order of the items, on all ranks, which take turns in the work.

        Args:
            items: the same on all ranks, and quick to make: each rank makes all of them.
            work: its results must be picklable, with tensors on the CPU, if there are several ranks.

        Raises:
            Stopped: a stop was requested on any rank.
            LostRank: another rank is gone.
        """
        if self.count == 1:
            for item in items:
                check_stop()
                yield work(item)
            return
        remaining = iter(items)
        while turn := list(islice(remaining, self.count)):
            mine = work(turn[self.rank]) if self.rank < len(turn) else None
            stops, results = zip(*self.all_gather((stop_requested(), mine)), strict=True)
            if any(stops):
                # all ranks at once, so that none waits for another
                raise Stopped("stopped")
            yield from results[: len(turn)]

    def all_reduce(self, values: Tensor) -> None:
        """Replace `values` by their sum over all ranks, in place; bit-identical on all ranks.

        Raises:
            LostRank: another rank is gone.
        """
        if self.count > 1:
            with _contact():
                if values.device.type != "cpu":
                    # over gloo, which notices at once that a rank is gone; NCCL would wait until TIMEOUT is over
                    dist.all_reduce(torch.zeros(1))
                dist.all_reduce(values)

    def broadcast(self, value: Result) -> Result:
        """Return the value of rank 0 on all ranks; it must be picklable.

        Raises:
            LostRank: another rank is gone.
        """
        if self.count == 1:
            return value
        box = [value if self.first else None]
        with _contact():
            dist.broadcast_object_list(box, src=0)
        shared: Any = box[0]
        return shared  # type: ignore[no-any-return]

    def broadcast_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the training state of rank 0 on all ranks: tensors (received on the CPU), numbers, dicts, lists."""
        if self.count == 1:
            return state
        buffer = io.BytesIO()
        if self.first:
            torch.save(state, buffer)
        received = io.BytesIO(self.broadcast(buffer.getvalue()))
        shared: dict[str, Any] = torch.load(received, weights_only=True, map_location="cpu")
        return shared

    def all_or_none(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank; if one fails, all fail, and only the first that failed reports why.

        Raises:
            RapidError: the error of the first rank that failed.
            LostRank: another rank is gone.
        """
        failure: RapidError | None = None
        try:
            result = action()
        except RapidError as error:
            failure = error
        failures = self.all_gather(failure)
        for rank, other in enumerate(failures):
            if other is not None:
                other.reported = rank != self.rank
                raise other
        return result

    def agree(self, what: str, value: bytes | memoryview) -> None:
        """Check that `value` is the same on all ranks; only a hash of it is sent.

        Raises:
            InputError: it is not; the message names it by `what`.
        """
        if self.count > 1 and len(set(self.all_gather(hashlib.sha256(value).hexdigest()))) > 1:
            problem = f"{what}: not the same on all ranks; give all of them the same files and arguments"
            error = InputError("", problem)
            error.reported = not self.first
            raise error

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks on the first rank, and an empty list on the others.

        Raises:
            LostRank: another rank is gone.
        """
        if self.count == 1:
            return [value]
        box: list[Any] | None = [None] * self.count if self.first else None
        with _contact():
            dist.gather_object(value, box)
        return box or []

    def all_gather(self, value: Result) -> list[Result]:
        """The values of all ranks, on all ranks."""
        if self.count == 1:
            return [value]
        box: list[Any] = [None] * self.count
        with _contact():
            dist.all_gather_object(box, value)
        return box


@contextmanager
def _contact() -> Iterator[None]:
    """Turn the errors of torch.distributed into ours."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if stop_requested():
            # the user stopped all ranks, and another one was quicker
            raise Stopped("stopped") from error
        # drop the location in gloo's source and its advice
        reason = re.sub(r"^\[\S*\]\s*", "", str(error).strip()).split(". ")[0].splitlines()[0]
        raise LostRank(f"lost contact with another rank ({reason})") from error
