"""Traces and metrics. Unless `OTEL_EXPORTER_OTLP_ENDPOINT` or `HOLDFAST_METRICS_LISTEN` is set, they are off: nothing is
imported and nothing is stored.

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
from typing import TYPE_CHECKING, Protocol

import structlog

from holdfast.domain import tracing
from holdfast.domain.distribution import install_command
from holdfast.domain.errors import HoldfastError
from holdfast.domain.tracing import Span, TraceContext, Value
from holdfast.runtime.telling.metrics import Metric

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

ENV_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own names, read here because its SDK reads them too
ENV_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
ENV_METRICS_LISTEN = "HOLDFAST_METRICS_LISTEN"

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


def configure(service: str, metrics_listen: str = "") -> None:
    """Enable export if it is configured: to the Collector of the environment, and to whoever scrapes `metrics_listen`
    (host:port; empty = nobody). Logs a warning if it cannot be enabled: a service works without it."""
    global _sink, _service
    _service = service
    endpoint = os.environ.get(ENV_ENDPOINT, "")
    if endpoint and (protocol := os.environ.get(ENV_PROTOCOL, "grpc")) != "grpc":
        log.warning("telemetry disabled", reason=f"{ENV_PROTOCOL} is {protocol!r}: only grpc is supported")
        endpoint = ""
    if not endpoint and not metrics_listen:
        return
    readers = []
    try:
        from holdfast.runtime.telling.otlp import OtlpSink

        if metrics_listen and (reader := _scraped(metrics_listen)) is not None:
            readers.append(reader)
    except ImportError as error:
        setting = ENV_ENDPOINT if endpoint else ENV_METRICS_LISTEN
        log.warning(
            "telemetry disabled", reason=f"{setting} is set but {error.name} is missing: {install_command('otel')}"
        )
        return
    if endpoint or readers:
        _sink = OtlpSink(service, endpoint, readers)


def _scraped(listen: str) -> MetricReader | None:
    """Serve the metrics. Returns None, and says why, if the address cannot be had."""
    from holdfast.runtime.telling.scraped import serve

    host, _, port = listen.rpartition(":")
    try:
        reader, port_taken = serve(host.strip("[]"), int(port))
    except HoldfastError as error:
        log.warning("metrics are not served", reason=str(error), setting=ENV_METRICS_LISTEN)
        return None
    log.info("metrics are served", url=f"http://{host}:{port_taken}/metrics")
    return reader


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
