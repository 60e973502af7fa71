"""The spans of first steps, which end the trace of an incident."""

from __future__ import annotations

from holdfast.agent.workers.generation import LocalGeneration
from holdfast.domain import spans
from holdfast.runtime.telling import telemetry


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
