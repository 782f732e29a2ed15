"""How often a step of a worker waits for a device: counted on the CPU by the operations that would wait there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rapid_server.worker import Worker
from torch.utils._python_dispatch import TorchDispatchMode

from rapid.methods import open_generator
from rapid.sampling.generate import generate

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)


class Waits(TorchDispatchMode):
    """Counts values that the host reads, and indices whose number only the device knows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            self.found[str(func)] += 1
        if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
            self.found["boolean index"] += any(one is not None and one.dtype == torch.bool for one in args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts also copies between host and device, except those to the device that do not wait."""
    to, waits = torch.Tensor.to, Waits()

    def counted_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, str | torch.device) and not kwargs.get("non_blocking"):
            waits.found["to"] += 1
        return to(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, waits:
        patch.setattr(torch.Tensor, "to", counted_to)
        for name in ("cpu", "tolist", "item"):
            own = getattr(torch.Tensor, name)

            def counted(self: torch.Tensor, *args: Any, own: Any = own, name: str = name) -> Any:
                waits.found[name] += 1
                return own(self, *args)

            patch.setattr(torch.Tensor, name, counted)
        yield waits.found


def test_the_counter_counts() -> None:
    x = torch.arange(3.0)
    with counting() as found:
        assert x[x > 1].sum().item() == 2
        x.cpu()
        x.to("cpu")
        x.to("cpu", non_blocking=True)
        assert bool(x[0] == 0)
    assert found == {"boolean index": 1, "item": 1, "aten._local_scalar_dense.default": 2, "cpu": 1, "to": 1}


@pytest.mark.parametrize("retrieval", ["class", "none"])
def test_at_most_one_wait_a_step(private_bundle: Path, retrieval: str) -> None:
    overrides = [f"generation.retrieval={retrieval}", "generation.attempts=2", "generation.steps=6"]
    worker = Worker(open_generator(private_bundle, "cpu", overrides), 8)
    for seed in range(3):
        worker.add(worker.make_request(6, seed=seed))
    steps = 0
    while worker.busy:
        with counting() as found:
            step = worker.step()
        steps += 1
        # latents come to the decoder by `to`, which does nothing where they are there already
        assert found.pop("to", 0) <= 1
        assert sum(found.values()) <= 1, found
        assert found["cpu"] >= bool(step.images)
    assert steps > 6


def test_both_at_once_are_what_they_are_alone(private_bundle: Path) -> None:
    probed = open_generator(private_bundle, "cpu", ["generation.attempts=2"])
    latents = torch.randn(70, *probed.latent_shape, generator=torch.Generator().manual_seed(0))
    images, chances = probed.finish(latents)
    np.testing.assert_array_equal(images, probed.decode(latents))
    expected = probed.label(images)
    assert chances is not None
    assert expected is not None
    np.testing.assert_allclose(chances, expected, atol=1e-6)
    drawn = open_generator(private_bundle, "cpu", ["generation.attempts=1"])
    np.testing.assert_array_equal(drawn.finish(latents)[1], chances)
    assert generate(drawn, 3, seed=1).images.shape == (3, *drawn.image_shape)
