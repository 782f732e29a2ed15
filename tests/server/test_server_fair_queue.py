"""The fair queue against a list of turns by the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapid_server.fair_queue import FairQueue


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "remove", "put back"]), st.sampled_from("abc"))))
def test_the_client_whose_turn_is_longest_ago_is_next(actions: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    # by the definition: items of each client, and when it had its last turn or came without waiting items
    items: dict[str, list[int]] = {client: [] for client in "abc"}
    since: dict[str, int] = dict.fromkeys("abc", 0)
    for now, (action, client) in enumerate(actions, 1):
        waiting = [one for one in items if items[one]]
        if action in ("put", "put back"):
            if not items[client]:
                since[client] = now
            items[client].insert(len(items[client]) if action == "put" else 0, now)
            (queue.put if action == "put" else queue.put_back)(client, now)
        elif action == "remove":
            there = items[client][-1:]
            assert queue.remove(client, there[0] if there else -1) == bool(there)
            items[client] = items[client][:-1]
        elif waiting:
            expected = min(waiting, key=since.__getitem__)
            assert queue.take() == (expected, items[expected].pop(0))
            since[expected] = now
        else:
            with pytest.raises(LookupError):
                queue.take()
        assert len(queue) == len(list(queue)) == sum(map(len, items.values()))
        assert all(queue.held(one) == len(items[one]) for one in items)
    left = sorted(queue)
    assert sorted(queue.clear()) == left
    assert len(queue) == 0
