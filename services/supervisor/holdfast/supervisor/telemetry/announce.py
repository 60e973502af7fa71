"""Logs one line for each decision, with its subject and its reason.

The level says what must be read: `error`, a job has failed; `warning`, something has broken or cannot go on; `info`, the rest,
such as what was done about it."""

from __future__ import annotations

import logging
from typing import assert_never

import structlog

from holdfast.domain.findings import Severity
from holdfast.domain.incidents import Incident, IncidentState
from holdfast.domain.nodes import NodeState
from holdfast.supervisor.alerts.alert import BREAKER, REDIS
from holdfast.supervisor.protocol import (
    FindingJudged,
    GenerationChanged,
    IncidentChanged,
    JobAccepted,
    JobChanged,
    JobPhase,
    NodeChanged,
    Noted,
    PolicyChanged,
)
from holdfast.supervisor.published import LeaderChanged, OperationDone, PolicyAsked, Published

JOB_LEVELS = {
    JobPhase.FAILED: logging.ERROR,
    JobPhase.WAITING: logging.WARNING,
    JobPhase.SUSPENDED: logging.WARNING,
}

log = structlog.get_logger("holdfast.supervisor")


def decision(record: Published) -> None:
    match record:
        case JobAccepted():
            log.info("job accepted", job=record.job, mesh=str(record.spec.mesh), nodes=record.spec.nodes)
        case JobChanged():
            log.log(
                JOB_LEVELS.get(record.phase, logging.INFO),
                "job",
                job=record.job,
                phase=record.phase,
                reason=record.reason,
            )
        case GenerationChanged():
            number = record.generation.number
            log.info("generation", job=record.job, generation=number, stage=record.stage, reason=record.reason)
        case IncidentChanged():
            _incident(record)
        case NodeChanged():
            level = logging.WARNING if record.state is NodeState.LOST else logging.INFO
            log.log(level, "node", node=record.node, state=record.state.value, job=record.job, reason=record.reason)
        case FindingJudged(finding=finding):
            log.info("finding", id=finding.id, node=finding.node, job=finding.job, reason=record.verdict)
        case PolicyChanged():
            log.info(
                "policy changed", job=record.job, policy=record.policy.name or "default", sha256=record.policy.sha256
            )
        case PolicyAsked():
            pass  # the result is logged with the incident
        case Noted():
            opens = record.subject == BREAKER and record.text.startswith("open")
            level = logging.ERROR if record.subject == REDIS else logging.WARNING if opens else logging.INFO
            log.log(level, "noted", subject=record.subject, reason=record.text)
        case OperationDone():
            log.info("operation", operation=record.operation, ok=record.ok, reason=record.reason)
        case LeaderChanged():
            log.info("leader", supervisor=record.supervisor, epoch=record.epoch)
        case _:
            assert_never(record)


def _incident(record: IncidentChanged) -> None:
    incident = record.incident
    action = incident.action
    log.log(
        _level(incident),
        "incident",
        incident=incident.id,
        job=incident.job,
        state=incident.state.value,
        kind=incident.kind,
        cause=incident.cause,
        generation=incident.generation,
        node=incident.node,
        rank=incident.rank,
        action=action.kind.value if action else None,
        reason=action.reason if action else None,
        decided_by=incident.decided_by,
        trace_id=incident.trace_id,
    )


def _level(incident: Incident) -> int:
    """A fault is a warning once, when it is found; its decision and recovery follow as information."""
    if incident.state is IncidentState.FAILED:
        return logging.ERROR
    fault = incident.severity in (Severity.ERROR, Severity.FATAL)
    return logging.WARNING if incident.state is IncidentState.OPEN and fault else logging.INFO
