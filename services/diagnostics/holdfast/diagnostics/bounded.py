"""A mapping with a limit, so that the memory of diagnostics stays bounded whatever agents send. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(OrderedDict[K, V]):
    """A mapping of at most `limit` entries, ordered by their last write. Reading does not change the order.

    Writing beyond the limit removes the entries that were written longest ago; `evicted` counts the removed entries. With
    `weigh`, the limit applies to the sum of the values' weights at the time of a write. The entry just written always stays.
    """

    def __init__(self, limit: int, *, weigh: Callable[[V], int] | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.evicted = 0
        self._weigh = weigh

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > 1 and self._size() > self.limit:
            self.popitem(last=False)
            self.evicted += 1

    def get_or_add(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`. If the key is missing, `make()` is written and returned."""
        try:
            return self[key]
        except KeyError:
            value = self[key] = make()
            return value

    def _size(self) -> int:
        return len(self) if self._weigh is None else sum(map(self._weigh, self.values()))
