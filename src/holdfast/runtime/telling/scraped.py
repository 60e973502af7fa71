"""Metrics for Prometheus to scrape: an HTTP server in threads of its own, which answers `GET /metrics`.

Imported only if it is configured, because it imports OpenTelemetry."""

from __future__ import annotations

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.process_collector import ProcessCollector

from holdfast.domain.errors import Conflict


def serve(host: str, port: int) -> tuple[PrometheusMetricReader, int]:
    """Return the reader, whose metrics the server shows from now on, and the port (0 = any free one). CPU time, memory and open
    files of the process are shown as well. Raises `Conflict` if the address cannot be had."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise Conflict(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return PrometheusMetricReader(scope_info_enabled=False, registry=registry), server.server_port
