"""A telemetry sink that keeps everything, in place of a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.domain.tracing import Span, Value
from holdfast.runtime.telling import telemetry
from holdfast.runtime.telling.metrics import Metric
from holdfast.runtime.telling.telemetry import Point


@dataclass(slots=True)
class Kept:
    """`recorded` is (metric, value, attributes); `shown` is metric → the last attribute of a series → value."""

    spans: list[Span] = field(default_factory=list)
    recorded: list[tuple[str, float, dict[str, Value]]] = field(default_factory=list)
    shown: dict[str, dict[Any, float]] = field(default_factory=dict)

    def write(self, span: Span) -> None:
        self.spans.append(span)

    def record(self, metric: Metric, value: float, attributes: Mapping[str, Value]) -> None:
        self.recorded.append((metric.name, value, dict(attributes)))

    def show(self, metric: Metric, points: Iterable[Point]) -> None:
        self.shown[metric.name] = {("", *attributes.values())[-1]: value for value, attributes in points}

    def observe(self, metric: Metric, read: Callable[[], float], attributes: Mapping[str, Value]) -> None:
        self.recorded.append((metric.name, read(), dict(attributes)))


def keep(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Telemetry is on, for this test."""
    sink = Kept()
    monkeypatch.setattr(telemetry, "_sink", sink)
    monkeypatch.setattr(telemetry, "_service", "holdfast-test")
    return sink
