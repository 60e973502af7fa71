"""Traces: one per incident, from the signal to the first new step, across all four services.

A trace's context travels as a W3C `traceparent` string inside messages and stream entries, with or without OpenTelemetry.
Spans are exported by OTLP only when `OTEL_EXPORTER_OTLP_ENDPOINT` is set and the `otel` extra is installed; otherwise `span`
costs a few microseconds and still hands on the context, so that every record can name its trace.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

ENV_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own name, read here because its SDK reads it too
SCOPE = "holdfast"
EXPORT_TIMEOUT_S = 2  # retries included; a collector that is away must not hold up a service that was told to stop

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)
log = structlog.get_logger("holdfast.telemetry")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where in which trace: 32 and 16 lower-case hex digits."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """A new span in the same trace."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled)


def new_trace() -> TraceContext:
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8))


def parse_traceparent(text: str) -> TraceContext | None:
    """None for anything that is not a valid W3C traceparent: a broken trace must not break an incident."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or text.startswith("ff") or (text.startswith("00") and len(text) != 55):
        return None
    trace_id, span_id, flags = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1))


def trace_id_of(traceparent: str) -> str:
    """The trace id, or an empty string when there is none."""
    context = parse_traceparent(traceparent)
    return context.trace_id if context else ""


@contextmanager
def span(name: str, parent: str = "", **attributes: str | int | float | bool) -> Iterator[TraceContext]:
    """A span below `parent` (a traceparent; empty or invalid = a new trace). Hand on the result's `.traceparent`."""
    above = parse_traceparent(parent)
    if _tracer is None:
        yield above.child() if above else new_trace()
        return
    from opentelemetry import trace

    with _tracer.start_as_current_span(name, context=_otel_context(above), attributes=attributes) as current:
        context: trace.SpanContext = current.get_span_context()
        yield TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", sampled=context.trace_flags.sampled)


# The tracer of this process; None = not configured. One per process, as OpenTelemetry's own provider is.
_tracer: Any = None


def configure(service: str) -> None:
    """Turn on export when the environment asks for it; says so in the log when it asks in vain."""
    global _tracer
    if not os.environ.get(ENV_ENDPOINT):
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "traces not exported",
            reason=f"{ENV_ENDPOINT} is set but {error.name} is missing: pip install 'holdfast[otel]'",
        )
        return
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)))
    _tracer = provider.get_tracer(SCOPE)


def _otel_context(above: TraceContext | None) -> Any:
    from opentelemetry import trace
    from opentelemetry.context import Context

    if above is None:
        return Context()
    parent = trace.SpanContext(
        trace_id=int(above.trace_id, 16),
        span_id=int(above.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if above.sampled else trace.TraceFlags.DEFAULT),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
