"""Near-copies: the comparison against a loop, the distance, the count and its charge."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rapid.data import ImageSet
from rapid.data.stored import image_digests
from rapid.data.units import ONE_PERSON
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge, balance, set_limit
from rapid.errors import InputError, PrivacyRefused
from rapid.release.nearness import Counted, Nearness, budget, copies_rule, release_count, too_blurred
from rapid.release.policy import CopiesPolicy
from rapid.training import RunFolder

CPU = torch.device("cpu")
Images = NDArray[np.uint8]


def images(count: int, seed: int, shape: tuple[int, ...] = (5, 4)) -> Images:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def squares(some: Images, others: Images) -> NDArray[np.int64]:
    """Squared distances in whole numbers, pair by pair."""
    own, other = (part.reshape(len(part), -1).astype(np.int64) for part in (some, others))
    return ((own[:, None] - other[None]) ** 2).sum(2)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 9), st.sampled_from([(5, 4), (3, 3, 3)]))
def test_the_comparison_is_exact(seed: int, count: int, others: int, shape: tuple[int, ...]) -> None:
    own, synthetic = images(count, seed, shape), images(others, seed + 1, shape)
    nearest = squares(own, synthetic).min(1)
    # at a distance that occurs, one unit below and one above
    for squared in (int(nearest[0]) - 1, int(nearest[0]), int(nearest.max()) + 1):
        found = Nearness(synthetic, squared, 1).holds(torch.from_numpy(own), CPU)
        assert found.tolist() == (nearest <= squared).tolist()


def test_it_does_not_depend_on_the_batch() -> None:
    """2,500 synthetic images are two blocks; distances of whole numbers leave no room for rounding."""
    own, synthetic = images(40, 0, (28, 28)), images(2500, 1, (28, 28))
    synthetic[2400] = own[7]
    near = Nearness(synthetic, int(squares(own, synthetic[:10]).min()), 1)
    together = near.holds(torch.from_numpy(own), CPU)
    alone = torch.cat([near.holds(torch.from_numpy(own[i : i + 1]), CPU) for i in range(40)])
    assert torch.equal(together, alone)
    assert together[7]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.01, 0.1, 0.5]))
def test_few_public_images_are_as_near_as_a_near_copy(seed: int, share: float) -> None:
    public, synthetic = images(120, seed, (3, 3)), images(30, seed + 1, (3, 3))
    near = Nearness.of(synthetic, public, share, CPU)
    nearest = squares(public, synthetic).min(1)
    assert (nearest <= near.squared).sum() <= share * len(public)
    # and it is the largest such distance
    assert (nearest <= near.squared + 1).sum() > share * len(public)
    assert near.distance == math.sqrt(near.squared) / 255


def test_identical_images_are_near_even_if_public_ones_are_copied() -> None:
    public = images(100, 0)
    near = Nearness.of(public, public, 0.01, CPU)
    assert near.squared == 0
    assert near.holds(torch.from_numpy(public[:1]), CPU).item()
    with pytest.raises(InputError, match="99 images; the distance of near-copies needs 100"):
        Nearness.of(public, public[:99], 0.01, CPU)


def counted(folder: Path, private: ImageSet, near: Nearness, book: Ledger, epsilon: float) -> int:
    """The noisy count as the gate makes it."""
    folder.mkdir(exist_ok=True)
    facts = PublicFacts.of(private)
    spent = budget(near, facts, epsilon, 1e-5)
    charge = Charge(
        book, book.account(image_digests(private.images)), RunFolder(folder).run_name(), Limit(epsilon, 1e-5)
    )
    access = PrivateAccess(private, facts, spent, RunFolder(folder), device=CPU)
    with access.charged(charge):
        return release_count(access, near)


@pytest.fixture
def book(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_planted_copies_raise_the_count(tmp_path: Path, book: Ledger) -> None:
    """With hardly any noise the count is the number of planted copies; with noise it stays near it."""
    private, public, synthetic = images(400, 0), images(400, 1), images(200, 2)
    plain = Nearness.of(synthetic, public, 0.01, CPU)
    synthetic = synthetic.copy()
    # one grey level off in each pixel
    synthetic[:50] = np.where(private[:50] < 255, private[:50] + 1, 254)
    planted = Nearness.of(synthetic, public, 0.01, CPU)
    whole = ImageSet(private, None, ())
    before = counted(tmp_path / "plain", whole, plain, book, 60)
    after = counted(tmp_path / "planted", whole, planted, book, 60)
    exact = [int((squares(private, one.synthetic).min(1) <= one.squared).sum()) for one in (plain, planted)]
    assert abs(before - exact[0]) <= 2
    assert abs(after - exact[1]) <= 2
    assert exact[1] - exact[0] >= 40
    spent = budget(planted, PublicFacts.of(whole), 1.0, 1e-5)
    noisy = counted(tmp_path / "noisy", whole, planted, book, 1.0)
    assert abs(noisy - exact[1]) < 7 * spent.main.noise_stddev
    assert Counted.of(noisy, spent, [], 0.95).epsilon <= 1


def test_a_person_counts_once(tmp_path: Path, book: Ledger) -> None:
    """However many of their images have a near-copy."""
    own, synthetic = images(30, 0), images(40, 1)
    synthetic[:20] = own[:20]
    people = ImageSet(own, None, (), units=np.array([0] * 18 + [1, 2] + [3] * 10, dtype=np.int64))
    near = Nearness(synthetic, 0, 100)
    facts = PublicFacts.of(people)
    assert (facts.dataset_size, facts.unit) == (4, ONE_PERSON)
    assert counted(tmp_path / "people", people, near, book, 90) == 3
    assert "people of whom an image has" in budget(near, facts, 1.0, 1e-5).main.spec.title


def test_it_is_charged_before_it_is_computed(tmp_path: Path, book: Ledger) -> None:
    whole = ImageSet(images(30, 0), None, ())
    broken = Nearness(images(5, 1, (9, 9)), 0, 100)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        counted(tmp_path / "broken", whole, broken, book, 0.5)
    (line,) = book.entries()
    assert line.kind == "reserve"
    assert [release.name for release in line.releases] == ["near-copies"]
    assert 0.4 < balance(book.entries(), line.dataset).epsilon <= 0.5


def test_a_recorded_count_costs_nothing_and_a_limit_is_kept(tmp_path: Path, book: Ledger) -> None:
    whole, near = ImageSet(images(30, 0), None, ()), Nearness(images(5, 1), 0, 100)
    first = counted(tmp_path / "one", whole, near, book, 0.5)
    dataset = book.account(image_digests(whole.images))
    spent = balance(book.entries(), dataset).epsilon
    assert counted(tmp_path / "one", whole, near, book, 0.5) == first
    assert balance(book.entries(), dataset).epsilon == spent
    # of other synthetic images, or at another distance, it is another count
    for other in (Nearness(images(5, 2), 0, 100), Nearness(near.synthetic, 1, 100)):
        with pytest.raises(InputError, match="another plan"):
            counted(tmp_path / "one", whole, other, book, 0.5)
    set_limit(book, dataset, Limit(0.6, 1e-5))
    with pytest.raises(PrivacyRefused, match="limit"):
        counted(tmp_path / "two", whole, near, book, 0.5)
    assert balance(book.entries(), dataset).epsilon_prv == pytest.approx(spent, rel=0.1)


def test_what_the_count_tells() -> None:
    near = Nearness(images(5, 1), 0, 100)
    facts = PublicFacts(10_000, (), (5, 4))
    spent = budget(near, facts, 0.1, 1e-5)
    policy = CopiesPolicy()
    assert not too_blurred(policy, spent)
    stddev = spent.main.noise_stddev
    for count, outcome in ((0, "pass"), (round(200 - 1.7 * stddev), "pass"), (round(201 - 1.6 * stddev), "fail")):
        told = Counted.of(count, spent, [], 0.95)
        assert told.at_most == max(0, math.ceil(count + 1.6448536 * stddev + 0.5))
        assert copies_rule(policy, told, facts.unit).outcome == outcome
    # 200 private images are too few for this noise: nothing is spent for a count that says nothing
    spec = spent.main.spec.model_copy(update={"dataset_size": 200})
    release = spent.main.model_copy(update={"spec": spec})
    few = spent.model_copy(update={"dataset_size": 200, "releases": (release,)})
    assert "nothing was counted" in too_blurred(policy, few)
    assert copies_rule(policy, "why", facts.unit).stops
    assert not copies_rule(CopiesPolicy(required=False), "why", facts.unit).stops
