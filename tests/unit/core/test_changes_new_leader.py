"""A new leader in the middle of a change: which agents and inventories it waits for, and which orders it sends again."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inventory, Prepare, PrepareTemplate, Start, Stop
from holdfast.supervisor.protocol import Evaluate, JobPhase, LeaderStarted, Send, SetTimer
from holdfast.supervisor.timers import DeferralOver


@pytest.mark.parametrize("phase", ["question", "prepare", "start"])
def test_a_new_leader_hands_out_everything_again(phase: str) -> None:
    fleet = running(job(dp=3), spares=1, decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    if phase != "question":
        fleet.answer()
    if phase == "start":
        for node in fleet.nodes():
            fleet.done(node, Prepare)
    commands = fleet.fold(LeaderStarted(fleet.now, 2))
    again = [command for command in commands if isinstance(command, Send)]
    assert {send.command_id for send in again} == {send.command_id for send in fleet.state.sends()}
    assert {type(send.order) for send in again} >= {
        {"question": PrepareTemplate, "prepare": Prepare, "start": Start}[phase]
    }
    assert [type(c) for c in commands].count(Evaluate) == (1 if phase == "question" else 0)
    armed = {command.timer for command in commands if isinstance(command, SetTimer)}
    assert armed >= set(fleet.state.timers)


def test_a_new_leader_starts_nothing_before_it_has_heard_who_may_run_what_the_log_has_forgotten() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=2))
    fleet.now += 1
    fleet.fold(LeaderStarted(fleet.now, 2))  # the log went back: generation 2, which n2 runs alone, is forgotten
    fleet.now += 0.1
    fleet.hello("n0")
    fleet.hello("n1")
    fleet.answer_orders()
    assert not fleet.orders(Start)
    assert fleet.job.reason == "waits for node n2 to reconnect to this leader"
    fleet.now += 3.5  # its Hello was lost, and it has a new session
    fleet.hello("n2", running=2)
    assert not fleet.orders(Start)
    fleet.done("n2", Stop)
    assert set(fleet.orders(Start)) == {"n0", "n1"}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_leader_starts_once_everybody_is_heard_or_the_time_to_connect_is_over(restarted: bool) -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=2))
    fleet.now += 1
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.now += 0.1
    fleet.hello("n0")
    fleet.hello("n1")
    fleet.answer_orders()
    fleet.wait(4.8)
    assert not fleet.orders(Start)
    if restarted:
        fleet.connect("n2")
    else:
        fleet.wait(0.2)
        assert not fleet.state.nodes["n2"].connected
    assert set(fleet.orders(Start)) == {"n0", "n1"}


def test_nodes_that_do_not_come_back_to_a_new_leader_have_no_session() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.now += 1
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.now += 0.1
    for node in ("n0", "n1", "n2"):
        fleet.hello(node, running=1)
    fleet.wait(5.1)
    assert not fleet.state.nodes["n3"].connected
    assert all(fleet.state.nodes[node].connected for node in ("n0", "n1", "n2"))
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_new_leader_restores_what_was_saved_while_nobody_led() -> None:
    """The snapshot's inventories are as old as the outage: electing from them would give up all that was saved in it."""
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.hello("n2")  # holds nothing, and is not asked about it
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.phase == JobPhase.WAITING
    assert "n0, n1 holds" in fleet.job.reason
    for node in ("n0", "n1"):
        fleet.hello(node, running=1)
        assert fleet.job.phase == JobPhase.WAITING
    assert fleet.job.running is not None
    for rank, node in enumerate(("n0", "n1")):
        key = ShardKey(fleet.job.running.attempt, 500, rank)
        fleet.report(node, Inventory(JOB, (ShardRecord(key, fleet.job.running.mesh, "memory", 1, "same", node),)))
    fleet.expect(JobPhase.PREPARING)
    prepare = fleet.orders(Prepare)["n0"]
    assert isinstance(prepare, Prepare)
    assert prepare.restore_step == 500


def shard(step: int, rank: int, node: str, *, attempt: int, tier: str = "memory") -> ShardRecord:
    return ShardRecord(ShardKey(attempt, step, rank), Mesh.of({"dp": 2}), tier, 1, "same", node)


def test_the_inventory_of_another_job_does_not_end_the_wait_for_that_of_this_job() -> None:
    """Nodes keep the checkpoints of jobs that ended. Their inventories come first if their names do."""
    fleet = running(job(dp=2), spares=1, saved=10)
    attempt = fleet.job.number + fleet.job.numbering.attempt_base
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.hello("n2", announced=())
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in ("n0", "n1"):
        fleet.hello(node, running=1, announced=("ended", JOB))
        fleet.report(node, Inventory("ended", (shard(3, 0, node, attempt=7, tier="disk"),)))
    fleet.expect(JobPhase.WAITING)
    for rank, node in enumerate(("n0", "n1")):
        fleet.expect(JobPhase.WAITING)
        fleet.report(node, Inventory(JOB, (shard(500, rank, node, attempt=attempt),)))
    fleet.expect(JobPhase.PREPARING)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 500


def test_a_job_does_not_wait_for_the_inventories_of_other_jobs() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in ("n0", "n1"):
        fleet.hello(node, running=1, announced=(JOB, "large"))
        fleet.inventory(node)
    fleet.expect(JobPhase.PREPARING)


@pytest.mark.parametrize("first", ["ended", JOB])
def test_every_node_of_a_job_is_booted_again_and_holds_other_jobs_too(first: str) -> None:
    fleet = running(job(dp=2), saved=10)
    attempt = fleet.job.number + fleet.job.numbering.attempt_base
    fleet.lose("n0")
    fleet.lose("n1")
    fleet.wait(1.0)
    for node in ("n0", "n1"):
        fleet.connect(node, announced=tuple(sorted((JOB, "ended"))))
    second = JOB if first == "ended" else "ended"
    for name in (first, second):
        for rank, node in enumerate(("n0", "n1")):
            step, of = (10, attempt) if name == JOB else (3, 7)
            fleet.report(node, Inventory(name, (shard(step, rank, node, attempt=of, tier="disk"),)))
    fleet.wait(30.0)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10


def test_a_node_that_announces_nothing_is_not_waited_for() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.hello("n0", running=1, announced=(JOB,))
    fleet.inventory("n0")
    fleet.expect(JobPhase.WAITING)
    fleet.hello("n1", running=1, announced=())  # its directory was emptied: it holds no copies any more
    assert JOB not in fleet.state.nodes["n1"].inventory
    fleet.expect(JobPhase.PREPARING)


def test_a_new_leader_does_not_wait_for_inventories_for_ever() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in ("n0", "n1"):
        fleet.hello(node, running=1)
    fleet.answer_orders()  # the old workers stop meanwhile
    fleet.wait(5.1)
    assert fleet.job.phase == JobPhase.PREPARING
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10


def test_the_inventory_of_an_agent_that_has_connected_is_waited_for_less_long_than_the_agent() -> None:
    """Its report was lost. The wait ends when that is clear, not when the time for agents to connect is over."""
    fleet = running(job(dp=2), saved=10)
    config, began = fleet.state.config, fleet.now
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.now += 0.5
    fleet.expect(JobPhase.WAITING)
    for node in ("n0", "n1"):
        fleet.hello(node, running=1)
    assert fleet.state.timers[DeferralOver(JOB)] == fleet.now + config.inventory_s < began + config.session_s
    fleet.answer_orders()
    fleet.wait(config.inventory_s + 0.1)
    fleet.expect(JobPhase.PREPARING)


def test_a_node_that_may_hold_newer_shards_is_waited_for_from_its_connection_on() -> None:
    fleet = running(job(dp=2), saved=10, decide=False)
    config = fleet.state.config
    fleet.gone("n0", "n1")
    for node in ("n0", "n1"):
        fleet.connect(node)
    connected = fleet.now
    while fleet.questions:
        fleet.now += 0.5  # the policy takes its time
        fleet.answer()
    assert "just connected" in fleet.job.reason
    assert fleet.state.timers[DeferralOver(JOB)] == connected + config.inventory_s
    assert fleet.now > connected


@pytest.mark.parametrize("saved", [500, 0])
def test_a_new_leader_asks_for_the_first_save_of_a_job_that_had_saved_nothing_before(saved: int) -> None:
    """Redis was away for long: the job made its first saves meanwhile, and then a rank failed."""
    fleet = running(job(dp=2))
    fleet.now += 1000.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for rank, node in enumerate(("n0", "n1")):
        fleet.expect(JobPhase.WAITING)
        assert fleet.job.running is not None
        fleet.hello(node, running=1, announced=(JOB,) if saved else ())
        if saved:
            fleet.expect(JobPhase.WAITING)
            fleet.report(node, Inventory(JOB, (shard(saved, rank, node, attempt=fleet.job.running.attempt),)))
    fleet.expect(JobPhase.PREPARING)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == saved


def test_a_new_leader_waits_for_no_inventory_of_a_script_that_never_saves() -> None:
    fleet = running(job(dp=2))
    fleet.state = evolve(
        fleet.state, jobs={JOB: evolve(fleet.job, progress=evolve(fleet.job.progress, reports_no_steps=True))}
    )
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.phase is JobPhase.PREPARING


def test_reports_acknowledged_by_the_last_leader_change_nothing_for_the_next_one() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.session = 7
    fleet.hello("n0", running=1)
    fleet.hello("n1", running=1)
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.save(15)  # was in the inbox
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.phase is JobPhase.WAITING


def test_command_ids_differ_even_when_everything_was_forgotten() -> None:
    first, second = Fleet(1), Fleet(0)
    second.now += 60
    second.connect("n0")
    for fleet in (first, second):
        fleet.submit(job(dp=1))
    ids = [{send.command_id for send in each.state.sends()} for each in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
