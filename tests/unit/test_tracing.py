"""Spans from records: their ids, who is below whom, and that the record's trace and the services' agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.domain import spans, tracing
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState, NodeTiming
from holdfast.domain.signals import KernelLine, WorkerExited
from holdfast.domain.tracing import Span

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
EXIT = WorkerExited("n2", 100.0, "gpt", 3, 4, 4711, None, 9, 50, expected=False)


def finding_of(signal: WorkerExited) -> Finding:
    """As diagnostics publishes it: with its own place in the signal's trace."""
    context = tracing.parse(signal.traceparent)
    assert context is not None
    return Finding(
        id="worker:gpt:3:4",
        kind=FindingKind.WORKER_CRASH,
        severity=Severity.ERROR,
        at=100.2,
        since=100.0,
        summary="rank 4 was killed",
        node="n2",
        job="gpt",
        generation=3,
        rank=4,
        evidence={tracing.SIGNAL: signal.traceparent},
        traceparent=context.child(tracing.FINDING, "worker:gpt:3:4").traceparent,
    )


def incident_of(finding: Finding) -> Incident:
    """As the supervisor closes it."""
    return Incident(
        id="i-1",
        job="gpt",
        kind=finding.kind,
        cause=finding.summary,
        state=IncidentState.RESOLVED,
        generation=3,
        node="n2",
        rank=4,
        action=Action(ActionKind.RESTART, "a crash is cured by a restart"),
        decided_by="default policy",
        new_generation=4,
        fault_at=100.0,
        detected_at=100.2,
        decided_at=100.3,
        prepared_at=100.5,
        first_step_at=101.0,
        restored_step=48,
        trace_id=tracing.trace_id_of(finding.traceparent),
        evidence={**finding.evidence, tracing.TRACEPARENT: finding.traceparent},
        outcome="generation 4 steps",
        shares=(
            NodeTiming("n2", 100.5, (), {"stop": 0.05, "fork": 0.08, "stage": 0.1}, {"memory": 2}),
            NodeTiming("n2", 101.0, (4, 5), {"first_step": 0.1, "process_group": 0.2, "restore": 0.1}),
        ),
    )


def traced(signal: WorkerExited) -> WorkerExited:
    return replace(signal, traceparent=spans.trace_of_signal(signal))


def by_name(found: tuple[Span, ...]) -> dict[str, list[Span]]:
    names: dict[str, list[Span]] = {}
    for span in found:
        names.setdefault(span.name, []).append(span)
    return names


def test_a_traceparent_survives_parsing() -> None:
    context = tracing.parse(PARENT)
    assert context is not None
    assert context.traceparent == PARENT
    assert tracing.trace_id_of(PARENT) == "a" * 32
    assert tracing.parse(tracing.new_trace("x").traceparent) == tracing.new_trace("x")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT.replace("a", "0"),
        PARENT.replace("b", "0"),
    ],
)
def test_a_broken_traceparent_is_no_parent(text: str) -> None:
    assert tracing.parse(text) is None
    assert tracing.trace_id_of(text) == ""
    assert tracing.below(text, "x") == ""


def test_ids_are_derived_and_differ_by_name_and_key() -> None:
    context = tracing.new_trace("seed")
    children = [context.child("prepare", "n1", 4), context.child("prepare", "n2", 4), context.child("prepare", "n1", 5)]
    assert len({child.span_id for child in children}) == 3
    assert {child.trace_id for child in children} == {context.trace_id}
    assert context.child("prepare", "n1", 4) == children[0]
    assert spans.trace_of_signal(EXIT) == spans.trace_of_signal(EXIT)
    assert spans.trace_of_signal(EXIT) != spans.trace_of_signal(replace(EXIT, rank=5))
    line = KernelLine("n2", 100.0, "NVRM: Xid 79")
    assert spans.trace_of_signal(line) != spans.trace_of_signal(replace(line, at=101.0))


def test_the_record_tells_the_whole_chain() -> None:
    incident = incident_of(finding_of(traced(EXIT)))
    found = spans.of_trace(incident)
    names = by_name(found)
    [signal], [finding], [own] = names["signal"], names["finding"], names["incident"]
    [decision], [change], [prepare] = names["decision"], names["generation change"], names["prepare"]
    assert (signal.parent, finding.parent, own.parent) == ("", signal.context.span_id, finding.context.span_id)
    assert decision.parent == change.parent == own.context.span_id
    assert prepare.parent == change.context.span_id
    assert {span.parent for name in ("stop", "fork", "stage") for span in names[name]} == {prepare.context.span_id}
    firsts = names["first step"]
    assert [(span.attributes["rank"], span.parent) for span in firsts] == [
        (4, change.context.span_id),
        (5, change.context.span_id),
    ]
    assert {span.parent for span in names["process group"]} == {span.context.span_id for span in firsts}
    assert {span.context.trace_id for span in found} == {incident.trace_id}
    assert len({span.context.span_id for span in found}) == len(found)
    assert names["process group"][0].start < names["restore"][0].start < names["step"][0].start
    assert (change.start, change.end) == (100.3, 101.0)
    assert prepare.start == pytest.approx(100.35)
    assert decision.attributes["reason"] == "a crash is cured by a restart"
    assert all(span.attributes["job"] == "gpt" for span in found)


def test_what_the_services_write_has_the_ids_of_the_record() -> None:
    signal = traced(EXIT)
    finding = finding_of(signal)
    incident = incident_of(finding)
    names = by_name(spans.of_trace(incident))
    written = [spans.of_signal(signal, 100.01), spans.of_finding(finding), *spans.of_incident(incident)]
    steps = spans.of_first_step(
        spans.change_below(incident), job="gpt", generation=4, node="n2", rank=4, start=100.5, end=101.0, phases_s=()
    )
    for span, name in zip(
        [*written, *steps],
        ["signal", "finding", "incident", "decision", "generation change", "first step"],
        strict=True,
    ):
        assert span is not None
        assert (span.context, span.parent) == (names[name][0].context, names[name][0].parent), name


def test_a_fault_without_a_signal_begins_with_its_finding() -> None:
    finding = replace(finding_of(traced(EXIT)), evidence={}, traceparent=tracing.new_trace("node lost").traceparent)
    names = by_name(spans.of_trace(incident_of(finding)))
    assert "signal" not in names
    assert names["finding"][0].parent == ""


def test_a_better_root_does_not_change_the_trace() -> None:
    """A lost node that supersedes the crash which it caused brings the signal of another trace along."""
    incident = incident_of(finding_of(traced(EXIT)))
    other = spans.trace_of_signal(replace(EXIT, rank=7))
    names = by_name(spans.of_trace(replace(incident, evidence={**incident.evidence, tracing.SIGNAL: other})))
    assert "signal" not in names
    assert names["finding"][0].context.trace_id == incident.trace_id


def test_a_planned_change_begins_its_own_trace() -> None:
    incident = replace(incident_of(finding_of(traced(EXIT))), kind="repair", evidence={}, trace_id="c" * 32)
    found = spans.of_trace(incident)
    assert {span.context.trace_id for span in found} == {"c" * 32}
    assert [span.name for span in found if not span.parent] == ["incident"]


def test_an_open_incident_shows_what_is_known() -> None:
    incident = incident_of(finding_of(traced(EXIT)))
    unknown: dict[str, Any] = {
        "action": None,
        "new_generation": None,
        "decided_at": None,
        "prepared_at": None,
        "first_step_at": None,
    }
    found = spans.of_trace(replace(incident, state=IncidentState.OPEN, shares=(), **unknown))
    assert [span.name for span in found] == ["signal", "finding", "incident"]


def test_what_has_no_trace_has_no_spans() -> None:
    incident = replace(incident_of(finding_of(traced(EXIT))), trace_id="", evidence={})
    assert spans.of_trace(incident) == ()
    assert spans.change_below(incident) == ""
    assert spans.of_signal(EXIT, 1.0) is None
    assert spans.of_finding(replace(finding_of(traced(EXIT)), traceparent="garbage")) is None
