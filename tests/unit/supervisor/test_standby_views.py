"""What a standby shows of the workers: it has only the newest snapshot, and no session with any agent."""

from __future__ import annotations

from fleet import job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.supervisor.api import job_views, node_views
from holdfast.supervisor.core.model.state import Breaker
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.picture import Picture, Progress


def test_a_standby_shows_the_pids_that_agents_have_reported() -> None:
    fleet = running(job(dp=2))
    fleet.all_live()
    leader = Picture(fleet.state, leading=True)
    parts = {key: part for key, part in snapshot.changes(None, fleet.state).items() if part is not None}
    standby = Picture(snapshot.load(parts))
    shown = [
        [rank.pid for rank in job_views.job(picture, Progress(), fleet.job).ranks] for picture in (leader, standby)
    ]
    assert None not in shown[0]
    assert shown[1] == shown[0]


def test_a_standby_without_a_leader_shows_no_run_as_running() -> None:
    """It shows the snapshot only while no leader answers: what agents confirmed to the last leader is no news of the run."""
    fleet = running(job(dp=2))
    fleet.all_live()
    parts = {key: part for key, part in snapshot.changes(None, fleet.state).items() if part is not None}
    standby, leader = Picture(snapshot.load(parts)), Picture(fleet.state, leading=True)
    assert job_views.job_summary(leader, Progress(), fleet.job).phase == "running"
    shown = job_views.job_summary(standby, Progress(), fleet.job)
    assert (shown.phase, shown.unknown_since) == ("unknown", standby.state.folded_at)
    assert shown.reason.startswith("no supervisor leads, so this is the state at ")
    node = standby.state.nodes["n0"]
    assert node_views.reason_of_node(standby, node, fleet.now).startswith(
        "no supervisor leads, so this is the state at "
    )
    refused = Picture(standby.state, trouble="Redis is full; make room")
    assert " (Redis is full; make room); until then: " in job_views.job_summary(refused, Progress(), fleet.job).reason
    fleet.finish()
    over = Picture(fleet.state)
    assert job_views.job_summary(over, Progress(), fleet.job).phase == "completed"


def test_a_job_with_a_fault_that_waits_for_the_breaker_says_so() -> None:
    """Its rank is dead, and nothing is done about it: neither `running` nor `not confirmed` says why."""
    fleet = running(job(dp=2))
    until = fleet.now + 300
    fleet.state = evolve(fleet.state, breaker=Breaker(open_until=until, reason="31 generation changes within 300 s"))
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    [incident] = fleet.state.incidents.values()
    assert incident.action is None
    shown = job_views.job_summary(Picture(fleet.state, leading=True, at=fleet.now), Progress(), fleet.job).reason
    assert (
        f"no action for {incident.id} while the circuit breaker is open (31 generation changes within 300 s)" in shown
    )
    assert "`holdfast breaker reset`" in shown
    assert incident.cause in shown
