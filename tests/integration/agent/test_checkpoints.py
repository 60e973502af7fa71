"""Agent, template, trainer and replicator together: what a killed worker had saved, its successor starts from.

One job lives through these tests, in their order; `make test` gives a file to one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from agent_harness import Agent, newest_in_memory, prepare_order, read_json, running_agent, script, start_job
from leftovers import gone
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.generations import RankRestore, ShardKey, ShardRecord, ShardSource
from holdfast.domain.orders import CheckpointNow, Inventory, RanksStepping, SaveStage, Stop
from holdfast.domain.replication import CommonCheckpoint
from holdfast.domain.signals import RankProgress, WorkerExited

# A step takes 10 ms: what an inventory lists is still in memory when somebody has read it.
TRAIN = """
import time, torch, holdfast.train as hf
def main(run):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    step = run.restore(state)
    print("from step", step, flush=True)
    while True:
        with run.step(step) as s:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            s.log(loss=loss.item(), tokens=4)
        step += 1
        run.checkpoint(state, step)
hf.launch(main)
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with running_agent(tmp_path_factory.mktemp("node"), replicator=True) as agent:
        yield agent


def common_step(agent: Agent, job: str, ranks: set[int], at_least: int = 1) -> dict[int, ShardRecord]:
    """The newest step that the node's inventory holds for every rank, as records by rank."""

    def newest() -> dict[int, ShardRecord]:
        inventories = [i for i in agent.plane.all_of(Inventory) if i.job == job]
        steps: dict[tuple[int, int], dict[int, ShardRecord]] = {}
        for shard in inventories[-1].shards if inventories else ():
            steps.setdefault((shard.key.attempt, shard.key.step), {})[shard.key.rank] = shard
        whole = [key for key, shards in steps.items() if shards.keys() == ranks and key[1] >= at_least]
        return steps[max(whole)] if whole else {}

    return wait_until(newest, description=f"a complete step of {job}")


def steps_now(agent: Agent) -> int:
    """The step that the ranks have just reached: a report that is still to come, since the last one may be old."""
    before = len(agent.plane.signals(RankProgress))
    wait_until(lambda: len(agent.plane.signals(RankProgress)) > before, description="progress")
    return max(agent.plane.signals(RankProgress)[-1].step)


def test_a_killed_rank_comes_back_from_shared_memory(agent: Agent) -> None:
    order = prepare_order("train", script(agent.root, "train", TRAIN), nproc=2)
    first = start_job(agent.plane, order)
    common_step(agent, "train", {0, 1})
    os.kill(first.workers[1].pid, signal.SIGKILL)
    exited = agent.plane.wait_for_signal(WorkerExited, lambda e: e.job == "train" and e.rank == 1)
    # Rank 0 does not go on without it: nothing overwrites what memory has now.
    shards = common_step(agent, "train", {0, 1}, at_least=newest_in_memory(agent, "train", 2))
    endpoint = ShardSource("node-0", agent.wait_connected().facts.replicator_endpoint)
    step = shards[0].key.step
    restore = tuple(RankRestore(rank, shard.key, shard.digest, (endpoint,)) for rank, shard in sorted(shards.items()))
    again = replace(
        order, generation=2, attempt=2, restore_step=step, restore=restore, restore_mesh=order.mesh, token=order.token
    )
    start_job(agent.plane, again)
    assert all(gone(worker.pid) for worker in first.workers)
    stepping = agent.plane.wait_for(RanksStepping, lambda r: r.generation == 2)
    assert stepping.step >= step + 1
    assert {"process_group", "restore", "first_step"} <= {name for name, _ in stepping.phases_s}
    for rank in (0, 1):
        assert f"from step {step}" in agent.worker_log("train", 2, rank)
    assert exited.step > 0


def test_checkpoint_now_reaches_every_rank(agent: Agent) -> None:
    """Rank by rank the step may have passed already: then the order is missed, and that is said; here it lies ahead."""
    at_step = steps_now(agent) + 300
    at_step += at_step % 50 == 0  # one that the interval does not save anyway
    assert agent.plane.ask(CheckpointNow("train", 2, at_step)).ok
    wait_until(
        lambda: (
            {s.key.rank for i in agent.plane.all_of(Inventory) for s in i.shards if s.key.step == at_step} == {0, 1}
        ),
        description=f"step {at_step} in the inventory",
    )
    assert agent.plane.differences > 0, "a session's later inventories only say what has changed"


def test_ranks_agree_on_a_save_before_they_make_it(agent: Agent) -> None:
    passed = steps_now(agent)
    proposal = CheckpointNow("train", 2, passed, stage=SaveStage.PROPOSED)
    refused = agent.plane.ask(proposal)
    assert not refused.ok
    assert f"has passed step {passed}" in refused.reason
    assert agent.plane.ask(replace(proposal, stage=SaveStage.VOID)).ok

    at_step = steps_now(agent) + 300
    at_step += at_step % 50 == 0
    proposal = replace(proposal, at_step=at_step)
    assert agent.plane.ask(proposal).ok
    assert not any(s.key.step == at_step for i in agent.plane.all_of(Inventory) for s in i.shards)
    assert agent.plane.ask(
        replace(proposal, stage=SaveStage.AGREED)
    ).ok  # the ranks wait for it if they have come there
    wait_until(
        lambda: (
            {s.key.rank for i in agent.plane.all_of(Inventory) for s in i.shards if s.key.step == at_step} == {0, 1}
        ),
        description=f"step {at_step} in the inventory",
    )


def test_a_proposal_is_answered_when_its_ranks_end(agent: Agent) -> None:
    """This script never looks for orders, so its rank never agrees."""
    start_job(agent.plane, prepare_order("silent", script(agent.root, "silent", "import time\ntime.sleep(600)\n")))
    proposal = agent.plane.send(CheckpointNow("silent", 1, 5, stage=SaveStage.PROPOSED))
    assert agent.plane.ask(Stop("silent", 1)).ok
    (answer,) = wait_until(lambda: agent.plane.answers(proposal), description="the answer to the proposal")
    assert not answer.ok
    assert "rank 0 of silent ended before it agreed to save step 5" in answer.reason


def test_a_shard_that_nobody_has_is_a_clear_refusal(agent: Agent) -> None:
    """The other node answers; for one that does not, a replicator waits longer than a test needs to (its own tests)."""
    order = prepare_order("lost", script(agent.root, "lost", TRAIN))
    other = ShardSource("node-9", agent.wait_connected().facts.replicator_endpoint)
    nowhere = RankRestore(0, ShardKey(1, 50, 0), "00", (other,))
    answer = agent.plane.ask(replace(order, generation=2, restore_step=50, restore=(nowhere,), restore_mesh=order.mesh))
    assert not answer.ok
    assert "node-9" in answer.reason
    assert answer.unrestorable, "nothing is said against this node"
    log = agent.directory / "logs" / "lost" / "g2" / "rank-0.log"
    assert not log.exists() or "from step" not in log.read_text()  # forked or not by then, it never ran the script


def test_which_step_every_node_has_is_passed_on_to_the_replicator(agent: Agent) -> None:
    remembered = agent.root / "disk" / "train" / "job.json"
    # One of a leader of the past, and one that is late.
    for step, epoch in (
        (50, None),
        (5000, 0),
        (40, None),
        (60, None),
    ):
        agent.plane.tell(CommonCheckpoint("train", 2, step), epoch=epoch)
        if step in (50, 60):
            wait_until(
                lambda step=step: read_json(remembered)["saved_by_all"] == [2, step],  # type: ignore[misc]
                description=f"word of step {step}",
            )


def test_training_survives_the_replicators_death(agent: Agent) -> None:
    (old,) = agent.running("holdfast.replicator")
    before = common_step(agent, "train", {0, 1})[0].key.step
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: [old] != agent.running("holdfast.replicator") != [], description="another replicator")
    common_step(agent, "train", {0, 1}, at_least=before + 50)
    assert not [e for e in agent.plane.signals(WorkerExited) if e.job == "train" and e.generation == 2]


def test_an_agent_that_is_asked_to_end_leaves_every_checkpoint_whole(agent: Agent) -> None:
    """Amid training: what was saved last is there when the agent is back, and can be restored."""
    order = prepare_order("train", str(agent.root / "train.py"), nproc=2)
    reported = common_step(agent, "train", {0, 1})[0].key.step
    agent.process.terminate()
    assert agent.process.wait(TIMEOUT_S) == 0, agent.log()
    saved = newest_in_memory(agent, "train", 2)
    assert saved >= reported
    agent.plane.reports.clear()
    endpoint = ShardSource("node-0", agent.restart().facts.replicator_endpoint)
    shards = common_step(agent, "train", {0, 1}, at_least=saved)
    key = shards[0].key
    restore = tuple(RankRestore(rank, shard.key, shard.digest, (endpoint,)) for rank, shard in sorted(shards.items()))
    again = replace(order, generation=3, attempt=3, restore_step=key.step, restore=restore, restore_mesh=order.mesh)
    start_job(agent.plane, again)
    agent.plane.wait_for(RanksStepping, lambda stepping: stepping.generation == 3)
    for rank in (0, 1):
        assert f"from step {key.step}" in agent.worker_log("train", 3, rank)


def test_forget_leaves_nothing_in_shared_memory(agent: Agent) -> None:
    assert (agent.memory / "train").exists()
    answer = agent.plane.ask(Stop("train", 3, grace_s=5.0, forget=True))
    assert answer.ok, answer.reason
    assert not (agent.memory / "train").exists()
