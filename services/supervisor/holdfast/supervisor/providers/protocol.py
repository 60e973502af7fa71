"""What a provider does: one method, or two. Nothing of the supervisor is needed to write one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to be replaced. No worker runs on it, and nothing is stored there alone."""

    node: str  # its name in the fleet; another machine may come under the same name, or under a new one
    hostname: str
    address: str
    reason: str  # what is wrong with it, one sentence
    request: str  # of this request, unique; the same request never comes twice


@runtime_checkable
class Provider(Protocol):
    """A plug-in of `holdfast.providers` returns one."""

    async def replace(self, machine: Machine) -> str:
        """Have the machine replaced, and return in a few words what was done, for operators to read.

        The new machine need not be there yet. Runs in the supervisor's event loop: it must not block. Whatever it raises
        counts as a refusal with these words, and the request is repeated, as another one, up to three times.
        """
        ...


@dataclass(frozen=True, slots=True)
class MoreNodes:
    """Jobs of a pool lack nodes."""

    pool: str  # empty = jobs and nodes without one
    wanted: int  # nodes that the pool should have in all
    missing: int  # of them, on top of those that are there
    jobs: tuple[str, ...]  # that lack them
    reason: str  # one sentence


@runtime_checkable
class Supplier(Protocol):
    """A provider that can also be asked for more nodes."""

    async def more(self, asked: MoreNodes) -> str:
        """Have the pool grow to `wanted` nodes, and return in a few words what was done. As `Provider.replace`, but the same is
        asked for again while nodes are missing, perhaps by another supervisor: it is a number to reach, and not one to add.
        Whatever it raises is a refusal with these words."""
        ...
