"""Short values and counters that all ranks of a launch share through the store of the process group.

Used only by background threads, over their own connection, and only with calls that return at once. One process
serves the store: the more ranks poll it, the less often each rank polls (`paced`).
"""

from __future__ import annotations

from typing import Final

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # re-exported without `__all__`
from torch.distributed.distributed_c10d import Store, _get_default_store

from holdfast.domain.errors import Unavailable

REQUESTS_PER_S_MAX: Final = 50_000  # by all ranks together


def paced(poll_s: float, world_size: int) -> float:
    """Seconds between two polls of one rank: `poll_s`, or longer if all ranks together would send too many requests."""
    return max(poll_s, world_size / REQUESTS_PER_S_MAX)


class Board:
    """Values in the store. Every method raises Unavailable if the store has ended with its process, rank 0 or the launcher."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def alone(cls) -> Board:
        return cls(HashStore())

    @classmethod
    def shared(cls, launch: str) -> Board:
        """Open the process group's store. `launch` separates a restart from the values of an earlier launch."""
        store = _get_default_store()
        if hasattr(store, "clone"):
            # torch 2.8 and newer; in older versions a blocking call of the training thread delays this one.
            store = store.clone()
        return cls(PrefixStore(f"holdfast/{launch}/", store))

    def count(self, name: str, amount: int = 0) -> int:
        """Add `amount` and return the sum; 0 only reads it."""
        try:
            return int(self._store.add(name, amount))
        except (RuntimeError, dist.DistError) as error:
            raise Unavailable(f"the ranks' shared store does not answer: {error}") from error

    def put(self, name: str, text: str) -> None:
        try:
            self._store.set(name, text)
        except (RuntimeError, dist.DistError) as error:
            raise Unavailable(f"the ranks' shared store does not answer: {error}") from error

    def get(self, name: str) -> str | None:
        """Return the value; None if it has not been set yet."""
        try:
            if not self._store.check([name]):
                return None
            raw: bytes = self._store.get(name)
            return raw.decode()
        except (RuntimeError, dist.DistError) as error:
            raise Unavailable(f"the ranks' shared store does not answer: {error}") from error
