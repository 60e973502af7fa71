"""Whether the last checkpoint of a finished job can still reach the disks: `holdfast run` waits for it, and must not wait for a
copy that a full disk cannot take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

CONFIRMED_S = 2.0  # a disk without room may get some: the replicator deletes older checkpoints first
_PART = "**/.*.part"  # unfinished copies: their space counts as free, because the next attempt continues them
_BLOCK_BYTES = 512

Kept = Mapping[str, Any]


def free_bytes(directory: Path) -> int:
    """Return how much the disk of the directory can still take of the job's files. Raises OSError."""
    there = next(each for each in (directory, *directory.parents) if each.exists())
    parts = sum(path.stat().st_blocks * _BLOCK_BYTES for path in directory.glob(_PART))
    return shutil.disk_usage(there).free + parts


@dataclass(slots=True)
class LastCopy:
    """`on_this_machine`: the nodes are those of a local stack, whose end loses the memory. `waits_s`: how long the command
    waits in any case, because somebody at the terminal may make room; 0 = nobody."""

    on_this_machine: bool
    waits_s: float = 0.0
    free: Callable[[Path], int] = free_bytes
    since: float | None = None  # when the disks were first seen without room
    said: bool = False

    @property
    def given_up(self) -> bool:
        """Whether waiting for the copy is in vain."""
        return self.said and not self.waits_s

    def look(self, kept: Kept | None, findings: Iterable[Mapping[str, Any]], now: float) -> str:
        """Return a line of markup, once, if the disks cannot take the copy. `findings`: of the job, newest first; `now`:
        monotonic seconds."""
        if self.said or not kept:
            return ""
        why = without_room(kept, self.free) if self.on_this_machine else refused(kept, findings)
        if not why:
            self.since = None
            return ""
        self.since = now if self.since is None else self.since
        if now - self.since < CONFIRMED_S:
            return ""
        self.said = True
        if self.waits_s:
            then = (
                f"To do: make room within {self.waits_s - CONFIRMED_S:.0f} s, and it is written; Ctrl-C ends the wait"
            )
        elif self.on_this_machine:
            then = "It is lost when this local stack ends, now; make room before the next run"
        else:
            then = "To do: make room there, and it is written; this command does not wait for it"
        return f"[yellow]warning[/]   the checkpoint at step {kept['step']} is not on disk: {escape(why)}. {then}"


def without_room(kept: Kept, free: Callable[[Path], int]) -> str:
    """Describe the disks of this machine that lack the room for what is only in memory; empty if there are none.

    `kept`: of the API. Its directories must be on this machine, as those of a local stack are."""
    lacks = []
    for node, size in kept.get("unwritten", {}).items():
        directory = Path(kept["directories"].get(node, ""))
        try:
            room = free(directory)
        except OSError:
            continue  # a file was deleted meanwhile; the next look sees the result
        if size > room:
            lacks.append(f"{directory} of {node} needs {_mb(size)} and has {_mb(room)} free")
    return "; ".join(lacks)


def refused(kept: Kept, findings: Iterable[Mapping[str, Any]]) -> str:
    """Return the newest reason why the disk of a node with such a shard accepts no copies; empty if none was reported."""
    waiting = kept.get("unwritten", {})
    for finding in findings:  # newest first
        evidence = finding["evidence"]
        if finding["node"] in waiting and (evidence.get("trouble"), evidence.get("place")) == ("tier_fails", "disk"):
            return str(finding["summary"])
    return ""


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
