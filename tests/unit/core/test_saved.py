"""What was saved and cannot be restored: another step before another node, and never a start from scratch in a hurry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.generations import OBJECT_STORE, ShardKey, ShardRecord, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import CheckpointNow, Inventory, OrderDone, Prepare, Stop
from holdfast.supervisor.core import saved_steps
from holdfast.supervisor.core.changes.change import REPLANS_MAX
from holdfast.supervisor.protocol import JobPhase, LeaderStarted
from holdfast.supervisor.timers import PrepareTimeout

STORE = "gs://bucket/p"


def with_store(**more: Any) -> Fleet:
    """A job of three nodes, a spare, steps 10 to 30 saved; 20 is in the object store."""
    spec = job(dp=3, **more)
    fleet = running(replace(spec, checkpoint=replace(spec.checkpoint, store=STORE)), spares=1)
    for step in (10, 20, 30):
        fleet.train(step, save=True)
    generation = fleet.job.running
    assert generation is not None
    stored = StoredStep(generation.attempt, 20, generation.mesh, False)
    held = fleet.state.nodes["n2"].inventory[JOB]
    fleet.report("n2", Inventory(JOB, held, (stored,)))
    fleet.report("n3", Inventory(JOB))
    return fleet


def refuse(fleet: Fleet, node: str, *, unrestorable: bool = True) -> None:
    send = next(send for send in fleet.sent if send.node == node and isinstance(send.order, Prepare))
    reason = "rank 0 cannot restore step 30: n0: its checksum is wrong"
    fleet.report(node, OrderDone(send.command_id, False, reason, at=fleet.now, unrestorable=unrestorable))


def restored(fleet: Fleet) -> int:
    assert fleet.job.generation is not None
    return fleet.job.generation.restore.step


def test_a_step_that_cannot_be_restored_is_passed_over_and_its_node_stays() -> None:
    fleet = with_store()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert restored(fleet) == 30
    refuse(fleet, "n1")
    assert restored(fleet) == 20
    assert fleet.nodes() == ("n0", "n1", "n2"), "a healthy node must not leave because a copy has gone bad"
    assert fleet.job.generation is not None
    assert "its checksum is wrong" in fleet.job.generation.restore.reason
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.job.checkpoints.skipped == ()


def test_a_node_that_cannot_prepare_for_another_reason_leaves() -> None:
    fleet = with_store()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    refuse(fleet, "n1", unrestorable=False)
    assert (restored(fleet), fleet.nodes()) == (30, ("n0", "n3", "n2"))


def test_when_a_source_has_gone_meanwhile_the_same_step_is_elected_again() -> None:
    fleet = with_store()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.report("n2", Inventory(JOB, ()))
    refuse(fleet, "n1")
    assert restored(fleet) == 30
    assert fleet.job.checkpoints.skipped == ()


def test_when_the_holders_are_lost_the_store_has_it() -> None:
    fleet = with_store()
    for node in ("n0", "n1", "n2"):
        fleet.report(node, Inventory(JOB, ()))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert restored(fleet) == 20
    sources = {s.node for prepare in fleet.orders(Prepare).values() for r in prepare.restore for s in r.sources}  # type: ignore[union-attr]
    assert sources == {OBJECT_STORE}
    assert fleet.job.generation is not None
    assert "from the object store" in fleet.job.generation.restore.reason
    fleet.run()
    assert fleet.job.checkpoints.measured.faults == {"copies": 1}


def test_what_is_damaged_in_the_store_is_passed_over_until_somebody_finds_it_whole() -> None:
    fleet = with_store()
    (stored,) = fleet.job.checkpoints.stored
    fleet.report("n1", Inventory(JOB, (), (replace(stored, damage="rank 2's share was found damaged"),)))
    fleet.report("n2", Inventory(JOB, (), (stored,)))  # it looked before that, and has not looked since
    fleet.report("n0", Inventory(JOB, ()))
    assert [step.stored for step in saved_steps(fleet.state, JOB)] == [False]
    fleet.train(45)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.phase is JobPhase.WAITING
    assert "in the object store, rank 2's share was found damaged" in fleet.job.reason
    fleet.answer_orders()
    fleet.wait(fleet.state.config.scratch_s + 1)
    fleet.run()
    assert fleet.job.checkpoints.stored == (), (
        "every node lists the store anew with a generation: complete steps are reported again"
    )


def test_the_store_is_given_more_time_than_the_nodes() -> None:
    fleet = with_store()
    limits = fleet.job.spec.limits
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.state.timers[PrepareTimeout("job", 2)] == fleet.now + limits.prepare_timeout_s
    fleet = with_store()
    for node in ("n0", "n1", "n2"):
        fleet.report(node, Inventory(JOB, ()))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.state.timers[PrepareTimeout("job", 2)] > fleet.now + limits.prepare_timeout_s
    fleet.wait(limits.prepare_timeout_s + 1)
    assert (restored(fleet), fleet.nodes(), fleet.job.number) == (20, ("n0", "n1", "n2"), 2)


def test_a_store_that_is_away_is_waited_for_and_nothing_is_given_up() -> None:
    fleet = with_store()
    fleet.train(45)
    for node in ("n0", "n1", "n2", "n3"):
        fleet.report(node, Inventory(JOB, ()))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for round_number in range(1, 6):
        assert restored(fleet) == 20
        refuse(fleet, fleet.nodes()[0])
        if fleet.job.phase is JobPhase.PREPARING:  # a node that failed twice: a spare tries
            assert round_number > 1
            refuse(fleet, fleet.nodes()[0])
        assert fleet.job.phase is JobPhase.WAITING, "not from scratch, and not over and over"
        assert "cannot be restored now" in fleet.job.reason
        fleet.answer_orders()
        fleet.wait(fleet.state.config.unrestorable_s * round_number + 1)
    assert restored(fleet) == 20
    fleet.run()
    assert (fleet.job.phase, fleet.job.progress.step) == (JobPhase.RUNNING, 20)


def test_a_second_failure_of_one_node_is_tried_on_a_spare() -> None:
    fleet = with_store()
    fleet.train(45)
    for node in ("n0", "n1", "n2"):
        fleet.report(node, Inventory(JOB, ()))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    refuse(fleet, "n1")
    fleet.answer_orders()
    fleet.wait(fleet.state.config.unrestorable_s + 1)
    assert restored(fleet) == 20
    refuse(fleet, "n1")
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert restored(fleet) == 20


def test_a_node_that_can_restore_no_step_costs_no_older_and_older_steps_while_a_spare_is_free() -> None:
    """Its network or its replicator is broken: another node restores the newest step."""
    fleet = with_store()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    refuse(fleet, "n1")
    assert (restored(fleet), fleet.nodes()) == (20, ("n0", "n1", "n2")), "the copy may be the cause"
    refuse(fleet, "n1")
    assert (restored(fleet), fleet.nodes()) == (30, ("n0", "n3", "n2"))
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_two_nodes_that_cannot_restore_a_step_leave_it_passed_over() -> None:
    fleet = with_store()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    refuse(fleet, "n0")
    assert restored(fleet) == 20
    refuse(fleet, "n1")
    assert restored(fleet) < 20
    refuse(fleet, "n1")
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert restored(fleet) == 20, "30 failed on n0 as well as 20 on n1 alone"


def test_what_the_store_holds_is_remembered_without_the_node_that_said_so() -> None:
    fleet = with_store()
    fleet.lose("n2")
    assert [stored.step for stored in fleet.job.checkpoints.stored] == [20]
    fleet.run()
    assert restored(fleet) == 30
    assert [stored.step for stored in fleet.job.checkpoints.stored] == [20]


def test_steps_after_the_last_verified_one_are_given_up_when_the_state_is_corrupt() -> None:
    fleet = with_store()
    fleet.find(
        FindingKind.SILENT_CORRUPTION, "n1", severity=Severity.FATAL, verified_step="25", name="odd gradient norm"
    )
    assert restored(fleet) == 20
    assert "n1" not in fleet.nodes()
    assert fleet.job.generation is not None
    assert "after step 25, the last one that was verified" in fleet.job.generation.restore.reason
    fleet.run()
    assert fleet.job.checkpoints.trusted is None
    assert [segment.until for segment in fleet.job.checkpoints.lineage] == [None, 20], "30 can never come back"


def test_a_corruption_without_a_verified_step_distrusts_nothing() -> None:
    fleet = with_store()
    fleet.find(FindingKind.SILENT_CORRUPTION, "n1", severity=Severity.FATAL)
    assert restored(fleet) == 30
    assert "names no verified_step" in fleet.notes()


def test_sharded_state_is_put_together_when_a_replica_leaves() -> None:
    fleet = running(job(dp=3), saved=10)
    generation = fleet.job.running
    assert generation is not None
    for step in (10, 20):
        for rank, copy in ((0, 1), (1, 2), (2, 0)):
            shard = ShardRecord(
                ShardKey(generation.attempt, step, rank), generation.mesh, "memory", 1, f"{step}/{rank}", f"n{rank}"
            )
            for node in (f"n{rank}", f"n{copy}"):
                held = fleet.state.nodes[node].inventory.get(JOB, ())
                held = tuple(each for each in held if each.key != shard.key)
                fleet.report(node, Inventory(JOB, (*held, shard)))
    assert fleet.job.checkpoints.sharded is True
    fleet.train(25)
    fleet.lose("n2")
    assert (restored(fleet), fleet.nodes()) == (20, ("n0", "n1"))
    orders = fleet.orders(Prepare)
    for node in ("n0", "n1"):
        prepare = orders[node]
        assert isinstance(prepare, Prepare)
        assert [restore.shard.rank for restore in prepare.restore] == [0, 1, 2]
        read = (("memory", 4_000_000), ("peer", 9_200_000))
        command = next(send.command_id for send in fleet.sent if send.node == node and send.order == prepare)
        done = OrderDone(
            command, True, master=f"{node}:1", at=fleet.now, restored_from=(("peer", 2),), restored_bytes=read
        )
        fleet.report(node, done)
    fleet.run()
    assert fleet.incident.outcome == (
        "generation 2 steps from step 20 on, re-sharded from dp 3 to dp 2: read 18.4 MB from peers, 8.0 MB from memory"
    )


@pytest.mark.parametrize("cut_off", [(), ("n0", "n1", "n2")], ids=["sessions stand", "sessions have ended"])
def test_after_a_time_without_a_leader_the_newest_step_is_elected_and_not_the_newest_known(
    cut_off: tuple[str, ...],
) -> None:
    """Nodes save while nobody leads. The finding is read before they have come back and reported their shards."""
    fleet = running(job(dp=3), saved=10)
    old = fleet.job.generation
    assert old is not None
    fleet.now += 100.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.gone(*cut_off)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, age_s=100.0)
    assert not fleet.orders(Prepare)
    for node in ("n0", "n1", "n2"):
        fleet.session += 1
        fleet.hello(node, running=1)
        assert not fleet.orders(Prepare)
    for rank, node in enumerate(("n0", "n1", "n2")):
        fleet.inventory(node, ShardRecord(ShardKey(old.attempt, 60, rank), old.mesh, "memory", 1, "60@0", node))
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 60


def test_a_change_that_is_planned_anew_is_one_change_for_the_breaker() -> None:
    """One fault, and a source that keeps failing: the fleet's other jobs must not be held for it."""
    fleet = with_store()
    before = len(fleet.state.breaker.changes)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in ("n1", "n1"):
        refuse(fleet, node)
    assert fleet.job.change is not None
    assert fleet.job.change.replans == 2
    assert len(fleet.state.breaker.changes) == before + 1
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    assert len(fleet.state.breaker.changes) == before + 2, "another fault is another change"


def test_replans_without_end_are_seen_by_the_breaker_all_the_same() -> None:
    fleet = with_store()
    before = len(fleet.state.breaker.changes)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for _ in range(2 * REPLANS_MAX):
        fleet.connect("n2")  # its agent was started again, with nothing prepared
    assert fleet.job.change is not None
    assert fleet.job.change.replans == 2 * REPLANS_MAX
    assert len(fleet.state.breaker.changes) == before + 3


def without_two_replicas(*saved: int) -> Fleet:
    """Two of three replicas were lost with their disks after these saves, and two go on, on n0 and n3. Nothing of rank 1 is
    left, until n3 turns out to have what it saved first."""
    fleet = running(job(dp=3), spares=1)
    for step in saved:
        fleet.train(step, save=True)
    fleet.train(saved[-1] + 5)
    first = fleet.job.running
    assert first is not None
    for node in ("n1", "n2"):
        fleet.lose(node)
    fleet.run()
    assert (fleet.nodes(), fleet.job.progress.step) == (("n0", "n3"), saved[-1])
    key = ShardKey(first.attempt, saved[0], 1)
    fleet.inventory("n3", ShardRecord(key, first.mesh, "memory", 1, f"{saved[0]}@0", "n1"))
    return fleet


def test_a_planned_change_saves_first_when_its_mesh_can_restore_only_an_old_step() -> None:
    fleet = without_two_replicas(10, 40)
    fleet.connect("n1")
    fleet.wait(2.1)
    assert fleet.job.phase is JobPhase.RUNNING
    orders = fleet.orders(CheckpointNow)
    assert set(orders) == {"n0", "n3"}
    asked = orders["n0"]
    assert isinstance(asked, CheckpointNow)
    fleet.save(asked.at_step)
    assert (fleet.job.phase, restored(fleet)) == (JobPhase.PREPARING, asked.at_step)


def test_a_change_that_waits_for_saved_steps_is_decided_again_when_inventories_change_and_not_before() -> None:
    fleet = without_two_replicas(10, 20)
    fleet.connect("n1")
    fleet.wait(2.1)
    assert fleet.orders(CheckpointNow)
    fleet.wait(15.0)  # the save does not come, and step 10 is not older than an interval
    assert (fleet.job.phase, restored(fleet)) == (JobPhase.PREPARING, 10)
    refuse(fleet, "n0")
    assert fleet.job.phase is JobPhase.WAITING
    stops = {send.node: send.command_id for send in fleet.sent if isinstance(send.order, Stop)}
    fleet.done("n0", Stop)
    left = {send.node: send.command_id for send in fleet.sent if isinstance(send.order, Stop)}
    assert left == {node: stops[node] for node in ("n1", "n3")}, "an answer about workers contains no saved steps"
    fleet.answer_orders()
    first = fleet.job.checkpoints.lineage[-1]
    fleet.inventory("n1", ShardRecord(ShardKey(first.attempt, 20, 1), Mesh.of({"dp": 3}), "memory", 1, "20@0", "n1"))
    assert (fleet.job.phase, restored(fleet)) == (JobPhase.PREPARING, 20)


def test_fewer_replicas_that_can_restore_a_saved_step_are_better_than_step_0() -> None:
    fleet = running(job(dp=3, interval=10), saved=20)
    fleet.train(25)
    for node in fleet.nodes():  # every copy of rank 0's shard went bad
        left = [record for record in fleet.state.nodes[node].inventory[JOB] if record.key.rank != 0]
        fleet.report(node, Inventory(JOB, tuple(left)))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.phase is JobPhase.WAITING
    fleet.answer_orders()
    fleet.wait(fleet.state.config.scratch_s + 1)
    assert (restored(fleet), len(fleet.nodes())) == (20, 2)
    assert "3 replicas can restore no saved step" in fleet.job.reason
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_a_node_that_started_again_holds_nothing_until_it_says_what() -> None:
    fleet = running(job(dp=3))
    generation = fleet.job.running
    assert generation is not None
    shards = [
        ShardRecord(ShardKey(generation.attempt, 10, rank), generation.mesh, "disk", 1, "d", f"n{rank}")
        for rank in range(3)
    ]
    fleet.inventory("n0", shards[0])
    fleet.inventory("n1", shards[1])
    assert {step: list(slots) for step, slots in fleet.job.checkpoints.at_home.items()} == {10: [0, 1]}
    fleet.connect("n0")
    fleet.inventory("n2", shards[2])
    assert fleet.job.checkpoints.step == 0
    fleet.inventory("n0", shards[0])
    assert fleet.job.checkpoints.step == 10
    assert fleet.job.checkpoints.at_home == {}
