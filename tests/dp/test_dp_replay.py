"""Record and replay: with the same randomness, an image more or another image changes a sum and nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rapid.dp
from rapid.bundle.format import Bundle
from rapid.config.presets import apply_overrides
from rapid.config.sections import PrivateSettings, Settings
from rapid.data import fit_images, load_images
from rapid.diffusion import Schedule
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.dp.releases import Plan
from rapid.dp.training import train_private
from rapid.methods.rapid.networks import encode_all
from rapid.methods.rapid.objectives import Draws, PrivateObjective, Retriever

SIZE, STEPS, CLIP_NORM, LAST = 24, 4, 0.01, 23
PLAN = Plan(
    dataset_size=SIZE, expected_batch=12, steps=STEPS, clip_norm=CLIP_NORM, noise_multiplier=1.0, delta=1e-3,
    multiplicity=2,
)  # fmt: skip
SOURCE = str(Path(rapid.dp.__file__).parent)


class Replay:
    """An objective whose draws depend on the call and the example alone, so that a second run repeats them."""

    def __init__(self, objective: PrivateObjective) -> None:
        self.objective = objective
        self.sizes: list[int] = []
        self.step = 0
        self.silent: int | None = None

    def __call__(self, indices: Tensor) -> Tensor:
        self.sizes.append(len(indices))
        seen: dict[int, int] = {}
        parts = []
        for index in indices.tolist():
            seen[index] = seen.get(index, -1) + 1
            self.objective.randomness = Randomness(stream(self.step * 10_000 + index * 10 + seen[index]))
            parts.append(self.objective.draw(1))
        draws = Draws(*(torch.cat(values) for values in zip(*parts, strict=True)))
        losses = self.objective.losses(indices, draws)
        return losses if self.silent is None else losses * (indices != self.silent)


def stream(seed: int = 0) -> Callable[[int], bytes]:
    """Bytes that are the same in every run."""
    call = 0

    def take(count: int) -> bytes:
        nonlocal call
        call += 1
        return np.random.default_rng((seed, call)).bytes(count)

    return take


@pytest.fixture(params=["rapid", "late", "ldm"])
def replay(
    request: pytest.FixtureRequest, public_bundle: Path, digits: Path, tiny_settings: Settings
) -> Iterator[Replay]:
    chosen = apply_overrides(tiny_settings.model_dump(mode="json"), [f"private.objective={request.param}"])
    bundle = Bundle.open(public_bundle, "base")
    public = bundle.public_denoiser().requires_grad_(False)
    torch.manual_seed(0)
    denoiser = public.with_classes(10).requires_grad_(True)
    images = fit_images(load_images(digits, "private"), chosen.image, "private")
    assert images.labels is not None
    latents = encode_all(bundle.autoencoder(), images.images[:SIZE], torch.device("cpu"))
    retriever = Retriever(
        Schedule.build(chosen.schedule), public, bundle.encoder(), bundle.knowledge_base(), chosen.retrieval.k
    )
    yield Replay(
        PrivateObjective(
            chosen, denoiser, retriever if request.param == "rapid" else None, latents,
            torch.from_numpy(images.labels[:SIZE]), Randomness(),
        )
    )  # fmt: skip


def mechanism(replay: Replay) -> PrivateMechanism:
    return PrivateMechanism(
        PLAN, replay.objective.denoiser, replay, physical_batch=10, randomness=Randomness(stream())
    )  # fmt: skip


@contextmanager
def lines_executed() -> Iterator[list[tuple[str, int]]]:
    """Every line of rapid.dp that runs, in order."""
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


def test_one_image_more_moves_each_sum_by_at_most_clip_norm(replay: Replay) -> None:
    target = mechanism(replay)
    met = 0
    for step in range(STEPS):
        replay.step = step
        batch = target.draw_batch()
        replay.sizes.clear()
        more = target.clipped_sum(batch).double()
        sizes = replay.sizes.copy()
        replay.sizes.clear()
        less = target.clipped_sum(batch[batch != LAST]).double()
        if LAST in batch:
            met += 1
            assert sum(sizes) == sum(replay.sizes) + PLAN.multiplicity
            # the sums are of floats of this size, which is where the tolerance comes from
            assert 0 < (more - less).norm() <= CLIP_NORM * (1 + 1e-4)
        else:
            assert sizes == replay.sizes
            assert torch.equal(more, less)
    assert 0 < met < STEPS


@pytest.mark.parametrize("other", ["black", "white", "noise"])
def test_another_image_changes_no_line_that_runs(replay: Replay, other: str) -> None:
    """Control flow, shapes and number of steps are those of the set with another image in the place of one."""
    latent = replay.objective.latents[LAST]
    replacement = {
        "black": torch.full_like(latent, -3.0),
        "white": torch.full_like(latent, 1e6),
        "noise": torch.randn(latent.shape, generator=torch.Generator().manual_seed(0)),
    }[other]
    runs = []
    mechanism(replay).gradient()  # what is computed once is cached
    for value in (latent.clone(), replacement):
        replay.objective.latents[LAST] = value
        replay.sizes.clear()
        target = mechanism(replay)
        sums = []
        with lines_executed() as lines:
            for step in range(STEPS):
                replay.step = step
                sums.append(target.clipped_sum(target.draw_batch()).double())
                released = target.gradient()
        runs.append((lines, replay.sizes.copy(), target.steps_taken, [g.shape for g in released], sums))
    (lines, sizes, steps, shapes, sums), (lines2, sizes2, steps2, shapes2, sums2) = runs
    assert len(lines) > 1000
    assert lines == lines2
    assert (sizes, steps, shapes) == (sizes2, steps2, shapes2)
    distances = [float((a - b).norm()) for a, b in zip(sums, sums2, strict=True)]
    # one image out, another in
    assert 0 < max(distances) <= 2 * CLIP_NORM * (1 + 1e-4)


def test_what_is_written_and_shown_is_the_same_without_the_image(
    replay: Replay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole loop on the set and on the same set in which one image contributes nothing: all but the weights."""
    settings = PrivateSettings(expected_batch=12, steps=STEPS, physical_batch=10, clip_norm=CLIP_NORM)
    start = {name: value.clone() for name, value in replay.objective.denoiser.state_dict().items()}
    written, shown = [], []
    for silent in (None, LAST):
        replay.objective.denoiser.load_state_dict(start)
        replay.silent = silent
        file = tmp_path / str(silent) / "state.pt"
        file.parent.mkdir()
        train_private(replay.objective.denoiser, replay, PLAN, settings, file)
        state = torch.load(file, weights_only=True)
        written.append((describe(state), file.stat().st_size))
        # without time and rate, which tqdm writes as step/s or s/step
        shown.append(re.sub(r"\[[^,]*,[^,]*,", "", capfd.readouterr().err.split("\r")[-1]))
    assert written[0] == written[1]
    assert shown[0] == shown[1]


def describe(state: object) -> object:
    """A checkpoint without the numbers in its tensors."""
    if isinstance(state, Tensor):
        return ("tensor", tuple(state.shape), state.dtype)
    if isinstance(state, dict):
        return {key: describe(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [describe(value) for value in state]
    return state
