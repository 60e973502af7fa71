"""What once stopped a job for ever, or stopped a healthy one, planted again: the hostile worlds find each of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from worlds import require_found

from holdfast.domain.orders import RanksFinished
from holdfast.runtime.steady_clock import SteadyClock
from holdfast.sim import diagnostics, supervisor
from holdfast.sim.hostility import Hostility
from holdfast.sim.invariants import UNKNOWN_RUN_S_MAX
from holdfast.sim.leader_time import LeaderTime
from holdfast.sim.scenario import simulate
from holdfast.sim.watched import Step
from holdfast.sim.world import Violation
from holdfast.supervisor.agents.beats import Reported
from holdfast.supervisor.agents.unanswered import Unanswered
from holdfast.supervisor.core import State, progress, step
from holdfast.supervisor.core.handling import reconcile
from holdfast.supervisor.protocol import (
    Command,
    Event,
    FindingArrived,
    FindingJudged,
    NodeReported,
    Publish,
    TimerFired,
)
from holdfast.supervisor.timers import RanksDue, StepDue

SEEDS = 120
PEACE_S = 75.0
FORGOTTEN_RUN = 1780  # in FORGETFUL: the log loses everything, and the run that it knew is not known any more
NEVER_SHOWN_RUN = 144  # in FORGETFUL: the log loses everything, and the Hello of a node that runs is lost, too
EXPIRED = 206  # in CLOCKS: a leader is replaced while a notice about a node stands
NEVER_TRAINS = "the job does not train"
TIME_WENT_ON = "the leader's time went on by"

CLOCKS = Hostility(clocks=True, peace_s=PEACE_S)
WRONG_CLOCKS = Hostility(
    clocks=True, diagnostics=True, peace_s=PEACE_S
)  # diagnostics restarts and reads its wall clock again
ABSENCE = Hostility(absence=True, peace_s=PEACE_S + 330.0)
DIAGNOSTICS = Hostility(diagnostics=True, peace_s=PEACE_S)
LOG = Hostility(log_tail=True, peace_s=PEACE_S)
LOSS = Hostility(loss=0.5, peace_s=PEACE_S)
FORGETFUL = Hostility(log_all=True, loss=0.5, peace_s=120.0)
BABBLE = Hostility(babble=True, peace_s=PEACE_S)


def _edge_triggered(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: what should run is never compared with what runs."""
    if isinstance(event, TimerFired) and isinstance(event.timer, RanksDue | StepDue):
        return state, ()
    return step(state, event)


def _events_only(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: a finding that arrives 300 s after it was made, by the clocks of two machines, is history."""
    if isinstance(event, FindingArrived) and event.at - event.finding.at > 300.0:
        return state, (Publish(FindingJudged(event.at, event.finding, "ignored: it is old")),)
    return _edge_triggered(state, event)


@patch.object(progress, "_has_progressed", lambda job: job.progress.progressed)
def _no_progress(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: steps that diagnostics did not report are no progress."""
    after, commands = step(state, event)
    jobs = {
        name: replace(
            job,
            progress=replace(
                job.progress,
                restarts_without_progress=max(
                    each.progress.restarts_without_progress for each in (job, state.jobs[name])
                ),
                progressed=False,
            ),
        )
        if name in state.jobs
        else job
        for name, job in after.jobs.items()
    }
    return replace(after, jobs=jobs).indexed(after.index) if after.index else after, commands


def _believe_anyone(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Planted: whoever reports a rank as finished is believed."""
    if not isinstance(event, NodeReported) or not isinstance(event.report, RanksFinished):
        return step(state, event)
    report, commands = event.report, tuple[Command, ...]()
    running = state.jobs[report.job].running if report.job in state.jobs else None
    for placement in running.placements if running is not None else ():
        node = state.nodes[placement.node]
        ranks = tuple(rank for rank in placement.ranks if rank in report.ranks)
        theirs = replace(report, ranks=ranks)
        state, more = step(
            state,
            NodeReported(event.at, node.name, node.facts.incarnation, state.last_seq(node) + 1, theirs, node.session),
        )
        commands = (*commands, *more)
    return state, commands


def _found(hostility: Hostility, said: str, fold: Step = step, *, first: int) -> None:
    """`first`: a seed near which it is found."""

    require_found(said, range(first, first + SEEDS), lambda seed: simulate(seed, fold=fold, hostility=hostility))


@pytest.mark.parametrize(
    ("planted", "hostility", "said", "first"),
    [
        (_events_only, WRONG_CLOCKS, f"{NEVER_TRAINS}|was to be reset since|has not been booted since its fault", 51),
        (_events_only, ABSENCE, NEVER_TRAINS, 7),
        (_edge_triggered, LOG, NEVER_TRAINS, 112),
        (_no_progress, DIAGNOSTICS, "finished no new step", 559),  # few seeds find it
        (_believe_anyone, BABBLE, "have not finished", 1),
    ],
    ids=[
        "finding of another clock",
        "finding that waited for a leader",
        "finding in the log's last second",
        "progress without diagnostics",
        "job finished by a stranger",
    ],
)
def test_what_once_went_wrong_is_found_when_it_is_planted(
    planted: Step, hostility: Hostility, said: str, first: int
) -> None:
    _found(hostility, said, planted, first=first)


class WallClock(SteadyClock):
    def __init__(self, wall: Callable[[], float], elapsed: Callable[[], float]) -> None:
        super().__init__(wall, elapsed)
        self._now = wall

    def __call__(self) -> float:
        return self._now()


def test_a_leader_that_lives_by_its_wall_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SteadyClock", WallClock)
    _found(CLOCKS, TIME_WENT_ON, first=0)


class NeverResumes(SteadyClock):
    """Planted: a leader begins with the wall clock of its machine, or with the newest time in the state if that is later."""

    def resume(self, at: float, ago_s: float) -> None:
        """Does nothing."""


def test_a_takeover_by_a_machine_with_another_clock_that_lets_time_pass_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "SteadyClock", NeverResumes)
    _found(CLOCKS, TIME_WENT_ON, first=0)


class JumpsAtTakeover(SteadyClock):
    """Planted: at each takeover an hour passes."""

    def resume(self, at: float, ago_s: float) -> None:
        super().resume(at, ago_s)
        self._offset += 3600.0


def test_what_a_takeover_by_a_machine_with_another_clock_lets_expire_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consequence of the same, without the promise about the time itself: a node that is to be avoided gets ranks."""
    simulate(EXPIRED, hostility=CLOCKS)
    monkeypatch.setattr(supervisor, "SteadyClock", JumpsAtTakeover)
    monkeypatch.setattr(LeaderTime, "folded", lambda *_: None)
    with pytest.raises(Violation, match=r"which is held down for|whose machine will be taken"):
        simulate(EXPIRED, hostility=CLOCKS)


def test_diagnostics_that_lives_by_its_wall_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the clock is set back, no lost node is noticed for as long."""
    simulate(256, hostility=CLOCKS)
    monkeypatch.setattr(diagnostics, "SteadyClock", WallClock)
    _found(CLOCKS, "no finding about the node_lost", first=256)


def test_orders_that_are_sent_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unanswered, "due", lambda *_: [])
    _found(LOSS, "still runs generation|could not be started", first=19)  # a Stop, or a Prepare, was lost


def test_a_run_that_was_replaced_while_nobody_knew_of_it_and_is_not_stopped_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate(FORGOTTEN_RUN, hostility=FORGETFUL)
    monkeypatch.setattr(reconcile, "stop_orphaned", lambda *_: None)
    with pytest.raises(Violation, match=rf"was replaced, and is not stopped|still runs generation|{NEVER_TRAINS}"):
        simulate(FORGOTTEN_RUN, hostility=FORGETFUL)


def test_a_session_that_the_state_never_shows_is_found_by_the_run_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Hello was lost, so that nobody can tell the node to stop what was replaced meanwhile."""
    reported = supervisor.Supervisor._reported

    def of_known_nodes(self: supervisor.Supervisor, node: str) -> Reported | None:
        known = node in self.committed.nodes
        return reported(self, node) if known else Reported(self.sessions[node], self.agents[node].version)

    simulate(NEVER_SHOWN_RUN, hostility=FORGETFUL)
    monkeypatch.setattr(supervisor.Supervisor, "_reported", of_known_nodes)
    with pytest.raises(Violation, match=f"is not stopped after {UNKNOWN_RUN_S_MAX:g} s with a session"):
        simulate(NEVER_SHOWN_RUN, hostility=FORGETFUL)
