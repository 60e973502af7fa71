"""A lost control plane means: stop acting, keep training. When it is back, it sees, remembers and acts as before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from losses import losses
from training import Cluster, cluster, gpt_job
from waiting import wait_until

REDIS_AWAY_S = 5.0
STEPS_MAX = 1_000_000


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, out: Path) -> Iterator[Cluster]:
    """One job that runs through all tests of this module, dp 2 on two nodes."""
    with cluster(tmp_path_factory.mktemp("stack"), nodes=2) as run:
        job = gpt_job("long", out, dp=2, pp=1, steps=STEPS_MAX)
        run.client.submit({**job, "hang": {"floor_s": 2.0, "factor": 3.0, "init_s": 60.0}})
        run.wait_step("long", 10)
        yield run


def goes_on(run: Cluster, out: Path) -> None:
    """The training itself, and then what the API says of it."""
    trained = max(losses(out))
    wait_until(lambda: max(losses(out)) > trained + 10, description="ten more steps")
    run.wait_step("long", trained + 10)  # as heartbeats tell, too
    run.wait("long", "a loss, which only diagnostics tells", lambda view: view["loss"] is not None)


def generation(run: Cluster) -> int:
    return int(run.client.job("long")["generation"])


def hang_is_found(run: Cluster, out: Path) -> None:
    # A new leader hears from the agents which processes there are.
    run.wait("long", "the processes of all ranks", lambda view: all(worker["pid"] for worker in view["ranks"]))
    before, found = generation(run), len(list(run.client.incidents("long")))
    run.inject.hang("long", 1)
    run.wait("long", "a new generation", lambda view: view["phase"] == "running" and view["generation"] > before)
    newest = run.wait_resolved("long", found + 1)[-1]
    assert (newest["kind"], newest["rank"]) == ("hang", 1)
    goes_on(run, out)


def test_restarted_diagnostics_sees_steps_again_and_finds_a_hang(run: Cluster, out: Path) -> None:
    before = generation(run)
    run.stack.kill_service("diagnostics")
    run.stack.start_service("diagnostics")
    goes_on(run, out)
    assert generation(run) == before
    hang_is_found(run, out)


def test_restarted_supervisor_knows_what_was_and_acts_on_what_comes(run: Cluster, out: Path) -> None:
    before = generation(run)
    history = {incident["id"] for incident in run.client.incidents("long")}
    run.stack.kill_service("supervisor")
    run.stack.start_service("supervisor")
    goes_on(run, out)
    assert generation(run) == before
    assert {incident["id"] for incident in run.client.incidents("long")} == history
    hang_is_found(run, out)


def pid_of(run: Cluster, rank: int) -> int:
    """As its agent reports it."""
    view = run.wait("long", "the processes of all ranks", lambda view: all(each["pid"] for each in view["ranks"]))
    return int(next(each["pid"] for each in view["ranks"] if each["rank"] == rank))


def trains_again(out: Path) -> None:
    """By what the script itself writes: who watches steps may be away."""
    written = (out / "loss.jsonl").stat().st_size
    wait_until(lambda: (out / "loss.jsonl").stat().st_size > written + 2000, description="training goes on")


def test_a_rank_that_dies_while_diagnostics_is_away_steps_again(run: Cluster, out: Path) -> None:
    before, incidents, pid = generation(run), len(list(run.client.incidents("long"))), pid_of(run, 1)
    run.stack.kill_service("diagnostics")
    os.kill(pid, signal.SIGKILL)
    newest = run.wait_resolved("long", incidents + 1)[-1]
    trains_again(out)
    run.stack.start_service("diagnostics")
    goes_on(run, out)
    assert (newest["kind"], newest["rank"]) == ("ranks_missing", 1)
    assert "was ended by signal 9" in newest["cause"]
    assert generation(run) == before + 1


def test_a_rank_that_dies_while_nobody_leads_steps_again(run: Cluster, out: Path) -> None:
    """Its end is reported to nobody in time: the next leader compares what runs with what should."""
    before, pid = generation(run), pid_of(run, 0)
    run.stack.kill_service("supervisor")
    run.stack.kill_service("diagnostics")
    os.kill(pid, signal.SIGKILL)
    run.stack.start_service("supervisor")
    run.wait("long", "a new generation", lambda view: view["phase"] == "running" and view["generation"] > before)
    trains_again(out)
    run.stack.start_service("diagnostics")
    goes_on(run, out)


def test_a_job_whose_agent_is_silent_is_not_said_to_run(run: Cluster, out: Path) -> None:
    before, node = generation(run), run.node_of("long", 0)
    agent = next(each["agent_pid"] for each in run.client.nodes() if each["node"] == node)
    os.kill(agent, signal.SIGSTOP)
    try:
        seen = run.wait("long", "doubt", lambda view: view["phase"] == "unknown")
        assert node in seen["reason"]
        assert seen["unknown_since"] is not None
        trains_again(out)
    finally:
        os.kill(agent, signal.SIGCONT)
    run.wait("long", "certainty", lambda view: view["phase"] == "running")
    goes_on(run, out)
    assert generation(run) == before


def test_training_does_not_notice_that_redis_is_away(run: Cluster, out: Path) -> None:
    before, trained = generation(run), max(losses(out))
    run.stack.kill_service("redis")
    time.sleep(REDIS_AWAY_S)  # the length of the outage
    while_away = max(losses(out)) - trained
    run.stack.start_service("redis")
    assert while_away > 10
    goes_on(run, out)
    assert generation(run) == before
    hang_is_found(run, out)
