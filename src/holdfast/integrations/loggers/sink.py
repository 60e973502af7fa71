"""What a logger must be able to do, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

PREFIX = "holdfast/"
MARKER = f"{PREFIX}incident"  # a metric with the value 1 at the step of each incident


@dataclass(frozen=True, slots=True)
class Entry:
    """A text at a step: an incident, a start of the job, a planned end."""

    id: str  # equal if the same entry is written again
    step: int  # steps finished
    title: str
    text: str  # Markdown
    is_incident: bool = False

    @property
    def topic(self) -> str:
        """Where a logger keeps it: beside the others of its sort."""
        return f"{PREFIX}{'incidents' if self.is_incident else 'changes'}"


class Sink(Protocol):
    """One logger. Its methods but `check` are called by one thread at a time, may block, and may raise: the error is
    logged, and training continues."""

    def check(self) -> None:
        """Called first, by `attach` in the script's thread: raise if the logger cannot be used as it was set up."""

    def open(self, restored_step: int) -> None:
        """Begin. `restored_step`: steps finished when this process started; later ones of earlier processes are repeated."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def entry(self, entry: Entry) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None:
        """End. A logger that belongs to the user stays open."""
