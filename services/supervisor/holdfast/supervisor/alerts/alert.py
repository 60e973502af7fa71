"""Which records are an alert, and its text. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import ActionKind, Incident, IncidentState
from holdfast.supervisor.protocol import FindingJudged, IncidentChanged, JobChanged, JobPhase, Noted
from holdfast.supervisor.published import Published

BREAKER = "breaker"  # the subject of what the circuit breaker notes
REDIS = "redis"  # the subject of what is noted about data that Redis has lost
TEXT_CHARS_MAX = 2000


class Topic(StrEnum):
    """What an alert is about; `HOLDFAST_ALERT_TOPICS` chooses."""

    FAILED = "failed"  # a job has failed
    WAITING = "waiting"  # a job cannot run: it waits for nodes
    SUSPENDED = "suspended"  # all nodes of a job were asked to end
    COMPLETED = "completed"  # a job is done
    INCIDENT = "incident"  # an incident is over, and what it took
    NOTIFY = "notify"  # a policy answered `notify`, or the first start of a job takes long
    BREAKER = "breaker"  # automatic recovery was suspended or enabled again
    REDIS = "redis"  # Redis has lost data, or a supervisor cannot act on faults without it
    TEST = "test"  # `holdfast notify test`


class Level(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Alert:
    """One message. An alert that is sent twice has the same `id`."""

    id: str
    at: float  # Unix seconds
    topic: Topic
    level: Level
    title: str  # one line
    text: str
    job: str = ""
    incident: str = ""
    node: str = ""


_OF_PHASES = {
    JobPhase.FAILED: (Topic.FAILED, Level.ERROR, "has failed"),
    JobPhase.WAITING: (Topic.WAITING, Level.ERROR, "cannot run"),
    JobPhase.SUSPENDED: (Topic.SUSPENDED, Level.WARNING, "is suspended"),
    JobPhase.COMPLETED: (Topic.COMPLETED, Level.INFO, "is completed"),
}


def alert_of(record: Published, topics: Collection[Topic]) -> Alert | None:
    """Return the alert of a record; None if the record causes no alert, or one of another topic than `topics`."""
    match record:
        case JobChanged():
            alert = _of_job(record)
        case IncidentChanged(incident=incident) if incident.closed:
            alert = _of_incident(incident, record.at)
        case FindingJudged(finding=Finding(kind=FindingKind.RANKS_MISSING, severity=Severity.WARNING) as finding):
            title = f"{finding.job}: has not stepped yet"
            alert = Alert(
                f"{finding.id}:{record.at:.3f}",
                record.at,
                Topic.NOTIFY,
                Level.WARNING,
                title,
                _cut(finding.summary),
                finding.job,
            )
        case Noted(subject=subject) if subject == BREAKER:
            title = f"circuit breaker {record.text.partition(':')[0]}"
            alert = Alert(f"breaker:{record.at:.3f}", record.at, Topic.BREAKER, Level.ERROR, title, _cut(record.text))
        case Noted(subject=subject) if subject == REDIS:
            title = "Redis has lost data"
            alert = Alert(f"redis:{record.at:.3f}", record.at, Topic.REDIS, Level.ERROR, title, _cut(record.text))
        case _:
            alert = None
    return alert if alert is not None and alert.topic in topics else None


def _of_job(record: JobChanged) -> Alert | None:
    if record.phase not in _OF_PHASES:
        return None
    topic, level, what = _OF_PHASES[record.phase]
    title = f"{record.job} {what}"
    return Alert(
        f"{record.job}:{record.phase}:{record.at:.3f}", record.at, topic, level, title, _cut(record.reason), record.job
    )


def _of_incident(incident: Incident, at: float) -> Alert | None:
    action = incident.action
    if action is None or action.kind is ActionKind.IGNORE or incident.state is IncidentState.FAILED:
        return None  # the end of the job is an alert of its own
    if action.kind is ActionKind.NOTIFY:
        topic, title, text = Topic.NOTIFY, f"{incident.job}: {incident.kind}", action.reason
    elif incident.first_step_at is not None:
        duration_s = incident.first_step_at - incident.fault_at
        took = "" if incident.planned else f", {duration_s:.1f} s from fault to first step"
        topic, title = Topic.INCIDENT, f"{incident.job}: {incident.kind}, {action.kind}{took}"
        text = f"{incident.cause}\n{action.kind}: {action.reason}\n{incident.outcome}"
    else:
        return None  # nothing was done about it, and nobody is to hear of it
    level = Level.INFO if incident.planned and topic is Topic.INCIDENT else Level.WARNING
    return Alert(
        f"{incident.id}:{topic}", at, topic, level, title, _cut(text), incident.job, incident.id, incident.node
    )


def test_alert(at: float, supervisor: str) -> Alert:
    text = f"This is a test of the alerts of supervisor {supervisor}. Nothing has happened."
    return Alert(f"test:{at:.3f}", at, Topic.TEST, Level.INFO, "Holdfast: test", text)


def held_back(count: int, at: float, target: str) -> Alert:
    """What stands for alerts that were not sent because there were too many."""
    noun = "alert was" if count == 1 else "alerts were"
    return Alert(
        f"held:{target}:{at:.3f}",
        at,
        Topic.INCIDENT,
        Level.WARNING,
        f"{count} more {noun} held back",
        "There were too many in a short time. `holdfast incidents list` and the dashboard have all of them.",
    )


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 1]}…"
