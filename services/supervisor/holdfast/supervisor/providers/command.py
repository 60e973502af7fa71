"""Providers that run the operator's command lines, without a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.processes import operator_command
from holdfast.supervisor.providers.protocol import Machine, MoreNodes

REPLACE = "HOLDFAST_REPLACE_COMMAND"
MORE = "HOLDFAST_MORE_COMMAND"
COMMAND_S = 300.0  # less than the time that the core waits for an answer


class Command:
    """`{node}`, `{hostname}`, `{address}`, `{reason}` and `{request}` are replaced in each word of the line."""

    def __init__(self, line: str, timeout_s: float = COMMAND_S) -> None:
        self._words, self._timeout_s = _words(REPLACE, line), timeout_s

    async def replace(self, machine: Machine) -> str:
        """Raises `Unavailable` if the command fails, or does not end in time."""
        values = {name: str(getattr(machine, name)) for name in Machine.__slots__}
        return await operator_command.run("replace", [_filled(word, values) for word in self._words], self._timeout_s)


class MoreCommand:
    """`{pool}`, `{wanted}`, `{missing}`, `{jobs}` and `{reason}` are replaced in each word of the line."""

    def __init__(self, line: str) -> None:
        self._words = _words(MORE, line)

    async def more(self, asked: MoreNodes) -> str:
        """Raises `Unavailable` if the command fails, or does not end in time."""
        values = {
            "pool": asked.pool,
            "wanted": str(asked.wanted),
            "missing": str(asked.missing),
            "jobs": ",".join(asked.jobs),
            "reason": asked.reason,
        }
        return await operator_command.run("more", [_filled(word, values) for word in self._words], COMMAND_S)


def _words(setting: str, line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidSpec(setting, line, f"a command line ({error})") from error
    if not operator_command.exists(line):
        raise InvalidSpec(setting, line, "a command line whose program is on this machine")
    return words


_PLACE = re.compile(r"\{(\w+)\}")


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Replace all names in one pass, so that a value's own text is not replaced again."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), word)
