"""What users do, as functions that `device.child.on_device` runs; the first argument is the pretend device."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import pretend
from numpy.typing import NDArray
from rapid_server.engine import Engine, EngineStoppedError
from torch.optim.optimizer import register_optimizer_step_post_hook

from rapid.bundle import Bundle
from rapid.config.sections import MethodSettings
from rapid.data.private import PrivateImages
from rapid.errors import Stopped
from rapid.evaluate import Request, report
from rapid.interop.endless import EndlessImages
from rapid.methods import find_method, generator_of
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle
from rapid.stopping import request_stop, stop_on_signal


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """Stop the training within the block after so many steps of any optimiser, as Ctrl-C does."""
    taken = 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == steps:
            request_stop()

    hook = register_optimizer_step_post_hook(count)
    try:
        with stop_on_signal():
            yield
    except Stopped:
        return
    finally:
        hook.remove()
    raise AssertionError("it ended before it could be stopped")


def build(device: torch.device, public: Path, out: Path, settings: MethodSettings, stop: int | None = None) -> None:
    """`rapid build-kb`; with `stop` it is stopped after so many steps, and resumed."""
    if stop is not None:
        with stopped_after(stop):
            build_public_bundle([public], out, settings, device, resume=False)
    build_public_bundle([public], out, settings, device, resume=stop is not None)


def train(
    device: torch.device,
    base: Path | None,
    private: Path,
    out: Path,
    settings: MethodSettings,
    stop: int | None = None,
    count: int = 4,
) -> NDArray[Any]:
    """`rapid train-private`, and images of the bundle, or probabilities of a classifier; for `stop` see `build`."""

    def run(resume: bool) -> None:
        train_private_bundle(
            base, PrivateImages(private), out, settings, epsilon=10.0, delta=None, device=device, resume=resume,
            ledger=out.parent / f"{out.name}.jsonl",
        )  # fmt: skip

    if stop is not None:
        with stopped_after(stop):
            run(resume=False)
    run(resume=stop is not None)
    return sample(device, out, [], count)


def sample(device: torch.device, path: Path, overrides: Sequence[str], count: int) -> NDArray[Any]:
    """`rapid generate` with seed 1, or `rapid predict` for the black image if the bundle classifies."""
    bundle = Bundle.open(path, "model")
    method: Any = find_method(bundle.config.method)
    if hasattr(method, "classifier"):
        found: NDArray[Any] = method.classifier(bundle, device).probabilities(
            np.zeros((count, *bundle.image_shape), np.uint8)
        )
        return found
    return generate(generator_of(bundle, device, overrides), count, seed=1).images


def sample_many(device: torch.device, path: Path, cases: Sequence[Sequence[str]], count: int) -> list[NDArray[Any]]:
    """`sample` with several overrides."""
    return [sample(device, path, overrides, count) for overrides in cases]


def endless(device: torch.device, path: Path, batches: int) -> NDArray[Any]:
    """`EndlessImages`, so many batches."""
    dataset = EndlessImages(path, seed=5, batch_size=4, overrides=["generation.attempts=1"])
    with pytest.MonkeyPatch.context() as patch:
        # the pretend device has no name that users may give
        patch.setattr("rapid.runtime.choose_device", lambda _: device)
        images = torch.stack([image for image, _ in itertools.islice(dataset, 4 * batches)])
    return ((images + 1) * 127.5).round().byte().numpy()


def serve(device: torch.device, path: Path, counts: Sequence[int]) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Images of several requests at a time to the server's engine, with seeds 0, 1, ..., and the image of a record."""
    engine = Engine({"model": generator_of(Bundle.open(path, "model"), device)}, batch=4)

    async def run() -> tuple[list[NDArray[Any]], NDArray[Any]]:
        jobs = [engine.submit("model", count, seed=seed) for seed, count in enumerate(counts)]
        found = []
        for job in jobs:
            images = {one.place: one.image async for done in job for one in done}
            found.append(np.stack([images[place] for place in range(len(images))]))
        return found, await engine.record_image("model", 0)

    try:
        return asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        engine.close()


def break_while_serving(device: torch.device, path: Path) -> tuple[bool, bool, str]:
    """Whether the engine is ready before and after the device breaks down, and how a later request is answered."""
    engine = Engine({"model": generator_of(Bundle.open(path, "model"), device)}, batch=4)

    async def run() -> tuple[bool, bool, str]:
        await asyncio.to_thread(engine.ready.wait, 60)
        before = engine.ready.is_set()
        pretend.break_down()
        job = engine.submit("model", 1)
        with pytest.raises(EngineStoppedError):
            await anext(aiter(job))
        await asyncio.to_thread(engine._thread.join, 60)
        try:
            engine.submit("model", 1)
            later = "accepted"
        except EngineStoppedError:
            later = "refused"
        return before, engine.ready.is_set(), later

    try:
        return asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        engine.close()


def evaluate(device: torch.device, synthetic: Path, real: Path, public: Path, model: Path) -> dict[str, Any]:
    """`rapid evaluate`."""
    request = Request(synthetic, real, public=(public,), classifiers=("small",), epochs=1)
    return report.evaluate(request, device, generator_of(Bundle.open(model, "model"), device)).content
