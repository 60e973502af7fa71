"""Reads the output of selected ranks from the agents' log files, for nodes on this machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli.client import Client
from holdfast.domain.worker import TORCH_SERVER_LINE

READ_BYTES_MAX = 1 << 20  # per read of one file
LINE_BYTES_MAX = 64 << 10  # a longer line without an end, such as a progress bar, is cut
GENERATIONS_MAX = 2  # the newest and the previous one, whose last lines show why it ended

Ranks = frozenset[int] | None
ALL_RANKS: Ranks = None


def log_file(directory: str | Path, job: str, generation: int, rank: int) -> Path:
    """Return the path of a rank's log. `directory` is that of the agent."""
    return Path(directory) / "logs" / job / f"g{generation}" / f"rank-{rank}.log"


class LogTail:
    """Call `lines` with every view of the job, and `rest` once at its end."""

    def __init__(self, client: Client, job: str, ranks: Ranks) -> None:
        self._client = client
        self._job = job
        self._ranks = ranks
        self._tails: dict[tuple[int, int], Tail] = {}  # (generation, rank)
        self._directories: dict[str, Path | None] = {}

    def lines(self, job: Mapping[str, Any]) -> Iterator[str]:
        """Yield the complete lines that were written since the last call, each with its rank."""
        for worker in job["ranks"]:
            self._open(worker["node"], job["generation"], worker["rank"])
        for tail in self._tails.values():
            yield from tail.lines()
        for key in [key for key in self._tails if key[0] <= job["generation"] - GENERATIONS_MAX]:
            yield from self._tails.pop(key).rest()

    def rest(self) -> Iterator[str]:
        """Yield the remaining lines, including a last line without an end."""
        for tail in self._tails.values():
            yield from tail.rest()

    def _open(self, node: str, generation: int, rank: int) -> None:
        if (self._ranks is not None and rank not in self._ranks) or (generation, rank) in self._tails:
            return
        if node not in self._directories:
            facts = self._client.node(node)
            here = facts["hostname"] == socket.gethostname()
            self._directories[node] = Path(facts["directory"]) if here else None
        if (directory := self._directories[node]) is not None:
            path = log_file(directory, self._job, generation, rank)
            self._tails[generation, rank] = Tail(path, f"[rank{rank}] ")


@dataclass(slots=True)
class Tail:
    """One growing file."""

    path: Path
    prefix: str
    position: int = 0
    partial: bytes = b""
    unreadable: bool = False

    def lines(self) -> Iterator[str]:
        try:
            raw = self._read()
        except OSError as error:
            if not self.unreadable:  # reported once
                self.unreadable = True
                yield f"{self.prefix}(its output is not shown: cannot read {self.path}: {error.strerror})"
            return
        *whole, self.partial = (self.partial + raw).split(b"\n")
        if len(self.partial) > LINE_BYTES_MAX:
            whole, self.partial = [*whole, self.partial], b""
        for line in map(self._shown, whole):
            if not TORCH_SERVER_LINE.search(line):
                yield line

    def whole_lines(self) -> Iterator[str]:
        """Yield all lines that are complete."""
        while True:
            before = self.position
            yield from self.lines()
            if self.position == before:
                break

    def rest(self) -> Iterator[str]:
        yield from self.whole_lines()
        if self.partial:
            yield self._shown(self.partial)
            self.partial = b""

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as log:
                if os.fstat(log.fileno()).st_size < self.position:  # truncated by the agent, which limits its size
                    self.position, self.partial = 0, b""
                self.position = _data_from(log.fileno(), self.position)
                log.seek(self.position)
                raw = log.read(READ_BYTES_MAX)
        except FileNotFoundError:  # not created yet, or deleted with its generation
            return b""
        self.position += len(raw)
        return raw.replace(b"\0", b"")  # the dropped part of a log with a size limit reads as zeros

    def _shown(self, line: bytes) -> str:
        """Return the text of a line; of an overwritten line, such as a progress bar, the last text."""
        return self.prefix + line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _data_from(log: int, position: int) -> int:
    """Return the position of the next bytes that still exist, because the dropped part of a log can be large."""
    try:
        return os.lseek(log, position, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no data after this position. EINVAL: a file system without holes.
        return os.fstat(log).st_size if error.errno == errno.ENXIO else position
