"""Specs and releases: what is refused, the events that they stand for, derived numbers."""

from __future__ import annotations

import math

import pytest
import torch
from dp_accounting import GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rapid.dp import DpSgdSpec, QuerySpec, Release, default_delta
from rapid.dp.releases import check_budget
from rapid.errors import InputError

TRAINING = {"name": "denoiser", "dataset_size": 100, "expected_batch": 20, "steps": 7, "clip_norm": 0.5}
QUERY = {"name": "many", "kind": "count", "dataset_size": 100}


@pytest.mark.parametrize(
    "changes",
    [
        {"expected_batch": 101},
        {"expected_batch": 0},
        {"steps": 0},
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"multiplicity": 0},
        {"dataset_size": 0},
        {"share": 0.0},
        {"share": 1.0},
        {"least_noise_multiplier": -1.0},
        {"name": ""},
        {"name": "Denoiser"},
        {"name": "../denoiser"},
        {"name": "de noiser"},
        {"kind": "count"},
        {"batch": 3},
    ],
)
def test_trainings_that_are_refused(changes: dict[str, object]) -> None:
    DpSgdSpec.model_validate(TRAINING)
    with pytest.raises(ValidationError) as refused:
        DpSgdSpec.model_validate(TRAINING | changes)
    assert all(name in str(refused.value) for name in changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sensitivity": 2.0},
        {"sensitivity": 0.5, "kind": "histogram"},
        {"sensitivity": 0.0, "kind": "mean"},
        {"sensitivity": -1.0, "kind": "mean"},
        {"kind": "median"},
        {"kind": "dp-sgd"},
        {"steps": 2},
    ],
)
def test_queries_that_are_refused(changes: dict[str, object]) -> None:
    QuerySpec.model_validate(QUERY)
    QuerySpec.model_validate(QUERY | {"kind": "mean", "sensitivity": 0.5})
    with pytest.raises(ValidationError) as refused:
        QuerySpec.model_validate(QUERY | changes)
    assert next(iter(changes)) in str(refused.value)


def test_public_numbers_cannot_be_changed() -> None:
    release = Release(spec=DpSgdSpec.model_validate(TRAINING), noise_multiplier=2.0)
    for holder, name in ((release, "noise_multiplier"), (release.spec, "clip_norm"), (release.spec, "steps")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(holder, name, 1)
    with pytest.raises(ValidationError):
        Release(spec=release.spec, noise_multiplier=-0.1)


def test_a_training_is_so_many_poisson_sampled_gaussians() -> None:
    release = Release(spec=DpSgdSpec.model_validate(TRAINING | {"multiplicity": 4}), noise_multiplier=2.0)
    step = PoissonSampledDpEvent(0.2, GaussianDpEvent(2.0))
    assert release.event() == SelfComposedDpEvent(step, 7)
    assert release.event(3) == SelfComposedDpEvent(step, 3)
    assert release.event(0) == NoOpDpEvent()
    assert (release.name, release.spec.sample_rate, release.noise_stddev) == ("denoiser", 0.2, 1.0)
    assert release.spec.gradient_computations == 20 * 7 * 4


def test_a_query_is_one_gaussian() -> None:
    release = Release(
        spec=QuerySpec.model_validate(QUERY | {"kind": "mean", "sensitivity": 0.25}), noise_multiplier=8.0
    )
    assert release.event() == release.event(1) == GaussianDpEvent(8.0)
    assert release.event(0) == NoOpDpEvent()
    assert (release.noise_stddev, release.spec.steps, release.spec.sample_rate) == (2.0, 1, 1.0)


def test_releases_survive_json() -> None:
    for spec in (DpSgdSpec.model_validate(TRAINING), QuerySpec.model_validate(QUERY | {"share": 0.1, "title": "é"})):
        release = Release(spec=spec, noise_multiplier=1 / 3)
        assert Release.model_validate_json(release.model_dump_json()) == release


def test_signal_to_noise_is_that_of_a_sum_of_equal_gradients() -> None:
    release = Release(spec=DpSgdSpec.model_validate(TRAINING), noise_multiplier=2.0)
    direction = torch.nn.functional.normalize(torch.randn(200_000), dim=0)
    signal = (20 * 0.5 * direction).norm()
    noise = (release.noise_stddev * torch.randn(200_000)).norm()
    assert release.signal_to_noise(200_000) == pytest.approx(float(signal / noise), rel=0.01)
    assert Release(spec=release.spec, noise_multiplier=0).signal_to_noise(5) == math.inf


@given(st.integers(1, 10**8))
def test_the_default_delta_is_under_one_in_n(size: int) -> None:
    assert 0 < default_delta(size) <= 1 / (2 * size)
    assert default_delta(size + 1) < default_delta(size)
    check_budget(1.0, default_delta(size), size)
    if size >= 8:
        assert default_delta(size) == pytest.approx(1 / (size * math.log(size)))


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"),
    [
        (0.0, 1e-5, "epsilon"),
        (-1.0, 1e-5, "epsilon"),
        (math.nan, 1e-5, "epsilon"),
        (math.inf, 1e-5, "epsilon"),
        (1.0, 0.0, "delta"),
        (1.0, 1.0, "delta"),
        (1.0, math.nan, "delta"),
    ],
)
def test_what_is_no_budget(epsilon: float, delta: float, field: str) -> None:
    with pytest.raises(InputError) as refused:
        check_budget(epsilon, delta, 100)
    assert refused.value.field == field
