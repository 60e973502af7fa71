"""First steps that travel in heartbeats: recorded once, repeated until that is confirmed, and bound to their sender."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
from fleet import JOB, Fleet, job
from supervising import facts
from waiting import VIRTUAL_TIME

from holdfast.domain.findings import FindingKind
from holdfast.domain.orders import (
    FirstStepsRecorded,
    OrderDone,
    Prepare,
    RanksFinished,
    RanksStepping,
    Report,
    StepReached,
)
from holdfast.log.memory import MemoryLog
from holdfast.supervisor.agents.sessions import AGAIN_S, Sessions
from holdfast.supervisor.inbox import InboxWriter
from holdfast.supervisor.protocol import Command, IncidentChanged, JobPhase, NodeReported, SendNotification
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.control import decode_first_steps, decode_first_steps_recorded, encode_beat

PHASES = (("process_group", 0.5), ("restore", 0.3), ("first_step", 0.9))


def starting(nodes: int = 3) -> Fleet:
    fleet = Fleet(nodes)
    fleet.submit(job(dp=nodes))
    for node in fleet.nodes():
        fleet.done(node, Prepare)
    assert fleet.job.phase is JobPhase.STARTING
    return fleet


def stepping(
    fleet: Fleet, slot: int, *, ranks: tuple[int, ...] | None = None, number: int | None = None
) -> RanksStepping:
    generation = fleet.job.generation
    assert generation is not None
    mine = tuple(generation.placements[slot].ranks) if ranks is None else ranks
    return RanksStepping(JOB, number or generation.number, mine, 1, fleet.now + slot / 10, PHASES)


def beat(fleet: Fleet, node: str, report: Report, *, incarnation: str = "") -> tuple[Command, ...]:
    return fleet.fold(NodeReported(fleet.now, node, incarnation or f"{node}-1", 0, report, fleet.session))


def confirmed(commands: tuple[Command, ...]) -> list[tuple[tuple[str, ...], FirstStepsRecorded]]:
    return [
        (each.nodes, each.message)
        for each in commands
        if isinstance(each, SendNotification) and isinstance(each.message, FirstStepsRecorded)
    ]


def test_first_steps_in_heartbeats_are_recorded_as_reports_of_them_are() -> None:
    in_beats, reported = starting(), starting()
    for slot, node in enumerate(in_beats.nodes()):
        commands = beat(in_beats, node, stepping(in_beats, slot))
        assert confirmed(commands) == [((node,), FirstStepsRecorded(JOB, in_beats.job.number))]
        reported.report(node, stepping(reported, slot))
    in_beats.expect(JobPhase.RUNNING)
    assert in_beats.job == reported.job
    assert in_beats.records == reported.records
    assert not in_beats.state.broadcasts, "they answer the order to start"
    assert in_beats.state.heard != reported.state.heard, "they have no number"


def starting_again() -> Fleet:
    """A crash after a minute; all nodes are prepared for the next generation."""
    fleet = starting()
    for slot, node in enumerate(fleet.nodes()):
        beat(fleet, node, stepping(fleet, slot))
    fleet.now += 60.0
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in fleet.nodes():
        fleet.done(node, Prepare)
    return fleet


def test_what_heartbeats_say_of_a_recovery_stands_in_its_incident() -> None:
    fleet = starting_again()
    reports = [stepping(fleet, slot) for slot in range(3)]
    fleet.now += 1.0
    for report, node in zip(reports, fleet.nodes(), strict=True):
        for _ in range(2):
            beat(fleet, node, report)
    fleet.expect(JobPhase.RUNNING)
    closed = next(each.incident for each in fleet.records[::-1] if isinstance(each, IncidentChanged))
    assert closed.closed
    assert closed.first_step_at == reports[2].at
    assert closed.phases_s["first_step"] == 0.9
    assert [share.node for share in closed.shares if share.ranks] == [*fleet.nodes()], "each node once"


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_first_step_is_neither_before_its_start_nor_later_than_now_whatever_a_node_says(ahead_s: float) -> None:
    """The time of a recovery is reported, and the checkpoint interval is computed from it."""
    fleet = starting_again()
    begun_at = fleet.now
    fleet.now += 5.0
    for slot, node in enumerate(fleet.nodes()):
        report = stepping(fleet, slot)
        beat(fleet, node, replace(report, at=report.at + ahead_s) if node == "n1" else report)
    fleet.expect(JobPhase.RUNNING)
    closed = next(each.incident for each in fleet.records[::-1] if isinstance(each, IncidentChanged))
    assert closed.first_step_at is not None
    assert begun_at <= closed.first_step_at <= fleet.now
    assert fleet.job.checkpoints.measured.recovery_s < 60.0


def test_a_repeated_heartbeat_changes_nothing_and_is_confirmed_again() -> None:
    fleet = starting()
    first, second, _ = fleet.nodes()
    beat(fleet, first, stepping(fleet, 0))
    before = fleet.state
    assert confirmed(beat(fleet, first, stepping(fleet, 0))), "the first confirmation may be lost"
    assert fleet.state == before
    beat(fleet, second, stepping(fleet, 1))
    change = fleet.job.change
    assert change is not None
    assert [share.node for share in change.shares if share.ranks] == [first, second]


def test_nobody_speaks_of_ranks_of_others_in_heartbeats() -> None:
    fleet = starting()
    first, *_ = fleet.nodes()
    before = fleet.job
    assert confirmed(beat(fleet, first, stepping(fleet, 0, ranks=(0, 1, 2)))), "or the agent would repeat it for ever"
    assert fleet.job == before
    assert list(fleet.state.unanswered[JOB]) == [0, 1, 2]
    assert fleet.state.nodes[first].refused_at == fleet.now
    assert not beat(fleet, "nobody", stepping(fleet, 0))


def test_heartbeats_of_another_generation_or_incarnation_record_nothing() -> None:
    fleet = starting()
    first, *_ = fleet.nodes()
    before = fleet.state
    assert confirmed(beat(fleet, first, stepping(fleet, 0, number=7))) == [((first,), FirstStepsRecorded(JOB, 7))]
    assert not beat(fleet, first, stepping(fleet, 0), incarnation="another"), "its Hello may not be folded yet"
    assert fleet.state == before


def test_other_reports_without_a_number_are_ignored() -> None:
    fleet = starting()
    first, *_ = fleet.nodes()
    before, number = fleet.state, fleet.job.number
    for report in (RanksFinished(JOB, number, (0,), fleet.now), OrderDone("c-1", False, "no", at=fleet.now)):
        assert not beat(fleet, first, report)
    assert fleet.state == before


def test_what_a_message_says() -> None:
    report = RanksStepping(JOB, 3, (0, 1), 7, 12.5, PHASES)
    raw = encode_beat(1.0, 2, (StepReached(JOB, 3, 7),), first_steps=(report,)).SerializeToString()
    assert decode_first_steps(pb.AgentMessage.FromString(raw).beat) == (report,)
    assert decode_first_steps(encode_beat(1.0).beat) == ()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])
async def test_a_session_passes_on_what_is_new_and_what_was_not_confirmed_in_time() -> None:
    passed: list[NodeReported] = []
    sessions = Sessions(1, InboxWriter(MemoryLog()), anyio.current_time, passed.append)
    session = sessions.open(facts("a"), "peer-1")
    report, later = (RanksStepping(JOB, number, (0,), 1, 5.0) for number in (1, 2))

    def hear(*first_steps: RanksStepping) -> None:
        sessions.first_steps(session, anyio.current_time(), first_steps)

    for _ in range(3):
        hear(report)
    assert [(each.node, each.seq, each.session, each.report) for each in passed] == [("a", 0, session.number, report)]
    await anyio.sleep(AGAIN_S + 0.1)
    hear(report)
    hear(later)
    hear()
    hear(later)
    assert [each.report for each in passed[1:]] == [report, later, later]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])
@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
async def test_first_steps_are_passed_on_with_times_of_the_leaders_clock(ahead_s: float) -> None:
    passed: list[NodeReported] = []
    sessions = Sessions(1, InboxWriter(MemoryLog()), anyio.current_time, passed.append)
    session = sessions.open(facts("a"), "peer-1")
    await anyio.sleep(10.0)
    for _ in range(2):  # it is repeated as long as it is not confirmed, and that changes nothing of what it says
        stepped = RanksStepping(JOB, 1, (0,), 1, 7.0 + ahead_s)
        sessions.first_steps(session, anyio.current_time() + ahead_s, (stepped,))
    [report] = [each.report for each in passed]
    assert isinstance(report, RanksStepping)
    assert report.at == pytest.approx(7.0)


@pytest.mark.anyio
async def test_the_confirmation_goes_to_the_nodes_that_it_is_for() -> None:
    sessions = Sessions(1, InboxWriter(MemoryLog()), anyio.current_time)
    session, other = sessions.open(facts("a"), "peer-1"), sessions.open(facts("b"), "peer-2")
    sessions.tell(("a", "gone"), FirstStepsRecorded(JOB, 4))
    raw = await session.next()
    assert isinstance(raw, bytes)
    message = pb.SupervisorMessage.FromString(raw)
    assert decode_first_steps_recorded(message.first_steps_recorded) == FirstStepsRecorded(JOB, 4)
    with pytest.raises(TimeoutError), anyio.fail_after(0.0):
        await other.next()
