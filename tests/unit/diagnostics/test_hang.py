"""Hangs: found when the job's own rhythm does not explain the silence, and blamed on the rank that the others wait for."""

from __future__ import annotations

import random
from collections import deque

import pytest
from diagnosing import T0, Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnostics.detectors.rhythm import p99
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import Phase


def fleet_of(dp: int = 3, pp: int = 3, *, ranks_per_node: int = 1, **hang: float) -> Fleet:
    fleet = Fleet(
        nodes=dp * pp // ranks_per_node,
        ranks_per_node=ranks_per_node,
        mesh=Mesh.of({"dp": dp, "pp": pp}),
        hang=HangSpec(**{"floor_s": 3.0, "init_s": 60.0, **hang}),
    )
    fleet.start()
    fleet.run(until=5.0)
    return fleet


@pytest.mark.parametrize(("dp", "pp", "per_node"), [(3, 3, 1), (2, 4, 2), (4, 1, 1), (1, 4, 4), (2, 2, 4)])
def test_a_stopped_rank_is_named_wherever_it_stands(dp: int, pp: int, per_node: int) -> None:
    for stopped in range(dp * pp):
        fleet = fleet_of(dp, pp, ranks_per_node=per_node)
        fleet.training = False
        fleet.ranks[stopped].state = "T"
        fleet.run(until=6.9)
        assert fleet.found == []
        fleet.run(until=7.3)
        found = fleet.only()
        assert (found.kind, found.rank, found.node) == (FindingKind.HANG, stopped, fleet.node_of(stopped))
        assert "stopped" in found.summary
        assert T0 + 4.9 <= found.since <= T0 + 5.1
        assert found.recommended_actions[0] is Remedy.RESTART_PROCESS
        assert f"rank {stopped} " in found.evidence["ranks"].splitlines()[0]


def test_a_rank_that_is_proven_stuck_is_a_hang_long_before_the_floor() -> None:
    """The job file says so."""
    fleet = fleet_of(floor_s=120.0, init_s=1200.0)
    fleet.training = False
    fleet.ranks[1].state = "T"
    fleet.run(until=7.3)
    assert (fleet.only().severity, fleet.only().rank) == (Severity.ERROR, 1)


@pytest.mark.parametrize(("init_s", "error_s"), [(60.0, 30.0), (20.0, 20.0)])
def test_a_silence_is_a_warning_at_the_floor_and_a_hang_at_ten_times_as_long_or_at_init(
    init_s: float, error_s: float
) -> None:
    """The job file says so."""
    fleet = fleet_of(floor_s=3.0, init_s=init_s)
    fleet.training = False
    silent_s = 5.0  # at which the last step was finished
    fleet.run(until=silent_s + 2.5)
    assert fleet.found == []
    fleet.run(until=silent_s + error_s - 1.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING]
    fleet.run(until=silent_s + error_s + 5.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING, Severity.ERROR]


def test_a_generation_of_which_no_rank_is_left_is_no_hang() -> None:
    """All that is known of it has ended well, and no agent says that it stopped: seen while every node was replaced."""
    fleet = fleet_of(2, 1)
    for rank in range(2):
        fleet.exits(rank, exit_code=0, signal=None)
    fleet.training = False
    fleet.run(until=200.0)
    assert fleet.found == []


def test_a_stall_is_a_warning_then_an_error_and_the_next_one_is_new() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.run(until=34.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING]
    assert "may be a pause" in fleet.found[0].summary
    fleet.run(until=60.0)
    fleet.training = True
    fleet.run(until=66.0)
    fleet.training = False
    fleet.run(until=100.0)
    assert [finding.severity for finding in fleet.found] == [Severity.WARNING, Severity.ERROR] * 2


def test_nobody_stands_out() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.run(until=9.0)
    assert fleet.only().rank is None
    assert "network, storage or a deadlock" in fleet.only().summary


def test_slow_steps_have_a_longer_allowance() -> None:
    fleet = Fleet(nodes=2, step_s=4.0, hang=HangSpec(floor_s=3.0, init_s=60.0))
    fleet.start()
    fleet.run(until=40.0)
    fleet.training = False
    fleet.run(until=50.0)
    assert fleet.found == []
    fleet.run(until=53.0)
    assert "p99" in fleet.only().evidence["rule"]
    assert fleet.only().severity is Severity.WARNING


@pytest.mark.parametrize("phase", [Phase.EVAL, Phase.CHECKPOINT, Phase.COMPILE, Phase.RESTORE])
def test_another_phase_may_take_long(phase: Phase) -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.ranks[4].phase = phase
    fleet.run(until=60.0)
    assert fleet.found == []
    fleet.run(until=70.0)
    assert fleet.only().rank == 4


def test_a_rank_stopped_inside_a_checkpoint_is_no_phase() -> None:
    fleet = fleet_of()
    fleet.training = False
    for rank in fleet.ranks.values():
        rank.phase = Phase.CHECKPOINT
    fleet.ranks[4].state = "T"
    fleet.run(until=10.0)
    assert fleet.only().rank == 4


def test_a_profilers_short_stop_during_a_long_compile_is_nothing() -> None:
    fleet = fleet_of()
    fleet.training = False
    for rank in fleet.ranks.values():
        rank.phase = Phase.COMPILE
    fleet.run(until=20.0)
    fleet.ranks[4].state = "t"
    fleet.run(until=20.4)
    fleet.ranks[4].state = "S"
    fleet.run(until=30.0)
    assert fleet.found == []


def test_before_the_first_step_the_allowance_is_init() -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=3.0, init_s=20.0))
    fleet.training = False
    fleet.start()
    fleet.run(until=19.0)
    assert fleet.found == []
    fleet.run(until=21.0)
    assert fleet.only().kind is FindingKind.HANG


def test_the_rhythm_outlives_a_generation_but_its_first_steps_do_not_hurry() -> None:
    fleet = fleet_of()
    fleet.stop()
    fleet.training = False
    fleet.start(2, connect=False)
    fleet.run(until=30.0)  # restoring, say
    fleet.training = True
    fleet.run(until=30.6)
    fleet.training = False
    fleet.run(until=60.0)  # compiling once more
    assert fleet.found == []
    fleet.training = True
    fleet.run(until=62.0)
    fleet.training = False
    fleet.run(until=66.0)
    assert fleet.only().generation == 2


def silent_fleet() -> Fleet:
    """An unmodified script: every rank in phase init since it was started, whatever it does."""
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=3.0, init_s=20.0))
    fleet.training = False
    for rank in fleet.ranks.values():
        rank.phase, rank.phase_at = Phase.INIT, 0.0
    fleet.start()
    return fleet


def test_a_script_that_never_speaks_never_hangs() -> None:
    fleet = silent_fleet()
    fleet.run(until=200.0)
    assert fleet.found == []


def test_a_script_that_never_speaks_can_be_stopped() -> None:
    """The stall is dated by its stopped process: of its steps nothing is known, and nothing is claimed."""
    fleet = silent_fleet()
    fleet.run(until=100.0)
    fleet.ranks[1].state = "T"
    fleet.run(until=101.9)
    assert fleet.found == []
    fleet.run(until=103.2)
    found = fleet.only()
    assert found.rank == 1
    assert T0 + 100.0 <= found.since <= T0 + 101.0
    assert "is held up for 2." in found.summary
    assert "step 0" not in found.summary
    assert "step" not in found.evidence


def test_a_script_that_never_speaks_may_be_stopped_for_a_moment() -> None:
    fleet = silent_fleet()
    for stopped_at in (100.0, 110.0, 120.0):
        fleet.run(until=stopped_at)
        fleet.ranks[1].state = "T"
        fleet.run(until=stopped_at + 1.5)
        fleet.ranks[1].state = "S"
    fleet.run(until=150.0)
    assert fleet.found == []


def test_a_rank_that_is_stopped_and_continued_in_turn_is_slow_and_no_hang() -> None:
    """Agents may happen to see it stopped every time: its CPU time shows that it runs."""
    fleet = silent_fleet()
    for half in range(200):
        fleet.ranks[1].state = "S" if half % 2 else "T"
        fleet.run(until=(half + 1) * 0.5)
    assert fleet.found == []
    fleet.ranks[1].state = "T"
    fleet.run(until=104.0)
    assert fleet.only().rank == 1


def test_a_script_that_spoke_once_can_hang_in_init() -> None:
    fleet = silent_fleet()
    fleet.run(until=1.0)
    fleet.ranks[1].phase_at = 1.0
    fleet.run(until=25.0)
    assert fleet.only().kind is FindingKind.HANG


@pytest.mark.parametrize(
    ("learned", "trains", "expected"), [(True, False, "learned_start"), (True, True, ""), (False, False, "")]
)
def test_a_hang_before_the_first_step_of_a_start_with_learned_modules_says_so(
    learned: bool, trains: bool, expected: str
) -> None:
    """The next start differs, so the hang says nothing about the script."""
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=3.0, init_s=20.0), learned_start=learned)
    fleet.start()
    fleet.training = trains
    if not trains:
        for rank in fleet.ranks.values():
            rank.phase, rank.phase_at = Phase.INIT, 1.0
    fleet.run(until=30.0)
    fleet.training = False
    fleet.ranks[1].state = "T"
    fleet.run(until=60.0)
    found = next(each for each in fleet.found if each.severity is Severity.ERROR)
    assert (found.kind, found.attribution.error_class) == (FindingKind.HANG, expected)


def test_ranks_that_ended_well_are_not_waited_for() -> None:
    """Rank 0 has left; the others wait for rank 5 at the end."""
    fleet = fleet_of(ranks_per_node=3)
    fleet.training = False
    for rank in (0, 1, 2, 3):
        fleet.ranks[rank].state = ""
        fleet.fold(fleet.exit_of(rank, exit_code=0))
    fleet.silent.add("n0")
    fleet.ranks[5].state = "T"
    fleet.run(until=9.0)
    assert fleet.found[0].rank == 5


def test_a_finished_job_does_not_hang() -> None:
    fleet = fleet_of()
    fleet.training = False
    for rank in fleet.ranks.values():
        rank.phase = Phase.DONE
    fleet.run(until=200.0)
    assert fleet.found == []


def test_a_generation_stopped_on_purpose_does_not_hang() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.stop("n4")
    fleet.run(until=200.0)
    assert fleet.found == []


def test_a_rank_may_hang_on_its_way_out_though_others_have_finished() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.stop("n4", finished=True)
    fleet.run(until=200.0)
    assert fleet.kinds() == [FindingKind.HANG] * 2


def test_a_crash_explains_the_stall() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.exits(4, signal=9)
    fleet.run(until=60.0)
    assert fleet.kinds() == [FindingKind.WORKER_CRASH]


def test_a_node_that_is_not_heard_defers_the_verdict() -> None:
    """Its ranks may be training: unknown is not faulty. Here the whole view is lost, so liveness stays silent as well."""
    fleet = fleet_of()
    fleet.training = False
    fleet.breaks(*fleet.names)
    fleet.run(until=30.0)
    assert FindingKind.HANG not in fleet.kinds()


@pytest.mark.parametrize(("step", "found"), [(2, True), (3, False)])
def test_a_node_that_comes_back_without_a_new_step_is_no_progress(step: int, found: bool) -> None:
    fleet = Fleet(nodes=2, hang=HangSpec(floor_s=3.0, init_s=20.0))
    fleet.start()
    fleet.training = False
    fleet.silent.add("n1")
    for done in (1, 2):
        fleet.ranks[0].step = done
        fleet.run(until=float(done))
    fleet.run(until=15.0)
    fleet.ranks[1].step = step
    fleet.connects("n1")
    fleet.run(until=30.0)
    assert (FindingKind.HANG in fleet.kinds()) is found


def test_a_process_that_slept_gives_everybody_a_new_allowance() -> None:
    fleet = fleet_of()
    fleet.now += 100.0
    fleet._next_step = fleet.now + 2.0
    fleet.run(until=fleet.now + 20.0)
    assert fleet.found == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 5))
def test_a_clean_run_with_jitter_and_lost_ticks_finds_nothing(seed: int, nodes: int) -> None:
    fleet = Fleet(nodes=nodes, ranks_per_node=2, hang=HangSpec(floor_s=3.0))
    fleet.start()
    fleet.run(until=40.0, chance=random.Random(seed))
    assert fleet.found == []


# ------------------------------------------------------------------ collectives


def standstill(fleet: Fleet, node: str, *, absent: int, held: bool = False) -> StallSnapshot:
    """Every rank of the node is inside #9 of the one group, but for one that has not come."""
    ranks = tuple(fleet.ranks_of(node))
    n = len(ranks)
    rows = CollectiveRows(
        rank=ranks,
        group=("0",) * n,
        members=(f"0-{len(fleet.ranks) - 1}",) * n,
        kind=tuple("" if rank == absent else "all_reduce" for rank in ranks),
        sizes=("",) * n,
        peer=(-1,) * n,
        entered=tuple(8 if rank == absent else 9 for rank in ranks),
        pending=tuple(-1 if rank == absent else 9 for rank in ranks),
    )
    interpreter = tuple("held" if held and rank == absent else "free" for rank in ranks)
    frames = tuple("read (loader.py:7)" for _ in ranks)
    at = T0 + fleet.now
    return StallSnapshot(
        node, at, fleet.job, fleet.generation, ranks, (True,) * n, interpreter, ("",) * n, (True,) * n, frames, rows
    )


def count_collectives(fleet: Fleet, count: int) -> None:
    for rank in fleet.ranks.values():
        rank.seq = count


def test_the_recorders_name_the_rank_that_the_others_wait_for() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.run(until=6.5)
    count_collectives(fleet, 900)
    for node in fleet.names:
        fleet.fold(standstill(fleet, node, absent=7, held=True))
    fleet.run(until=8.2)
    found = fleet.only()
    assert (found.rank, found.node) == (7, "n7")
    assert "has not entered all_reduce #9" in found.evidence["reason"]
    assert "holds the interpreter's lock" in found.evidence["reason"]
    assert found.evidence["stack"] == "read (loader.py:7)"


def test_a_verdict_waits_for_recorders_that_answer_but_not_long() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.run(until=7.0)
    count_collectives(fleet, 900)
    for node in fleet.names[:-1]:
        fleet.fold(standstill(fleet, node, absent=99))
    fleet.run(until=9.0)
    assert fleet.found == []
    fleet.run(until=10.0)
    assert fleet.only().rank == 8  # the one that says nothing of itself
    assert "does not answer" in fleet.only().summary


def test_a_hang_that_waits_for_a_node_without_contact_names_the_node_and_recommends_another() -> None:
    """Its control session may be alive, as behind a link that drops large packets: then nobody else finds the node lost."""
    fleet = fleet_of()
    fleet.training = False
    fleet.run(until=6.5)
    fleet.silent.add("n7")
    count_collectives(fleet, 900)
    for node in fleet.names:
        if node != "n7":
            fleet.fold(standstill(fleet, node, absent=99))
    fleet.run(until=300.0)
    hang = [each for each in fleet.found if each.kind is FindingKind.HANG and each.severity is Severity.ERROR]
    assert [(each.node, each.rank, each.recommended_actions) for each in hang] == [("n7", 7, (Remedy.REPLACE_NODE,))]
    assert "rank 7 on n7: its node sends no telemetry" in hang[0].summary


def test_a_stopped_process_needs_no_recorder() -> None:
    fleet = fleet_of()
    fleet.training = False
    fleet.ranks[4].state = "T"
    count_collectives(fleet, 900)
    fleet.run(until=8.2)
    assert fleet.only().rank == 4


def test_a_long_step_in_which_collectives_go_on_is_no_hang() -> None:
    fleet = fleet_of()
    fleet.training = False
    for second in range(6, 40):
        count_collectives(fleet, second)
        fleet.run(until=float(second))
    assert fleet.found == []
    fleet.run(until=50.0)
    assert fleet.only().kind is FindingKind.HANG


def test_collectives_do_not_excuse_a_stall_for_ever() -> None:
    fleet = fleet_of(init_s=20.0)
    fleet.training = False
    for second in range(6, 40):
        count_collectives(fleet, second)
        fleet.run(until=float(second))
    assert "collectives are still entered" in fleet.only().evidence["rule"]


def test_p99() -> None:
    assert p99(deque()) == 0.0
    assert p99(deque([1.0] * 199 + [50.0])) == 1.0
    assert p99(deque([1.0, 2.0])) == 2.0
