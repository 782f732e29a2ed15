"""A queue in which clients take turns, so that no client waits for all that another one has asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of clients. The next one is the oldest of the client whose last turn is longest ago. Not thread-safe."""

    def __init__(self) -> None:
        # clients in the order of their turns; none without items
        self._waiting: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._waiting.values() for item in items)

    def held(self, client: str) -> int:
        """Number of items of a client."""
        return len(self._waiting.get(client, ()))

    def put(self, client: str, item: Item) -> None:
        """Add an item behind the others of its client."""
        self._waiting.setdefault(client, deque()).append(item)

    def put_back(self, client: str, item: Item) -> None:
        """Add an item before the others of its client: more is to be done for it, after a turn of the other clients."""
        self._waiting.setdefault(client, deque()).appendleft(item)

    def take(self) -> tuple[str, Item]:
        """The next item and its client, who then comes after all others.

        Raises:
            LookupError: there are no items.
        """
        if not self._waiting:
            raise LookupError("there are no items")
        client = next(iter(self._waiting))
        items = self._waiting.pop(client)
        item = items.popleft()
        if items:
            self._waiting[client] = items
        return client, item

    def remove(self, client: str, item: Item) -> bool:
        """Remove an item; return whether it was there."""
        items = self._waiting.get(client, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[client]
        return True

    def clear(self) -> list[Item]:
        """Remove all items, and return them."""
        items = list(self)
        self._waiting.clear()
        return items
