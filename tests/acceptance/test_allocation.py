"""An allocation ends: every agent of a job is asked to end at once. The launcher says that the job is suspended, and where."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import scaling_train
import yaml
from commands import Shell
from training import Cluster, cluster
from waiting import TIMEOUT_S, wait_until

JOB = "suspended"
LEAVING = {"HOLDFAST_TERMINATION_GRACE_S": "20", "HOLDFAST_HANDOVER_S": "1"}


def _steps(out: Path) -> list[int]:
    path = out / "steps.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def _sigterm(run: Cluster) -> list[psutil.Process]:
    agents = [psutil.Process(node["agent_pid"]) for node in run.client.nodes()]
    for agent in agents:
        os.kill(agent.pid, signal.SIGTERM)
    return agents


def _gone(process: psutil.Process) -> bool:
    """With all of its threads: the first of them may end before the others."""
    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        return False
    tasks = Path("/proc", str(process.pid), "task")
    return not tasks.exists() or len(list(tasks.iterdir())) < 2


def test_the_launcher_ends_with_75_and_the_job_goes_on_where_it_was_when_nodes_are_back(tmp_path: Path) -> None:
    out, body = tmp_path / "out", tmp_path / "job.yaml"
    body.write_text(
        yaml.safe_dump(
            {
                "name": JOB,
                "script": scaling_train.__file__,
                "args": ["--steps", "1000000", "--out", str(out), "--step-s", "0.02"],
                "nodes": 2,
                "mesh": {"dp": 2},
                "elastic": {"min_dp": 1, "max_dp": 2},
                "checkpoint": {"interval_steps": 100000, "keep": 2},  # none comes by itself
            }
        )
    )
    with cluster(tmp_path / "stack", nodes=2, environment=LEAVING) as run:
        shell = Shell(tmp_path, run.stack.for_commands)
        with shell.start("run", str(body)) as launcher:
            wait_until(lambda: JOB in {job["name"] for job in run.client.jobs()}, description="the submission")
            run.wait_step(JOB, 10)
            agents = _sigterm(run)
            said, err = launcher.communicate(timeout=TIMEOUT_S)
        assert launcher.returncode == 75, said + err
        job = run.client.job(JOB)
        assert (job["phase"], job["suspended"]["durable"]) == ("suspended", True), job
        step = job["suspended"]["step"]
        assert step >= 10
        assert f"it goes on from step {step} when nodes are there again" in job["reason"]
        assert f"checkpoint at step {step} is in: memory of 2 ranks, disk of 2 ranks" in " ".join(said.split())
        assert [each["kind"] for each in run.client.incidents(JOB)] == ["maintenance"]
        for agent in agents:
            wait_until(lambda each=agent: _gone(each), description="the agents to end")  # type: ignore[misc]
        before = len(_steps(out))

        for node in run.stack.node_names:
            run.inject.node_return(node)
        run.wait(JOB, "it to run again", lambda view: view["phase"] == "running" and view["generation"] == 2)
        wait_until(lambda: len(_steps(out)) > before, description="a step")
        assert _steps(out)[before] == step + 1, "it goes on where it was saved, with both replicas"
        assert run.client.job(JOB)["mesh"] == {"dp": 2}
        assert [each["kind"] for each in run.client.incidents(JOB)] == ["maintenance"], "nothing was lost"
        run.client.stop(JOB, "seen enough")  # or the agents would wait for somebody to take their ranks
        run.wait_end(JOB)
