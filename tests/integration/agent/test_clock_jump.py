"""A clock that jumps, by a real agent and in real workers. The machine's clock is never set: a preloaded library keeps an
offset per agent (benchmarks/soak/clock.c), and the agent has no right to set the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from agent_harness import Agent, ControlPlane, prepare_order, script, start_job
from jumping_clocks import clocks_in
from waiting import wait_until
from warm_processes import WarmProcess

from benchmarks.soak.clock import Clocks
from holdfast.domain.evolve import evolve
from holdfast.domain.orders import Inject, OrderDone

CAP_SYS_TIME = 25
OFFSET_S = 3600.0
# Writes how far its wall clock is from where it was at first, by the clock that nobody sets.
WATCHES = """
import os, sys, time
clock = lambda: time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
first = clock()
while True:
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(clock() - first))
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.05)
"""


def skew_s() -> float:
    """Of this machine's real clock, since any moment."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class UnprivilegedAgent(Agent):
    def _start(self) -> WarmProcess:
        drop = ["setpriv", "--bounding-set=-sys_time", "--inh-caps=-sys_time"]
        with (self.root / "agent.log").open("ab") as output:
            process = subprocess.Popen(
                [*drop, sys.executable, "-m", "holdfast.agent"],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return cast(WarmProcess, process)


@contextmanager
def agent(root: Path, **environment: str) -> Iterator[UnprivilegedAgent]:
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("an agent that is certain not to set the machine's clock needs root and setpriv (util-linux)")
    plane = ControlPlane()
    made = UnprivilegedAgent(plane, root, replicator=False, **environment)
    try:
        made.wait_connected()
        (line,) = (
            x for x in Path(f"/proc/{made.process.pid}/status").read_text().splitlines() if x.startswith("CapEff")
        )
        assert not int(line.split()[1], 16) >> CAP_SYS_TIME & 1
        before = skew_s()
        yield made
        assert abs(skew_s() - before) < 1.0, "the machine's own clock was not touched"
    finally:
        made.close()
        plane.close()


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return clocks_in(tmp_path / "clocks")


def run_job(made: Agent, root: Path) -> Path:
    """Returns the file in which rank 0 says how wrong its clock is."""
    watched = root / "skew"
    order = prepare_order("gpt", script(root, "watch", WATCHES), args=(str(watched),))
    start_job(made.plane, evolve(order, chaos=True))
    wait_until(watched.exists, description="a rank that runs")
    return watched


def inject(made: Agent, **changes: Any) -> OrderDone:
    values: dict[str, Any] = {"for_s": 600.0, "offset_s": OFFSET_S, **changes}
    order = Inject("gpt", 1, "clock_jump", 0, xid=0, not_after=time.time() + 2 * OFFSET_S, operation="op", **values)
    return made.plane.ask(order)


def wait_skew(watched: Path, expected_s: float) -> None:
    wait_until(
        lambda: abs(float(watched.read_text()) - expected_s) < 1.0, description=f"a clock that is {expected_s:+g} s off"
    )


def fault_process(made: Agent) -> psutil.Process:
    (pid,) = made.running("holdfast.agent.injection.machine_faults")
    return psutil.Process(pid)


def test_the_clock_jumps_for_its_time_and_only_as_far_as_the_agent_allows(tmp_path: Path, clocks: Clocks) -> None:
    allowed = {"HOLDFAST_FAULT_CLOCK_S_MAX": str(OFFSET_S), **clocks.environment("n0")}
    with agent(tmp_path, **allowed) as made:
        watched = run_job(made, tmp_path)
        refused = inject(made, offset_s=-OFFSET_S - 1)
        assert not refused.ok
        assert "at most 3600 s, and -3601 s are requested" in refused.reason
        assert inject(made, for_s=4.0).ok
        wait_skew(watched, OFFSET_S)
        again = inject(made)
        assert (again.ok, again.reason) == (False, "an injected clock_jump lasts already on this node")
        wait_skew(watched, 0.0)
        wait_until(lambda: "injected fault ended" in made.log(), description="the end in the log")
        assert abs(clocks.offset_s("n0")) < 0.1
        assert inject(made, for_s=2.0, offset_s=-OFFSET_S).ok
        wait_skew(watched, -OFFSET_S)
        wait_skew(watched, 0.0)


def test_the_clock_is_right_again_when_the_agent_is_killed(tmp_path: Path, clocks: Clocks) -> None:
    allowed = {"HOLDFAST_FAULT_CLOCK_S_MAX": str(OFFSET_S), **clocks.environment("n0")}
    with agent(tmp_path, **allowed) as made:
        run_job(made, tmp_path)
        assert inject(made).ok
        assert clocks.offset_s("n0") == pytest.approx(OFFSET_S, abs=0.5)
        made.process.kill()
        made.process.wait()
        wait_until(lambda: abs(clocks.offset_s("n0")) < 0.1, description="the clock is set back")


def test_the_next_agent_sets_the_clock_back_when_nothing_else_could(tmp_path: Path, clocks: Clocks) -> None:
    allowed = {"HOLDFAST_FAULT_CLOCK_S_MAX": str(OFFSET_S), **clocks.environment("n0")}
    with agent(tmp_path, **allowed) as made:
        watched = run_job(made, tmp_path)
        assert inject(made).ok
        fault_process(made).kill()  # the agent looks after what it caused
        wait_skew(watched, 0.0)
        wait_until(lambda: "injected fault ended" in made.log(), description="the agent knows that it is undone")
        assert not list(made.directory.glob("injected-*")), "the record is gone"
        assert inject(made).ok
        left = fault_process(made)
        left.suspend()
        made.process.kill()
        made.process.wait()
        left.kill()
        assert clocks.offset_s("n0") == pytest.approx(OFFSET_S, abs=0.5)
        made.restart()
        wait_until(lambda: abs(clocks.offset_s("n0")) < 0.1, description="the clock is set back")
        wait_until(lambda: "an earlier agent injected is undone" in made.log(), description="the line in its log")


def test_an_agent_without_the_right_refuses(tmp_path: Path) -> None:
    with agent(tmp_path, HOLDFAST_FAULT_CLOCK_S_MAX=str(OFFSET_S)) as made:
        run_job(made, tmp_path)
        refused = inject(made)
        assert not refused.ok
        assert refused.reason == "the clock cannot be set: Operation not permitted; it needs CAP_SYS_TIME"
        assert not list(made.directory.glob("injected-*"))
