"""A command line of the operator's as a provider, without a shell."""

from __future__ import annotations

import shlex

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime import operator_command
from holdfast.supervisor.providers.protocol import Machine

_SETTING = "HOLDFAST_REPLACE_COMMAND"
COMMAND_S = 300.0  # less than the core waits for an answer


class Command:
    """`{node}`, `{hostname}`, `{address}`, `{reason}` and `{request}` are replaced in each word of the line."""

    def __init__(self, line: str, timeout_s: float = COMMAND_S) -> None:
        try:
            self._words = shlex.split(line)
        except ValueError as error:
            raise InvalidSpec(_SETTING, line, f"a command line ({error})") from error
        if not operator_command.exists(line):
            raise InvalidSpec(_SETTING, line, "a command line whose program is on this machine")
        self._timeout_s = timeout_s

    async def replace(self, machine: Machine) -> str:
        """Raises `Unavailable` if the command fails, or does not end in time."""
        return await operator_command.run("replace", [_filled(word, machine) for word in self._words], self._timeout_s)


def _filled(word: str, machine: Machine) -> str:
    for name in Machine.__slots__:
        word = word.replace(f"{{{name}}}", getattr(machine, name))
    return word
