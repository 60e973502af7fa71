"""Maintenance notices: the owner of a machine will take it away. Its node gets no new ranks, and its ranks leave in time.

    notice ──► the job saves, to the last tier ──► the policy: swap │ fewer replicas │ stay ──► asked again when a spare
                                                                                       is free, or when the time is near

A notice is not a fault. The run is healthy until the machine is taken, and the node is then lost like any other: its ranks
move, and its state comes from elsewhere. So nothing is stopped for a notice that could as well continue. If nothing is done
about the notice, that costs one recovery. `job_needs` decides what a job needs; this module supplies the data.
"""

from __future__ import annotations

import math
import re

from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding
from holdfast.domain.incidents import MAINTENANCE, Action, Incident, IncidentState
from holdfast.domain.nodes import TERMINATION, Notice
from holdfast.supervisor.core.changes import planned, suspension
from holdfast.supervisor.core.fleet import nodes
from holdfast.supervisor.core.incidents.views import options
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import DeferredEviction, Job
from holdfast.supervisor.core.model.state import Node, State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.saves import ordered_saves, reports
from holdfast.supervisor.protocol import NoticeRequested
from holdfast.supervisor.timers import NoticeDue

SOURCES_MAX = 8  # of one node's notices
SOURCE = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
OF_AGENTS = ("file", "gce", TERMINATION)  # sources that report through the node's agent, not through the API
EVENT_CHARS_MAX = 500
AHEAD_S_MAX = 366 * 86_400.0

TOGETHER_S = 1.0  # agents that are asked to end together, as at the end of an allocation, report it within this

# ---------------------------------------------------------------- incoming notices


def on_finding(turn: Turn, finding: Finding) -> None:
    """Fold a notice, a new time for it, or its withdrawal."""
    node = turn.nodes.get(finding.node)
    if node is None:
        turn.judge(finding, "ignored: this node has never connected here")
        return
    notice = finding.notice
    if notice is None:
        turn.judge(finding, "ignored: the finding contains no maintenance notice")
        return
    if notice.incarnation and notice.incarnation != node.facts.incarnation:
        turn.judge(finding, "ignored: the agent that was asked to end has ended")
        return
    notice = evolve(notice, at=finding.at)  # by this clock
    known = {each.source: each for each in node.notices}
    if notice.source in known and known[notice.source].at >= notice.at:
        turn.judge(finding, "ignored: a newer notice of the same source is known")
        return
    turn.judge(finding, "recorded: while it holds the node gets no ranks, and those that it has leave in time")
    _put(turn, node, {**known, notice.source: notice}, finding.summary)


def check(state: State, event: NoticeRequested) -> None:
    """Raises `NotFound`, `Conflict` or `InvalidSpec`."""
    node = state.nodes.get(event.node)
    if node is None:
        raise NotFound(f"there is no node {event.node}")
    if not SOURCE.fullmatch(event.source) or event.source in OF_AGENTS:
        raise InvalidSpec(
            "source", event.source, f"1 to 32 of a-z, 0-9, '.', '_' and '-', and none of {', '.join(OF_AGENTS)}"
        )
    holds = any(each.source == event.source and each.event for each in node.notices)
    if not event.event:
        if not holds:
            raise NotFound(f"{event.node} has no notice of {event.source}")
        return
    if len(event.event) > EVENT_CHARS_MAX:
        raise InvalidSpec("event", event.event, f"at most {EVENT_CHARS_MAX} characters")
    if event.starts_at is not None and not 0 < event.starts_at <= event.at + AHEAD_S_MAX:
        raise InvalidSpec("starts_at", event.starts_at, "Unix seconds, at most a year ahead")
    if not holds and sum(bool(each.event) for each in node.notices) >= SOURCES_MAX:
        raise Conflict(f"{event.node} has notices of {SOURCES_MAX} sources already")


def on_request(turn: Turn, event: NoticeRequested) -> None:
    node = turn.nodes.get(event.node)
    if node is None:
        turn.note(event.node, "no notice is taken: no such node has ever connected")
        return
    event_text = " ".join(event.event.split())
    notice = Notice(event.source, event_text, turn.at, event.starts_at if event_text else None)
    reason = f"notice of {event.source}: {event_text}" if event_text else f"{event.source} has withdrawn its notice"
    _put(turn, node, {**{each.source: each for each in node.notices}, notice.source: notice}, reason)


def forget(turn: Turn, node: Node, reason: str) -> None:
    """An operator uncordons the node: withdraw all of its notices."""
    _put(turn, node, {each.source: _over(each, turn.at) for each in node.notices}, reason)


def on_agent_restarted(turn: Turn, name: str) -> None:
    """An agent that was asked to end has ended, and the node has a new one: withdraw the notice of its end."""
    node = turn.nodes[name]
    by_source = {each.source: each for each in node.notices}
    if (leaving := by_source.get(TERMINATION)) is not None:
        _put(turn, node, {**by_source, TERMINATION: _over(leaving, turn.at)}, "its agent started again")


def on_timer(turn: Turn, name: str) -> None:
    """Withdraw expired notices (their source may have ended without withdrawing them) and reconcile the node's jobs, because
    the maintenance may be near."""
    node = turn.nodes.get(name)
    if node is None:
        return
    left = {each.source: _over(each, turn.at) if turn.at >= _ends(turn, each) else each for each in node.notices}
    _put(turn, node, left, "its maintenance notice has expired")
    for job in turn.found(By.CLAIM, name):
        turn.touch(job)


def _over(notice: Notice, at: float) -> Notice:
    return Notice(notice.source, "", max(at, notice.at))


def _put(turn: Turn, node: Node, by_source: dict[str, Notice], reason: str) -> None:
    newest = sorted(by_source.values(), key=lambda each: (-each.at, each.source))[:SOURCES_MAX]
    notices = tuple(sorted(newest, key=lambda each: each.source))
    held = node.notice is not None
    if notices != node.notices:
        node = turn.put_node(node.name, notices=notices)
        nodes.refresh(turn, node.name, reason)
    if held and node.notice is None:
        _call_off(turn, node.name)
    moments = [
        when for each in notices if each.event for when in (_settled(each), _near(turn, each), _ends(turn, each))
    ]
    if ahead := [when for when in moments if when > turn.at]:
        turn.set_timer(NoticeDue(node.name), min(ahead))
    else:
        turn.cancel_timer(NoticeDue(node.name))


def _call_off(turn: Turn, name: str) -> None:
    """The node's notice is withdrawn: drop planned changes for it that have not begun."""
    for job in turn.found(By.CLAIM, name):
        wanted = any(each.kind == MAINTENANCE and each.node == name for each in turn.open_incidents(job))
        if wanted and turn.jobs[job].change is None:
            planned.drop(turn, job, f"the maintenance of {name} is off")


def _settled(notice: Notice) -> float:
    """From when on the notice is acted on. Agents that are asked to end together are given time to report it."""
    return notice.at + TOGETHER_S if notice.source == TERMINATION else notice.at


def _near(turn: Turn, notice: Notice) -> float:
    """From when on there is no time to wait for a spare; -inf if the start is unknown."""
    return notice.starts_at - turn.config.notice_lead_s if notice.starts_at is not None else -math.inf


def _ends(turn: Turn, notice: Notice) -> float:
    return max(notice.at, notice.starts_at or 0.0) + turn.config.notice_hold_s


# ---------------------------------------------------------------- consequences for a job


def wanted(turn: Turn, job: Job) -> tuple[str, str] | None:
    """(node, cause) of the job's node that must leave first, except those that were decided to stay. If several leave at the
    same time, a node with an open incident comes first: the end of an allocation is one incident."""
    assert job.generation is not None
    announced = turn.members(job.generation, By.ANNOUNCED)
    leaving = [(notice, name) for name in announced if (notice := _open(turn, job, name)) is not None]
    if not leaving:
        return None
    notice, name = min(leaving, key=_first)
    asked = {incident.node for incident in turn.open_incidents(job.name) if incident.kind == MAINTENANCE}
    if together := [item for item in leaving if item[1] in asked and _together(item[0], notice)]:
        notice, name = min(together, key=_first)
    why = "leaves" if notice.source == TERMINATION else "will be taken for maintenance"
    return name, f"{name} {why}: {notice.event}"


def _first(leaving: tuple[Notice, str]) -> tuple[float, str]:
    notice, name = leaving
    return notice.starts_at or 0.0, name


def _together(one: Notice, other: Notice) -> bool:
    """Whether both notices are of one event, judged by their times: those of agents differ by the delay of their reports."""
    same = one.source == other.source == TERMINATION
    return same and abs((one.starts_at or 0.0) - (other.starts_at or 0.0)) <= TOGETHER_S


def _open(turn: Turn, job: Job, name: str) -> Notice | None:
    node = turn.nodes[name]
    notice = node.notice
    if notice is None or not node.connected or turn.at < _settled(notice):
        return None
    if job.progress.reports_no_steps and not -math.inf < _near(turn, notice) <= turn.at:
        return None  # it has no checkpoint boundary to leave at: it leaves as late as possible, or with the machine
    stay = job.deferred_evictions.get(name)
    stays = (
        stay is not None and stay.notice == notice and turn.at < stay.until and stay.candidates == options(turn, job)
    )
    return None if stays else notice


def evidence_of(turn: Turn, name: str) -> dict[str, str]:
    """The notice as evidence of the incident, which the policy sees."""
    notice = turn.nodes[name].notice
    assert notice is not None
    when = {} if notice.starts_at is None else {"starts_at": f"{notice.starts_at:.0f}"}
    return {"source": notice.source, "event": notice.event, **when}


def save(turn: Turn, name: str, node: str) -> None:
    """Save, to the last tier that the time allows, and report the tiers reached. Independent of the decision."""
    job, notice = turn.jobs[name], turn.nodes[node].notice
    if job.progress.reports_no_steps or notice is None:
        return
    at_step = ordered_saves.save_soon(turn, job, to_object_store=True)
    until = turn.at + ordered_saves.patience_s(turn, job, at_step) + reports.travel_s(turn, job)
    if notice.starts_at is not None and notice.starts_at > turn.at:
        until = min(until, notice.starts_at)
    reports.expect(turn, name, "", at_step, until)


def end_of_all(turn: Turn, incident: Incident) -> float | None:
    """When the nodes of the incident's job end, if all of them were asked to end and the time is near; None otherwise."""
    job = turn.jobs[incident.job]
    if not suspension.all_leave(turn, job):
        return None
    assert job.generation is not None
    notices = [notice for name in turn.members(job.generation, By.ANNOUNCED) if (notice := turn.nodes[name].notice)]
    first = min(notices, key=lambda notice: notice.starts_at or 0.0)
    return max(turn.at, first.starts_at or 0.0) if _near(turn, first) <= turn.at else None


def stay(turn: Turn, incident: Incident, action: Action) -> None:
    """The node keeps its ranks, and so do the other nodes with notices that the policy saw: when an allocation ends, each node
    has one. The policy is asked again when there are other nodes, another notice, or no time left."""
    job = turn.jobs[incident.job]
    assert job.generation is not None
    stays = {name: each for name, each in job.deferred_evictions.items() if name in job.generation.nodes}
    candidates = options(turn, job)
    for name in (incident.node, *turn.members(job.generation, By.ANNOUNCED)):
        notice = turn.nodes[name].notice
        if notice is not None and (name == incident.node or _near(turn, notice) <= turn.at):
            near = _near(turn, notice)
            stays[name] = DeferredEviction(notice, candidates, near if turn.at < near else _ends(turn, notice))
    turn.put_job(job.name, deferred_evictions=stays)
    turn.close_incident(incident.id, IncidentState.RESOLVED, f"{incident.node} keeps its ranks: {action.reason}")
