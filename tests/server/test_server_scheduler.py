"""The rows of each request in a step: bounds for any requests, and the cases that the rule was made for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapid_server.scheduler import RIDERS, Costs, Load, Turns, share

loads = st.lists(st.builds(Load, missing=st.integers(1, 3000), rows=st.integers(0, 300)), max_size=12)


def cpu(rows: int) -> float:
    """A small fixed cost, then every row costs."""
    return 6 + 0.4 * rows


def gpu(rows: int) -> float:
    """All rows cost the same."""
    return 6.0


@given(loads=loads, batch=st.integers(1, 256), seconds=st.sampled_from([cpu, gpu]))
def test_bounds(loads: list[Load], batch: int, seconds: object) -> None:
    granted = share(loads, batch, seconds)  # type: ignore[arg-type]
    assert len(granted) == len(loads)
    assert all(0 <= rows <= load.rows for rows, load in zip(granted, loads, strict=True))
    assert sum(granted) <= batch
    ready = [load for load in loads if load.rows]
    # never idle while there is work, and the smallest request takes part if there is room for all its peers
    assert (sum(granted) > 0) == bool(ready)
    if ready:
        smallest = min(load.missing for load in ready)
        first = next(index for index, load in enumerate(loads) if load.rows and load.missing == smallest)
        if len(ready) <= batch:
            assert granted[first] > 0


@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=20), batch=st.integers(1, 200))
def test_equals_share_evenly(rows: list[int], batch: int) -> None:
    """No request gets less than another unless it needs no more, and no place stays empty while one waits."""
    granted = share([Load(10, row) for row in rows], batch, cpu)
    most = max(granted)
    assert all(got == row or got >= most - 1 for got, row in zip(granted, rows, strict=True))
    assert sum(granted) == min(batch, sum(rows))


@given(
    many=st.lists(st.integers(1, 50), min_size=1, max_size=99),
    other=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    batch=st.integers(1, 200),
)
def test_clients_share_evenly(many: list[int], other: list[int], batch: int) -> None:
    """However many requests one of them has; and within a client as above."""
    loads = [Load(10, rows, client="a") for rows in many] + [Load(10, rows, client="b") for rows in other]
    granted = share(loads, batch, cpu)
    parts = granted[: len(many)], granted[len(many) :]
    for own, wanted in zip(parts, (many, other), strict=True):
        assert sum(own) == sum(wanted) or sum(own) >= batch // 2
        assert all(got == rows or got >= max(own) - 1 for got, rows in zip(own, wanted, strict=True))
    assert sum(granted) == min(batch, sum(many) + sum(other))


@pytest.mark.parametrize("small", [1, 4, 12])
def test_a_small_request_beside_a_large_one(small: int) -> None:
    alone = cpu(2 * small)
    granted = share([Load(2000, 250), Load(small, 2 * small)], 128, cpu)
    assert granted[1] == 2 * small
    assert alone < cpu(sum(granted)) <= (1 + RIDERS) * alone
    # on a device that computes all rows at once, the large one rides along without limit
    assert share([Load(2000, 250), Load(small, 2 * small)], 128, gpu)[0] == 128 - 2 * small


def test_a_large_request_alone_gets_the_whole_batch() -> None:
    assert share([Load(2000, 250)], 128, cpu) == [128]
    assert share([], 128, cpu) == []
    assert share([Load(5, 0)], 128, cpu) == [0]


def test_costs() -> None:
    costs = Costs([1, 2, 4, 8, 16], [1.0, 1.1, 1.0, 2.0, 4.1])
    assert [costs(rows) for rows in (1, 2, 3, 4, 6, 16, 32)] == pytest.approx([1, 1.1, 1.1, 1.1, 1.55, 4.1, 8.2])
    assert costs.best_batch(10) == 8
    assert costs.best_batch(1.5) == 4
    assert costs.best_batch(0.5) == 1
    # larger steps have fewer of everything else
    assert Costs([1, 2, 4], [1.0, 1.04, 2.0]).best_batch(10) == 4
    assert Costs([1, 2, 4], [1.0, 1.01, 2.0]).best_batch(10) == 2


@pytest.mark.parametrize("without", [3, 10, 1000])
def test_a_large_request_keeps_its_share_when_small_ones_come_and_go(without: int) -> None:
    """In every step but each tenth or so there is a request for one image, which leaves no room for the large one."""
    turns, of_large, all_together = Turns(), 0.0, 0.0
    for step in range(3000):
        loads = [Load(20_000, 300), Load(30, 60)]
        loads += [Load(1, 2)] if step % without else []
        granted = turns.correct(loads, share(loads, 64, cpu), 64, cpu)
        took = cpu(sum(granted))
        all_together += took
        of_large += took * granted[0] / sum(granted)
    # an eighth, less what a turn is too long for the steps before it
    assert of_large / all_together > 0.9 * RIDERS / (1 + RIDERS)


@pytest.mark.parametrize("requests", [20, 100, 1000])
def test_a_client_with_many_requests_has_no_more_than_another(requests: int) -> None:
    """Also over many steps, and each of its requests has its turn."""
    turns, served, rows_of_b, made = Turns(), [0] * (requests + 1), 0, 0
    for step in range(1, 200):
        loads = [Load(8, 8, last, "a") for last in served[:-1]] + [Load(8, 64, served[-1], "b")]
        granted = turns.correct(loads, share(loads, 64, cpu), 64, cpu)
        served = [step if rows else last for rows, last in zip(granted, served, strict=True)]
        rows_of_b, made = rows_of_b + granted[-1], made + sum(granted)
    assert rows_of_b / made == 0.5
    assert min(served) > 200 - 2 * -(-requests // 32)
