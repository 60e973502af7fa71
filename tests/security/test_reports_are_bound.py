"""What an agent says counts for its own node, the ranks that it has there, and their generation: a node that lies about others
changes nothing for them, and is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.domain.nodes import Check, Preflight, RunningWorker, WorkerEnded
from holdfast.domain.orders import (
    Hello,
    Inventory,
    OrderDone,
    Prepare,
    RanksFinished,
    RanksStepping,
    Report,
    Start,
    StepReached,
    Stop,
    WorkersChanged,
)
from holdfast.domain.orders import (
    Tested as SelfTest,
)
from holdfast.supervisor.agents.beats import steps_to_fold
from holdfast.supervisor.core import Batch, saved_steps
from holdfast.supervisor.core.progress import SECOND_WITNESS_S
from holdfast.supervisor.protocol import JobPhase, NodeReported, Noted, Send, StepSeen

FOREIGN = "n3"  # a node without ranks of the job
LATER = 10**19  # fits the message, and nothing was ever numbered so

Liar = Callable[[Fleet], Report]


def reporting(*, spares: int = 1, saved: int = 10) -> Fleet:
    """Three nodes with a rank each, whose agents report their workers, and one without."""
    fleet = running(job(dp=3), spares, saved=saved)
    fleet.all_live()
    fleet.answer_orders()
    return fleet


def starting() -> Fleet:
    fleet = Fleet(4)
    fleet.submit(job(dp=3))
    fleet.answer_orders()
    fleet.expect(JobPhase.STARTING)
    return fleet


def preparing() -> Fleet:
    fleet = Fleet(4)
    fleet.submit(job(dp=3))
    fleet.expect(JobPhase.PREPARING)
    return fleet


def of_others(fleet: Fleet, liar: str) -> Mapping[str, Any]:
    """All that the core knows, but for what it knows of `liar`."""
    state = fleet.state
    return {
        "jobs": state.jobs,
        "nodes": {name: node for name, node in state.nodes.items() if name != liar},
        "incidents": (state.incidents, state.closed),
        "orders": [send for send in state.sends() if send.node != liar],
        "timers": {timer: due for timer, due in state.timers.items() if liar not in str(timer)},
    }


def noted(fleet: Fleet, node: str) -> list[str]:
    return [record.text for record in fleet.records if isinstance(record, Noted) and record.subject == node]


def order(fleet: Fleet, node: str, kind: type) -> Send:
    return next(send for send in fleet.sent if send.node == node and isinstance(send.order, kind))


def shards(fleet: Fleet, step: int, attempt: int | None = None) -> tuple[ShardRecord, ...]:
    """Of every rank."""
    generation = fleet.job.running
    assert generation is not None
    number = generation.attempt if attempt is None else attempt
    keys = [ShardKey(number, step, rank) for rank in range(generation.mesh.world_size)]
    return tuple(ShardRecord(key, generation.mesh, "disk", 1, "d", generation.node_of(key.rank)) for key in keys)


def stored(fleet: Fleet, step: int, damage: str = "") -> StoredStep:
    generation = fleet.job.running
    assert generation is not None
    return StoredStep(generation.attempt, step, generation.mesh, False, damage)


# ---------------------------------------------------------------- a node speaks for others

# What a node without ranks says of a job that runs on others.
OF_A_FOREIGN_NODE: dict[type[Report], Liar] = {
    Hello: lambda fleet: Hello(fleet.facts("n0"), (), Preflight(1.0, 1.0, (Check("disk", False, "gone"),))),
    WorkersChanged: lambda fleet: WorkersChanged(9, (), (WorkerEnded(JOB, fleet.job.number, 0, exit_code=0),)),
    OrderDone: lambda fleet: OrderDone("c-1-1-1/0", False, "no", "evil:1", fleet.now),
    RanksStepping: lambda fleet: RanksStepping(JOB, fleet.job.number, (0, 1, 2), 500, fleet.now),
    RanksFinished: lambda fleet: RanksFinished(JOB, fleet.job.number, (0, 1, 2), fleet.now),
    Inventory: lambda fleet: Inventory(JOB, shards(fleet, 500), (stored(fleet, 500), stored(fleet, 10, "rank 0"))),
    SelfTest: lambda fleet: SelfTest(Preflight(fleet.now, 0.1, (Check("disk", False, "gone"),))),
}


def test_each_kind_of_report_is_tried() -> None:
    assert OF_A_FOREIGN_NODE.keys() == set(get_args(Report)), (
        "a new kind of report says who may make it, and is tried here"
    )


@pytest.mark.parametrize("kind", OF_A_FOREIGN_NODE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("make", [reporting, starting])
def test_a_node_without_ranks_changes_nothing_for_those_that_have_them(
    make: Callable[[], Fleet], kind: type[Report]
) -> None:
    fleet = make()
    if kind is Inventory and fleet.job.phase is JobPhase.STARTING:
        fleet.step_all()
    before = of_others(fleet, FOREIGN)
    fleet.report(FOREIGN, OF_A_FOREIGN_NODE[kind](fleet))
    assert of_others(fleet, FOREIGN) == before
    if kind not in (
        SelfTest,
        OrderDone,
        Inventory,
    ):  # of itself; to an order that was withdrawn; of what it has fetched
        assert "ignored" in noted(fleet, FOREIGN)[-1]


def test_the_end_of_a_job_is_not_a_strangers_to_tell() -> None:
    """One report ended any job, and its checkpoints were deleted."""
    fleet = reporting()
    for _ in range(3):
        fleet.report(FOREIGN, RanksFinished(JOB, fleet.job.number, (0, 1, 2), fleet.now))
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.orders(Stop)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (0, 7)], ids=str)
def test_a_node_of_the_job_tells_of_its_own_ranks_only(ranks: tuple[int, ...]) -> None:
    fleet = reporting()
    before = of_others(fleet, "n0")
    fleet.report("n0", RanksFinished(JOB, fleet.job.number, ranks, fleet.now))
    assert of_others(fleet, "n0") == before
    assert "ranks of job that it does not have" in noted(fleet, "n0")[-1]


def test_the_workers_of_a_node_that_ended_well_are_its_own() -> None:
    fleet = reporting()
    number = fleet.job.number
    ended = tuple(WorkerEnded(JOB, number, rank, exit_code=0) for rank in range(3))
    fleet.report("n0", WorkersChanged(9, (), ended))
    assert set(fleet.job.membership.finished) == {0}
    assert fleet.state.nodes["n0"].ended == ended[:1]
    assert "ranks of job that it does not have" in noted(fleet, "n0")[-1]
    fleet.hello("n0")
    fleet.report("n0", Hello(fleet.facts("n0"), (), None, 10, ended))
    assert set(fleet.job.membership.finished) == {0}


def test_ranks_of_others_do_not_stand_in_for_a_nodes_own() -> None:
    """A node that has lost its rank, and says that it runs another one's."""
    fleet = reporting()
    fleet.report("n1", WorkersChanged(9, (RunningWorker(JOB, fleet.job.number, 2, 7),)))
    fleet.wait(3.5)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING
    assert (fleet.incident.node, fleet.incident.rank) == ("n1", 1)


def test_an_old_generation_says_nothing_of_the_new_one() -> None:
    fleet = reporting()
    old = fleet.job.number
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.all_live()
    fleet.expect(JobPhase.RUNNING)
    before = fleet.state.jobs
    for node, rank in (("n0", 0), ("n1", 1), ("n2", 2)):
        fleet.report(node, RanksFinished(JOB, old, (rank,), fleet.now))
        fleet.report(node, RanksStepping(JOB, old, (rank,), 999, fleet.now))
        fleet.report(node, WorkersChanged(fleet.version[node] + 1, fleet.state.nodes[node].workers, _well(old, rank)))
        fleet.version[node] += 1
    assert fleet.state.jobs == before
    assert not any("ignored" in text for node in ("n0", "n1", "n2") for text in noted(fleet, node)), "late is no lie"


def _well(generation: int, rank: int) -> tuple[WorkerEnded, ...]:
    return (WorkerEnded(JOB, generation, rank, exit_code=0),)


def test_a_job_is_completed_by_all_of_its_nodes() -> None:
    fleet = reporting()
    number = fleet.job.number
    for node, rank in (("n0", 0), ("n2", 2)):
        fleet.report(node, RanksFinished(JOB, number, (rank,), fleet.now))
        fleet.report(node, RanksFinished(JOB, number, (rank,), fleet.now))
    fleet.report("n0", RanksFinished(JOB, number, (0, 1, 2), fleet.now))
    fleet.expect(JobPhase.RUNNING)
    assert not fleet.orders(Stop), "no node hears that the job is over"
    fleet.report("n1", RanksFinished(JOB, number, (1,), fleet.now))
    fleet.expect(JobPhase.COMPLETED)
    orders = fleet.orders(Stop)
    assert set(orders) == {"n0", "n1", "n2"}
    assert all(isinstance(each, Stop) and each.ended and not each.forget for each in orders.values())


# ---------------------------------------------------------------- answers to orders


@pytest.mark.parametrize("ok", [True, False])
def test_an_order_to_another_node_of_the_job_is_not_answered(ok: bool) -> None:
    fleet = preparing()
    before = of_others(fleet, "n1")
    fleet.report("n1", OrderDone(order(fleet, "n0", Prepare).command_id, ok, "", "evil:1", fleet.now))
    assert of_others(fleet, "n1") == before
    assert "an order for n0" in noted(fleet, "n1")[-1]
    fleet.run()
    assert fleet.orders(Start) == {}
    fleet.expect(JobPhase.RUNNING)


@pytest.mark.parametrize("ok", [True, False])
def test_a_stranger_that_knows_every_id_answers_nothing(ok: bool) -> None:
    """The ids could be guessed, and a stranger's answers set the rendezvous of every node."""
    fleet = preparing()
    before = of_others(fleet, FOREIGN)
    for send in list(fleet.sent):
        fleet.report(FOREIGN, OrderDone(send.command_id, ok, "", "evil:1", fleet.now))
    assert of_others(fleet, FOREIGN) == before
    fleet.answer_orders()
    fleet.expect(JobPhase.STARTING)


def test_the_rendezvous_is_named_by_the_node_of_rank_0() -> None:
    fleet = preparing()
    for node in ("n2", "n1", "n0"):
        master = "n0:29500" if node == "n0" else f"{node}:666"
        fleet.report(node, OrderDone(order(fleet, node, Prepare).command_id, True, "", master, fleet.now))
    starts = fleet.orders(Start)
    assert set(starts) == {"n0", "n1", "n2"}
    assert {each.master for each in starts.values() if isinstance(each, Start)} == {"n0:29500"}


def test_an_order_to_a_single_node_is_answered_by_that_node() -> None:
    fleet = reporting()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.lose("n2")
    fleet.hello("n2")
    stop = order(fleet, "n2", Stop)
    before = of_others(fleet, FOREIGN)
    fleet.report("n0", OrderDone(stop.command_id, True))
    assert stop.command_id in fleet.state.outbox
    assert of_others(fleet, FOREIGN)["orders"] == before["orders"]
    assert "an order for n2" in noted(fleet, "n0")[-1]


# ---------------------------------------------------------------- what is saved


def test_a_stranger_has_no_shards_of_the_generation_that_runs() -> None:
    """An election would choose the newest step that anybody says is complete."""
    fleet = reporting()
    fleet.report(FOREIGN, Inventory(JOB, shards(fleet, 500), (stored(fleet, 600),)))
    assert fleet.job.checkpoints.stored == ()
    assert [each.step for each in saved_steps(fleet.state, JOB)] == [10]
    assert fleet.job.checkpoints.saved_by_all <= (shards(fleet, 10)[0].key.checkpoint)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_a_copy_that_a_spare_has_fetched_counts() -> None:
    """It prepared to take a rank over, and the job was planned again without it: its shards are of the attempt that runs."""
    fleet = reporting()
    fleet.report(FOREIGN, Inventory(JOB, shards(fleet, 10)))
    for node in ("n0", "n1", "n2"):
        fleet.report(node, Inventory(JOB, ()))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10


def test_a_strangers_copies_do_not_let_others_delete_theirs() -> None:
    """A step is safe everywhere when each rank has a copy with a peer: a stranger is nobody's peer."""
    fleet = reporting()
    attempt = shards(fleet, 20)[0].key.attempt
    for rank, node in enumerate(("n0", "n1", "n2")):
        fleet.inventory(node, shards(fleet, 20)[rank])
    fleet.report(FOREIGN, Inventory(JOB, shards(fleet, 20)))
    fleet.wait(10.0)
    assert fleet.job.checkpoints.step == 20
    assert fleet.job.checkpoints.saved_by_all < (attempt, 20)


def test_a_node_that_has_left_keeps_what_it_saved() -> None:
    """Shards of earlier generations lie on nodes that have no ranks any more."""
    fleet = reporting()
    old = shards(fleet, 10)[:1]
    fleet.lose("n0")
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    fleet.hello("n0")
    fleet.report("n0", Inventory(JOB, old))
    assert tuple(fleet.state.nodes["n0"].inventory[JOB]) == old
    assert not noted(fleet, "n0") or "ignored" not in noted(fleet, "n0")[-1]


@pytest.mark.parametrize("there", [True, False], ids=["a job that runs", "a name that is not known"])
def test_numbers_that_nobody_gave_out_count_for_nothing(there: bool) -> None:
    """A generation or an attempt is one more than the newest that any node reports: it must fit the messages still."""
    fleet = reporting()
    name = JOB if there else "other"
    fleet.report(FOREIGN, WorkersChanged(9, (RunningWorker(name, LATER, 0, 7),), _well(LATER, 0)))
    fleet.report(FOREIGN, Inventory(name, shards(fleet, 5, attempt=LATER)))
    assert "ignored" in noted(fleet, FOREIGN)[-1]
    if not there:
        fleet.submit(job(name=name, dp=1))
        fleet.about = name
    else:
        fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    generation = fleet.job.generation
    assert generation is not None
    assert max(generation.number, generation.attempt) < 2**54


def test_a_step_that_nobody_can_have_reached_is_not_believed() -> None:
    fleet = starting()
    fleet.report("n0", RanksStepping(JOB, fleet.job.number, (0,), LATER, fleet.now))
    assert fleet.job.progress.seen_step == 0
    assert "ignored" in noted(fleet, "n0")[-1]


# ---------------------------------------------------------------- beats


@pytest.mark.parametrize("report", [OF_A_FOREIGN_NODE[RanksStepping], OF_A_FOREIGN_NODE[RanksFinished]])
def test_the_beat_of_a_stranger_starts_and_ends_nothing(report: Liar) -> None:
    """First steps in heartbeats are reports without a number."""
    fleet = starting()
    before = fleet.job
    fleet.fold(NodeReported(fleet.now, FOREIGN, f"{FOREIGN}-1", 0, report(fleet), fleet.session))
    assert fleet.job == before


def test_the_beat_of_a_stranger_is_no_sign_of_a_step() -> None:
    """It would end a start that never came about, and hide a hang."""
    fleet = starting()
    number = fleet.job.number
    for step in (1, 2, 3):
        reached = StepReached(JOB, number, step)
        assert steps_to_fold([(FOREIGN, reached)], fleet.state, fleet.now + SECOND_WITNESS_S) == []
        before = fleet.state.jobs
        fleet.fold(StepSeen(fleet.now, reached, FOREIGN))
        assert fleet.state.jobs == before
    [due] = steps_to_fold([("n1", StepReached(JOB, number, 2))], fleet.state, fleet.now + SECOND_WITNESS_S)
    assert due == ("n1", StepReached(JOB, number, 2))
    fleet.fold(StepSeen(fleet.now, due[1], due[0]))
    fleet.wait(5.0)
    fleet.expect(JobPhase.RUNNING)


def test_a_strangers_step_does_not_hide_that_of_a_member() -> None:
    fleet = reporting()
    number = fleet.job.number
    reached = [(FOREIGN, StepReached(JOB, number, LATER)), ("n1", StepReached(JOB, number, 40))]
    assert steps_to_fold(reached, fleet.state, fleet.now + SECOND_WITNESS_S) == [reached[1]]


# ---------------------------------------------------------------- signals


def test_a_fault_that_a_stranger_signals_interrupts_no_run() -> None:
    """Its signals say that a rank of the job has crashed there, or is slow there."""
    fleet = reporting()
    before = fleet.state.jobs
    for kind, severity in (
        (FindingKind.WORKER_CRASH, Severity.ERROR),
        (FindingKind.HANG, Severity.ERROR),
        (FindingKind.STRAGGLER, Severity.WARNING),
    ):
        fleet.find(kind, FOREIGN, rank=0, severity=severity)
    assert fleet.state.jobs == before
    assert not fleet.state.incidents
    assert fleet.notes().count(f"ignored: {FOREIGN} has no ranks in generation 1 of job") == 3
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.number == 2


# ---------------------------------------------------------------- sessions


def say(fleet: Fleet, node: str, seq: int, session: int, report: Report, incarnation: str = "") -> None:
    life = incarnation or fleet.state.nodes[node].facts.incarnation
    fleet.fold(NodeReported(fleet.now, node, life, seq, report, session))


def preflight(at: float) -> SelfTest:
    return SelfTest(Preflight(at, 0.1, (Check("disk", True, ""),)))


def test_a_greeting_with_a_huge_number_does_not_mute_the_agent() -> None:
    """Somebody greets as the agent, with a number that it will never reach. The agent's own next session counts."""
    fleet = reporting()
    fleet.session = 1
    for node in ("n0", "n1", "n2"):
        fleet.hello(node)
    say(fleet, "n1", 2**63, 2, Hello(fleet.facts("n1")))
    assert fleet.state.nodes["n1"].session == 2
    workers = (RunningWorker(JOB, fleet.job.number, 1, 101),)
    seq = fleet.seq["n1"]
    say(fleet, "n1", seq + 1, 3, Hello(fleet.facts("n1"), workers, None, 20))
    assert fleet.state.nodes["n1"].session == 3
    assert fleet.state.nodes["n1"].workers_version == 20
    say(fleet, "n1", seq + 2, 3, preflight(fleet.now))
    tested = fleet.state.nodes["n1"].preflight
    assert tested is not None
    assert tested.at == fleet.now
    fleet.wait(60.0)
    fleet.expect(JobPhase.RUNNING)
    assert not fleet.state.incidents


def test_what_was_said_on_an_earlier_session_is_over() -> None:
    """The log may deliver it once more: neither is it folded, nor does its number mute the present session."""
    fleet = reporting()
    fleet.session = 1
    fleet.hello("n1")
    say(fleet, "n1", 2**63, 2, Hello(fleet.facts("n1")))
    seq = fleet.seq["n1"]
    say(fleet, "n1", seq + 1, 3, Hello(fleet.facts("n1")))
    before = fleet.state
    say(fleet, "n1", 2**63, 2, Hello(fleet.facts("n1")))
    say(fleet, "n1", 2**63 + 1, 2, preflight(fleet.now))
    assert fleet.state.nodes == before.nodes
    say(fleet, "n1", seq + 2, 3, preflight(fleet.now + 1.0))
    tested = fleet.state.nodes["n1"].preflight
    assert tested is not None
    assert tested.at == fleet.now + 1.0


def test_a_report_that_comes_twice_is_folded_once() -> None:
    fleet = reporting()
    fleet.session = 1
    fleet.hello("n1")
    seq = fleet.seq["n1"]
    say(fleet, "n1", seq + 1, 1, preflight(5.0))
    say(fleet, "n1", seq + 2, 1, preflight(6.0))
    before = fleet.state
    say(fleet, "n1", seq + 1, 1, preflight(5.0))
    say(fleet, "n1", seq, 1, Hello(fleet.facts("n1")))
    assert fleet.state.nodes == before.nodes


def test_an_agent_greets_in_its_own_name() -> None:
    fleet = reporting()
    theirs = replace(fleet.facts("n0"), incarnation="another life")
    for facts in (fleet.facts("n0"), theirs, replace(fleet.facts(FOREIGN), incarnation="another life")):
        before = of_others(fleet, FOREIGN)
        fleet.report(FOREIGN, Hello(facts))
        assert of_others(fleet, FOREIGN) == before
        assert fleet.state.nodes[FOREIGN].facts == fleet.facts(FOREIGN)
    say(fleet, "unheard of", 1, 9, Hello(fleet.facts("n0")), "i1")
    assert "unheard of" not in fleet.state.nodes


# ---------------------------------------------------------------- what an operator sees


def test_a_node_that_lies_without_end_is_named_once_a_minute() -> None:
    fleet = reporting()
    for _ in range(100):
        fleet.now += 1.3
        fleet.report(FOREIGN, RanksFinished(JOB, fleet.job.number, (0, 1, 2), fleet.now))
    texts = noted(fleet, FOREIGN)
    lies = [text for text in texts if "ranks of job that it does not have" in text]
    assert 2 <= len(lies) <= 3


def test_a_lie_among_reports_that_come_together_spoils_none_of_them() -> None:
    fleet = starting()
    number = fleet.job.number
    batch = Batch(fleet.state)
    reports = []
    for rank, node in enumerate(("n0", "n1", "n2", FOREIGN)):
        fleet.seq[node] += 1
        reported = (rank,) if rank < 3 else (0, 1, 2)
        stepping = RanksStepping(JOB, number, reported, 1 if rank < 3 else 77, fleet.now)
        reports.append(NodeReported(fleet.now, node, f"{node}-1", fleet.seq[node], stepping))
    batch.reports(fleet.now, reports)
    fleet.state = batch.state
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.progress.seen_step == 1
