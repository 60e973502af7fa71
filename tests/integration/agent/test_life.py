"""The agent's own life: killed, stopped, restarted, cut off; nothing is left behind and nothing is done twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from agent_harness import SLEEPER, Agent, ControlPlane, prepare_order, running_agent, script, start_job
from leftovers import gone
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.orders import Hello, RanksFinished, Start, Stop
from holdfast.domain.signals import GenerationStarted, KernelLine, WorkerExited

STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)
time.sleep(600)
"""
DDP = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group('gloo')
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 8), float(dist.get_rank()))).sum().backward()
    optimizer.step()
total = torch.ones(1)
dist.all_reduce(total)
print(os.environ['TORCHELASTIC_RUN_ID'], os.environ['GROUP_RANK'], int(total))
dist.destroy_process_group()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with running_agent(tmp_path) as agent:
        yield agent


def test_unmodified_torchrun_script_trains(agent: Agent, tmp_path: Path) -> None:
    start_job(agent.plane, prepare_order("ddp", script(tmp_path, "ddp", DDP), nproc=2))
    finished = agent.plane.wait_for(RanksFinished, timeout_s=60)
    assert finished.ranks == (0, 1)
    assert agent.worker_log("ddp", 1, 0).splitlines()[-1] == "ddp 0 2"


def test_sigkill_of_the_agent_takes_everything_with_it(agent: Agent, tmp_path: Path) -> None:
    start_job(agent.plane, prepare_order("orphans", script(tmp_path, "sleeper", SLEEPER), nproc=2))
    family = [child.pid for child in agent.descendants()]
    assert len(family) >= 3  # the template and two workers
    agent.process.kill()
    wait_until(lambda: all(gone(pid) for pid in family), description="every descendant to be gone")


def test_next_agent_ends_what_a_killed_one_could_not(agent: Agent, tmp_path: Path) -> None:
    """A process in a session of its own, started by a worker, survives everybody: until the directory has a new owner."""
    start_job(agent.plane, prepare_order("strays", script(tmp_path, "stubborn", STUBBORN)))
    stray = int(wait_until(lambda: agent.worker_lines("strays", 1, 0), description="the stray's pid"))
    agent.process.kill()
    agent.process.wait()
    assert not gone(stray)
    agent.restart()
    assert gone(stray)


def test_sigterm_leaves_nothing_and_says_goodbye(agent: Agent, tmp_path: Path) -> None:
    start_job(agent.plane, prepare_order("term", script(tmp_path, "stubborn", STUBBORN), nproc=2))
    wait_until(
        lambda: all(agent.worker_lines("term", 1, rank) for rank in (0, 1)),
        description="the pids of what the scripts start",
    )
    family = [child.pid for child in agent.descendants()]
    assert len(family) >= 7, "the template and, of each rank, its reaper, the worker and what its script has started"
    agent.process.terminate()
    assert agent.process.wait(TIMEOUT_S) == 0, agent.log()
    wait_until(lambda: agent.plane.goodbyes, description="the goodbye")
    # A reaper has reported the end of its worker before it ends itself, and may outlive the agent by that moment.
    wait_until(lambda: all(gone(pid) for pid in family), description="the end of every process")
    exits = [e for e in agent.plane.signals(WorkerExited) if e.job == "term"]
    assert sorted(e.rank for e in exits) == [0, 1]
    assert all(e.expected for e in exits)
    assert not list(agent.directory.glob("*.sock"))


def test_restarted_agent_repeats_answers_and_refuses_old_epochs(agent: Agent, tmp_path: Path) -> None:
    plane = agent.plane
    path = script(tmp_path, "sleeper", SLEEPER)
    plane.epoch = 7
    first = plane.ask(prepare_order("memory", path), command_id="p1")
    assert first.ok
    agent.process.kill()
    agent.process.wait()
    hello = agent.restart()
    assert hello.running == ()
    again = plane.ask(prepare_order("memory", path), command_id="p1")
    assert again == replace(
        first, workers_version=0
    )  # from memory: nothing was forked, and the set may be another by now
    assert not [child for child in agent.descendants() if _name(child.pid).startswith("holdfast: memory rank")]
    assert not plane.ask(Start("memory", 1, first.master), command_id="s1").ok
    stale = plane.ask(prepare_order("memory", path, generation=2), command_id="p2", epoch=6)
    assert not stale.ok
    assert "epoch 6 is over" in stale.reason
    assert plane.ask(prepare_order("memory", path, generation=2), command_id="p2").ok  # the new leader's repeat counts


def test_a_leader_that_a_later_one_has_replaced_is_refused_before_the_later_one_has_ordered_anything(
    agent: Agent, tmp_path: Path
) -> None:
    plane = agent.plane
    hellos = len(plane.all_of(Hello))
    plane.epoch = 8
    plane.drop_session()
    wait_until(lambda: len(plane.all_of(Hello)) > hellos, description="a session with the later leader")
    wait_until(lambda: '"epoch": 8' in agent.log(), description="its greeting")
    late = plane.ask(prepare_order("late", script(tmp_path, "sleeper", SLEEPER)), command_id="late", epoch=7)
    assert not late.ok
    assert "epoch 7 is over" in late.reason
    plane.epoch = 7
    plane.drop_session()
    wait_until(
        lambda: "this agent has already seen epoch 8" in agent.log(), description="the refusal of the earlier one"
    )
    opened = agent.log().count("control session opened")
    plane.epoch = 8
    wait_until(lambda: agent.log().count("control session opened") > opened, description="a session with the later one")
    assert plane.ask(prepare_order("late", script(tmp_path, "sleeper", SLEEPER)), command_id="late").ok


def test_training_goes_on_without_a_supervisor(agent: Agent, tmp_path: Path) -> None:
    prepared = start_job(agent.plane, prepare_order("alone", script(tmp_path, "sleeper", SLEEPER)))
    hellos = len(agent.plane.all_of(Hello))
    agent.plane.refuse = "not the leader"
    agent.plane.drop_session()
    wait_until(lambda: "not the leader" in agent.log(), description="a refused session")
    os.kill(prepared.workers[0].pid, signal.SIGCONT)  # raises if it were gone
    agent.plane.refuse = ""
    wait_until(lambda: len(agent.plane.all_of(Hello)) > hellos, description="a new session")
    assert agent.plane.all_of(Hello)[-1].running == prepared.workers
    assert agent.plane.ask(Stop("alone", 1)).ok


def test_second_endpoint_is_asked_when_the_first_does_not_lead(tmp_path: Path) -> None:
    standby = ControlPlane()
    standby.refuse = "not the leader"
    try:
        leader = ControlPlane()
        agent = Agent(leader, tmp_path, HOLDFAST_SUPERVISOR=f"{standby.endpoint},127.0.0.1:1,{leader.endpoint}")
        try:
            assert agent.wait_connected().facts.node == "node-0"
        finally:
            agent.close()
            leader.close()
    finally:
        standby.close()


def test_one_directory_has_one_agent(agent: Agent) -> None:
    second = agent._start()
    assert second.wait(TIMEOUT_S) == 2
    assert "another agent runs in" in agent.log()


def test_kernel_lines_are_reported_once_across_a_restart(agent: Agent) -> None:
    with agent.kernel_log.open("a") as log:
        log.write("usb 1-1: new device\n3,812,55,-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n")
    line = agent.plane.wait_for_signal(KernelLine)
    assert (line.xid, line.pci) == (79, "0000:18:00")
    agent.process.terminate()
    agent.process.wait(TIMEOUT_S)
    with agent.kernel_log.open("a") as log:
        log.write("NVRM: Xid (PCI:0000:19:00): 48, pid=1, name=python\n")
    agent.restart()
    agent.plane.wait_for_signal(KernelLine, lambda found: found.xid == 48)
    assert [found.xid for found in agent.plane.signals(KernelLine)] == [79, 48]


def test_reliable_signals_are_sent_again_until_they_are_acknowledged(agent: Agent, tmp_path: Path) -> None:
    plane = agent.plane
    wait_until(lambda: plane.ticks, description="telemetry")
    plane.acknowledge_ticks = False
    start_job(plane, prepare_order("again", script(tmp_path, "ok", "pass\n")))
    exited = plane.wait_for_signal(WorkerExited)
    seqs = {tick.seq for tick in plane.ticks if exited in tick.signals}
    plane.restart_telemetry()
    plane.acknowledge_ticks = True
    wait_until(
        lambda: [t.seq for t in plane.ticks if exited in t.signals] == [*seqs, *seqs], description="the same tick"
    )


def test_a_new_telemetry_stream_begins_with_what_runs(agent: Agent, tmp_path: Path) -> None:
    """Diagnostics may have been restarted; what it has not heard of, it cannot find a hang in."""
    plane = agent.plane
    start_job(plane, prepare_order("longer", script(tmp_path, "sleeper", SLEEPER)))
    began = plane.wait_for_signal(GenerationStarted)
    reported = len(plane.signals(GenerationStarted))
    plane.restart_telemetry()
    wait_until(lambda: len(plane.signals(GenerationStarted)) > reported, description="the generation, announced again")
    assert plane.signals(GenerationStarted)[-1] == began
    plane.ask(Stop("longer", 1))
    reported, ticks = len(plane.signals(GenerationStarted)), len(plane.ticks)
    plane.restart_telemetry()
    wait_until(lambda: len(plane.ticks) > ticks + 2, description="ticks on a third stream")
    assert len(plane.signals(GenerationStarted)) == reported


def _name(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""
