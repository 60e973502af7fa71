"""Creates the spans of an incident from the data that the services keep anyway. Pure; `tracing` describes the tree of spans.

Each service writes its own spans when their ends are known. `of_trace` creates all spans from the incident's record alone, for
the API and `holdfast incidents show --trace`, without an OpenTelemetry Collector. Both have the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from holdfast.domain import tracing
from holdfast.domain.findings import Finding
from holdfast.domain.incidents import Incident, IncidentState, NodeTiming
from holdfast.domain.signals import KernelLine, WorkerExited
from holdfast.domain.tracing import Span, TraceContext, Value

AGENT = "holdfast-agent"
DIAGNOSTICS = "holdfast-diagnostics"
SUPERVISOR = "holdfast-supervisor"

_PARTS = ("fork", "stop", "stage")  # parts of prepare; they overlap
_NOBODY = "0" * 16
# The phases of a rank's start, in order, and the names of their spans.
_STAGES = {
    "script": "script",
    "process_group": "process group",
    "build": "build",
    "restore": "restore",
    "first_step": "step",
}


# ---------------------------------------------------------------- spans that each service writes


def trace_of_signal(signal: WorkerExited | KernelLine) -> str:
    """Traceparent of a signal that reports a failure. A repeat of the signal belongs to the same trace."""
    match signal:
        case WorkerExited():
            seed = f"{signal.job}/{signal.generation}/{signal.rank}/{signal.pid}"
        case KernelLine():
            seed = signal.text
    return tracing.new_trace(f"{signal.node}/{signal.at!r}/{seed}").traceparent


def of_signal(signal: WorkerExited | KernelLine, sent_at: float) -> Span | None:
    """The span of a signal; None if the signal has no trace."""
    context = tracing.parse(signal.traceparent)
    if context is None:
        return None
    match signal:
        case WorkerExited():
            name = "worker exited"
            about: dict[str, Value] = {"job": signal.job, "generation": signal.generation, "rank": signal.rank}
        case KernelLine():
            name, about = "kernel line", {"kind": signal.event.value}
    return Span(name, AGENT, context, "", signal.at, sent_at, {"node": signal.node, **about})


def of_finding(finding: Finding) -> Span | None:
    """The span of a finding, from the beginning of the fault to the conclusion; None if the finding has no trace."""
    context = tracing.parse(finding.traceparent)
    if context is None:
        return None
    about = {
        "kind": finding.kind.value,
        "severity": finding.severity.value,
        "summary": finding.summary,
        **_where(finding.job, finding.generation, finding.node, finding.rank),
    }
    return Span(
        tracing.FINDING, DIAGNOSTICS, context, _signal_of(context, finding.evidence), finding.since, finding.at, about
    )


def of_incident(incident: Incident) -> tuple[Span, ...]:
    """The spans that the supervisor writes for a closed incident: the incident, the decision, the change of generation."""
    context = context_of(incident)
    if context is None:
        return ()
    finding, end = _finding_of(incident), _end_of(incident)
    about = {
        "incident": incident.id,
        "kind": incident.kind,
        "cause": incident.cause,
        "outcome": incident.outcome,
        **_where(incident.job, incident.generation, incident.node, incident.rank),
    }
    failed = incident.outcome if incident.state is IncidentState.FAILED else ""
    parent = finding.span_id if finding else ""
    spans = [Span(tracing.INCIDENT, SUPERVISOR, context, parent, incident.detected_at, end, about, failed)]
    if incident.action is not None and incident.decided_at is not None:
        spans.append(_decision(incident, context))
        if incident.new_generation is not None:
            spans.append(_change(incident, context, end))
    return tuple(spans)


def change_below(incident: Incident) -> str:
    """Traceparent for the orders of the change that ends this incident; the same if the change is planned again."""
    context = context_of(incident)
    return context.child(tracing.CHANGE).traceparent if context else ""


def context_of(incident: Incident) -> TraceContext | None:
    """The incident's own span, a child of its finding's span. An incident without a finding, such as a planned change, begins a
    new trace."""
    if not incident.trace_id:
        return None
    above = _finding_of(incident) or TraceContext(incident.trace_id, _NOBODY)
    return above.child(tracing.INCIDENT, incident.id)


def of_first_step(
    change: str,
    *,
    job: str,
    generation: int,
    node: str,
    rank: int,
    start: float,
    end: float,
    phases_s: Iterable[tuple[str, float]],
) -> Iterator[Span]:
    """The span from START to the end of the rank's first step, and spans of the parts that the rank measured, in sequence."""
    above = tracing.parse(change)
    if above is None:
        return
    context = above.child(tracing.FIRST_STEP, generation, rank)
    where = _where(job, generation, node, rank)
    yield Span(tracing.FIRST_STEP, AGENT, context, above.span_id, start, end, where)
    seconds_of = dict(phases_s)  # records contain the phases in any order
    phases = [(title, seconds_of[name]) for name, title in _STAGES.items() if name in seconds_of]
    at = max(start, end - sum(seconds for _, seconds in phases))
    for title, seconds in phases:
        yield Span(title, AGENT, context.child(title), context.span_id, at, min(end, at + seconds), where)
        at += seconds


# ---------------------------------------------------------------- the whole trace, from the record


def of_trace(incident: Incident) -> tuple[Span, ...]:
    """All spans that follow from the incident's record, parents before children. An open span ends at the last known time."""
    own = of_incident(incident)
    if not own:
        return ()
    below = tracing.parse(change_below(incident))
    shares = () if below is None or incident.new_generation is None else incident.shares
    nodes = (_of_timing(incident, below, share) for share in shares if below is not None)
    return (*_before(incident), *own, *chain.from_iterable(nodes))


def _before(incident: Incident) -> Iterator[Span]:
    """The spans of the signal and of the finding, as far as the incident's record contains them."""
    if (context := _finding_of(incident)) is None:
        return
    where = _where(incident.job, incident.generation, incident.node, incident.rank)
    signal = _signal_of(context, incident.evidence)
    if signal:
        at = incident.fault_at
        yield Span("signal", AGENT, TraceContext(context.trace_id, signal), "", at, at, where)
    about = {"kind": incident.kind, "severity": incident.severity, "summary": incident.cause, **where}
    yield Span(tracing.FINDING, DIAGNOSTICS, context, signal, incident.fault_at, incident.detected_at, about)


def _of_timing(incident: Incident, change: TraceContext, share: NodeTiming) -> Iterator[Span]:
    generation = incident.new_generation or 0
    if not share.ranks:
        yield from _preparation(incident.job, generation, change, share)
        return
    start = incident.prepared_at if incident.prepared_at is not None else share.at
    for rank in share.ranks:
        yield from of_first_step(
            change.traceparent,
            job=incident.job,
            generation=generation,
            node=share.node,
            rank=rank,
            start=start,
            end=max(start, share.at),
            phases_s=share.phases_s.items(),
        )


def _preparation(job: str, generation: int, change: TraceContext, share: NodeTiming) -> Iterator[Span]:
    seconds = share.phases_s
    stop, stage, fork = (seconds.get(name, 0.0) for name in ("stop", "stage", "fork"))
    start = share.at - max(fork, stop + stage)
    context = change.child(tracing.PREPARE, *prepare_key(share.node, generation))
    where = _where(job, generation, share.node, None)
    came = {"source": ", ".join(f"{count} from {source}" for source, count in share.restored_from.items())}
    yield Span(
        tracing.PREPARE, AGENT, context, change.span_id, start, share.at, {**where, **(came if came["source"] else {})}
    )
    for name in (name for name in _PARTS if name in seconds):
        begin = start + stop if name == "stage" else start
        yield Span(name, AGENT, context.child(name), context.span_id, begin, begin + seconds[name], where)


def prepare_key(node: str, generation: int) -> tuple[object, ...]:
    """The key that distinguishes the preparations of several nodes below one change."""
    return node, generation


# ---------------------------------------------------------------- details


def _decision(incident: Incident, context: TraceContext) -> Span:
    assert incident.action is not None
    assert incident.decided_at is not None
    about = {
        "action": incident.action.kind.value,
        "reason": incident.action.reason,
        "decided_by": incident.decided_by,
        "job": incident.job,
    }
    own = context.child(tracing.DECISION)
    return Span(tracing.DECISION, SUPERVISOR, own, context.span_id, incident.detected_at, incident.decided_at, about)


def _change(incident: Incident, context: TraceContext, end: float) -> Span:
    assert incident.decided_at is not None
    about: dict[str, Value] = {
        "job": incident.job,
        "generation": incident.generation,
        "new_generation": incident.new_generation or 0,
        "reason": incident.action.reason if incident.action else "",
    }
    if incident.restored_step is not None:
        about["restored_step"] = incident.restored_step
    own = context.child(tracing.CHANGE)
    return Span(tracing.CHANGE, SUPERVISOR, own, context.span_id, incident.decided_at, end, about)


def _finding_of(incident: Incident) -> TraceContext | None:
    return tracing.parse(incident.evidence.get(tracing.TRACEPARENT, ""))


def _end_of(incident: Incident) -> float:
    """The end of the incident, or the last known time in its record."""
    moments = (incident.detected_at, incident.decided_at, incident.prepared_at, incident.first_step_at)
    return max(moment for moment in moments if moment is not None)


def _signal_of(context: TraceContext, evidence: Mapping[str, str]) -> str:
    """Span id of the signal; empty if there is none, or if it belongs to the trace of another finding."""
    signal = tracing.parse(evidence.get(tracing.SIGNAL) or evidence.get(tracing.EARLIER_SIGNAL, ""))
    return signal.span_id if signal and signal.trace_id == context.trace_id else ""


def _where(job: str, generation: int, node: str, rank: int | None) -> dict[str, Value]:
    """The known attributes of the location."""
    place: dict[str, Value | None] = {"job": job or None, "generation": generation, "node": node or None, "rank": rank}
    return {name: value for name, value in place.items() if value is not None}
