"""Flows in which work on the pretend device is recorded as on a GPU: what is recorded must not wait for the host."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from device.pretend import counting

from rapid.recording import Capture, Work

USERS = ("rapid.recording", "rapid.dp.mechanism", "rapid.dp.physical", "rapid.sampling.linear_trajectories")
"""Modules that ask whether work on a device is recorded."""


def run(device: torch.device, flow: Callable[..., Any], *arguments: Any) -> tuple[Any, int, list[str]]:
    """What a flow returns, how much it recorded, and where that waited for the host."""
    captured, waits = 0, list[str]()

    def graphs(_: torch.device) -> Capture:
        def capture(work: Work) -> Work:
            nonlocal captured
            captured += 1
            with counting() as counts:
                work()
            waits.extend(counts.waits)
            # run again instead of being replayed: the pretend device has no graphs
            return work

        return capture

    with recording(graphs):
        return flow(device, *arguments), captured, waits


@contextmanager
def recording(graphs: Callable[[torch.device], Capture]) -> Iterator[None]:
    """Within the block, work on any device but the CPU is recorded."""
    patches = [
        patch.object(importlib.import_module(name), "records", lambda device: device.type != "cpu") for name in USERS
    ]
    for one in [*patches, patch("rapid.recording.cuda_graphs", graphs)]:
        one.start()
    try:
        yield
    finally:
        patch.stopall()
