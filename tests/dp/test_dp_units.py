"""People as units: whatever images a person has, each sum changes by at most its sensitivity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from rapid.data import ImageSet
from rapid.dp import Budget, DpSgdSpec, PrivateAccess, PublicFacts, QuerySpec, Ranks, Release
from rapid.dp.gradients.forms import ROUNDING_MARGIN
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.dp.rehearsal import COUNTS
from rapid.dp.units import Units
from rapid.errors import PrivacyRefused
from rapid.stages.private_set import PrivateSet
from rapid.training import RunFolder, Trainer

CPU = torch.device("cpu")
CLIP = 0.5
NUMBERS = st.floats(width=32) | st.sampled_from([3e38, -3e38, float("nan"), float("inf"), 0.0])


def people(sizes: list[int], seed: int = 0) -> Tensor:
    """Person of each row, mixed; person i has sizes[i] rows."""
    order = np.random.default_rng(seed).permutation(sum(sizes))
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)[order])


def rows_of(units: Tensor, person: int) -> np.ndarray[Any, Any]:
    return np.flatnonzero(units.numpy() == person)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 99))
def test_queries_against_a_loop_over_people(sizes: list[int], seed: int) -> None:
    units, draws = people(sizes, seed), np.random.default_rng(seed)
    features = draws.normal(size=(sum(sizes), 2, 3))
    features[draws.random(sum(sizes)) < 0.1] = np.inf
    bins, holds = draws.integers(-1, 4, sum(sizes)), draws.random(sum(sizes)) < 0.3
    count, mean, votes = 0, np.zeros((2, 3)), np.zeros(3)
    for person in range(len(sizes)):
        own = rows_of(units, person)
        count += bool(holds[own].any())
        middle = features[own].mean(0)
        if np.isfinite(middle).all():
            # as stated for `MOVED_MARGIN`, 1/256 of the bound is left for rounding
            mean += middle * min(1.0, CLIP / (1 + 1 / 256) / np.linalg.norm(middle))
        votes += [np.mean(bins[own] == number) for number in range(3)]
    found = Units(units)
    assert found.number(torch.from_numpy(holds)).tolist() == [count]
    sums = found.clipped_sum(torch.from_numpy(features).split(4), CLIP).view(2, 3)
    np.testing.assert_allclose(sums, mean, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.votes(torch.from_numpy(bins), 3), votes, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    added=st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(-2, 3), st.booleans()), min_size=1, max_size=50),
    others=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_a_person_with_any_images_changes_no_query_by_more_than_its_sensitivity(
    added: list[tuple[float, float, int, bool]], others: list[int]
) -> None:
    few = people(others)
    more = torch.cat([few, torch.full((len(added),), len(others))])
    draws = np.random.default_rng(1)
    features = torch.from_numpy(draws.normal(size=(len(few), 2))).float()
    bins, holds = torch.from_numpy(draws.integers(0, 3, len(few))), torch.from_numpy(draws.random(len(few)) < 0.5)
    own = [torch.tensor(one) for one in zip(*added, strict=True)]
    without, within = Units(few), Units(more)
    grown = torch.cat([features, torch.stack([own[0], own[1]], 1).float()])
    for change, most in (
        (within.number(torch.cat([holds, own[3]])) - without.number(holds), 1.0),
        (within.votes(torch.cat([bins, own[2]]), 3) - without.votes(bins, 3), 1.0),
        (within.clipped_sum([grown], CLIP) - without.clipped_sum([features], CLIP), CLIP),
    ):
        assert float(change.norm()) <= most


def release_of(size: int, **changes: float) -> Release:
    base = {"name": "network", "dataset_size": size, "expected_batch": size, "steps": 3, "clip_norm": CLIP}
    return Release(spec=DpSgdSpec.model_validate(base | changes), noise_multiplier=1e-6)


def set_of(units: Tensor) -> ImageSet:
    images = np.random.default_rng(2).integers(0, 256, (len(units), 3, 4), np.uint8)
    return ImageSet(images, np.arange(len(units)) % 2, ("a", "b"), units=units.numpy())


def access_to(images: ImageSet, folder: Path, *releases: Release) -> PrivateAccess:
    facts = PublicFacts.of(images)
    budget = Budget(epsilon=1, delta=1e-3, dataset_size=facts.dataset_size, releases=releases)
    return PrivateAccess(images, facts, budget, RunFolder(folder), device=CPU)


@pytest.mark.parametrize("draws", [1, 3])
def test_steps_against_a_loop_over_people(tmp_path: Path, draws: int) -> None:
    """A full batch: each person's drawn images by autograd, their mean, then the clipping."""
    units = people([1, 7, 2, 30])
    images = set_of(units)
    access = access_to(images, tmp_path, release_of(4, steps=1, multiplicity=draws))
    network = nn.Linear(12, 1)
    before, seen = [p.detach().double().clone() for p in network.parameters()], []

    def losses(rows: Tensor) -> Tensor:
        seen.append(rows.clone())
        return network(rows.flatten(1).float() / 255).square().sum(1)

    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    trainer = Trainer(network, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), ema_decay=0.0)
    oracle = nn.Linear(12, 1)
    oracle.load_state_dict(network.state_dict())
    access.train("network", trainer, losses, [access.images])
    # a rehearsal comes first
    drawn = torch.cat(seen[len(COUNTS) :])
    assert len(drawn) == 4 * draws
    total = torch.zeros(13, dtype=torch.float64)
    for person, own in enumerate(drawn.split(draws)):
        theirs = torch.from_numpy(images.images[rows_of(units, person)])
        assert all(bool((theirs == row).flatten(1).all(1).any()) for row in own)
        loss = oracle(own.flatten(1).float() / 255).square().sum(1).mean()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(oracle.parameters()))]).double()
        total += gradient * min(1.0, CLIP / (1 + ROUNDING_MARGIN) / float(gradient.norm()))
    taken = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, network.parameters(), strict=True)])
    torch.testing.assert_close(taken * 4, total, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    added=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=50),
    draws=st.integers(1, 4),
    physical=st.integers(1, 9),
)
def test_a_person_with_any_images_changes_a_clipped_sum_by_at_most_clip_norm(
    added: list[tuple[float, float]], draws: int, physical: int
) -> None:
    few = people([1, 4, 2])
    units = Units(torch.cat([few, torch.full((len(added),), 3)]))
    x = torch.cat([torch.ones(len(few), 2), torch.tensor(added, dtype=torch.float32)])
    network = nn.Linear(2, 1, bias=False)
    nn.init.ones_(network.weight)
    # of the others every image is the same, so that their draws do not matter
    mechanism = PrivateMechanism(
        release_of(4, multiplicity=draws),
        network,
        lambda indices: network(x[units.draw(indices, Randomness())]).sum(1),
        physical_batch=physical,
    )
    change = mechanism._clipped_sum(torch.arange(4)) - mechanism._clipped_sum(torch.arange(3))
    assert float(change.norm()) <= CLIP


def test_people_are_drawn_at_one_rate_and_each_of_their_images_as_often() -> None:
    units = Units(people([1, 1000, 1, 1, 5]))
    seen: list[Tensor] = []
    network = nn.Linear(1, 1)

    def losses(indices: Tensor) -> Tensor:
        seen.append(indices)
        return network(torch.zeros(len(indices), 1)).sum(1)

    steps, rate = 600, 0.4
    mechanism = PrivateMechanism(
        release_of(5, expected_batch=2, steps=steps), network, losses, physical_batch=8, randomness=Randomness()
    )
    for _ in range(steps):
        mechanism.gradient()
    drawn = torch.cat(seen).bincount(minlength=5)
    assert all(stats.binomtest(int(count), steps, rate).pvalue > 1e-6 for count in drawn)
    images = units.draw(torch.full((5000,), 4), Randomness()).bincount(minlength=1008)
    assert sorted(np.flatnonzero(images).tolist()) == rows_of(people([1, 1000, 1, 1, 5]), 4).tolist()
    assert stats.chisquare(images[images > 0]).pvalue > 1e-6
    many = units.draw(torch.full((20_000,), 1), Randomness())
    assert set(many.tolist()) == set(rows_of(people([1, 1000, 1, 1, 5]), 1).tolist())


def test_one_image_a_person_is_the_unit_of_an_image() -> None:
    one, plain = Units(torch.tensor([2, 0, 1])), Units(None)
    holds, bins, features = torch.tensor([True, False, True]), torch.tensor([0, 3, 1]), torch.randn(3, 4) + 5
    assert torch.equal(one.number(holds), plain.number(holds))
    assert torch.equal(one.votes(bins, 2), plain.votes(bins, 2))
    # but for what is left for rounding
    assert torch.linalg.vector_norm(features, dim=1).min() > 1
    left = (1 + 1 / 256) / (1 + 2.0**-20)
    torch.testing.assert_close(left * one.clipped_sum([features], 1.0), plain.clipped_sum([features], 1.0))
    assert one.draw(torch.tensor([0, 1, 2, 2]), Randomness()).tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize("units", [[0, 2], [-1, 0]])
def test_units_without_images_are_an_error(units: list[int]) -> None:
    with pytest.raises(ValueError, match="each must have a row"):
        Units(torch.tensor(units))


def test_ranks_get_whole_people() -> None:
    images = set_of(people([3, 1, 4, 1, 5]))
    private = PrivateSet(images, PublicFacts.of(images), "", "", "")
    parts = [private.part(Ranks(rank, 3)) for rank in range(3)]
    assert sum(len(part) for part in parts) == len(images)
    for rank, part in enumerate(parts):
        assert part.units is not None
        assert part.labels is not None
        mine = Ranks(rank, 3).part(5)
        assert set(part.units.tolist()) == set(range(len(mine)))
        for number, person in enumerate(mine):
            own = rows_of(torch.from_numpy(images.units), person)
            assert np.array_equal(part.images[part.units == number], images.images[own])
            assert np.array_equal(part.labels[part.units == number], images.labels[own])


def test_more_ranks_than_people() -> None:
    images = set_of(people([3]))
    part = PrivateSet(images, PublicFacts.of(images), "", "", "").part(Ranks(1, 2))
    assert part.units is not None
    empty = Units(torch.from_numpy(part.units))
    assert empty.number(torch.zeros(0, dtype=torch.bool)).tolist() == [0]
    assert empty.votes(torch.zeros(0, dtype=torch.int64), 2).tolist() == [0, 0]
    assert empty.clipped_sum([torch.zeros(0, 2)], 1.0).tolist() == [0, 0]
    assert empty.draw(torch.zeros(0, dtype=torch.int64), Randomness()).tolist() == []


def test_a_vote_does_not_hang_on_how_many_images_others_have(tmp_path: Path) -> None:
    """Last bits of a float32 product depend on the place of a row in its batch, here strongly enough for a tie."""

    def scores(rows: Tensor) -> Tensor:
        place = torch.arange(len(rows)) % 2
        return torch.stack([torch.full((len(rows),), 1e-7), 2e-7 * place], 1)

    def found(more: int, *, decides: bool) -> list[int]:
        images = set_of(torch.cat([torch.zeros(more, dtype=torch.int64), torch.arange(4), torch.arange(4)]))
        access = access_to(images, tmp_path)
        rows = access.map(scores, access.images, decides=decides)
        return rows._rows.argmax(1)[more:].tolist()

    assert found(0, decides=False) != found(1, decides=False)
    assert found(0, decides=True) == found(1, decides=True) == found(2, decides=True)


def test_how_many_images_people_have_is_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images = set_of(people([1000, 211, 1]))
    queries = [
        Release(spec=QuerySpec(name=kind, kind=kind, dataset_size=3), noise_multiplier=1.0)
        for kind in ("count", "mean", "histogram")
    ]
    access = access_to(images, tmp_path, *queries)
    assert access.facts.dataset_size == 3
    assert access.facts.unit == "one person"
    access.map(lambda rows: rows.float(), access.images, title="features")
    access.count("count", lambda rows: rows.flatten(1).float().mean(1) > 127, access.images)
    access.mean("mean", lambda rows: rows.float(), access.images)
    access.histogram("histogram", 2, lambda labels: labels, access.labels)
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""
    assert "1212" not in repr(access.images) + str(access.images)
    with pytest.raises(PrivacyRefused):
        access.count("other", lambda rows: rows, access.images)
