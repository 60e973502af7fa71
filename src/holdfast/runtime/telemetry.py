"""Traces and metrics, off unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set: then nothing is imported and nothing is kept.

A trace's context travels as a W3C `traceparent`: in stream entries, in orders and signals, in gRPC metadata
(`grpc_tracing`), and inside a process in a context variable. It travels with or without a collector, so that every record and
every log line of an incident can name its trace. Which spans there are, and their ids, is `domain.tracing`'s business; which
metrics, `metrics`'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import structlog

from holdfast.domain import tracing
from holdfast.domain.tracing import Span, TraceContext, Value
from holdfast.runtime.metrics import Metric

ENV_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own names, read here because its SDK reads them too
ENV_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"

Point = tuple[float, Mapping[str, Value]]

log = structlog.get_logger("holdfast.telemetry")


class Sink(Protocol):
    """Where spans and measurements go. Nothing here may block or raise: it is called from event loops."""

    def write(self, span: Span) -> None: ...

    def record(self, metric: Metric, value: float, attributes: Mapping[str, Value]) -> None: ...

    def show(self, metric: Metric, points: Iterable[Point]) -> None: ...

    def observe(self, metric: Metric, read: Callable[[], float], attributes: Mapping[str, Value]) -> None: ...


# Of this process; None = not configured. One per process, as OpenTelemetry's own providers are.
_sink: Sink | None = None
_service = ""
_current: ContextVar[TraceContext | None] = ContextVar("holdfast_trace", default=None)


def configure(service: str) -> None:
    """Turn on export when the environment asks for it; says so in the log when it asks in vain."""
    global _sink, _service
    _service = service
    if not os.environ.get(ENV_ENDPOINT):
        return
    if (protocol := os.environ.get(ENV_PROTOCOL, "grpc")) != "grpc":
        log.warning("telemetry disabled", reason=f"{ENV_PROTOCOL} is {protocol!r}: only grpc is spoken here")
        return
    try:
        from holdfast.runtime.otlp import OtlpSink
    except ImportError as error:
        log.warning(
            "telemetry disabled",
            reason=f"{ENV_ENDPOINT} is set but {error.name} is missing: pip install 'holdfast[otel]'",
        )
        return
    _sink = OtlpSink(service, os.environ[ENV_ENDPOINT])


def on() -> bool:
    """Whether anybody collects: for what is worth computing only then."""
    return _sink is not None


def service() -> str:
    """The name that this process writes its spans under."""
    return _service


# ---------------------------------------------------------------- traces


@contextmanager
def span(
    name: str, parent: str = "", *, key: tuple[object, ...] = (), **attributes: Value | None
) -> Iterator[TraceContext | None]:
    """A span around a block, below the traceparent `parent`, or below the current span when there is none.

    `key` tells it from others of this name below the same parent. Without anything to be below there is no span: what belongs
    to no incident is not traced.
    """
    above = tracing.parse(parent) or _current.get()
    if above is None:
        yield None
        return
    context = above.child(name, *key)
    start, error = time.time(), ""
    token = _current.set(context)
    try:
        yield context
    except BaseException as raised:
        error = str(raised) or type(raised).__name__
        raise
    finally:
        _current.reset(token)
        write(Span(name, _service, context, above.span_id, start, time.time(), _given(attributes), error))


def write(finished: Span | None) -> None:
    """Export a span whose start and end are known; None is what belongs to no trace."""
    if _sink is not None and finished is not None:
        _sink.write(finished)


@contextmanager
def within(traceparent: str) -> Iterator[None]:
    """Make a span of somebody else's the current one: of the caller, for the length of a call."""
    token = _current.set(tracing.parse(traceparent))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> TraceContext | None:
    return _current.get()


# ---------------------------------------------------------------- metrics


def record(metric: Metric, value: float, **attributes: Value | None) -> None:
    """Add to a counter, or count a value in a histogram."""
    if _sink is not None:
        _sink.record(metric, value, _given(attributes))


def show(metric: Metric, points: Iterable[Point]) -> None:
    """What a gauge shows from now on, all of it: a series that is not among `points` ends."""
    if _sink is not None:
        _sink.show(metric, points)


def observe(metric: Metric, read: Callable[[], float], **attributes: Value | None) -> None:
    """A counter that is kept elsewhere: `read` is called in the exporter's thread whenever it exports."""
    if _sink is not None:
        _sink.observe(metric, read, _given(attributes))


def _given(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}
