"""A real agent resets GPUs with a command in nvidia-smi's place: once, only while nothing uses them, and tests itself then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import Agent, prepare_order, running_agent, script, start_job
from resets import StandInGpus
from waiting import wait_until

from holdfast.agent.connection.admission import UNKNOWN_OUTCOME
from holdfast.domain import orders
from holdfast.domain.orders import ResetGpu, Stop

HOLDS = "import sys, time; device = open(sys.argv[1]); print('open', flush=True); time.sleep(600)"
TRAINS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def gpus(tmp_path: Path) -> StandInGpus:
    return StandInGpus.make(tmp_path / "gpus", 2)


@pytest.fixture
def agent(tmp_path: Path, gpus: StandInGpus) -> Iterator[Agent]:
    with running_agent(
        tmp_path,
        HOLDFAST_GPU_RESET_COMMAND=gpus.command,
        HOLDFAST_GPU_DEVICES=str(gpus.devices),
        HOLDFAST_GPU_RESET_TOGETHER="one",
    ) as agent:
        yield agent


def test_a_reset_is_made_once_and_the_node_tests_itself(agent: Agent, gpus: StandInGpus) -> None:
    assert agent.wait_connected().facts.resets_gpus
    order = ResetGpu("gpt", (1,), 30.0)
    first = agent.plane.ask(order, command_id="c-reset")
    assert first.ok, first.reason
    assert first.reason == "GPU 1 was successfully reset. All done."
    assert [name for name, _ in first.phases_s] == ["gpu_reset", "self_test"]
    tested = agent.plane.wait_for(orders.Tested).preflight
    assert {check.name for check in tested.checks} >= {"products", "disk"}
    assert tested.failures == ""
    assert agent.plane.ask(order, command_id="c-reset") == first
    agent.process.kill()
    agent.process.wait()
    agent.restart()
    assert agent.plane.ask(order, command_id="c-reset") == first
    assert gpus.resets == ["1"]


def test_no_reset_under_workers_nor_under_a_strangers_process(tmp_path: Path, agent: Agent, gpus: StandInGpus) -> None:
    start_job(agent.plane, prepare_order("gpt", script(tmp_path, "train", TRAINS)))
    refused = agent.plane.ask(ResetGpu("gpt", (0,), 30.0))
    assert not refused.ok
    assert "not reset while workers run on this node: rank 0 of gpt" in refused.reason
    assert agent.plane.ask(Stop("gpt", 1)).ok

    stranger = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(gpus.devices / "nvidia0")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline().strip() == "open"
        refused = agent.plane.ask(ResetGpu("gpt", (0,), 30.0))
        assert not refused.ok
        assert f"GPU 0 is not reset while a process uses it: pid {stranger.pid}" in refused.reason
        assert gpus.resets == []
    finally:
        stranger.kill()
        stranger.communicate()
    done = agent.plane.ask(ResetGpu("gpt", (0,), 30.0))
    assert done.ok, done.reason
    assert gpus.resets == ["0"]


def test_a_command_that_fails_or_hangs_fails_the_order(agent: Agent, gpus: StandInGpus) -> None:
    gpus.behave("fails")
    failed = agent.plane.ask(ResetGpu("gpt", (0,), 30.0))
    assert (failed.ok, "Unable to reset GPU 0: Unknown Error" in failed.reason) == (False, True)
    gpus.behave("hangs")
    late = agent.plane.ask(ResetGpu("gpt", (0,), 0.5))
    assert (late.ok, "did not end within 0.5 s and was killed" in late.reason) == (False, True)
    assert not agent.running("--gpu-reset")


def test_workers_are_forked_when_the_reset_is_over(tmp_path: Path, agent: Agent, gpus: StandInGpus) -> None:
    gpus.behave("takes 2")
    reset = agent.plane.send(ResetGpu("gpt", (0,), 60.0))
    wait_until(lambda: agent.running("--gpu-reset"), description="the command")
    prepared = agent.plane.ask(prepare_order("gpt", script(tmp_path, "train", TRAINS)))
    assert (prepared.ok, gpus.resets) == (True, ["0"])
    assert [answer.ok for answer in agent.plane.answers(reset)] == [True]


def test_an_agent_that_ends_during_a_reset_does_not_make_it_again(agent: Agent, gpus: StandInGpus) -> None:
    gpus.behave("hangs")
    order = ResetGpu("gpt", (0,), 60.0)
    agent.plane.send(order, command_id="c-reset")
    wait_until(lambda: agent.running("--gpu-reset"), description="the command")
    agent.process.kill()
    agent.process.wait()
    gpus.behave("")
    agent.restart()
    answer = agent.plane.ask(order, command_id="c-reset")
    assert (answer.ok, answer.reason) == (False, UNKNOWN_OUTCOME)
    assert gpus.resets == []


def test_an_agent_without_a_command_says_so(tmp_path: Path) -> None:
    with running_agent(tmp_path, HOLDFAST_GPU_RESET_COMMAND="no-such-program {gpu}") as agent:
        assert not agent.wait_connected().facts.resets_gpus
        assert "no command resets GPUs on this node" in agent.plane.ask(ResetGpu("gpt", (0,), 30.0)).reason
