"""What a standby shows of the workers: it has only the newest snapshot, and no session with any agent."""

from __future__ import annotations

from fleet import job, running

from holdfast.supervisor.api import views
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.picture import Picture, Progress


def test_a_standby_shows_the_pids_that_agents_have_reported() -> None:
    fleet = running(job(dp=2))
    fleet.all_live()
    leader = Picture(fleet.state, leading=True)
    parts = {key: part for key, part in snapshot.changes(None, fleet.state).items() if part is not None}
    standby = Picture(snapshot.load(parts))
    shown = [[rank.pid for rank in views.job(picture, Progress(), fleet.job).ranks] for picture in (leader, standby)]
    assert None not in shown[0]
    assert shown[1] == shown[0]
