"""Record and replay of the mechanism: with the same randomness, an image more or another image moves a sum, no more.

`test_dp_replay_stage.py` replays the whole private stage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_tracing import first_difference, places_executed
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import fit_images, load_images, to_unit_range
from rapid.diffusion import Schedule
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, Release
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.objectives import Draws, PrivateObjective, Retriever
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder

SIZE, STEPS, CLIP_NORM, LAST = 24, 4, 0.01, 23
SPEC = DpSgdSpec(
    name="denoiser", dataset_size=SIZE, expected_batch=12, steps=STEPS, clip_norm=CLIP_NORM, multiplicity=2
)


class Replay:
    """An objective whose draws depend on the call and the example alone, so that a second run repeats them."""

    def __init__(self, objective: PrivateObjective, latents: Tensor, labels: Tensor) -> None:
        self.objective = objective
        self.latents = latents
        self.labels = labels
        self.sizes: list[int] = []
        self.step = 0

    def __call__(self, indices: Tensor) -> Tensor:
        self.sizes.append(len(indices))
        seen: dict[int, int] = {}
        parts = []
        for index in indices.tolist():
            seen[index] = seen.get(index, -1) + 1
            self.objective.randomness = Randomness(stream(self.step * 10_000 + index * 10 + seen[index]))
            parts.append(self.objective.draw(1))
        draws = Draws(*(torch.cat(values) for values in zip(*parts, strict=True)))
        return self.objective.losses(self.latents[indices], self.labels[indices], draws)


def stream(seed: int = 0) -> Callable[[int], bytes]:
    """Bytes that are the same in every run."""
    call = 0

    def take(count: int) -> bytes:
        nonlocal call
        call += 1
        return np.random.default_rng((seed, call)).bytes(count)

    return take


@pytest.fixture(params=["rapid", "late", "ldm"])
def replay(request: pytest.FixtureRequest, public_bundle: Path, digits: Path, tiny_settings: RapidSettings) -> Replay:
    chosen = apply_overrides(tiny_settings.model_dump(mode="json"), [f"private.objective={request.param}"])
    assert isinstance(chosen, RapidSettings)
    bundle = Bundle.open(public_bundle, "base")
    public = bundle.component("denoiser", Denoiser).requires_grad_(False)
    torch.manual_seed(0)
    denoiser = public.with_classes(10).requires_grad_(True)
    images = fit_images(load_images(digits, "private"), chosen.image, "private")
    assert images.labels is not None
    latents = bundle.component("autoencoder", Autoencoder).encode(to_unit_range(images.images[:SIZE]))
    encoder = bundle.component("encoder", TrajectoryEncoder)
    schedule = Schedule.build(chosen.schedule)
    retriever = Retriever(schedule, public, encoder, open_knowledge_base(bundle), chosen.retrieval.k)
    objective = PrivateObjective(chosen, denoiser, retriever if request.param == "rapid" else None, Randomness())
    return Replay(objective, latents, torch.from_numpy(images.labels[:SIZE]))


def mechanism(replay: Replay) -> PrivateMechanism:
    release = Release(spec=SPEC, noise_multiplier=1.0)
    randomness = Randomness(stream())
    return PrivateMechanism(release, replay.objective.denoiser, replay, physical_batch=10, randomness=randomness)


def test_one_image_more_moves_each_sum_by_at_most_clip_norm(replay: Replay) -> None:
    target = mechanism(replay)
    met = 0
    for step in range(STEPS):
        replay.step = step
        batch = target._draw_batch()
        replay.sizes.clear()
        more = target._clipped_sum(batch).double()
        sizes = replay.sizes.copy()
        replay.sizes.clear()
        less = target._clipped_sum(batch[batch != LAST]).double()
        if LAST in batch:
            met += 1
            assert sum(sizes) == sum(replay.sizes) + SPEC.multiplicity
            # the sums are of floats of this size, which is where the tolerance comes from
            assert 0 < (more - less).norm() <= CLIP_NORM * (1 + 1e-4)
        else:
            assert sizes == replay.sizes
            assert torch.equal(more, less)
    assert 0 < met < STEPS


def test_latents_of_any_size_change_no_line_of_the_mechanism(replay: Replay) -> None:
    """Control flow, shapes and number of steps stay, even for latents that no image has."""
    latent = replay.latents[LAST].clone()
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    mechanism(replay).gradient()  # what is computed once is cached
    runs = []
    for value in (latent, torch.full_like(latent, -3.0), torch.full_like(latent, 1e6), noise):
        replay.latents[LAST] = value
        replay.sizes.clear()
        target = mechanism(replay)
        sums = []
        with places_executed() as executed:
            for step in range(STEPS):
                replay.step = step
                sums.append(target._clipped_sum(target._draw_batch()).double())
                released = target.gradient()
        runs.append((executed, replay.sizes.copy(), target.steps_taken, [g.shape for g in released], sums))
    first, first_sums = runs[0][:4], runs[0][4]
    assert len(first[0]) > 1000
    for *other, sums in runs[1:]:
        assert first_difference(first[0], other[0]) is None
        assert list(first[1:]) == other[1:]
        distances = [float((a - b).norm()) for a, b in zip(first_sums, sums, strict=True)]
        # one image out, another in
        assert 0 < max(distances) <= 2 * CLIP_NORM * (1 + 1e-4)


def test_a_branch_on_private_data_would_be_seen() -> None:
    """The tracer tells two runs of rapid's own code apart that differ by one branch within a line."""
    runs = []
    for value in (None, 1):
        with places_executed() as executed:
            InputError("field", "problem", value)
        runs.append(executed)
    assert first_difference(*runs) is not None
    assert first_difference(runs[0], runs[0]) is None
