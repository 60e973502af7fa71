"""What a provider does: one method. Nothing of the supervisor is needed to write one."""

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
