"""Rows of the samplers, deterministic and stochastic, against one row run alone, for a denoiser in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests_support import traced
from torch import Tensor

from rapid.diffusion.samplers import SAMPLERS, Churn, Path, SamplerName
from rapid.sampling.linear_trajectories import Entry, LinearTrajectories, Phase, Route
from rapid.sampling.streams import Streams, normal

SHAPE = (1, 2, 2)


class Model:
    """Depends on level and label; notes the size of each batch."""

    device = torch.device("cpu")
    latent_shape = SHAPE

    def __init__(self, sampler: SamplerName) -> None:
        self._sampler = sampler
        self._routes: dict[int, Route] = {}
        self.batches: list[int] = []

    def route(self, steps: int | None = None) -> Route:
        count = steps or 4
        if count not in self._routes:
            path = Path.build(self._sampler, count, Churn(2.0, 0.01, 100.0, 1.01))
            self._routes[count] = (Phase(path, ("",) * len(path)),)
        return self._routes[count]

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        return Entry(torch.from_numpy(normal(streams, SHAPE)))

    def predict(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        self.batches.append(len(x))
        level = 0.0 if labels is None else labels.view(-1, 1, 1, 1) / 10
        return torch.sin(x / (1 + t.view(-1, 1, 1, 1))) + level


def alone(model: Model, number: int, label: int | None, steps: int | None) -> Tensor:
    """An image with all calls in turn, and noise from its own stream whenever a call needs it."""
    stream = np.random.Generator(np.random.Philox(key=np.array([4, number], np.uint64)))
    path = model.route(steps)[0].sampler
    assert isinstance(path, Path)
    labels = None if label is None else torch.tensor([label])
    x = path.first_level * torch.from_numpy(stream.standard_normal(SHAPE, np.float32))[None]
    kept = torch.zeros_like(x)
    for sigma, weights in zip(path.sigmas, path.weights.tolist(), strict=True):
        denoised = model.predict("", x, sigma[None], labels)
        noise = torch.zeros_like(x)
        if weights[0][3]:
            noise = torch.from_numpy(stream.standard_normal(SHAPE, np.float32))[None]
        parts = (x, kept, denoised, noise)
        x, kept = (sum((w * part for w, part in zip(row, parts, strict=True)), torch.zeros(1)) for row in weights)
    return x[0]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("recorded", [False, True])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_their_batch(
    sampler: SamplerName, labelled: bool, recorded: bool, data: st.DataObject
) -> None:
    """Recorded calls are run again on a CPU, with their padding."""
    model = Model(sampler)
    trajectories = LinearTrajectories(model, traced if recorded else None)
    choices: list[int | None] = [None, 1, 2, 7]
    steps = {number: data.draw(st.sampled_from(choices)) for number in range(8)}
    row_of: dict[int, int] = {}
    made: dict[int, Tensor] = {}
    dropped, number = set(), 0
    while number < 8 or row_of:
        if number < 8 and (data.draw(st.booleans()) or not row_of):
            labels = np.array([number % 3]) if labelled else None
            (row,) = trajectories.begin(4, np.array([number]), labels, steps[number]).tolist()
            row_of[row] = number
            number += 1
        chosen = data.draw(st.lists(st.sampled_from(sorted(row_of)), min_size=1, unique=True))
        finished = trajectories.advance(np.array(chosen))
        assert (finished.records == -1).all()
        for row, latent in zip(finished.rows.tolist(), finished.latents, strict=True):
            made[row_of.pop(row)] = latent
        if len(row_of) > 5 and data.draw(st.booleans()):
            row = min(row_of)
            trajectories.drop(np.array([row]))
            dropped.add(row_of.pop(row))
        assert len(trajectories) == len(row_of)
    assert set(made) | dropped == set(range(8))
    for which, latent in made.items():
        expected = alone(model, which, which % 3 if labelled else None, steps[which])
        torch.testing.assert_close(latent, expected, rtol=1e-3, atol=1e-3)


def test_rows_at_different_calls_of_different_paths_share_a_batch() -> None:
    model = Model("churn")
    trajectories = LinearTrajectories(model)
    first = trajectories.begin(np.array([1, 2]), np.array([0, 5]), None, 7)
    trajectories.advance(first)
    second = trajectories.begin(1, np.arange(60), None, 3)
    trajectories.advance(np.concatenate([first, second]))
    assert model.batches == [2, 62]
    assert trajectories.search_seconds == 0


def test_nothing_to_do() -> None:
    trajectories = LinearTrajectories(Model("churn"))
    assert len(trajectories.begin(0, np.arange(0), None)) == 0
    trajectories.drop(np.arange(0))


def test_a_row_that_was_not_finite_leaves_nothing_behind() -> None:
    trajectories = LinearTrajectories(Model("churn"))
    row = trajectories.begin(1, np.array([0]), None)
    trajectories._parts[torch.from_numpy(row)] = torch.nan
    trajectories.advance(row)
    trajectories.drop(row)
    rows = trajectories.begin(2, np.arange(32), None)
    assert row[0] in rows
    while not len((finished := trajectories.advance(rows)).rows):
        pass
    assert finished.latents.isfinite().all()
