"""A fake OpenTelemetry Collector in this process: receives spans and metrics by OTLP over gRPC and stores them.

    with collecting() as collector:                     # for processes of this machine
    with collecting(host="0.0.0.0") as collector:       # for containers, which use endpoint_at(GATEWAY OF THEIR NETWORK)

For tests and benchmarks. Needs the `otel` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

THREADS = 4


@dataclass(frozen=True, slots=True)
class Received:
    """A span. Ids are hex; the parent of a root is empty; times are Unix seconds."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: str


@dataclass(slots=True)
class FakeCollector:
    """`endpoint` is the value for OTEL_EXPORTER_OTLP_ENDPOINT. `metrics` contains the latest points, name → attributes →
    value."""

    host: str
    port: int = 0
    spans: list[Received] = field(default_factory=list)
    metrics: dict[str, dict[tuple[tuple[str, Any], ...], float]] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return self.endpoint_at(self.host)

    def endpoint_at(self, host: str) -> str:
        """Return the endpoint for clients that reach this machine at `host`."""
        return f"http://{host}:{self.port}"

    def trace(self, trace_id: str) -> list[Received]:
        """Return the spans received of one trace, in order of arrival."""
        return [span for span in tuple(self.spans) if span.trace_id == trace_id]


@contextmanager
def collecting(host: str = "127.0.0.1") -> Iterator[FakeCollector]:
    """Run a collector on a free port of `host`."""
    collector = FakeCollector(host)
    server = grpc.server(ThreadPoolExecutor(THREADS), options=(("grpc.so_reuseport", 0),))
    trace_grpc.add_TraceServiceServicer_to_server(_Traces(collector), server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(collector), server)  # type: ignore[no-untyped-call]
    collector.port = server.add_insecure_port(f"{host}:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, collector: FakeCollector) -> None:
        self._collector = collector

    def Export(  # noqa: N802
        self, request: trace_pb.ExportTraceServiceRequest, context: object
    ) -> trace_pb.ExportTraceServiceResponse:
        for of_process in request.resource_spans:
            service = _attributes(of_process.resource.attributes)["service.name"]
            for scope in of_process.scope_spans:
                self._collector.spans.extend(_span(span, service) for span in scope.spans)
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, collector: FakeCollector) -> None:
        self._collector = collector

    def Export(  # noqa: N802
        self, request: metrics_pb.ExportMetricsServiceRequest, context: object
    ) -> metrics_pb.ExportMetricsServiceResponse:
        for of_process in request.resource_metrics:
            for scope in of_process.scope_metrics:
                for metric in scope.metrics:
                    self._take(metric)
        return metrics_pb.ExportMetricsServiceResponse()

    def _take(self, metric: Any) -> None:
        series = self._collector.metrics.setdefault(metric.name, {})
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            value = point.count if kind == "histogram" else getattr(point, point.WhichOneof("value"))
            series[tuple(sorted(_attributes(point.attributes).items()))] = float(value)


def _span(span: Any, service: str) -> Received:
    return Received(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        error=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
