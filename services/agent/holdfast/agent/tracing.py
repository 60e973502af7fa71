"""The agent's spans of an incident's trace: the signals that begin one, and the first steps that end it.

The preparation of a generation is traced in `node.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from holdfast.agent.workers.generation import LocalGeneration
from holdfast.domain import spans
from holdfast.domain.signals import KernelLine, NodeSignal, WorkerExited
from holdfast.runtime import telemetry


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


def stepped(generation: LocalGeneration, at: float) -> None:
    """Record that every rank of this node has finished its first step. `at` is used for scripts that report no steps."""
    if not telemetry.on() or generation.progress is None or generation.started_at is None:
        return
    order = generation.order
    for start in generation.progress.starts():
        for span in spans.of_first_step(
            order.traceparent,
            job=order.job,
            generation=order.generation,
            node=generation.node,
            rank=start.rank,
            start=generation.started_at,
            end=start.first_step_at or at,
            phases_s=start.phases_s,
        ):
            telemetry.write(span)
