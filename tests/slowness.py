"""What makes a process slow from outside: a cgroup that throttles it, as a limit of a container does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

PERIOD_US = 100_000


def _hierarchies() -> Iterator[tuple[Path, bool]]:
    """(where the hierarchy that limits CPU time is mounted, whether it is of version 2)."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            yield Path(mount), False
        elif kind == "cgroup2" and "cpu" in (Path(mount) / "cgroup.subtree_control").read_text().split():
            yield Path(mount), True


def _own_group(pid: int, *, second: bool) -> str:
    """The path of its group in that hierarchy, as /proc says."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if (second and number == "0") or (not second and "cpu" in controllers.split(",")):
            return path
    return "/"


def throttling() -> str:
    """Why processes cannot be throttled here; empty if they can."""
    made = None
    try:
        for mount, _ in _hierarchies():
            made = mount / f"holdfast-test-{uuid4().hex[:8]}"
            made.mkdir()
            made.rmdir()
            return ""
    except OSError as error:
        return f"{made}: {error.strerror}"
    return "no hierarchy of control groups limits CPU time here"


@contextmanager
def throttled(pid: int, share: float) -> Iterator[None]:
    """The process, with all its threads, gets `share` of one CPU, as in a container with a limit."""
    mount, second = next(_hierarchies())
    group, before = mount / f"holdfast-test-{uuid4().hex[:8]}", mount / _own_group(pid, second=second).lstrip("/")
    group.mkdir()
    try:
        quota_us = int(share * PERIOD_US)
        if second:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(OSError):  # it may have ended
            (before / "cgroup.procs").write_text(str(pid))
        group.rmdir()
