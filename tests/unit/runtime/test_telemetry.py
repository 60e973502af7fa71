"""Spans in a process: how they nest, what is not traced, and what the environment asks for in vain."""

from __future__ import annotations

import sys

import pytest
import structlog
from sinks import Kept, keep

from holdfast.domain.tracing import new_trace, parse
from holdfast.runtime.telling import metrics, otlp, telemetry

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return keep(monkeypatch)


# ---------------------------------------------------------------- spans


def test_spans_nest_and_are_written_when_they_end(kept: Kept) -> None:
    with telemetry.span("prepare", PARENT, key=("n1",), node="n1", rank=None) as outer, telemetry.span("stop") as inner:
        assert outer is not None
        assert inner is not None
        assert telemetry.current() == inner
    stop, prepare = kept.spans
    above = parse(PARENT)
    assert above is not None
    assert (prepare.context, prepare.parent) == (above.child("prepare", "n1"), "b" * 16)
    assert (stop.context, stop.parent) == (outer.child("stop"), outer.span_id)
    assert prepare.attributes == {"node": "n1"}
    assert prepare.start <= stop.start <= stop.end <= prepare.end
    assert telemetry.current() is None


def test_a_span_says_why_it_failed(kept: Kept) -> None:
    with pytest.raises(ValueError, match="no room"), telemetry.span("stage", PARENT):
        raise ValueError("no room")
    assert kept.spans[0].error == "no room"


def test_what_belongs_to_no_incident_is_not_traced(kept: Kept) -> None:
    with telemetry.span("prepare", "") as context:
        assert context is None
    assert kept.spans == []


def test_the_context_is_handed_on_while_nothing_collects() -> None:
    assert not telemetry.on()
    with telemetry.span("prepare", PARENT) as context:
        assert context is not None
        assert context.trace_id == "a" * 32


# ---------------------------------------------------------------- what the environment asks for in vain


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(telemetry.ENV_ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.delitem(sys.modules, "holdfast.runtime.telling.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with structlog.testing.capture_logs() as lines:
        telemetry.configure("holdfast-test")
    assert "holdfast-training[otel]" in lines[0]["reason"]
    assert not telemetry.on()


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(telemetry.ENV_ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv(telemetry.ENV_PROTOCOL, "http/protobuf")
    with structlog.testing.capture_logs() as lines:
        telemetry.configure("holdfast-test")
    assert "only grpc" in lines[0]["reason"]
    assert not telemetry.on()


def test_the_return_of_the_collector_is_said() -> None:
    collector = otlp.Collector("http://c:4317")
    with structlog.testing.capture_logs() as lines:
        for answered in (True, False, False, True, True):
            collector.note_result(answered=answered)
    assert [line["event"].split()[2] for line in lines] == ["not", "reachable"]


def test_names_for_prometheus() -> None:
    assert metrics.JOB_TIME.prometheus_name == "holdfast_job_time_seconds"
    assert metrics.TOKEN_RATE.prometheus_name == "holdfast_job_tokens_per_second"
    assert metrics.REPLICATED.prometheus_name == "holdfast_replication_io_bytes_total"
    assert metrics.NODES.prometheus_name == "holdfast_nodes"
    assert new_trace("x") != new_trace("y")
