"""A conclusion that was wrong is taken back and hides nothing; one that still holds is said again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosing import BUG, COLLECTIVE, T0, Fleet

from holdfast.diagnostics.detectors.liveness import RECONNECT_GRACE_S
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.nodes import TELEMETRY_RETRY_S_MAX


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(nodes=4, hang=HangSpec(floor_s=3.0, init_s=60.0))
    fleet.start()
    fleet.run(until=5.0)
    return fleet


def lost_and_back(fleet: Fleet) -> None:
    """The stream of n3 breaks while the job happens to stand still, and comes back with the same agent."""
    fleet.dies("n3")
    fleet.run(until=9.0)
    assert [(f.kind, f.severity) for f in fleet.found] == [(FindingKind.NODE_LOST, Severity.ERROR)]
    fleet.connects("n3")
    fleet.training = True
    fleet.run(until=10.0)


def errors(fleet: Fleet) -> list[Finding]:
    return [finding for finding in fleet.found if finding.severity is Severity.ERROR]


def test_a_node_that_is_heard_again_withdraws_its_loss(fleet: Fleet) -> None:
    lost_and_back(fleet)
    lost, back = fleet.found
    assert (back.kind, back.severity, back.node) == (FindingKind.NODE_LOST, Severity.INFO, "n3")
    assert back.evidence["contradicts"] == lost.id


@pytest.mark.parametrize("how", [{"signal": 9}, {"error": BUG}, {"error": COLLECTIVE}], ids=["crash", "bug", "echo"])
def test_a_crash_after_a_loss_that_was_withdrawn_is_found(fleet: Fleet, how: dict[str, Any]) -> None:
    lost_and_back(fleet)
    fleet.training = False
    fleet.exits(1, **how)
    fleet.run(until=11.0)
    assert errors(fleet)[-1].kind in (FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION)


def test_a_hang_after_a_loss_that_was_withdrawn_is_found(fleet: Fleet) -> None:
    lost_and_back(fleet)
    fleet.training = False
    fleet.ranks[2].state = "T"
    fleet.run(until=20.0)
    assert (errors(fleet)[-1].kind, errors(fleet)[-1].rank) == (FindingKind.HANG, 2)


def test_a_crash_is_found_while_a_node_that_is_not_heard_is_taken_for_lost(fleet: Fleet) -> None:
    """Its agent does not reach diagnostics, but the supervisor: nothing is done about the loss."""
    fleet.dies("n3")
    fleet.run(until=9.0)
    fleet.exits(1, signal=9)
    assert (fleet.found[-1].kind, fleet.found[-1].rank) == (FindingKind.WORKER_CRASH, 1)


def test_errors_that_a_loss_explains_are_reported_when_nothing_is_done_about_the_loss(fleet: Fleet) -> None:
    fleet.dies("n3")
    fleet.exits(0, error=COLLECTIVE)
    fleet.run(until=12.0)
    assert fleet.kinds() == [FindingKind.NODE_LOST]
    fleet.run(until=18.0)
    assert fleet.kinds() == [FindingKind.NODE_LOST, FindingKind.WORKER_EXCEPTION]


def test_errors_that_a_loss_explains_say_nothing_when_the_generation_is_stopped(fleet: Fleet) -> None:
    fleet.dies("n3")
    fleet.exits(0, error=COLLECTIVE)
    fleet.run(until=7.0)
    fleet.stop("n0", "n1", "n2")
    fleet.run(until=40.0)
    assert fleet.kinds() == [FindingKind.NODE_LOST]


def test_a_hang_is_found_although_one_node_is_not_heard_for_long(fleet: Fleet) -> None:
    fleet.dies("n3")
    fleet.run(until=12.0)
    fleet.ranks[1].state = "T"
    fleet.run(until=30.0)
    assert (errors(fleet)[-1].kind, errors(fleet)[-1].rank) == (FindingKind.HANG, 1)


def test_the_grace_covers_the_longest_pause_between_two_tries_of_an_agent(fleet: Fleet) -> None:
    assert RECONNECT_GRACE_S > TELEMETRY_RETRY_S_MAX
    fleet.dies("n3")
    fleet.run(until=5.0 + TELEMETRY_RETRY_S_MAX + 0.3)
    fleet.connects("n3")
    fleet.run(until=12.0)
    assert FindingKind.NODE_LOST not in fleet.kinds()


def test_agents_in_their_longest_pause_are_not_lost_after_diagnostics_was_frozen(fleet: Fleet) -> None:
    """Their streams broke meanwhile; each comes back within a pause of the thaw."""
    fleet.now += 30.0
    fleet.fold(fleet.started("n0"))
    fleet.breaks("n2", "n3")
    fleet._next_step = fleet._next_beat = fleet.now
    fleet.training = False
    fleet.run(until=fleet.now + TELEMETRY_RETRY_S_MAX + 0.3)
    fleet.connects("n2")
    fleet.connects("n3")
    fleet.training = True
    fleet.run(until=fleet.now + 10.0)
    assert fleet.found == []


# ------------------------------------------------------------------ peers as witnesses


def test_a_node_whose_peers_go_on_is_not_lost(fleet: Fleet) -> None:
    """Its agent is frozen, or cut off from the control plane, while its ranks train."""
    fleet.silent.add("n3")
    fleet.run(until=60.0)
    assert [(f.kind, f.severity) for f in fleet.found] == [(FindingKind.NODE_LOST, Severity.WARNING)]
    assert "its ranks train" in fleet.found[0].summary
    fleet.silent.clear()
    fleet.run(until=70.0)
    assert len(fleet.found) == 1


def test_a_broken_stream_whose_peers_go_on_is_no_loss_and_one_whose_peers_stop_is(fleet: Fleet) -> None:
    fleet.breaks("n3")
    fleet.run(until=14.0)
    assert fleet.found == []
    fleet.training = False
    fleet.run(until=17.0)
    assert [(f.kind, f.severity) for f in errors(fleet)] == [(FindingKind.NODE_LOST, Severity.ERROR)]


def test_a_lost_node_of_a_job_with_slow_steps_is_found_when_the_next_step_does_not_come() -> None:
    fleet = Fleet(nodes=3, step_s=20.0)
    fleet.start()
    fleet.run(until=101.0)
    fleet.silent.add("n2")
    fleet.run(until=119.0)
    assert errors(fleet) == []  # the step in progress is not over yet: nobody knows
    fleet.training = False
    fleet.run(until=130.0)
    assert [finding.node for finding in errors(fleet)] == ["n2"]


def test_a_diagnostics_that_was_frozen_does_not_take_agents_that_have_not_come_back_for_hung() -> None:
    """What was on its way is folded at the thaw, then nothing comes until the agents' next try."""
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=2.0, init_s=60.0))
    fleet.start()
    fleet.run(until=5.0)
    fleet.now += 30.0
    fleet._next_step = fleet._next_beat = fleet.now
    fleet.run(until=fleet.now + 0.3)  # with the reports that had arrived
    fleet.silent.update(fleet.names)
    fleet.training = False
    fleet.run(until=fleet.now + 2.9)
    for rank in fleet.ranks.values():
        rank.step += 60
    fleet.silent.clear()
    fleet.training = True
    fleet.run(until=fleet.now + 10.0)
    assert fleet.found == []


def test_a_diagnostics_that_was_frozen_counts_none_of_it_against_a_run_whose_next_step_comes_a_moment_later() -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=2.0, init_s=60.0))
    fleet.start()
    fleet.run(until=40.0)
    fleet.now += 30.0
    fleet._next_beat, fleet._next_step = fleet.now, fleet.now + 1.8
    fleet.run(until=fleet.now + 10.0)
    assert fleet.found == []


# ------------------------------------------------------------------ said again


def test_what_holds_is_said_again_with_its_id_and_its_time_and_ever_more_seldom(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(1, signal=9)
    fleet.run(until=34.0)
    assert fleet.repeats == []
    fleet.run(until=600.0)
    said = fleet.only()
    assert [replace(finding, repeat=0, waited_s=0.0) for finding in fleet.repeats] == [said] * 4
    assert [finding.repeat for finding in fleet.repeats] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["stopped", "replaced", "goes on", "is back"])
def test_what_no_longer_holds_is_not_said_again(fleet: Fleet, how: str) -> None:
    fleet.dies("n3")
    fleet.run(until=12.0)
    assert fleet.kinds() == [FindingKind.NODE_LOST]
    if how == "stopped":
        fleet.stop("n0")
    elif how == "replaced":
        fleet.start(2, connect=False)
    elif how == "goes on":
        fleet._next_step = fleet.now
        fleet.training = True
    else:
        fleet.connects("n3")
    fleet.run(until=13.0)
    fleet.training = False
    fleet.run(until=60.0)
    assert [finding for finding in fleet.repeats if finding.kind is FindingKind.NODE_LOST] == []


def test_a_repeat_is_dated_like_the_first(fleet: Fleet) -> None:
    fleet.training = False
    fleet.exits(1, signal=9)
    fleet.run(until=36.0)
    assert fleet.repeats[0].at == fleet.found[0].at == T0 + 5.0
