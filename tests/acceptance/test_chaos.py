"""`holdfast inject --every`, as a user types it, against a real job: what allows it, what becomes of faults, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from training import Cluster, cluster, gpt_job
from waiting import wait_until

from holdfast.domain.errors import Conflict, Unavailable

TIMEOUT_S = 200.0


def begin(run: Cluster, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "inject", "--api", run.stack.api_url, "--job", "gpt", *options],
        env={**os.environ, "COLUMNS": "140"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def interrupted_when(condition: Callable[[], bool], process: subprocess.Popen[str], run: Cluster) -> str:
    """Interrupts the command when the condition holds. Returns what the command has printed."""

    def holds() -> bool:
        run.stack.tend()  # as `holdfast up` does: whatever has ended is started again
        assert process.poll() is None, process.communicate()[0]
        with suppress(Unavailable):
            return condition()
        return False

    wait_until(holds, description="the last fault", timeout_s=TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text
    return text


def job(out: Path, *, chaos: bool) -> dict[str, Any]:
    return {**gpt_job("gpt", out, dp=2, pp=1, steps=1_000_000, min_dp=1), "chaos": chaos}


@pytest.mark.timeout(400)
def test_a_schedule_of_faults_is_survived_and_every_fault_has_its_row(tmp_path: Path) -> None:
    report = tmp_path / "chaos.json"
    # The first three are a crash, a hang and an Xid. A second Xid of one kind soon after the first would be no new finding.
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(job(tmp_path / "out", chaos=True))
        run.wait_step("gpt", 10)
        mix = ("--mix", "crash=2,hang=1,xid=1", "--seed", "338")
        process = begin(run, "--every", "4s", "--for", "1h", "--lasting", "30s", *mix, "--out", str(report))
        # The fourth comes when the job has survived the third, however long that takes.
        text = interrupted_when(lambda: len(list(run.client.incidents("gpt"))) > 3, process, run)
        last = run.client.job("gpt")
        run.wait_step("gpt", (last["step"] or 0) + 10)
        incidents = {incident["id"]: incident for incident in run.client.incidents("gpt")}
    written = json.loads(report.read_text())
    faults = written["faults"][:3]  # the next one may be open when the command is interrupted
    assert (written["job"], written["seed"], written["ended_by"]) == ("gpt", 338, "interrupted")
    assert [fault["kind"] for fault in faults] == ["crash", "hang", "xid"], text
    found_as = {"crash": "worker_crash", "hang": "hang", "xid": "gpu_error"}
    for number, fault in enumerate(faults, 1):
        incident = incidents[fault["incident"]]
        assert fault["outcome"] == "survived", fault
        assert fault["found_as"] == found_as[fault["kind"]] == incident["kind"]
        assert 0 <= fault["found_after_s"] < fault["steps_after_s"] < TIMEOUT_S
        assert incident["rank"] in (fault["rank"], None)
        assert f"{number}. {fault['kind']} of rank {fault['rank']} on {fault['node']}" in text
    assert len({fault["incident"] for fault in faults}) == len(faults)
    assert sum(written["counts"].values()) == len(written["faults"])
    assert written["counts"]["survived"] >= len(faults)


def test_a_job_that_does_not_allow_it_is_refused_at_every_door_and_keeps_running(tmp_path: Path) -> None:
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(job(tmp_path / "out", chaos=False))
        run.wait_step("gpt", 5)
        process = begin(run, "--every", "1s", "--for", "10s")
        text, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode != 0
        assert "gpt does not allow injected faults" in text
        assert "`chaos: true`" in text
        with pytest.raises(Conflict, match=r"gpt does not allow injected faults"):
            run.client.inject_fault("gpt", "crash", 0, 10.0, 0)
        run.wait_step("gpt", run.client.job("gpt")["step"] + 10)
        assert run.client.job("gpt")["generation"] == 1
        assert list(run.client.incidents("gpt")) == []


@pytest.mark.slow
def test_a_slow_rank_ends_by_itself_when_the_command_is_gone(tmp_path: Path) -> None:
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(job(tmp_path / "out", chaos=True))
        run.wait_step("gpt", 10)
        pids = [int(worker["pid"]) for worker in run.client.job("gpt")["ranks"]]
        process = begin(run, "--every", "1s", "--for", "1h", "--mix", "slow=1", "--lasting", "15s")
        seen: set[int] = set()

        def a_rank_is_stopped_now_and_then() -> bool:
            seen.update(pid for pid in pids if psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            return bool(seen)

        wait_until(a_rank_is_stopped_now_and_then, description="a rank that is stopped")
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
        slowed = psutil.Process(seen.pop())
        before = slowed.cpu_times()
        log = tmp_path / "stack" / "nodes"

        def ended() -> bool:
            return any("injected fault ended" in path.read_text() for path in log.glob("*/agent.log"))

        wait_until(ended, description="the end of the slow rank")
        assert slowed.is_running()
        assert slowed.status() != psutil.STATUS_STOPPED
        run.wait_step("gpt", run.client.job("gpt")["step"] + 10)
        assert slowed.cpu_times().user >= before.user
        assert run.client.job("gpt")["generation"] == 1, "a slow rank interrupts nothing"


@pytest.mark.slow
def test_ctrl_c_ends_it_with_the_table(tmp_path: Path) -> None:
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(job(tmp_path / "out", chaos=True))
        run.wait_step("gpt", 10)
        process = begin(run, "--every", "2s", "--for", "1h", "--mix", "crash=1")
        run.wait_resolved("gpt", 1)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, text
        assert "ended: interrupted" in text
        assert "worker_crash" in text
        generation = run.wait_step("gpt", run.client.job("gpt")["step"] + 20)["generation"]
        run.wait_step("gpt", run.client.job("gpt")["step"] + 100)
        assert run.client.job("gpt")["generation"] == generation, "no further fault"


@pytest.mark.slow
def test_a_lost_node_is_its_agents_own_end(tmp_path: Path) -> None:
    report = tmp_path / "chaos.json"
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(job(tmp_path / "out", chaos=True))
        run.wait_step("gpt", 10)
        agent_pid = int(run.client.node(run.node_of("gpt", 0))["agent_pid"])
        options = ("--every", "4s", "--for", "10s", "--mix", "node_loss=1", "--seed", "71", "--out", str(report))
        text, _ = begin(run, *options).communicate(timeout=TIMEOUT_S)
        assert run.client.job("gpt")["mesh"]["dp"] == 1
        assert not psutil.pid_exists(agent_pid) or psutil.Process(agent_pid).status() == psutil.STATUS_ZOMBIE
    (fault,) = json.loads(report.read_text())["faults"]
    assert (fault["kind"], fault["rank"], fault["refused"]) == ("node_loss", 0, ""), text
    assert (fault["found_as"], fault["action"], fault["outcome"]) == ("node_lost", "scale_down", "survived")


def test_a_flipped_bit_is_in_a_stored_shard_and_the_run_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(job(tmp_path / "out", chaos=True))
        stored = [tmp_path / "stack" / "nodes" / name for name in ("node-0", "node-1")]
        wait_until(
            lambda: all(list(node.rglob("rank-1.json")) for node in stored),
            description="rank 1's shard on its node, whichever that is",
            timeout_s=TIMEOUT_S,
        )
        done = run.client.inject_fault("gpt", "bit_flip", 1, 10.0, 0)
        assert done["state"] == "succeeded", done
        logs = [path.read_text() for path in (tmp_path / "stack" / "nodes").glob("*/agent.log")]
        assert any('"fault": "bit_flip"' in log and "rank-1.shard flipped" in log for log in logs)
        run.wait_step("gpt", run.client.job("gpt")["step"] + 10)
        assert run.client.job("gpt")["generation"] == 1


@pytest.mark.timeout(400)
def test_the_control_plane_is_killed_under_a_job_that_steps_on(tmp_path: Path) -> None:
    report = tmp_path / "chaos.json"
    allowed = {"HOLDFAST_FAULT_REDIS_KILL": "restarted", "HOLDFAST_FAULT_LEADER_KILL": "restarted"}
    with cluster(tmp_path / "stack", nodes=2, environment=allowed) as run:
        run.client.submit(job(tmp_path / "out", chaos=True))
        run.wait_step("gpt", 10)
        mix = ("--mix", "leader_kill=1,redis_kill=1", "--seed", "18")  # Redis, the leader, and the leader once more
        process = begin(run, "--every", "6s", "--for", "1h", *mix, "--out", str(report))
        leaders = set[int]()

        def third_leader() -> bool:
            leaders.add(run.stack.service_pids()["supervisor"])
            return len(leaders) == 3 and run.client.job("gpt")["phase"] == "running"

        text = interrupted_when(third_leader, process, run)
        last = run.client.job("gpt")
        assert run.wait_step("gpt", (last["step"] or 0) + 10)["generation"] == 1
        assert list(run.client.incidents("gpt")) == []
    faults = json.loads(report.read_text())["faults"][:2]
    assert [fault["kind"] for fault in faults] == ["redis_kill", "leader_kill"], text
    for number, fault in enumerate(faults, 1):
        assert (fault["outcome"], fault["refused"], fault["incident"]) == ("survived", "", ""), fault
        assert fault["found_as"] == {"leader_kill": "new_leader", "redis_kill": "redis_restarted"}[fault["kind"]]
        assert 0 < fault["found_after_s"] < fault["steps_after_s"] < TIMEOUT_S
        assert f"{number}. {fault['kind']} of the control plane at step {fault['step']}" in text
