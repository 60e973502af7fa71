"""Back-off, the ready file, trace contexts, logs."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.runtime import logs, telemetry
from holdfast.runtime.backoff import Backoff
from holdfast.runtime.ready import announce

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


# ---------------------------------------------------------------- back-off


@given(seed=st.integers(), first_s=st.floats(0.01, 1), factor=st.floats(1, 4))
def test_delays_grow_to_the_limit_within_their_jitter(seed: int, first_s: float, factor: float) -> None:
    backoff = Backoff(first_s=first_s, max_s=5.0, factor=factor, chance=random.Random(seed))
    ceiling_s = first_s
    for _ in range(20):
        assert ceiling_s / 2 <= backoff.next_s() <= ceiling_s
        ceiling_s = min(ceiling_s * factor, 5.0)
    backoff.reset()
    assert backoff.next_s() <= first_s


def test_two_agents_do_not_wait_in_step() -> None:
    assert Backoff(chance=random.Random(1)).next_s() != Backoff(chance=random.Random(2)).next_s()


@pytest.mark.parametrize(("first_s", "max_s", "factor"), [(0, 1, 2), (2, 1, 2), (1, 2, 0.5)])
def test_a_backoff_that_would_not_back_off(first_s: float, max_s: float, factor: float) -> None:
    with pytest.raises(ValueError, match="first_s ≤ max_s"):
        Backoff(first_s=first_s, max_s=max_s, factor=factor)


# ---------------------------------------------------------------- the ready file


def test_the_ready_file_is_whole_and_alone(tmp_path: Path) -> None:
    announce(tmp_path / "ready.json", {"endpoint": "127.0.0.1:1"})
    announce(tmp_path / "ready.json", {"endpoint": "127.0.0.1:2"})
    assert json.loads((tmp_path / "ready.json").read_text()) == {"endpoint": "127.0.0.1:2"}
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_nobody_asked_for_a_ready_file() -> None:
    announce(None, {"endpoint": "127.0.0.1:1"})


# ---------------------------------------------------------------- traces


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def test_a_traceparent_survives_parsing() -> None:
    context = telemetry.parse_traceparent(PARENT)
    assert context is not None
    assert context.traceparent == PARENT
    assert telemetry.trace_id_of(PARENT) == "a" * 32
    assert telemetry.parse_traceparent(telemetry.new_trace().traceparent) is not None


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
    assert telemetry.parse_traceparent(text) is None
    assert telemetry.trace_id_of(text) == ""


def test_spans_hand_on_the_trace_without_opentelemetry() -> None:
    with telemetry.span("decide", PARENT) as outer, telemetry.span("prepare", outer.traceparent) as inner:
        assert outer.trace_id == inner.trace_id == "a" * 32
        assert len({outer.span_id, inner.span_id, "b" * 16}) == 3
    with telemetry.span("detect") as first, telemetry.span("detect") as second:
        assert first.trace_id != second.trace_id


def test_spans_are_exported_below_their_remote_parent(spans: InMemorySpanExporter) -> None:
    with telemetry.span("decide", PARENT, node="n1") as context:
        assert context.trace_id == "a" * 32
    [exported] = spans.get_finished_spans()
    assert exported.parent is not None
    assert f"{exported.parent.span_id:016x}" == "b" * 16
    assert f"{exported.context.span_id:016x}" == context.span_id
    assert dict(exported.attributes or {}) == {"node": "n1"}


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(telemetry.ENV_ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with structlog.testing.capture_logs() as lines:
        telemetry.configure("holdfast-test")
    assert "holdfast[otel]" in lines[0]["reason"]


# ---------------------------------------------------------------- logs


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored_logging")
def test_our_lines_and_the_librarys_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent", form="json")
    structlog.get_logger("holdfast.test").info("restart", node="n1", reason="rank 4 was killed")
    logging.getLogger("uvicorn").warning("slow")
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["service"], ours["level"], ours["node"]) == ("restart", "agent", "info", "n1")
    assert (theirs["event"], theirs["service"], theirs["level"], theirs["logger"]) == (
        "slow",
        "agent",
        "warning",
        "uvicorn",
    )


@pytest.mark.usefixtures("restored_logging")
def test_the_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent", level="error", form="console")
    structlog.get_logger("holdfast.test").info("chatter")
    structlog.get_logger("holdfast.test").error("trouble")
    err = capsys.readouterr().err
    assert "trouble" in err
    assert "chatter" not in err
