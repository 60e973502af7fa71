"""Kills for lack of memory in the cgroup of the agent and its workers: the limit of a container, a Slurm job or a service.

A container has no kernel log. The kernel also counts these kills in the cgroup, before the process ends, so the count is
compared when a worker has failed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

V2, V1 = ("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")
UNLIMITED_BYTES = 1 << 60  # the value of cgroup v1 without a limit is larger


class MemoryLimit:
    """`proc`, `mounts`: /proc and /sys/fs/cgroup."""

    def __init__(self, proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> None:
        self._directory, self._names = _find(proc, mounts)
        self._kills = self._count()

    def killed(self, pid: int | None) -> str:
        """Describe, in the kernel's words, a kill since the last call; empty = there was none. `pid`: the process that it was,
        if that is known."""
        before, self._kills = self._kills, self._count()
        if self._kills <= before or self._directory is None:
            return ""
        what = f"process {pid}" if pid is not None else "a process"
        return f"Memory cgroup out of memory: Killed {what} (limit: {self._limit()}, {self._directory})"

    def _count(self) -> int:
        if self._directory is not None:
            with suppress(OSError, ValueError, IndexError):
                lines = (self._directory / self._names[0]).read_text().splitlines()
                return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return 0

    def _limit(self) -> str:
        assert self._directory is not None
        with suppress(OSError, ValueError):
            limit = int((self._directory / self._names[1]).read_text())
            if limit < UNLIMITED_BYTES:
                return f"{limit / 2**30:.2f} GiB"
        return "that of a cgroup above"


def _find(proc: Path, mounts: Path) -> tuple[Path | None, tuple[str, str]]:
    """Return the directory of this process's cgroup, and its files. In a container it is mounted at the root, whatever its path
    on the machine is."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                names, root = V1, mounts / "memory"
            elif not controllers:
                names, root = V2, mounts
            else:
                continue
            for directory in (root / path.lstrip("/"), root):
                if (directory / names[0]).is_file():
                    return directory, names
    return None, V2
