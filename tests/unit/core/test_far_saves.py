"""A checkpoint that somebody asked for goes to the farthest tier, and is answered when it is there or the grace is over."""

from __future__ import annotations

from dataclasses import replace

from fleet import JOB, Fleet, job, running

from holdfast.domain.generations import StoredStep
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import CheckpointNow, Inventory, OrderDone
from holdfast.supervisor.protocol import (
    CheckpointRequested,
    JobStopRequested,
    NodeCordonRequested,
)


def stored_job(dp: int = 2) -> JobSpec:
    spec = job(dp=dp)
    return replace(spec, checkpoint=replace(spec.checkpoint, store="file:///store"))


class Waiting(Fleet):
    def ask(self, grace_s: float = 0.0) -> int:
        self.train(3)
        self.fold(CheckpointRequested(self.now, JOB, "op-1", grace_s))
        order = self.orders(CheckpointNow)["n0"]
        assert isinstance(order, CheckpointNow)
        assert order.to_object_store
        return order.at_step

    def copy(self, step: int, *, stored: bool) -> None:
        """Every shard is on disk and with a peer, and in the store if `stored`."""
        self.save(step)
        assert self.job.generation is not None
        there = (StoredStep(self.job.generation.attempt, step, self.job.generation.mesh, False),) if stored else ()
        for node in self.nodes():
            held = self.state.nodes[node].inventory[JOB]
            self.report(node, Inventory(JOB, (*held, *(replace(each, tier="disk") for each in held)), there))


def waiting() -> Waiting:
    fleet = Waiting(2)
    fleet.submit(stored_job())
    fleet.run()
    return fleet


def test_it_is_answered_when_the_object_store_has_it() -> None:
    fleet = waiting()
    step = fleet.ask()
    fleet.copy(step, stored=False)
    assert not fleet.answers
    fleet.copy(step, stored=True)
    [answer] = fleet.answers
    assert answer.ok
    assert answer.reason.endswith(
        "is saved: memory (all of 2 ranks), disk (all of 2 ranks), a peer (all of 2 ranks), the object store"
    )


def test_what_the_store_has_is_saved_although_the_nodes_have_let_go_of_it() -> None:
    fleet = waiting()
    step = fleet.ask()
    assert fleet.job.generation is not None
    there = StoredStep(fleet.job.generation.attempt, step, fleet.job.generation.mesh, False)
    fleet.report("n0", Inventory(JOB, (), (there,)))
    [answer] = fleet.answers
    assert answer.ok
    assert answer.reason.endswith("is saved: the object store")


def test_the_grace_bounds_the_wait_and_the_answer_says_what_is_missing() -> None:
    fleet = waiting()
    step = fleet.ask(grace_s=30.0)
    fleet.copy(step, stored=False)
    fleet.wait(29.0)
    assert not fleet.answers
    fleet.wait(1.0)
    [answer] = fleet.answers
    assert answer.ok
    assert answer.reason.endswith("a peer (all of 2 ranks); not all of it yet: the object store")


def test_who_asks_while_a_save_is_ahead_gets_that_one() -> None:
    fleet = waiting()
    step = fleet.ask()
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-2"))
    assert len([send for send in fleet.sent if isinstance(send.order, CheckpointNow)]) == 2, "one per node"
    fleet.copy(step, stored=True)
    assert [answer.operation for answer in fleet.answers] == ["op-1", "op-2"]


def test_a_change_of_generation_answers_with_what_is_known() -> None:
    fleet = waiting()
    fleet.ask()
    fleet.lose("n1")
    fleet.run()
    [answer] = fleet.answers
    assert not answer.ok
    assert "nowhere" in answer.reason


def test_the_last_save_before_a_stop_goes_far_and_a_planned_changes_does_not() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.train(12)
    fleet.fold(NodeCordonRequested(fleet.now, "n1", True, "new firmware"))
    assert [
        order.to_object_store for order in fleet.orders(CheckpointNow).values() if isinstance(order, CheckpointNow)
    ] == [False] * 2
    assert fleet.state.nodes["n1"].state is NodeState.CORDONED
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    assert any(isinstance(send.order, CheckpointNow) and send.order.to_object_store for send in fleet.sent)


def test_a_node_that_cannot_pass_it_on_is_noted() -> None:
    fleet = waiting()
    fleet.ask()
    send = next(send for send in fleet.sent if send.node == "n1")
    fleet.report("n1", OrderDone(send.command_id, False, "no replicator"))
    assert "is not saved by any rank: n1: no replicator" in fleet.notes()
