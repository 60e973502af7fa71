"""Reads the output of selected ranks: from the agents' log files on this machine, else through the API from their agents."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.agent.workers.logs import data_from, log_path
from holdfast.cli.client import Client
from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.worker import TORCH_SERVER_LINE

READ_BYTES_MAX = 1 << 20  # per read of one file
LINE_BYTES_MAX = 64 << 10  # a longer line without an end is cut
BAR_EVERY_S = 10.0  # between two states that are shown of a line that is overwritten, such as a progress bar
FROM_END_BYTES = 1 << 20  # of a log that is long already when it is first seen
REMOTE_MAX = 8  # ranks on other machines: each read is a request
REMOTE_EVERY_S = 1.0
REMOTE_AGAIN_S = 30.0  # after an agent that has not answered
REMOTE_BYTES = 256 << 10  # of one request
LOOK_BYTES = 4 << 10  # of a request that only returns the size of the log
GENERATIONS_MAX = 2  # the newest and the previous one, whose last lines show why it ended

Ranks = frozenset[int] | None
ALL_RANKS: Ranks = None


def log_file(directory: str | Path, job: str, generation: int, rank: int) -> Path:
    """Return the path of a rank's log. `directory` is that of the agent."""
    return log_path(Path(directory) / "logs", job, generation, rank)


class LogTail:
    """Call `lines` with every view of the job, and `rest` once at its end."""

    def __init__(self, client: Client, job: str, ranks: Ranks) -> None:
        self._client = client
        self._job = job
        self._ranks = ranks
        self._tails: dict[tuple[int, int], Tail] = {}  # (generation, rank)
        self._directories: dict[str, Path | None] = {}
        self._skipped: list[str] = []  # lines about skipped output, to be printed

    def lines(self, job: Mapping[str, Any]) -> Iterator[str]:
        """Yield the complete lines that were written since the last call, each with its rank."""
        for worker in job["ranks"]:
            self._open(worker["node"], job["generation"], worker["rank"])
        skipped, self._skipped = self._skipped, []
        yield from skipped
        for tail in list(self._tails.values()):
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
            self._tails[generation, rank] = tail = Tail(path, f"[rank{rank}] ")
            if tail.skip(FROM_END_BYTES):
                self._skipped.append(f"{tail.prefix}(earlier output is not shown: {path})")
        elif rank == 0 or (self._ranks is not None and rank in sorted(self._ranks)[:REMOTE_MAX]):
            self._tails[generation, rank] = RemoteTail(
                Path(), f"[rank{rank}] ", client=self._client, job=self._job, generation=generation, rank=rank
            )


@dataclass(slots=True)
class Tail:
    """One growing file."""

    path: Path
    prefix: str
    position: int = 0
    partial: bytes = b""
    unreadable: bool = False
    clock: Callable[[], float] = time.monotonic
    bar_at: float = 0.0

    @property
    def where(self) -> str:
        return f"cannot read {self.path}"

    def skip(self, last_bytes: int) -> bool:
        """Begin at the first line that begins within the last bytes. Returns whether earlier output is skipped."""
        try:
            with self.path.open("rb") as log:
                start = os.fstat(log.fileno()).st_size - last_bytes
                if start <= 0:
                    return False
                log.seek(start - 1)
                log.readline(LINE_BYTES_MAX)
                self.position = log.tell()
        except OSError:
            return False  # not created yet; another failure is reported by `lines`
        return True

    def lines(self) -> Iterator[str]:
        """Yield the lines that are complete, of one read; of a line that is being overwritten, sometimes its state."""
        yield from self._complete()
        if b"\r" in self.partial and self.clock() >= self.bar_at:
            self.bar_at = self.clock() + BAR_EVERY_S
            yield self._shown(self.partial)

    def _complete(self) -> Iterator[str]:
        try:
            raw = self._read()
        except OSError as error:
            if not self.unreadable:  # reported once
                self.unreadable = True
                yield f"{self.prefix}(its output is not shown: {self.where}: {error.strerror})"
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
            yield from self._complete()
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
                self.position = data_from(log.fileno(), self.position)
                log.seek(self.position)
                raw = log.read(READ_BYTES_MAX)
        except FileNotFoundError:  # not created yet, or deleted with its generation
            return b""
        self.position += len(raw)
        return raw.replace(b"\0", b"")  # the dropped part of a log with a size limit reads as zeros

    def _shown(self, line: bytes) -> str:
        """Return the text of a line; of an overwritten line, such as a progress bar, the last text."""
        return self.prefix + line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


@dataclass(slots=True, kw_only=True)
class RemoteTail(Tail):
    """The log of a rank on another machine, read through the API. `path` is not used."""

    client: Client
    job: str
    generation: int
    rank: int
    next_at: float = 0.0

    @property
    def where(self) -> str:
        return f"generation {self.generation} of rank {self.rank} on another machine"

    def begin(self, bytes_max: int) -> str:
        """Start at most `bytes_max` bytes before the end; 0 = at the beginning. Returns node, generation and size of the log.
        Raises the error of the API if there is no log."""
        part = self.client.rank_log(self.job, self.rank, self.generation, -bytes_max or 0, LOOK_BYTES)
        self.position = part["offset"]
        return f"rank {self.rank} on {part['node']}, generation {part['generation']}: {part['size']:,} bytes"

    def lines(self) -> Iterator[str]:
        if self.clock() >= self.next_at:
            self.next_at = self.clock() + REMOTE_EVERY_S
            yield from super(RemoteTail, self).lines()

    def _read(self) -> bytes:
        try:
            part = self.client.rank_log(self.job, self.rank, self.generation, self.position, REMOTE_BYTES)
        except NotFound:  # not created yet, or deleted with its generation
            return b""
        except HoldfastError as error:
            self.next_at = self.clock() + REMOTE_AGAIN_S
            raise OSError(errno.EIO, str(error)) from error
        self.position = part["next_offset"]
        return str(part["text"]).encode()
