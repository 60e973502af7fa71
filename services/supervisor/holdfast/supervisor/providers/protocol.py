"""The interface of a provider: one method, or two. A provider needs no other code of the supervisor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to be replaced. No worker runs on it, and it does not hold the only copy of any data."""

    node: str  # its name in the fleet; another machine may come under the same name, or under a new one
    hostname: str
    address: str
    reason: str  # what is wrong with it, one sentence
    request: str  # id of this request, unique; a request is never sent twice


@runtime_checkable
class Provider(Protocol):
    """Returned by a plug-in of `holdfast.providers`."""

    async def replace(self, machine: Machine) -> str:
        """Have the machine replaced. Returns in a few words what was done, for operators.

        The new machine need not be available yet. Runs in the supervisor's event loop, so it must not block. An exception
        counts as a refusal with its text, and a new request is made, up to three times.
        """
        ...


@dataclass(frozen=True, slots=True)
class MoreNodes:
    """Jobs of a pool lack nodes."""

    pool: str  # empty = jobs and nodes without one
    wanted: int  # nodes that the pool should have in all
    missing: int  # of them, in addition to the present ones
    jobs: tuple[str, ...]  # the jobs that lack them
    reason: str  # one sentence


@runtime_checkable
class Supplier(Protocol):
    """A provider that can also be asked for more nodes."""

    async def more(self, asked: MoreNodes) -> str:
        """Have the pool grow to `wanted` nodes. Returns in a few words what was done. Like `Provider.replace`, but the request
        is repeated while nodes are missing, perhaps by another supervisor: `wanted` is a target, not a number to add. An
        exception is a refusal with its text."""
        ...
