"""Pauses that nobody announced are no hangs, and who is provably stuck is named within seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosing import T0, Fleet

from holdfast.diagnostics.detectors.rhythm import Rhythm
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import Phase, WorkerError

SIZE = 8


def fleet_of(**hang: float) -> Fleet:
    """Half-second steps."""
    fleet = Fleet(nodes=SIZE, mesh=Mesh.of({"dp": SIZE}), hang=HangSpec(**{"floor_s": 10.0, "init_s": 600.0, **hang}))
    fleet.start()
    fleet.run(until=50.1)
    fleet.training = False
    return fleet


def goes_on(fleet: Fleet, steps: int) -> None:
    fleet.training, fleet._next_step = True, fleet.now
    fleet.run(until=fleet.now + (steps - 1) * fleet.step_s + 0.02)
    fleet.training = False


def errors(fleet: Fleet) -> list[Finding]:
    return [finding for finding in fleet.found if finding.severity is Severity.ERROR]


def tell(fleet: Fleet, rank: int, *, entered: int, kind: str = "all_reduce", pending: bool = True, **said: str) -> None:
    """What the recorder of `rank`, one to a node, holds of the group of all."""
    rows = CollectiveRows(
        rank=(rank,),
        group=("0",),
        members=(f"0-{SIZE - 1}",),
        kind=(kind if pending else "",),
        sizes=("Float[4]" if pending else "",),
        peer=(-1,),
        entered=(entered,),
        pending=(entered if pending else -1,),
    )
    standstill = StallSnapshot(
        node=f"n{rank}",
        at=T0 + fleet.now,
        job=fleet.job,
        generation=fleet.generation,
        rank=(rank,),
        answered=(True,),
        interpreter=(said.get("interpreter", "free"),),
        kernel=(said.get("kernel", "futex_do_wait"),),
        messages=(True,),
        stack=("",),
        rows=rows,
    )
    fleet.fold(standstill)


def waits_for(fleet: Fleet, absent: int, **said: str) -> None:
    """Two seconds into the stall every recorder says that all but one rank are in all_reduce #9."""
    fleet.run(until=fleet.now + 2.0)
    for rank in range(SIZE):
        fleet.ranks[rank].seq = 8 if rank == absent else 9
        tell(
            fleet, rank, entered=8 if rank == absent else 9, pending=rank != absent, **(said if rank == absent else {})
        )


# ------------------------------------------------------------------ provably stuck


@pytest.mark.parametrize(("state", "named_after_s"), [("T", 3.0), ("Z", 12.0)])
def test_a_rank_that_is_stopped_or_gone_is_named_within_seconds(state: str, named_after_s: float) -> None:
    fleet = fleet_of()
    fleet.ranks[5].state = state
    fleet.run(until=50.0 + named_after_s)
    assert (fleet.only().kind, fleet.only().severity, fleet.only().rank) == (FindingKind.HANG, Severity.ERROR, 5)


def test_a_process_that_frees_its_memory_for_seconds_is_named_by_its_exit() -> None:
    """Its first thread is gone (state Z); the kernel reports the end when the last thread is."""
    fleet = fleet_of()
    fleet.ranks[5].state = "Z"
    fleet.run(until=58.0)
    assert fleet.found == []
    fleet.exits(5, error=WorkerError("MemoryError", ""))
    fleet.run(until=70.0)
    assert (fleet.only().kind, fleet.only().rank) == (FindingKind.WORKER_EXCEPTION, 5)
    assert "MemoryError" in fleet.only().summary


def test_a_rank_that_idles_outside_of_a_collective_that_all_others_have_entered_is_named() -> None:
    fleet = fleet_of()
    waits_for(fleet, 3)
    reported_at = fleet.now
    fleet.run(until=fleet.now + 3.0)
    assert (fleet.only().severity, fleet.only().rank) == (Severity.ERROR, 3)
    assert fleet.only().at - T0 <= reported_at + 2.0


@pytest.mark.parametrize("standing", ["mismatch", "ended"])
def test_what_cannot_end_by_itself_is_found_at_once(standing: str) -> None:
    fleet = fleet_of()
    if standing == "ended":
        fleet.fold(fleet.exit_of(3, exit_code=0))
        fleet.ranks[3].alive, fleet.ranks[3].state = False, ""
        fleet.silent.add("n3")
    fleet.run(until=52.1)
    for rank in range(SIZE):
        if (standing, rank) != ("ended", 3):
            tell(fleet, rank, entered=9, kind="broadcast" if rank == 3 else "all_reduce")
    fleet.run(until=55.0)
    assert (fleet.only().kind, fleet.only().severity) == (FindingKind.HANG, Severity.ERROR)
    if standing == "mismatch":
        assert fleet.only().rank == 3


def test_a_slow_job_is_given_three_of_its_slow_steps() -> None:
    fleet = Fleet(nodes=3, step_s=3.0, hang=HangSpec(floor_s=60.0))
    fleet.start()
    fleet.run(until=60.5)
    fleet.training = False
    fleet.ranks[1].state = "T"
    fleet.run(until=68.5)
    assert fleet.found == []
    fleet.run(until=70.0)
    assert fleet.only().rank == 1


def test_a_debugger_is_given_the_whole_floor() -> None:
    fleet = fleet_of()
    fleet.ranks[5].state = "t"
    fleet.run(until=59.5)
    assert fleet.found == []
    fleet.run(until=62.0)
    assert (fleet.only().severity, fleet.only().rank) == (Severity.ERROR, 5)


def test_a_job_all_of_which_is_stopped_is_given_the_whole_floor() -> None:
    """Somebody suspended it."""
    fleet = fleet_of()
    for rank in fleet.ranks.values():
        rank.state = "T"
    fleet.run(until=59.5)
    assert fleet.found == []
    fleet.run(until=62.0)
    assert fleet.only().rank is None


# ------------------------------------------------------------------ pauses


def test_an_unannounced_evaluation_of_everybody_is_a_warning_and_is_learned() -> None:
    """Twelve seconds after every hundredth step."""
    fleet = fleet_of()
    for _ in range(4):
        fleet.run(until=fleet.now + 12.0)
        goes_on(fleet, 100)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING]
    assert "may be a pause" in fleet.found[0].summary


@pytest.mark.parametrize("asked", [False, True])
def test_an_evaluation_by_everybody_is_given_as_long_as_an_announced_one(asked: bool) -> None:
    """All use CPU time, and no recorder says that anybody waits: minutes of that are no error."""
    fleet = fleet_of()
    for rank in fleet.ranks.values():
        rank.state, rank.cpu = "R", 0.9
    fleet.run(until=fleet.now + 2.0)
    for number in range(SIZE if asked else 0):
        fleet.ranks[number].seq = 9
        tell(fleet, number, entered=9, pending=False)
    fleet.run(until=fleet.now + 500.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING]
    fleet.run(until=fleet.now + 100.0)
    assert [finding.rank for finding in errors(fleet)] == [None]


@pytest.mark.parametrize("evidence", ["in flight", "asleep"])
def test_everybody_who_waits_computes_nothing(evidence: str) -> None:
    """A network that lets nothing through, or a deadlock: an error after ten times the allowance, as it always was."""
    fleet = fleet_of()
    if evidence == "in flight":
        for rank in fleet.ranks.values():
            rank.state, rank.cpu = "R", 1.0
        fleet.run(until=fleet.now + 2.0)
        for number in range(SIZE):
            fleet.ranks[number].seq = 9
            tell(fleet, number, entered=9)
    fleet.run(until=153.0)
    assert [finding.rank for finding in errors(fleet)] == [None]


@pytest.mark.parametrize("doing", ["computes", "uploads", "reads"])
def test_one_rank_that_evaluates_or_saves_alone_is_no_error(doing: str) -> None:
    fleet = fleet_of()
    match doing:
        case "computes":
            fleet.ranks[0].state, fleet.ranks[0].cpu = "R", 1.0
        case "reads":
            fleet.ranks[0].state = "D"
        case _:
            pass
    waits_for(fleet, 0, kernel="do_poll.constprop.0" if doing == "uploads" else "")
    fleet.run(until=fleet.now + 20.0)
    assert errors(fleet) == []
    fleet.run(until=fleet.now + 100.0)
    assert [finding.rank for finding in errors(fleet)] == [0]


def test_a_rank_that_announced_what_it_does_is_not_stuck() -> None:
    fleet = fleet_of()
    fleet.ranks[0].phase = Phase.CHECKPOINT
    waits_for(fleet, 0)
    fleet.run(until=fleet.now + 60.0)
    assert fleet.found == []


def test_where_a_job_paused_before_nobody_is_stuck_who_only_idles() -> None:
    fleet = fleet_of()
    fleet.run(until=fleet.now + 20.0)
    goes_on(fleet, 100)
    fleet.found.clear()
    waits_for(fleet, 0)
    fleet.run(until=fleet.now + 40.0)
    assert fleet.found == []
    fleet.run(until=fleet.now + 30.0)
    assert [finding.rank for finding in errors(fleet)] == [0]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_long_compile_in_the_first_steps_does_not_hide_a_later_hang(generation: int) -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=10.0, init_s=600.0))
    fleet.start()
    if generation == 2:
        fleet.run(until=20.0)
        fleet.stop()
        fleet.start(2, connect=False)
    fleet.training = False
    fleet.run(until=fleet.now + 60.0)
    goes_on(fleet, 50)
    assert fleet.found == []
    fleet.ranks[1].state = "T"
    began = fleet.now
    fleet.run(until=began + 3.0)
    assert fleet.only().rank == 1


# ------------------------------------------------------------------ the rhythm


def test_a_pause_is_no_part_of_the_rhythm_but_its_position_is_known() -> None:
    rhythm = Rhythm()
    for step in range(1, 351):
        rhythm.learn(step, 12.0 if step > 1 and step % 100 == 1 else 0.5, 10.0)
    assert rhythm.slow_s == 0.5
    assert [rhythm.pause_s(step) for step in (100, 400, 500, 399, 450)] == [12.0, 12.0, 12.0, 0.0, 0.0]


def test_positions_repeat_from_wherever_a_run_began() -> None:
    rhythm = Rhythm()
    for step in range(38, 300):
        rhythm.learn(step, 12.0 if step % 100 == 38 and step > 40 else 0.5, 10.0)
    assert [rhythm.pause_s(step) for step in (337, 437, 400)] == [12.0, 12.0, 0.0]


def test_a_job_that_has_become_slower_has_another_rhythm() -> None:
    rhythm = Rhythm()
    for step in range(1, 50):
        rhythm.learn(step, 0.5, 10.0)
    for step in range(50, 60):
        rhythm.learn(step, 30.0, max(10.0, 3 * rhythm.slow_s))
    assert rhythm.slow_s == 30.0


def test_a_node_whose_clock_jumps_does_not_shorten_the_wait() -> None:
    fleet = fleet_of(factor=10.0)
    fleet.ranks[5].state = "T"
    fleet.run(until=52.5)  # it is given 5 s, and a report may be one tick late
    while fleet.now < 53.0:
        for node in fleet.names:
            fleet.fold(replace(fleet.progress(node), at=T0 + fleet.now + 3600.0))
        fleet.run(until=fleet.now + 0.03)
    assert fleet.found == []
    fleet.run(until=56.0)
    assert fleet.only().rank == 5


@pytest.mark.parametrize("phase", [Phase.EVAL, Phase.COMPILE])
@pytest.mark.parametrize("ranks", [1, 3], ids=["one rank", "all ranks"])
def test_a_phase_that_the_script_has_announced_may_take_an_hour(phase: Phase, ranks: int) -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=10.0, init_s=600.0))
    fleet.start()
    fleet.run(until=30.0)
    fleet.training = False
    for rank in list(fleet.ranks)[:ranks]:
        fleet.ranks[rank].phase, fleet.ranks[rank].phase_at = phase, fleet.now
    fleet.run(until=30.0 + 1200.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING], "after ten minutes"
    assert "a rank is in another phase than step" in fleet.found[0].evidence["rule"]
    fleet.run(until=30.0 + 3700.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING, Severity.ERROR]


def test_a_phase_of_the_library_has_ten_minutes() -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=10.0, init_s=600.0))
    fleet.start()
    fleet.run(until=30.0)
    fleet.training = False
    for rank in fleet.ranks.values():
        rank.phase, rank.phase_at = Phase.CHECKPOINT, fleet.now
    fleet.run(until=700.0)
    assert [finding.severity for finding in fleet.found] == [Severity.ERROR]


def test_a_process_that_is_stopped_in_an_announced_phase_is_found_at_once() -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=10.0, init_s=600.0))
    fleet.start()
    fleet.run(until=30.0)
    fleet.training = False
    for rank in fleet.ranks.values():
        rank.phase, rank.phase_at = Phase.EVAL, fleet.now
    fleet.ranks[1].state = "T"
    fleet.run(until=40.0)
    assert [(finding.severity, finding.rank) for finding in fleet.found] == [(Severity.ERROR, 1)]
