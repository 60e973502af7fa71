"""The expected errors of Holdfast. A message states what failed, for which object, why, and what to do.

HoldfastError
├── InvalidSpec          the user's input is invalid: a job, policy, setting or command
│   └── InvalidSpecs     several invalid values of one input
├── NotFound             a job, node, incident or shard does not exist
├── Conflict             a valid request that is not possible now: a job with this name is running, the port is in use
├── Unavailable          Redis, a service or an agent does not answer
│   ├── RedisAway        Redis cannot be reached, or did not answer in time
│   ├── Unrestorable     no source has an intact copy of a shard; the requesting node is healthy
│   └── OtherFleet       the other end of a connection belongs to another fleet, or does not prove that it belongs to this one
│       └── OtherRole    the other end's certificate is not for the role that the connection needs
├── OutOfSpace           a file system is full; the message contains the needed and the free space
├── IncompatibleVersion  two components have different protocol versions
├── MalformedMessage     a message or record is malformed; it is rejected as a whole
├── PolicyError          a policy cannot be loaded, raises, times out or returns an invalid action
├── PluginError          an installed plug-in cannot be imported, or is not what its group requires; it is left out
├── StaleEpoch           a command from a leader that has been replaced
└── IntegrityError       bytes do not match their manifest; they are never restored
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

VALUE_CHARS_MAX = 200  # of a value quoted in a message


class HoldfastError(Exception):
    """Base class of all expected errors of Holdfast."""


class InvalidSpec(HoldfastError):
    """The user's input is invalid. The message contains the field, the value and the expected value."""

    def __init__(self, field: str, value: object, expected: str, where: str = "") -> None:
        """`where`: file and line of the input, if it has one."""
        prefix = f"{where}: " if where else ""
        super().__init__(f"{prefix}{field}: {_shown(value)} is not valid; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected
        self.where = where


class _Shortened(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print an integer of more than 4,300 digits, which YAML can contain in hexadecimal."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"<integer of {x.bit_length()} bits>"


def _shown(value: object) -> str:
    # The length is limited during formatting, not after it: the complete repr of ten nested YAML aliases would fill the memory.
    shorten = _Shortened()
    shorten.maxstring = shorten.maxother = shorten.maxlong = VALUE_CHARS_MAX
    shorten.maxlevel = 2
    return shorten.repr(value)


class InvalidSpecs(InvalidSpec):
    """All errors of one input, one per line. `field`, `value` and `expected` are those of the first error."""

    def __init__(self, problems: Sequence[InvalidSpec]) -> None:
        first = problems[0]
        super().__init__(first.field, first.value, first.expected, first.where)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class NotFound(HoldfastError):
    """A job, node, incident or shard does not exist."""


class Conflict(HoldfastError):
    """The request is valid, but not possible in the current state."""


class Unavailable(HoldfastError):
    """A component does not answer."""


class RedisAway(Unavailable):
    """Redis cannot be reached, or did not answer in time. A Redis that answers with a refusal is not away."""


class Unrestorable(Unavailable):
    """No source has an intact copy of a shard. The message contains the shard and the failure of each source."""


class OtherFleet(Unavailable):
    """The other end of a connection belongs to another fleet, or does not prove that it belongs to this one."""


class OtherRole(OtherFleet):
    """The other end's certificate does not have the identity that the connection needs."""


class OutOfSpace(HoldfastError):
    """A file system is full. Existing data is intact, and no partial file remains."""


class IncompatibleVersion(HoldfastError):
    """The other side has another protocol version."""


class MalformedMessage(HoldfastError):
    """A message or stored record is malformed. The message contains the field and the problem."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PolicyError(HoldfastError):
    """The job's policy failed: the message contains the file, the location and the error. The default policy decides."""


class PluginError(HoldfastError):
    """An installed plug-in cannot be used. The message contains plug-in and error. Holdfast runs without the plug-in."""

    def __init__(self, group: str, plugin: str, problem: str) -> None:
        super().__init__(f"plug-in {plugin} of {group}: {problem}")
        self.problem = problem


class StaleEpoch(HoldfastError):
    """A command comes from a supervisor that is no longer the leader."""


class IntegrityError(HoldfastError):
    """Stored bytes do not match their manifest."""
