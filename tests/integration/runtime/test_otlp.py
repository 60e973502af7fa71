"""OTLP over the wire: spans arrive under the ids they were given, a collector that is away is said once, off costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.tracing import parse
from holdfast.runtime.telling import otlp, telemetry
from holdfast.runtime.telling.fake_collector import FakeCollector, collecting

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCollector]:
    with collecting() as collector:
        monkeypatch.setenv(telemetry.ENV_ENDPOINT, collector.endpoint)
        monkeypatch.setenv(otlp.ENV_METRICS_EVERY_MS, "50")
        yield collector


def test_nothing_is_imported_while_off() -> None:
    code = (
        "import sys; from holdfast.runtime.telling import telemetry; telemetry.configure('holdfast-test');"
        "assert not telemetry.on(); sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_spans_and_metrics_arrive(collector: FakeCollector) -> None:
    """In a process of its own: OpenTelemetry's threads belong to a process for its whole life."""
    code = """
from holdfast.domain.tracing import Span, TraceContext
from holdfast.runtime.telling import metrics, telemetry
telemetry.configure("holdfast-test")
assert telemetry.on()
root = TraceContext("a" * 32, "b" * 16)
telemetry.write(Span("incident", "holdfast-test", root, "", 100.0, 101.5, {"job": "gpt"}))
telemetry.write(Span("decision", "holdfast-test", root.child("decision"), root.span_id, 101.0, 100.5, {}, "it was late"))
telemetry.record(metrics.INCIDENTS, 1, job="gpt", kind="hang", action="restart")
telemetry.record(metrics.INCIDENTS, 1, job="gpt", kind="hang", action="restart")
telemetry.record(metrics.RECOVERY, 0.3, phase="total")
telemetry.observe(metrics.TELEMETRY_DROPPED, lambda: 7, what="signals")
telemetry.show(metrics.WORLD_SIZE, [(9, {"job": "gpt"}), (2, {"job": "other"})])
input()
telemetry.show(metrics.WORLD_SIZE, [(6, {"job": "gpt"})])
print("shown", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: len(collector.metrics) == 4, description="metrics")
        assert collector.metrics["holdfast.job.world_size"] == {
            (("holdfast.job", "gpt"),): 9,
            (("holdfast.job", "other"),): 2,
        }
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "shown\n"

        def ended() -> bool:
            """An export that had begun before the change may still bring the series; the next one does not."""
            collector.metrics.clear()
            wait_until(lambda: "holdfast.job.world_size" in collector.metrics, description="another export")
            return len(collector.metrics["holdfast.job.world_size"]) == 1

        wait_until(ended, description="the end of a series")
        process.communicate("\n", timeout=TIMEOUT_S)
    assert process.returncode == 0
    incident, decision = sorted(collector.spans, key=lambda span: span.name, reverse=True)
    assert (incident.trace_id, incident.span_id, incident.parent_id) == ("a" * 32, "b" * 16, "")
    assert (incident.service, incident.attributes) == ("holdfast-test", {"holdfast.job": "gpt"})
    assert incident.end - incident.start == pytest.approx(1.5)
    assert (decision.trace_id, decision.parent_id) == ("a" * 32, "b" * 16)
    assert decision.span_id == parse_child()
    assert decision.error == "it was late"
    assert decision.end == decision.start, "clocks may disagree; time does not run backwards"
    assert collector.metrics["holdfast.job.world_size"] == {(("holdfast.job", "gpt"),): 6}, "a series can end"
    [(attributes, count)] = collector.metrics["holdfast.incidents"].items()
    assert (dict(attributes)["holdfast.kind"], count) == ("hang", 2)
    assert list(collector.metrics["holdfast.telemetry.dropped"].values()) == [7]


def parse_child() -> str:
    context = parse(PARENT)
    assert context is not None
    return context.child("decision").span_id


def test_a_collector_that_is_away_is_said_once_and_costs_nothing() -> None:
    code = """
import time
from holdfast.domain.tracing import Span, new_trace
from holdfast.runtime.telling import logs, otlp, telemetry
note_result, failures = otlp.Collector.note_result, []
def noted(self, *, answered):
    note_result(self, answered=answered)
    failures.append(not answered)
otlp.Collector.note_result = noted
otlp.EXPORT_TIMEOUT_S = 0.2
logs.configure("test", form="json")
telemetry.configure("holdfast-test")
began = time.monotonic()
for number in range(5000):
    telemetry.write(Span("incident", "holdfast-test", new_trace(str(number)), "", 1.0, 2.0))
assert time.monotonic() - began < 30  # each that waited for the collector would take 0.2 s
while len(failures) < 5:  # spans and metrics, again and again
    time.sleep(0.01)
assert all(failures)
"""
    environment = {**os.environ, telemetry.ENV_ENDPOINT: "http://127.0.0.1:9", otlp.ENV_METRICS_EVERY_MS: "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert "not reachable" in line
    assert "http://127.0.0.1:9" in line
