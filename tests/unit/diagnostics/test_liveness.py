"""Lost nodes: soon when it is true, never when it is not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from diagnosing import COLLECTIVE, T0, Fleet

from holdfast.diagnostics.detectors.liveness import UNWITNESSED_GRACE_S
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.job import HangSpec


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(nodes=10)
    fleet.start()
    fleet.run(until=5.0)
    return fleet


def test_a_broken_stream_is_a_lost_node_after_the_grace(fleet: Fleet) -> None:
    fleet.dies("n3")
    fleet.run(until=6.4)
    assert fleet.found == []
    fleet.run(until=7.6)
    found = fleet.only()
    assert (found.kind, found.node, found.job, found.generation, found.rank) == (
        FindingKind.NODE_LOST,
        "n3",
        "gpt",
        1,
        3,
    )
    assert found.recommended_actions == (Remedy.REPLACE_NODE,)
    assert T0 + 4.8 <= found.since <= T0 + 5.0


def test_a_freeze_of_diagnostics_is_no_silence_of_others_whatever_its_clock_says(fleet: Fleet) -> None:
    fleet.dies("n3")
    fleet.run(until=5.9)
    fleet.engine.gap(30.0, T0 + fleet.now)  # and the clock was set back by as much
    fleet.run(until=7.2)
    assert fleet.found == []
    fleet.run(until=8.5)
    assert fleet.only().node == "n3"


def test_witnesses_on_other_nodes_make_it_sooner_and_their_exits_are_cascade(fleet: Fleet) -> None:
    fleet.breaks("n3")
    for rank in (0, 1, 2):
        fleet.exits(rank, error=COLLECTIVE)
    fleet.run(until=5.12)
    found = fleet.only()
    assert found.kind is FindingKind.NODE_LOST
    assert found.at == pytest.approx(T0 + 5.06, abs=0.03)
    assert found.evidence["witnesses"] == "n0, n1, n2"
    fleet.exits(4, error=COLLECTIVE)
    fleet.training = False
    fleet.run(until=8.0)
    assert len(fleet.found) == 1


def test_a_job_that_has_finished_is_not_lost_with_the_node_that_ran_it(fleet: Fleet) -> None:
    fleet.stop(finished=True)
    fleet.job = "next"
    fleet.start(connect=False)
    fleet.run(until=8.0)
    fleet.dies("n3")
    fleet.run(until=11.0)
    assert (fleet.only().job, fleet.only().rank) == ("next", 3)


def test_witnesses_may_come_first(fleet: Fleet) -> None:
    fleet.exits(0, error=COLLECTIVE)
    fleet.run(until=5.2)
    fleet.breaks("n3")
    fleet.run(until=5.28)
    assert fleet.only().node == "n3"


def test_a_rank_that_failed_by_itself_explains_its_peers(fleet: Fleet) -> None:
    """A crash and, in the same moment, a blip of another node's stream: no lost node."""
    fleet.exits(1, signal=9)
    fleet.exits(0, error=COLLECTIVE)
    fleet.breaks("n3")
    fleet.run(until=5.2)
    fleet.connects("n3")
    fleet.run(until=6.0)
    assert fleet.only().kind is FindingKind.WORKER_CRASH


def test_the_same_agent_coming_back_in_time_means_nothing(fleet: Fleet) -> None:
    fleet.breaks("n3")
    fleet.run(until=5.3)
    fleet.connects("n3")
    fleet.run(until=15.0)
    assert fleet.found == []


def test_a_node_that_goes_out_of_sight_in_a_pause_has_longer_to_come_back(fleet: Fleet) -> None:
    """An evaluation that nobody announced: no steps for a minute, so that the other ranks say nothing for it."""
    fleet.training = False
    fleet.run(until=25.0)
    fleet.found.clear()
    fleet.breaks("n3")
    fleet.training = False
    fleet.run(until=30.0)
    assert FindingKind.NODE_LOST not in fleet.kinds()
    fleet.connects("n3")
    fleet.run(until=60.0)
    assert FindingKind.NODE_LOST not in fleet.kinds()
    fleet.breaks("n3")
    fleet.run(until=76.0)
    assert FindingKind.NODE_LOST in fleet.kinds()


def test_a_stream_that_breaks_by_a_keepalive_is_judged_by_the_steps_since_the_last_heartbeat(fleet: Fleet) -> None:
    """A machine without power or network closes no connection: its stream breaks seconds after the steps of all ranks stop."""
    fleet.silent.add("n3")
    fleet.training = False
    fleet.run(until=9.0)
    fleet.breaks("n3")
    fleet.training = False
    fleet.run(until=10.3)
    assert fleet.found == []
    fleet.run(until=10.7)
    assert (fleet.only().kind, fleet.only().node) == (FindingKind.NODE_LOST, "n3")


def silent_script(fleet: Fleet) -> None:
    """A script that reports no steps, for an hour."""
    fleet.training = False
    fleet.now = 3_600.0


def before_its_first_step(fleet: Fleet) -> None:
    fleet.run(until=20.0)


def after_a_first_step_of_which_only_the_end_was_heard(fleet: Fleet) -> None:
    """Nobody knows yet how long one takes: the next one takes 40 s."""
    fleet.now = 39.8
    fleet.run(until=41.0)


@pytest.mark.parametrize(
    "job", [silent_script, before_its_first_step, after_a_first_step_of_which_only_the_end_was_heard]
)
def test_a_connection_that_breaks_for_seconds_stops_no_job_whose_steps_tell_nothing(
    job: Callable[[Fleet], None],
) -> None:
    fleet = Fleet(nodes=4, hang=HangSpec(init_s=86_400.0))
    fleet.step_s = 40.0
    fleet.start()
    job(fleet)
    fleet.found.clear()
    fleet.breaks("n3")
    fleet.run(until=fleet.now + UNWITNESSED_GRACE_S - 1.0)
    assert fleet.found == []
    fleet.connects("n3")
    fleet.run(until=fleet.now + 5.0)
    assert fleet.found == []
    fleet.dies("n3")
    fleet.run(until=fleet.now + UNWITNESSED_GRACE_S + 1.0)
    assert fleet.only().kind is FindingKind.NODE_LOST


def test_a_job_on_one_node_has_no_other_node_that_could_tell() -> None:
    fleet = Fleet(nodes=1, ranks_per_node=4)
    fleet.start()
    fleet.run(until=20.0)
    fleet.breaks("n0")  # it goes on training, but says nothing
    fleet.run(until=34.0)
    assert fleet.found == []
    fleet.connects("n0")
    fleet.run(until=40.0)
    assert fleet.found == []


def test_two_nodes_that_break_together_do_not_testify_against_each_other() -> None:
    """All that could tell are out of sight: their steps ended for diagnostics, not for the job."""
    fleet = Fleet(nodes=2)
    fleet.start()
    fleet.run(until=20.0)
    fleet.breaks("n0", "n1")
    fleet.run(until=34.0)
    assert FindingKind.NODE_LOST not in fleet.kinds()


def test_a_new_incarnation_means_that_the_workers_are_gone(fleet: Fleet) -> None:
    fleet.breaks("n3")
    fleet.run(until=5.1)
    fleet.connects("n3", "n3-b")
    assert (fleet.only().kind, fleet.only().evidence["incarnation"]) == (FindingKind.NODE_LOST, "n3-a")


def test_a_lost_node_that_returns_is_not_lost_again(fleet: Fleet) -> None:
    fleet.dies("n3")
    fleet.run(until=8.0)
    fleet.connects("n3", "n3-b")
    fleet.run(until=15.0)
    assert len(fleet.found) == 1


def test_a_goodbye_is_no_fault(fleet: Fleet) -> None:
    fleet.breaks("n3", clean=True)
    fleet.run(until=20.0)
    assert fleet.found == []


def test_silence_on_an_open_stream(fleet: Fleet) -> None:
    fleet.silent.add("n3")
    fleet.training = False
    fleet.run(until=9.8)
    assert fleet.found == []
    fleet.run(until=10.2)
    assert (fleet.only().kind, fleet.only().node) == (FindingKind.NODE_LOST, "n3")
    fleet.silent.clear()  # it was paused; a later silence is a new matter
    fleet.run(until=11.0)
    fleet.silent.add("n3")
    fleet.run(until=28.0)  # nobody steps any more: it has longer this time
    assert [(finding.node, finding.severity) for finding in fleet.found] == [
        ("n3", Severity.ERROR),
        ("n3", Severity.INFO),
        ("n3", Severity.ERROR),
    ]


def test_an_idle_node_is_only_a_warning(fleet: Fleet) -> None:
    fleet.connects("spare", "s-a")
    fleet.breaks("spare")
    fleet.run(until=7.0)
    assert (fleet.only().severity, fleet.only().job) == (Severity.WARNING, "")


def test_a_node_never_seen_is_never_lost() -> None:
    fleet = Fleet(nodes=3)
    fleet.breaks("n0", "n1")
    fleet.stop()
    fleet.run(until=20.0)
    assert fleet.found == []


def test_a_diagnostics_that_restarted_learns_the_ranks_from_progress() -> None:
    fleet = Fleet(nodes=4)
    for node in fleet.names:
        fleet.connects(node)
    fleet.run(until=1.0)
    fleet.dies("n2")
    fleet.run(until=4.0)
    assert (fleet.only().job, fleet.only().rank) == ("gpt", 2)


# ------------------------------------------------------------------ is it they, or is it we?


def test_many_nodes_at_once_are_our_own_trouble(fleet: Fleet) -> None:
    fleet.breaks("n1", "n2", "n3")
    fleet.run(until=5.2)
    fleet.breaks("n4")
    fleet.run(until=7.0)
    found = fleet.only()
    assert found.kind is FindingKind.HOST_PRESSURE
    assert "of 10 nodes at once" in found.summary
    for node in ("n1", "n2", "n3", "n4"):
        fleet.connects(node)
    fleet.run(until=30.0)
    assert len(fleet.found) == 1


def test_everybody_at_once_is_never_a_lost_node(fleet: Fleet) -> None:
    fleet.breaks(*fleet.names)
    fleet.run(until=60.0)
    assert fleet.kinds() == [FindingKind.HOST_PRESSURE]


def test_a_rack_that_really_failed_is_believed_when_peers_say_so(fleet: Fleet) -> None:
    fleet.breaks("n1", "n2", "n3", "n4")
    fleet.exits(0, error=COLLECTIVE)
    fleet.run(until=5.2)
    assert {finding.node for finding in fleet.found} == {"n1", "n2", "n3", "n4"}
    assert set(fleet.kinds()) == {FindingKind.NODE_LOST}


def test_a_rack_that_stays_away_is_reported_in_the_end(fleet: Fleet) -> None:
    fleet.dies("n1", "n2", "n3", "n4")
    fleet.run(until=6.8)
    fleet.connects("n1")
    fleet.run(until=25.0)
    lost = [finding for finding in fleet.found if finding.kind is FindingKind.NODE_LOST]
    assert {finding.node for finding in lost} == {"n2", "n3", "n4"}
    assert all(finding.confidence < 0.9 for finding in lost)


def test_a_process_that_slept_concludes_nothing_from_it(fleet: Fleet) -> None:
    """SIGSTOP of diagnostics, a suspended machine, a clock set forward: silence in between proves nothing."""
    fleet.now += 600.0
    fleet.run(until=fleet.now + 30.0)
    assert fleet.found == []


def test_a_clock_set_back_does_not_blind_for_an_hour(fleet: Fleet) -> None:
    fleet.now -= 3600.0
    fleet._next_beat = fleet._next_step = fleet.now
    fleet.run(until=fleet.now + 2.0)
    fleet.dies("n3")
    fleet.run(until=fleet.now + 4.0)
    assert fleet.only().node == "n3"


def test_a_node_that_dies_supersedes_the_crash_heard_just_before(fleet: Fleet) -> None:
    fleet.exits(3, signal=9)
    fleet.dies("n3")
    fleet.run(until=8.0)
    crash, lost = fleet.found
    assert (lost.kind, lost.evidence["supersedes"]) == (FindingKind.NODE_LOST, crash.id)
