"""Every error that Holdfast raises on purpose. A message says what happened, to what, and what to do.

HoldfastError
├── InvalidSpec          a job, policy, setting or command that cannot mean anything: the user's input is wrong
│   └── InvalidSpecs     several of them, found in one go
├── NotFound             a job, node, incident or shard that does not exist
├── Conflict             right in itself, but not now: a job of that name is running, the port is in use
├── Unavailable          a peer that should answer does not: Redis, a service, an agent
│   └── Unrestorable     a shard that no source hands out whole: the node that asked for it is well
├── OutOfSpace           a directory that must hold something is full; says how much was needed and is free
├── IncompatibleVersion  two parts that do not speak the same protocol version
├── MalformedMessage     a message or record that no correct peer writes; refused whole, never half believed
├── PolicyError          a policy script that does not load, raises, overruns its deadline or answers nonsense
├── PluginError          an installed plug-in that cannot be imported or is not what its group asks for; it is left out
├── StaleEpoch           a command from a leader that has been replaced
└── IntegrityError       bytes that are not what their manifest says; never handed out
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

VALUE_CHARS_MAX = 200  # of a wrong string or number quoted in a message


class HoldfastError(Exception):
    """Base of everything below; catch it to catch every error that Holdfast raises on purpose."""


class InvalidSpec(HoldfastError):
    """The user's input is wrong: names the field, the value given and what would be right."""

    def __init__(self, field: str, value: object, expected: str, where: str = "") -> None:
        """`where`: the file and line of the input, when it has one."""
        prefix = f"{where}: " if where else ""
        super().__init__(f"{prefix}{field}: {_shown(value)} is not valid; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected
        self.where = where


def _shown(value: object) -> str:
    # Bounded while it is made, not after: ten nested YAML aliases are a value whose whole repr would fill the memory.
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxother = shorten.maxlong = VALUE_CHARS_MAX
    shorten.maxlevel = 2
    return shorten.repr(value)


class InvalidSpecs(InvalidSpec):
    """Everything that is wrong with one input, one line each; field, value and expected are those of the first."""

    def __init__(self, problems: Sequence[InvalidSpec]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.expected, first.where)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class NotFound(HoldfastError):
    """There is no such job, node, incident or shard."""


class Conflict(HoldfastError):
    """The request is valid but the present state rules it out."""


class Unavailable(HoldfastError):
    """A part that should answer does not."""


class Unrestorable(Unavailable):
    """No source of a saved shard hands it out whole: names the shard, and for each source why not."""


class OutOfSpace(HoldfastError):
    """A file system is full. Nothing that was there is lost, and nothing half-written stays."""


class IncompatibleVersion(HoldfastError):
    """The other side speaks another protocol version."""


class MalformedMessage(HoldfastError):
    """A message or stored record that cannot be understood: names the field and what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PolicyError(HoldfastError):
    """The job's policy script is of no use: says which file, where, and what is wrong. The default policy decides."""


class PluginError(HoldfastError):
    """An installed plug-in is of no use: says which and why. Everything else runs on without it."""

    def __init__(self, group: str, plugin: str, problem: str) -> None:
        super().__init__(f"plug-in {plugin} of {group}: {problem}")
        self.problem = problem


class StaleEpoch(HoldfastError):
    """The command comes from a supervisor that is no longer the leader."""


class IntegrityError(HoldfastError):
    """Stored bytes differ from their manifest."""
