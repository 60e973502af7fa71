"""Traces and metrics. Unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set, they are off: nothing is imported and nothing is stored.

A trace's context is passed on as a W3C `traceparent`: in stream entries, in orders and signals, in gRPC metadata
(`grpc_tracing`), and inside a process in a context variable. This does not depend on an OpenTelemetry Collector, so that every
record and every log line of an incident can name its trace. `domain.tracing` defines the spans and their ids, `metrics` the
metrics.
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
from holdfast.domain.distribution import install_command
from holdfast.domain.tracing import Span, TraceContext, Value
from holdfast.runtime.metrics import Metric

ENV_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own names, read here because its SDK reads them too
ENV_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"

Point = tuple[float, Mapping[str, Value]]

log = structlog.get_logger("holdfast.telemetry")


class Sink(Protocol):
    """Receives spans and measurements. Methods must not block or raise, because event loops call them."""

    def write(self, span: Span) -> None: ...

    def record(self, metric: Metric, value: float, attributes: Mapping[str, Value]) -> None: ...

    def show(self, metric: Metric, points: Iterable[Point]) -> None: ...

    def observe(self, metric: Metric, read: Callable[[], float], attributes: Mapping[str, Value]) -> None: ...


# Of this process; None = not configured. One per process, as OpenTelemetry's own providers are.
_sink: Sink | None = None
_service = ""
_current: ContextVar[TraceContext | None] = ContextVar("holdfast_trace", default=None)


def configure(service: str) -> None:
    """Enable export if it is configured in the environment. Logs a warning if it cannot be enabled."""
    global _sink, _service
    _service = service
    if not os.environ.get(ENV_ENDPOINT):
        return
    if (protocol := os.environ.get(ENV_PROTOCOL, "grpc")) != "grpc":
        log.warning("telemetry disabled", reason=f"{ENV_PROTOCOL} is {protocol!r}: only grpc is supported")
        return
    try:
        from holdfast.runtime.otlp import OtlpSink
    except ImportError as error:
        log.warning(
            "telemetry disabled",
            reason=f"{ENV_ENDPOINT} is set but {error.name} is missing: {install_command('otel')}",
        )
        return
    _sink = OtlpSink(service, os.environ[ENV_ENDPOINT])


def on() -> bool:
    """Whether export is enabled, for values that are expensive to compute."""
    return _sink is not None


def service() -> str:
    """The service name of this process's spans."""
    return _service


# ---------------------------------------------------------------- traces


@contextmanager
def span(
    name: str, parent: str = "", *, key: tuple[object, ...] = (), **attributes: Value | None
) -> Iterator[TraceContext | None]:
    """A span around a block. Its parent is the traceparent `parent` or, without one, the current span.

    `key` distinguishes spans of the same name below the same parent. Without a parent there is no span, because only incidents
    are traced.
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
    """Export a finished span; None = there is no trace."""
    if _sink is not None and finished is not None:
        _sink.write(finished)


@contextmanager
def within(traceparent: str) -> Iterator[None]:
    """Make a span of another process the current one, such as the caller's span during a call."""
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
    """Set all series of a gauge; a series that is not in `points` ends."""
    if _sink is not None:
        _sink.show(metric, points)


def observe(metric: Metric, read: Callable[[], float], **attributes: Value | None) -> None:
    """Register a counter whose value `read` returns; it is called in the exporter's thread at each export."""
    if _sink is not None:
        _sink.observe(metric, read, _given(attributes))


def _given(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}
