"""Rows of linear solvers against the solver run on one row, for a model in closed form with two phases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import ScheduleSettings
from rapid.diffusion import Schedule
from rapid.diffusion.solvers import SamplerName, Solver, early_grid, late_grid
from rapid.sampling.linear_trajectories import Entry, LinearTrajectories, Phase, Route
from rapid.sampling.streams import Streams, make_streams, normal

SHAPE = (1, 2, 2)


class TwoPhases:
    """T -> k with one network; at k the state is mirrored; v -> 0 with another network, which knows the label."""

    device = torch.device("cpu")
    latent_shape = SHAPE

    def __init__(self, sampler: SamplerName, single: bool = False) -> None:
        self._schedule, self._sampler = Schedule.build(ScheduleSettings()), sampler
        self._single = single
        self._routes: dict[int, Route] = {}

    def route(self, steps: int | None = None) -> Route:
        stride = self._schedule.timesteps // (steps or 10)
        if stride not in self._routes:
            early = Solver.build(
                self._sampler, self._schedule, early_grid(1000, 800, stride), stride, denoise_last=True
            )
            late = Solver.build(self._sampler, self._schedule, late_grid(200, stride), stride)
            phases = (Phase(early, ("a",) * len(early.timesteps)), Phase(late, ("b",) * len(late.timesteps)))
            self._routes[stride] = phases[1:] if self._single else phases
        return self._routes[stride]

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        if x is None:
            return Entry(torch.from_numpy(normal(streams, SHAPE)))
        offset = torch.from_numpy(normal(streams, (1, 1, 1)))
        return Entry(offset - x, np.arange(len(x)) * 0 + phase + 6)

    def predict(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        level = 0.0 if labels is None or network == "a" else labels.view(-1, 1, 1, 1) / 10
        return torch.sin(x * (1 if network == "a" else 2) + t.view(-1, 1, 1, 1) / 100) + level


def alone(model: TwoPhases, seed: int, number: int, label: int | None, steps: int | None) -> Tensor:
    streams, labels = make_streams(seed, np.array([number])), None if label is None else np.array([label])
    y, x = None if labels is None else torch.from_numpy(labels), None
    for index, (solver, networks) in enumerate(model.route(steps)):
        assert isinstance(solver, Solver)
        start = model.enter(index, streams, labels, x).x
        x = solver.run(lambda s, t, network=networks[0]: model.predict(network, s, torch.tensor([t]), y), start)
    assert x is not None
    return x[0]


@pytest.mark.parametrize("sampler", ["ddim", "pndm", "dpm-solver++"])
@pytest.mark.parametrize("labelled", [True, False])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_their_batch(sampler: SamplerName, labelled: bool, data: st.DataObject) -> None:
    model = TwoPhases(sampler)
    trajectories = LinearTrajectories(model)
    choices: list[int | None] = [None, 10, 20, 50]
    steps = {number: data.draw(st.sampled_from(choices)) for number in range(10)}
    row_of: dict[int, int] = {}
    made: dict[int, tuple[Tensor, int]] = {}
    dropped, number = set(), 0
    while number < 10 or row_of:
        if number < 10 and (data.draw(st.booleans()) or not row_of):
            labels = np.array([number % 3]) if labelled else None
            (row,) = trajectories.begin(data.draw(st.just(4)), np.array([number]), labels, steps[number]).tolist()
            row_of[row] = number
            number += 1
        chosen = data.draw(st.lists(st.sampled_from(sorted(row_of)), min_size=1, unique=True))
        finished = trajectories.advance(np.array(chosen))
        for row, latent, record in zip(finished.rows.tolist(), finished.latents, finished.records, strict=True):
            made[row_of.pop(row)] = latent, int(record)
        if len(row_of) > 5 and data.draw(st.booleans()):
            row = min(row_of)
            trajectories.drop(np.array([row]))
            dropped.add(row_of.pop(row))
        assert len(trajectories) == len(row_of)
    assert set(made) | dropped == set(range(10))
    for which, (latent, record) in made.items():
        expected = alone(model, 4, which, which % 3 if labelled else None, steps[which])
        torch.testing.assert_close(latent, expected, rtol=1e-3, atol=1e-4)
        assert record == 7


def test_a_single_phase_never_searches() -> None:
    model = TwoPhases("ddim", single=True)
    trajectories = LinearTrajectories(model)
    rows = trajectories.begin(np.array([3, 4]), np.array([0, 9]), None)
    calls = 1
    while not len((finished := trajectories.advance(rows)).rows):
        calls += 1
    assert calls == len(model.route()[0].networks)
    assert finished.records.tolist() == [-1, -1]
    assert trajectories.search_seconds == 0
    for latent, (seed, number) in zip(finished.latents, ((3, 0), (4, 9)), strict=True):
        torch.testing.assert_close(latent, alone(model, seed, number, None, None), rtol=1e-3, atol=1e-4)


def test_searches_are_timed() -> None:
    trajectories = LinearTrajectories(TwoPhases("ddim"))
    rows = trajectories.begin(1, np.arange(3), None)
    while not len(trajectories.advance(rows).rows):
        pass
    assert trajectories.search_seconds > 0


def test_nothing_to_do() -> None:
    trajectories = LinearTrajectories(TwoPhases("ddim"))
    assert len(trajectories.begin(0, np.arange(0), None)) == 0
    trajectories.drop(np.arange(0))


def test_a_row_that_was_not_finite_leaves_nothing_behind() -> None:
    model = TwoPhases("dpm-solver++")
    trajectories = LinearTrajectories(model)
    row = trajectories.begin(1, np.array([0]), None)
    trajectories._parts[torch.from_numpy(row)] = torch.nan
    trajectories.advance(row)
    trajectories.drop(row)
    rows = trajectories.begin(2, np.arange(32), None)
    assert row[0] in rows
    while not len((finished := trajectories.advance(rows)).rows):
        pass
    assert finished.latents.isfinite().all()
