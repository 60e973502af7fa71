"""Export of traces and metrics by OTLP over gRPC, and of metrics to whoever scrapes them (`scraped`). These two modules are the
only ones that import OpenTelemetry, and only imported when it is configured.

Exports run in the SDK's own threads. A Collector that does not answer costs a bounded queue and one line in the log.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.tracing import ATTRIBUTE_PREFIX, Span, TraceContext, Value
from holdfast.runtime.telling.metrics import Metric

SCOPE = "holdfast"
EXPORT_TIMEOUT_S = 2  # including retries; an unavailable Collector must not delay the stop of a service
SPANS_EVERY_MS = 1_000
METRICS_EVERY_MS = 10_000
ENV_METRICS_EVERY_MS = "OTEL_METRIC_EXPORT_INTERVAL"
SPANS_WAITING_MAX = 2_048

log = structlog.get_logger("holdfast.telemetry")


class OtlpSink:
    """A `telemetry.Sink`. Data that is unsent at the end of the process is sent then, for at most `EXPORT_TIMEOUT_S`."""

    def __init__(self, service: str, endpoint: str, readers: Iterable[MetricReader] = ()) -> None:
        """`endpoint`: of a Collector; empty = none, and no traces. `readers`: others that take the metrics."""
        # The SDK logs an unavailable Collector with every batch; this module logs it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.name": service,
                "service.version": version(DISTRIBUTION),
                "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            }
        )
        self._ids = _GivenIds()
        self._tracer: trace.Tracer | None = None
        readers = list(readers)
        if endpoint:
            collector = Collector(endpoint)
            provider = TracerProvider(resource=resource, id_generator=self._ids)
            provider.add_span_processor(
                BatchSpanProcessor(
                    _SpanExporter(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S), collector),
                    max_queue_size=SPANS_WAITING_MAX,
                    schedule_delay_millis=SPANS_EVERY_MS,
                )
            )
            self._tracer = provider.get_tracer(SCOPE)
            readers.append(
                PeriodicExportingMetricReader(
                    _MetricExporter(collector),
                    export_interval_millis=float(os.environ.get(ENV_METRICS_EVERY_MS) or METRICS_EVERY_MS),
                    export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
                )
            )
        self._meter = MeterProvider(readers, resource).get_meter(SCOPE)
        self._shown: dict[str, list[Observation]] = {}
        self._instruments: dict[str, Any] = {}  # by metric, made when first used
        self._observed: dict[str, list[tuple[Callable[[], float], dict[str, Value]]]] = {}

    # ------------------------------------------------------------------ traces

    def write(self, span: Span) -> None:
        if self._tracer is None:
            return
        with self._ids.being(span.context):
            exported = self._tracer.start_span(
                span.name,
                context=_above(span),
                attributes=_prefixed(span.attributes),
                start_time=_nanoseconds(span.start),
            )
        if span.error:
            exported.set_status(trace.StatusCode.ERROR, span.error)
        exported.end(_nanoseconds(max(span.start, span.end)))  # clocks of two machines may disagree

    # ------------------------------------------------------------------ metrics

    def record(self, metric: Metric, value: float, attributes: Mapping[str, Value]) -> None:
        instrument = self._instruments.get(metric.name)
        if instrument is None:
            instrument = self._instruments[metric.name] = self._instrument(metric)
        if metric.kind == "counter":
            instrument.add(value, _prefixed(attributes))
        else:
            instrument.record(value, _prefixed(attributes))

    def show(self, metric: Metric, points: Iterable[tuple[float, Mapping[str, Value]]]) -> None:
        first = metric.name not in self._shown
        self._shown[metric.name] = [Observation(value, _prefixed(attributes)) for value, attributes in points]
        if first:
            self._meter.create_observable_gauge(
                metric.name, [lambda _: self._shown[metric.name]], metric.unit, metric.meaning
            )

    def observe(self, metric: Metric, read: Callable[[], float], attributes: Mapping[str, Value]) -> None:
        readers = self._observed.setdefault(metric.name, [])
        readers.append((read, _prefixed(attributes)))
        if len(readers) == 1:
            self._meter.create_observable_counter(
                metric.name,
                [lambda _: [Observation(read(), attributes) for read, attributes in list(readers)]],
                metric.unit,
                metric.meaning,
            )

    def _instrument(self, metric: Metric) -> Any:
        if metric.kind == "counter":
            return self._meter.create_counter(metric.name, metric.unit, metric.meaning)
        return self._meter.create_histogram(
            metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
        )


class Collector:
    """Records whether exports reach the Collector, and logs each change."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._answers = True

    def note_result(self, *, answered: bool) -> None:
        if answered == self._answers:
            return
        self._answers = answered
        if answered:
            log.info("OpenTelemetry Collector reachable again", endpoint=self._endpoint)
        else:
            log.warning(
                "OpenTelemetry Collector not reachable: traces and metrics dropped",
                endpoint=self._endpoint,
            )


class _SpanExporter(SpanExporter):
    def __init__(self, exporter: OTLPSpanExporter, collector: Collector) -> None:
        self._exporter = exporter
        self._collector = collector

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self._collector.note_result(answered=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _MetricExporter(OTLPMetricExporter):
    """Derived, not wrapped, because the reader uses more of its exporter than the interface."""

    def __init__(self, collector: Collector) -> None:
        super().__init__(timeout=EXPORT_TIMEOUT_S)
        self._holdfast_collector = collector

    def export(self, *arguments: Any, **options: Any) -> MetricExportResult:
        result = super().export(*arguments, **options)
        self._holdfast_collector.note_result(answered=result is MetricExportResult.SUCCESS)
        return result


class _GivenIds(IdGenerator):
    """Assigns given ids to spans, because ids are known before a span is exported, also to other processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context = TraceContext("", "")

    @contextmanager
    def being(self, context: TraceContext) -> Iterator[None]:
        """Set the ids of the next span."""
        with self._lock:
            self._context = context
            yield

    def generate_span_id(self) -> int:
        return int(self._context.span_id, 16)

    def generate_trace_id(self) -> int:
        return int(self._context.trace_id, 16)


def _above(span: Span) -> Context:
    if not span.parent:
        return Context()
    flags = trace.TraceFlags.SAMPLED if span.context.sampled else trace.TraceFlags.DEFAULT
    parent = trace.SpanContext(
        trace_id=int(span.context.trace_id, 16),
        span_id=int(span.parent, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(flags),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {ATTRIBUTE_PREFIX + name: value for name, value in attributes.items()}


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
