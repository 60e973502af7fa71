"""SIGTERM to an agent: what a drain, an eviction, a time limit and a spot machine's end do. Its ranks leave in good order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import scaling_train
from training import Cluster, cluster
from waiting import wait_until

GRACE_S = "3600"  # and as long for other nodes: whoever ends sooner has been asked twice


def _job(name: str, out: Path, nodes: int) -> dict[str, Any]:
    return {
        "name": name,
        "script": scaling_train.__file__,
        "args": ["--steps", "1000000", "--out", str(out), "--step-s", "0.02"],
        "nodes": nodes,
        "nproc_per_node": 1,
        "mesh": {"dp": nodes},
        "checkpoint": {"interval_steps": 1000, "keep": 2},  # none comes by itself
    }


def _tell_to_end(run: Cluster, node: str) -> psutil.Process:
    agent = psutil.Process(next(each["agent_pid"] for each in run.client.nodes() if each["node"] == node))
    os.kill(agent.pid, signal.SIGTERM)
    return agent


def _gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_ranks_of_an_agent_that_is_asked_to_end_move_to_a_spare_and_no_step_is_done_again(tmp_path: Path) -> None:
    with cluster(
        tmp_path / "stack",
        nodes=3,
        environment={"HOLDFAST_TERMINATION_GRACE_S": GRACE_S, "HOLDFAST_HANDOVER_S": GRACE_S},
    ) as run:
        run.client.submit(_job("moved", tmp_path / "out", 2))
        run.wait_step("moved", 10)
        left = run.node_of("moved", 1)
        agent = _tell_to_end(run, left)
        (incident,) = run.wait_resolved("moved", 1)
        assert (incident["kind"], incident["action"]["kind"]) == ("maintenance", "hot_swap"), incident
        assert incident["rework_steps"] == 0
        assert "its agent was asked to end" in incident["cause"]
        assert left not in {worker["node"] for worker in run.client.job("moved")["ranks"]}
        directory = Path(next(each["directory"] for each in run.client.nodes() if each["node"] == left))
        wait_until(
            lambda: "no workers are left here" in (directory / "agent.log").read_text(),
            description="the agent to see that it may leave",
        )
        assert not _gone(agent), "others may restore from its shards for a while"
        os.kill(agent.pid, signal.SIGTERM)
        wait_until(lambda: _gone(agent), description="the agent to end at once")
        assert [each["kind"] for each in run.client.incidents("moved")] == ["maintenance"], "it is left, not lost"

        # Nobody to move to, and a second signal: the job has been saved, and goes on from there when the node is back.
        stays = run.node_of("moved", 0)
        last = _tell_to_end(run, stays)
        wait_until(
            lambda: any(each["step"] > incident["restored_step"] for each in run.client.checkpoints("moved")),
            description="the save",
        )
        os.kill(last.pid, signal.SIGTERM)
        wait_until(lambda: _gone(last), description="the agent to end at once")
        saved = max(each["step"] for each in run.client.checkpoints("moved"))
        run.wait("moved", "it to wait for nodes", lambda view: view["phase"] == "waiting")
        run.inject.node_return(stays)
        again = run.wait("moved", "it to run again", lambda view: view["phase"] == "running" and view["generation"] > 2)
        assert (again["step"] or 0) >= saved
        newest = sorted(run.client.incidents("moved"), key=lambda each: each["fault_at"])[-1]
        assert newest["restored_step"] >= saved
        (node,) = (each for each in run.client.nodes() if each["node"] == stays)
        assert (node["state"], node["reason"]) == ("active", ""), "an agent that has started there is not about to end"
        run.client.stop("moved", "seen enough")  # or the agents would wait for somebody to take their ranks
        run.wait_end("moved")
