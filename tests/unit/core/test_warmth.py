"""Spares keep a warm template: what was ordered once is compared with what their agents report."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.nodes import TemplateState
from holdfast.domain.orders import Hello, PrepareTemplate, RanksStepping, WorkersChanged

WARM = TemplateState((JOB,), True)
COLD = TemplateState((), True)  # its own first template, which no job has asked for


def template(fleet: Fleet, node: str, state: TemplateState | None) -> None:
    fleet.version[node] = fleet.version.get(node, 0) + 1
    fleet.report(node, WorkersChanged(fleet.version[node], template=state))


def connect(fleet: Fleet, node: str, state: TemplateState | None) -> None:
    fleet.life[node] = fleet.life.get(node, 0) + 1
    fleet.seq[node] = 0
    fleet.report(node, Hello(fleet.facts(node), workers_version=1, template=state))


@pytest.fixture
def fleet() -> Fleet:
    fleet = running(job(dp=2), spares=1)
    fleet.answer_orders()
    assert fleet.orders(PrepareTemplate) == {}
    assert fleet.state.nodes["n2"].warmed == (JOB,)
    template(fleet, "n2", WARM)
    return fleet


def test_a_spare_that_was_restarted_is_warmed_again(fleet: Fleet) -> None:
    connect(fleet, "n2", COLD)
    assert set(fleet.orders(PrepareTemplate)) == {"n2"}
    fleet.answer_orders()
    template(fleet, "n2", WARM)
    assert fleet.orders(PrepareTemplate) == {}


def test_a_spare_that_joins_while_the_job_runs_is_warmed(fleet: Fleet) -> None:
    connect(fleet, "n7", COLD)
    assert set(fleet.orders(PrepareTemplate)) == {"n7"}


def test_a_template_that_is_made_again_by_its_agent_is_not_ordered_again(fleet: Fleet) -> None:
    template(fleet, "n2", TemplateState((JOB,), False))
    template(fleet, "n2", WARM)
    assert fleet.orders(PrepareTemplate) == {}


def test_a_spare_that_has_none_any_more_is_asked_once(fleet: Fleet) -> None:
    template(fleet, "n2", COLD)
    assert set(fleet.orders(PrepareTemplate)) == {"n2"}
    before = fleet.orders(PrepareTemplate)["n2"]
    template(fleet, "n2", TemplateState())
    assert fleet.orders(PrepareTemplate)["n2"] == before
    assert len(list(fleet.state.sends())) == 1


def test_nothing_is_known_of_agents_that_do_not_say(fleet: Fleet) -> None:
    connect(fleet, "n2", None)
    assert fleet.orders(PrepareTemplate) == {}


def test_members_are_not_warmed_and_jobs_that_do_not_run_want_nobody() -> None:
    fleet = running(job(dp=2), spares=0)
    for node, ranks in (("n0", (0,)), ("n1", (1,))):
        fleet.workers(node, *ranks)
    template(fleet, "n0", COLD)
    assert fleet.orders(PrepareTemplate) == {}
    waiting = Fleet(1)
    waiting.submit(job(dp=3))
    connect(waiting, "n0", COLD)
    assert waiting.orders(PrepareTemplate) == {}


def test_one_template_serves_one_of_several_jobs_and_is_left_alone() -> None:
    fleet = running(job(dp=2), spares=3)
    fleet.submit(job(dp=2, name="other"))
    fleet.answer_orders()
    generation = fleet.state.jobs["other"].generation
    assert generation is not None
    for placement in generation.placements:
        fleet.report(placement.node, RanksStepping("other", generation.number, tuple(placement.ranks), 1, fleet.now))
    fleet.answer_orders()
    assert set(fleet.state.nodes["n4"].warmed) == {JOB, "other"}
    template(fleet, "n4", TemplateState(("other",), True))
    assert fleet.orders(PrepareTemplate) == {}
    template(fleet, "n4", COLD)
    assert set(fleet.orders(PrepareTemplate)) == {"n4"}


def test_a_template_that_keeps_dying_is_said_once_and_so_is_its_return(fleet: Fleet) -> None:
    for deaths in (3, 4, 5):
        template(fleet, "n2", TemplateState((JOB,), False, f"it has ended {deaths} times in a row: out of memory"))
    assert fleet.notes().count("has no worker template") == 1
    assert "it has ended 3 times in a row: out of memory" in fleet.notes()
    template(fleet, "n2", WARM)
    template(fleet, "n2", WARM)
    assert fleet.notes().count("has a worker template again") == 1
    assert fleet.orders(PrepareTemplate) == {}
