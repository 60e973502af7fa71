"""The agent's spans of an incident's trace: the signals that begin one. `node.py` traces the preparation of a generation, and
`workers/tracing.py` the first steps."""

from __future__ import annotations

import time
from dataclasses import replace

from holdfast.domain import spans
from holdfast.domain.signals import KernelLine, NodeSignal, WorkerExited
from holdfast.runtime.telling import telemetry


def begun(signal: NodeSignal) -> NodeSignal:
    """Return the signal to send. A signal of a fault begins a trace, which all later spans of the incident join."""
    match signal:
        case WorkerExited(expected=False) if signal.signal is not None or signal.exit_code != 0:
            traced: WorkerExited | KernelLine = replace(signal, traceparent=spans.trace_of_signal(signal))
        case KernelLine():
            traced = replace(signal, traceparent=spans.trace_of_signal(signal))
        case _:
            return signal
    telemetry.write(spans.of_signal(traced, time.time()))
    return traced
