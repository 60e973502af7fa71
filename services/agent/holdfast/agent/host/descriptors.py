"""Reserves file descriptors, so that running out of them affects new work and never running workers.

A process without free descriptors cannot read /proc, accept a worker's datagrams, restart its replicator or store its answers.
So the agent holds `RESERVE` descriptors from its start. If fewer than `LOW` others are free, it releases the reserve for its
running workers and refuses new work, with the reason in its refusals and in its host samples, until it can hold the reserve
again."""

from __future__ import annotations

import os
import resource
from typing import Final

import anyio
import structlog

from holdfast.domain.errors import Unavailable

log = structlog.get_logger("holdfast.agent.host.descriptors")

RESERVE: Final = 64  # the agent's loops need a few, a restart of the replicator or the template some more
LOW: Final = 16
LOOK_S: Final = 0.5


class Descriptors:
    """Created first, so that the reserved numbers are low and stay usable if the limit is lowered later."""

    def __init__(self, reserve: int = RESERVE, low: int = LOW) -> None:
        self._size, self._low = reserve, low
        self._held: list[int] = []
        self._take()

    async def run(self) -> None:
        """A loop for the agent's task group."""
        while True:
            self.look()
            await anyio.sleep(LOOK_S)

    @property
    def short(self) -> bool:
        """Whether the reserve is in use."""
        return not self._held

    def left(self) -> tuple[int, int]:
        """Return the descriptors left for new work (0 while the reserve is in use) and the limit."""
        free, limit = _free()
        return 0 if self.short else free, limit

    def look(self) -> None:
        """Release or acquire the reserve, depending on the free descriptors."""
        free, limit = _free()
        if not self.short and free < self._low:
            self._give()
            log.error("file descriptors exhausted: new work refused", left=free, limit=limit, held=_kinds())
        elif self.short and free >= self._size + 2 * self._low:
            self._take()
            log.info("file descriptors available again", left=free - self._size, limit=limit)

    def require(self) -> None:
        """Raises `Unavailable` with the cause if new work cannot be accepted."""
        self.look()
        if self.short:
            free, limit = _free()
            raise Unavailable(
                f"this node has {free} of {limit} file descriptors left: its agent (pid {os.getpid()}, {_kinds()}) keeps them "
                "for its running workers and takes no new work; raise its limit (ulimit -n, LimitNOFILE=)"
            )

    def _take(self) -> None:
        try:
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._give()  # the limit is too low for the reserve: refuse new work with this reason

    def _give(self) -> None:
        while self._held:
            os.close(self._held.pop())


def _free() -> tuple[int, int]:
    """Return the number of free descriptors below the limit, and the limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = sum(int(name) < limit for name in os.listdir("/proc/self/fd")) - 1  # the descriptor of the listing
    except OSError:
        return 0, limit
    return max(0, limit - used), limit


def _kinds() -> str:
    """Describe the open descriptors by kind: "61 sockets, 12 files …"."""
    counts = {"sockets": 0, "pipes": 0, "files": 0, "others": 0}
    try:
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue  # the descriptor of the listing
            kind = target.partition(":")[0] if ":" in target else "files" if target.startswith("/") else "others"
            counts[{"socket": "sockets", "pipe": "pipes", "files": "files"}.get(kind, "others")] += 1
    except OSError:
        return "their kinds cannot be read"
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
