"""What simulated agents of the earlier versions in `tests/versions.txt` send differently.

Such agents are part of a fleet until the last of them has been upgraded (docs/upgrades.md)."""

from __future__ import annotations

from enum import IntEnum
from zlib import crc32

from holdfast.agent.connection.reports import Reports


class Release(IntEnum):
    ANSWERS_START = (
        0  # Start by a report, because its heartbeats do not name what has started; otherwise as the next version
    )
    REPORTS_FIRST_STEPS = 1  # and does not have them in heartbeats; its ranks do not agree on saves
    THIS = 2


def of_node(name: str) -> Release:
    """The release of a node in a small world: three of four have this one."""
    number = crc32(name.encode())
    if number % 4:
        return Release.THIS
    return Release.REPORTS_FIRST_STEPS if number % 3 else Release.ANSWERS_START


class EarlierReports(Reports):
    def _move_first_steps(self) -> None:
        """Do nothing: they are sent as reports."""
