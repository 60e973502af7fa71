"""The node's GPUs as metrics: duty cycle, temperature, power and memory, from the newest signals."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.domain.signals import GpuHealth, GpuSample, NodeSignal
from holdfast.runtime.telling import metrics, telemetry
from holdfast.runtime.telling.telemetry import Point

NOT_KNOWN = -1


class GpuMeters:
    def watch(self, signal: NodeSignal) -> None:
        if not telemetry.on():
            return
        match signal:
            case GpuSample(node=node, gpu=gpus, lost=lost):
                there = [not gone for gone in lost]
                telemetry.show(metrics.GPU_TEMPERATURE, _points(node, gpus, signal.temperature_c, there))
                telemetry.show(metrics.GPU_POWER, _points(node, gpus, signal.power_w, there))
                telemetry.show(metrics.GPU_MEMORY, _points(node, gpus, signal.memory_used, there))
            case GpuHealth(node=node, gpu=gpus, utilization=utilization):
                known = [share != NOT_KNOWN for share in utilization]
                telemetry.show(metrics.GPU_UTILIZATION, _points(node, gpus, utilization, known))
            case _:
                pass


def _points(node: str, gpus: Sequence[int], values: Sequence[float], there: Sequence[bool]) -> list[Point]:
    """Return the points of GPUs with a known value. Other GPUs have no series, because a zero would look like an idle GPU."""
    return [(value, {"node": node, "gpu": gpu}) for gpu, value, known in zip(gpus, values, there, strict=True) if known]
