"""Kills for lack of memory are read from the cgroup, however it is mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.workers.memory_limit import MemoryLimit

GIB = 1 << 30
V1 = ("memory", "memory.oom_control", "memory.limit_in_bytes", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n")
V2 = ("", "memory.events", "memory.max", "low 0\nhigh 0\nmax 7\noom 1\noom_kill {}\noom_group_kill 0\n")


class Group:
    """A cgroup in files."""

    def __init__(self, root: Path, form: tuple[str, str, str, str], path: str, mounted: str) -> None:
        controller, self.events, self.max, self.text = form
        self.root = root
        (root / "proc" / "self").mkdir(parents=True)
        lines = f"4:cpu,cpuacct:/\n3:memory:{path}\n0::/\n" if controller else f"0::{path}\n"
        (root / "proc" / "self" / "cgroup").write_text(lines)
        self.directory = root / "cgroup" / controller / mounted
        self.directory.mkdir(parents=True)
        self.kills(0)

    def kills(self, count: int, limit: str = str(2 * GIB)) -> None:
        (self.directory / self.events).write_text(self.text.format(count))
        (self.directory / self.max).write_text(limit + "\n")

    def read(self) -> MemoryLimit:
        return MemoryLimit(self.root / "proc", self.root / "cgroup")


@pytest.mark.parametrize("form", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(("path", "mounted"), [("/jobs/7", "jobs/7"), ("/kubepods/pod9/c1", ""), ("/", "")])
def test_a_kill_is_described_once(tmp_path: Path, form: tuple[str, str, str, str], path: str, mounted: str) -> None:
    group = Group(tmp_path, form, path, mounted)
    group.kills(3)
    limit = group.read()
    assert limit.killed(17) == "", "kills before the start of the agent"
    group.kills(4)
    text = limit.killed(17)
    assert text.startswith("Memory cgroup out of memory: Killed process 17 (limit: 2.00 GiB")
    assert limit.killed(18) == ""
    group.kills(6, "max" if form is V2 else "9223372036854771712")
    assert "Killed a process (limit: that of a cgroup above" in limit.killed(None)


def test_without_a_memory_cgroup_nothing_is_described(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path / "none", tmp_path)
    assert limit.killed(1) == ""
    group = Group(tmp_path, V2, "/", "")
    read = group.read()
    (group.directory / group.events).write_text("garbage\noom_kill x\n")
    assert read.killed(1) == ""
    (group.directory / group.events).unlink()
    assert read.killed(1) == ""


def test_this_process_has_one_or_none() -> None:
    assert MemoryLimit().killed(1) == ""
