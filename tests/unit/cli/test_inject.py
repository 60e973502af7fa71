"""Faults hit exactly what they name: real processes that stand for an agent and its worker, and strangers beside them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from holdfast.agent.collectors.kernel_lines import parse_record, recognise
from holdfast.cli.inject import AGENT_MODULE, Injector
from holdfast.cli.processes import kill_tree
from holdfast.domain.errors import Conflict, HoldfastError, NotFound, Unavailable

AGENT = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(worker.pid, flush=True)
worker.wait()
input()
"""


@dataclass
class Played:
    """The two calls of the client that an injector makes."""

    agent_pid: int
    worker_pid: int | None
    directory: Path
    hostname: str = field(default_factory=socket.gethostname)

    def job(self, name: str) -> dict[str, Any]:
        return {"phase": "running", "ranks": [{"rank": 0, "node": "n0", "pid": self.worker_pid}]}

    def node(self, name: str) -> dict[str, Any]:
        return {
            "node": name,
            "state": "active",
            "hostname": self.hostname,
            "agent_pid": self.agent_pid,
            "directory": str(self.directory / "nodes" / name),
            "kernel_log": str(self.directory / "kernel.log"),
        }

    @property
    def inject(self) -> Injector:
        return Injector(self)  # type: ignore[arg-type]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, AGENT_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None
        yield Played(agent.pid, int(agent.stdout.readline()), tmp_path)
        kill_tree(agent.pid)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the pid that a dead one had."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        assert process.poll() is None, "a stranger was hit"
        process.kill()


def test_a_crash_kills_the_worker_alone(played: Played) -> None:
    assert f"SIGKILL to rank 0 of llm (pid {played.worker_pid} on n0)" in played.inject.crash("llm", 0)
    assert played.worker_pid is not None
    worker = played.worker_pid
    wait_until(lambda: not psutil.pid_exists(worker), description="the worker to be gone")
    assert psutil.pid_exists(played.agent_pid)


def test_a_hang_stops_it(played: Played) -> None:
    played.inject.hang("llm", 0)
    worker = psutil.Process(played.worker_pid)
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, description="the worker to be stopped")
    worker.send_signal(signal.SIGCONT)


def test_a_lost_node_loses_everything(played: Played) -> None:
    """Not started by `holdfast up`: there is no switchboard, the agent's tree is killed."""
    played.inject.node_loss("n0")
    wait_until(
        lambda: (
            not psutil.pid_exists(played.worker_pid or 0)
            and psutil.Process(played.agent_pid).status() == psutil.STATUS_ZOMBIE
        ),
        description="agent and worker to be gone",
    )


def test_a_stranger_with_the_workers_pid_is_not_hit(played: Played, stranger: subprocess.Popen[bytes]) -> None:
    played.worker_pid = stranger.pid
    for fault in (played.inject.crash, played.inject.hang):
        with pytest.raises(Conflict, match="rank 0 of llm has no running process on n0 now; the job is running"):
            fault("llm", 0)


def test_a_stranger_with_the_agents_pid_is_not_hit(played: Played, stranger: subprocess.Popen[bytes]) -> None:
    played.agent_pid = stranger.pid
    with pytest.raises(Conflict, match=rf"the agent of n0 \(pid {stranger.pid}\) is not running"):
        played.inject.node_loss("n0")
    with pytest.raises(Conflict, match="is not running"):
        played.inject.crash("llm", 0)


@pytest.mark.parametrize("pid", [None, 0])
def test_a_worker_that_has_not_started(played: Played, pid: int | None) -> None:
    played.worker_pid = pid
    with pytest.raises(Conflict, match="has no running process"):
        played.inject.crash("llm", 0)


def test_a_rank_that_is_not_there(played: Played) -> None:
    with pytest.raises(NotFound, match=r"job llm has no rank 9 now; the job is running with 1 rank$"):
        played.inject.crash("llm", 9)


def test_a_node_on_another_machine(played: Played) -> None:
    played.hostname = "elsewhere"
    refusal = r"n0 runs on elsewhere.*run `holdfast inject` on elsewhere"
    with pytest.raises(Unavailable, match=refusal):
        played.inject.crash("llm", 0)
    with pytest.raises(Unavailable, match=refusal):
        played.inject.node_loss("n0")


def test_only_a_local_stacks_node_can_be_switched_on(played: Played) -> None:
    with pytest.raises(Unavailable, match="only nodes that `holdfast up` started"):
        played.inject.node_return("n0")


@pytest.mark.parametrize("code", [31, 48, 79, 154])
@pytest.mark.parametrize("gpu", [0, 3])
def test_an_xid_is_read_back_by_the_agents_collector(played: Played, code: int, gpu: int) -> None:
    log = played.directory / "kernel.log"
    log.write_text("")
    assert str(log) in played.inject.xid("n0", code, gpu)
    found = recognise(parse_record(log.read_text().rstrip("\n")).text)
    assert found is not None
    assert (found.xid, found.pci) == (code, f"0000:{0x18 + gpu:02x}:00")


def test_a_kernel_log_that_cannot_be_written(played: Played) -> None:
    (played.directory / "kernel.log").mkdir()
    with pytest.raises(HoldfastError, match=r"cannot write to the kernel log .* of n0"):
        played.inject.xid("n0", 79)
