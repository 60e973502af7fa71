"""Exchange of data between ranks at the start: through the process group, on the main thread, before any other thread."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Exchange(Protocol):
    """All ranks of one launch. Every call except `send` and `receive` is collective."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank."""
        ...

    def send(self, data: memoryview, to: int) -> None:
        """Send bytes to one rank, which must `receive` the same number."""
        ...

    def receive(self, nbytes: int, sender: int) -> memoryview: ...


class Alone:
    """A world of one."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def send(self, data: memoryview, to: int) -> None:
        raise AssertionError("a world of one has no rank to send to")

    def receive(self, nbytes: int, sender: int) -> memoryview:
        raise AssertionError("a world of one has no rank to receive from")


class Group:
    """Exchange over a gloo group of the process group's ranks, from main memory. The construction is collective.

    With `timeout_s`, a separate group is created for use by background threads; no call waits longer.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group: Any = dist.group.WORLD
        if timeout_s is not None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        elif dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def send(self, data: memoryview, to: int) -> None:
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, group=self._group)

    def receive(self, nbytes: int, sender: int) -> memoryview:
        buffer = bytearray(nbytes)
        if nbytes:
            dist.recv(torch.frombuffer(buffer, dtype=torch.uint8), sender, group=self._group)
        return memoryview(buffer)
