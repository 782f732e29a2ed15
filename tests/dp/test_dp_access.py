"""The one door: what it refuses, releases once, shows of the rows, and charges."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rapid.data import ImageSet
from rapid.dp import Budget, DpSgdSpec, PrivateAccess, PublicFacts, QuerySpec, Release, calibrate
from rapid.dp.entry import Entry, Limit, Spent
from rapid.dp.ledger import Ledger
from rapid.dp.rehearsal import COUNTS
from rapid.dp.spending import Charge, balances, set_limit
from rapid.errors import InputError, LostRank, PrivacyRefused, Stopped
from rapid.stopping import request_stop, stop_on_signal
from rapid.training import RunFolder, Trainer

CPU = torch.device("cpu")
SIZE, CLASSES = 1200, ("a", "b", "c")
"""More images than are handled at a time."""
SPECS = [
    QuerySpec(name="many", kind="count", share=0.1, dataset_size=SIZE),
    QuerySpec(name="centre", kind="mean", share=0.1, sensitivity=0.5, dataset_size=SIZE),
    QuerySpec(name="classes", kind="histogram", share=0.1, dataset_size=SIZE),
    DpSgdSpec(name="network", dataset_size=SIZE, expected_batch=100, steps=4, clip_norm=1.0),
]
BUDGET = calibrate(SPECS, epsilon=4.0, delta=1e-4)


def images(count: int = SIZE, seed: int = 0) -> ImageSet:
    draws = np.random.default_rng(seed)
    pixels = draws.integers(0, 256, (count, 3, 5), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count, dtype=np.int64) % 3, CLASSES, "private")


def access_to(folder: Path, budget: Budget = BUDGET, own: ImageSet | None = None) -> PrivateAccess:
    own = images() if own is None else own
    return PrivateAccess(own, PublicFacts(SIZE, CLASSES, (3, 5)), budget, RunFolder(folder), device=CPU)


def bright(rows: Tensor) -> Tensor:
    return rows.flatten(1).float().mean(1) > 127


def pixels(rows: Tensor) -> Tensor:
    return rows.float() / 255


def release_all(access: PrivateAccess, losses: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Every release of the budget."""
    return [
        torch.tensor(access.count("many", bright, access.images)),
        access.mean("centre", pixels, access.images),
        access.histogram("classes", 3, lambda labels: labels, access.labels),
        train(access, losses),
    ]


def train(access: PrivateAccess, losses: Callable[..., Tensor] | None = None, name: str = "network") -> Tensor:
    torch.manual_seed(0)
    network, rehearsed = nn.Linear(15, 3), iter(COUNTS)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def plain(rows: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(pixels(rows).flatten(1)), labels, reduction="none")

    def chosen(*rows: Tensor) -> Tensor:
        return (plain if losses is None or next(rehearsed, None) else losses)(*rows)

    access.train(
        name,
        Trainer(network, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        chosen,
        [access.images, access.labels],
    )
    return network.weight.detach()


def test_a_release_that_is_not_listed_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    access = access_to(tmp_path)

    def never(*rows: Tensor) -> Tensor:
        raise AssertionError("rows were read")

    for asked in (
        lambda name: access.count(name, never, access.images),
        lambda name: access.mean(name, never, access.images),
        lambda name: access.histogram(name, 3, never, access.labels),
        lambda name: train(access, never, name),
    ):
        with pytest.raises(PrivacyRefused, match="'other' is not in the budget, which lists many, centre, classes, ne"):
            asked("other")
    assert access.steps_taken() == dict.fromkeys(BUDGET.names, 0)
    assert not list(tmp_path.iterdir())


def test_a_release_of_another_kind_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    access = access_to(tmp_path)

    def never(*rows: Tensor) -> Tensor:
        raise AssertionError("rows were read")

    ways: dict[str, Callable[[str], object]] = {
        "count": lambda name: access.count(name, never, access.images),
        "mean": lambda name: access.mean(name, never, access.images),
        "histogram": lambda name: access.histogram(name, 3, never, access.labels),
        "dp-sgd": lambda name: train(access, never, name),
    }
    kinds = {release.name: release.spec.kind for release in BUDGET.releases}
    for way, asked in ways.items():
        for name in BUDGET.names:
            if kinds[name] != way:
                with pytest.raises(PrivacyRefused, match=f"'{name}' is a {kinds[name]} in the budget, not a {way}"):
                    asked(name)
    assert not list(tmp_path.iterdir())


def test_a_finished_release_is_not_made_again(tmp_path: Path) -> None:
    first = release_all(access_to(tmp_path))
    # not even of other images, or by other functions
    again = access_to(tmp_path, own=images(seed=1))
    assert again.steps_taken() == {"many": 1, "centre": 1, "classes": 1, "network": 4}

    def black(rows: Tensor) -> Tensor:
        assert not rows.any()
        return pixels(rows)

    def never(*rows: Tensor) -> Tensor:
        raise AssertionError("rows were read")

    second = [
        torch.tensor(again.count("many", never, again.images)),
        again.mean("centre", black, again.images),
        again.histogram("classes", 3, never, again.labels),
        train(again, never),
    ]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(PrivacyRefused, match="'many' was made already; list a release of its own for each"):
        again.count("many", never, again.images)
    # elsewhere the noise is another
    elsewhere = release_all(access_to(tmp_path / "elsewhere"))
    assert not torch.equal(first[1], elsewhere[1])
    assert not torch.equal(first[3], elsewhere[3])


def test_results_have_the_shapes_and_types_that_are_told(tmp_path: Path) -> None:
    many, centre, classes, _ = release_all(access_to(tmp_path))
    assert many.dtype == torch.int64
    assert (centre.shape, centre.dtype) == ((3, 5), torch.float64)
    assert (classes.shape, classes.dtype) == ((3,), torch.float64)
    exact = bright(torch.from_numpy(images().images)).sum()
    assert abs(many - exact) < 6 * BUDGET.release("many").noise_stddev
    assert (classes - 400).abs().max() < 6 * BUDGET.release("classes").noise_stddev


def test_a_checkpoint_of_another_release_is_refused(tmp_path: Path) -> None:
    release_all(access_to(tmp_path))
    other = calibrate(SPECS, epsilon=5.0, delta=1e-4)
    access = access_to(tmp_path, other)
    for asked in (
        lambda: access.count("many", bright, access.images),
        lambda: access.mean("centre", pixels, access.images),
        lambda: access.histogram("classes", 3, lambda labels: labels, access.labels),
        lambda: train(access),
    ):
        with pytest.raises(InputError, match="was made with another plan") as refused:
            asked()
        assert refused.value.field == "resume"


@contextmanager
def stopping() -> Iterator[None]:
    """A stop that is requested within the block is Stopped, and forgotten after it."""
    with stop_on_signal(), pytest.raises(Stopped):
        yield


def test_a_stop_within_a_query_releases_nothing(tmp_path: Path) -> None:
    access, read = access_to(tmp_path), 0

    def stops(rows: Tensor) -> Tensor:
        nonlocal read
        read = max(read, len(rows))
        request_stop()
        return bright(rows)

    with stopping():
        access.count("many", stops, access.images)
    assert 1 < read < SIZE
    with stopping():
        access.mean("centre", stops, access.images)
    with stopping():
        access.map(stops, access.images)
    assert access.steps_taken() == dict.fromkeys(BUDGET.names, 0)
    assert not list(tmp_path.rglob("*.pt"))
    assert access_to(tmp_path).count("many", bright, access.images) > 0


def test_several_values_an_example_cannot_be_counted(tmp_path: Path) -> None:
    """An image would change the sum by more than 1."""
    access = access_to(tmp_path)
    with pytest.raises(ValueError, match="one value per example"):
        access.count("many", lambda rows: rows.flatten(1) > 127, access.images)
    with pytest.raises(ValueError, match="one value per example"):
        access.histogram("classes", 3, lambda labels: labels[:, None].repeat(1, 2), access.labels)
    assert access.steps_taken() == dict.fromkeys(BUDGET.names, 0)


def test_a_rank_without_images_has_rows_of_the_right_shape(tmp_path: Path) -> None:
    access = access_to(tmp_path, own=images(0))
    found = access.map(lambda rows: nn.functional.normalize(pixels(rows).flatten(1)), access.images)
    assert (len(found), found._rows.shape) == (0, (0, 15))
    assert abs(access.count("many", bright, access.images)) < 6 * BUDGET.release("many").noise_stddev
    assert access.mean("centre", pixels, access.images).shape == (3, 5)
    assert access.histogram("classes", 3, lambda labels: labels, access.labels).shape == (3,)


def test_private_rows_are_neither_shown_nor_pickled(tmp_path: Path) -> None:
    access = access_to(tmp_path)
    rows = access.images
    assert repr(rows) == str(rows) == f"{rows}" == "PrivateTensor(rows of (3, 5))"
    assert repr([access.map(pixels, rows)]) == "[PrivateTensor(rows of (3, 5))]"
    assert len(rows) == SIZE
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(PrivacyRefused, match="cannot be pickled"):
            pickle.dumps(rows, protocol)
    for copies in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save({"rows": one}, io.BytesIO())):
        with pytest.raises(PrivacyRefused):
            copies(rows)
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyRefused):
            copies(access)
    with pytest.raises(TypeError):
        iter(rows)
    with pytest.raises(TypeError):
        rows[0]
    assert np.asarray(rows).dtype == object
    with pytest.raises(AttributeError):
        rows.seen = 1


def test_unlabelled_images_have_no_labels(tmp_path: Path) -> None:
    own = ImageSet(images().images, None, (), "private")
    facts = PublicFacts.of(own)
    assert (facts.dataset_size, facts.classes, facts.image_shape) == (SIZE, (), (3, 5))
    access = PrivateAccess(own, facts, BUDGET, RunFolder(tmp_path), device=CPU)
    with pytest.raises(InputError, match="has no labels") as refused:
        _ = access.labels
    assert refused.value.field == "private"


class Book:
    """A run in a folder of its own, and what its ledger says."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.out = folder / "out"

    @contextmanager
    def run(self, *, resume: bool = False) -> Iterator[PrivateAccess]:
        with RunFolder.enter(self.out, "train-private", {}, resume=resume) as run_folder:
            facts = PublicFacts(SIZE, CLASSES, (3, 5))
            access = PrivateAccess(images(), facts, BUDGET, run_folder, device=CPU)
            charge = Charge(self.ledger, "a" * 32, run_folder.run_name(), Limit(BUDGET.epsilon, BUDGET.delta))
            with access.charged(charge):
                yield access

    def lines(self) -> list[Entry]:
        return self.ledger.entries()


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def spent(**steps: int) -> tuple[Spent, ...]:
    """What so many steps of releases reveal, as it stands in a line."""
    return tuple(Spent.of(name, BUDGET.release(name).event(count)) for name, count in steps.items())


EVERYTHING = spent(many=1, centre=1, classes=1, network=4)


def test_all_is_charged_before_the_first_release_and_settled_at_the_end(book: Book) -> None:
    with book.run() as access:
        (reserved,) = book.lines()
        assert (reserved.kind, reserved.releases) == ("reserve", EVERYTHING)
        assert (reserved.epsilon, reserved.delta) == (BUDGET.epsilon, BUDGET.delta)
        release_all(access)
    *spent_lines, settled = book.lines()[1:]
    assert {line.kind for line in spent_lines} == {"spend"}
    assert (settled.kind, settled.releases) == ("settle", EVERYTHING)
    # what was not made is not charged in the end; a line comes before the draw, and one has the result's hash
    other = Book(book.out.parent / "other")
    with other.run() as access:
        access.mean("centre", pixels, access.images)
    found = [(line.kind, line.releases) for line in other.lines()[1:]]
    assert found == [(kind, spent(centre=1)) for kind in ("spend", "spend", "settle")]


@pytest.mark.parametrize("error", [Stopped, LostRank, PrivacyRefused])
def test_an_orderly_end_is_charged_for_what_was_begun(book: Book, error: type[Exception]) -> None:
    with pytest.raises(error), book.run() as access:
        access.count("many", bright, access.images)
        raise error("here")
    reserved, *_, settled = book.lines()
    assert (reserved.kind, settled.kind, settled.releases) == ("reserve", "settle", spent(many=1))
    # resumed, what is left is charged on top
    with book.run(resume=True) as access:
        left = spent(centre=1, classes=1, network=4)
        assert (book.lines()[-1].kind, book.lines()[-1].releases) == ("reserve", left)
        assert [place.name for place in book.lines()[-1].checkpoints] == ["many"]
        release_all(access)
    assert (book.lines()[-1].kind, book.lines()[-1].releases) == ("settle", left)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, InputError, MemoryError])
def test_a_crash_stays_charged_in_full(book: Book, error: type[BaseException]) -> None:
    with pytest.raises(error), book.run() as access:
        access.count("many", bright, access.images)
        raise error("out", "is no folder")
    assert [line.kind for line in book.lines()] == ["reserve", "spend", "spend"]
    (counting,) = balances(book.lines())[0].runs
    assert (counting.kind, counting.releases) == ("reserve", EVERYTHING)


def test_a_step_whose_rank_was_lost_is_charged(book: Book) -> None:
    def lost(rows: Tensor, labels: Tensor) -> Tensor:
        raise LostRank("the other one is gone")

    with pytest.raises(LostRank), book.run() as access:
        train(access, lost)
    assert book.lines()[-1].releases == spent(network=1)


def test_a_run_beyond_the_limit_leaves_nothing(book: Book) -> None:
    set_limit(book.ledger, "a" * 32, Limit(1.0, BUDGET.delta))
    with pytest.raises(PrivacyRefused, match="limit of this data set"), book.run():
        raise AssertionError("it began")
    assert not book.out.exists()
    assert [line.kind for line in book.lines()] == ["limit"]
    # a folder that an earlier run began is kept
    set_limit(book.ledger, "a" * 32, Limit(10.0, BUDGET.delta))
    with pytest.raises(Stopped), book.run():
        raise Stopped("at once")
    set_limit(book.ledger, "a" * 32, Limit(1.1, BUDGET.delta))
    with pytest.raises(PrivacyRefused, match="limit of this data set"), book.run(resume=True):
        raise AssertionError("it began")
    assert (book.out / "checkpoints" / "manifest.json").exists()


def test_the_other_ranks_charge_nothing(tmp_path: Path) -> None:
    access = access_to(tmp_path / "out")
    with access.charged(None) as same:
        assert same is access
    assert not (tmp_path / "out").exists()


def test_a_release_keeps_the_numbers_that_it_was_made_with(tmp_path: Path) -> None:
    release_all(access_to(tmp_path))
    for name in BUDGET.names:
        saved: dict[str, Any] = torch.load(tmp_path / "checkpoints" / f"{name}.pt", weights_only=True)
        assert Release.model_validate(saved["release"]) == BUDGET.release(name)
