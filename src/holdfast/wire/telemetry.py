"""Telemetry: one agent's tick ↔ `holdfast/v1/telemetry.proto`.

A tick groups its signals by kind, so their order across kinds does not travel; `decode_tick` puts them back in the order of
their times. `data_s`, `stall_s`, `comm_wait_s`, temperature and power travel as 32-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import assert_never

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.signals import (
    CollectorSilent,
    GenerationStarted,
    GenerationStopped,
    GpuHealth,
    GpuSample,
    HostSample,
    KernelLine,
    MaintenanceNotice,
    NicSample,
    NodeSignal,
    RankProgress,
    StepColumns,
    Tick,
    WorkerError,
    WorkerExited,
)
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire import machine, types

_by_time: Callable[[NodeSignal], float] = attrgetter("at")


def encode_tick(tick: Tick, *, goodbye: bool = False, traceparent: str = "") -> pb.Tick:
    """One message per tick. `goodbye`: the agent leaves on purpose, its absence is no fault.

    Raises ValueError for another node's signal, `MalformedMessage` for columns of unequal length.
    """
    message = pb.Tick(
        node=tick.node,
        incarnation=tick.incarnation,
        seq=tick.seq,
        at=tick.at,
        dropped=tick.dropped,
        protocol_version=PROTOCOL_VERSION,
        traceparent=traceparent,
        goodbye=goodbye,
    )
    for signal in tick.signals:
        if signal.node != tick.node:
            raise ValueError(f"a {type(signal).__name__} of node {signal.node!r} in a tick of {tick.node!r}")
        _add(message, signal)
    return message


def decode_tick(message: pb.Tick) -> Tick:
    """Raises `IncompatibleVersion` for an agent of another protocol version and `MalformedMessage` naming the bad field."""
    types.check_protocol(message.protocol_version, f"the agent of node {message.node!r}")
    if not message.node or not message.incarnation:
        raise MalformedMessage("tick", "a node name and an incarnation are required")
    signals = list(_signals(message))
    for signal in signals:
        types.check_time(signal.at, f"{type(signal).__name__}.at")
    return Tick(
        node=message.node,
        incarnation=message.incarnation,
        seq=message.seq,
        at=types.check_time(message.at, "tick.at"),
        signals=tuple(sorted(signals, key=_by_time)),
        dropped=message.dropped,
    )


def _add(tick: pb.Tick, signal: NodeSignal) -> None:
    match signal:
        case GenerationStarted():
            tick.generation_started.append(_encode_started(signal))
        case GenerationStopped():
            tick.generation_stopped.add(
                at=signal.at, job=signal.job, generation=signal.generation, finished=signal.finished
            )
        case StepColumns():
            tick.steps.append(_encode_steps(signal))
        case RankProgress():
            tick.progress.append(_encode_progress(signal))
        case WorkerExited():
            tick.worker_exited.append(_encode_exit(signal))
        case KernelLine():
            tick.kernel_lines.append(machine.encode_line(signal))
        case HostSample():
            tick.host.append(machine.encode_host(signal))
        case GpuSample():
            tick.gpus.append(machine.encode_gpus(signal))
        case GpuHealth():
            tick.gpu_health.append(machine.encode_gpu_health(signal))
        case NicSample():
            tick.nics.append(machine.encode_nics(signal))
        case MaintenanceNotice():
            tick.maintenance.add(at=signal.at, source=signal.source, event=signal.event, starts_at=signal.starts_at)
        case CollectorSilent():
            tick.collectors_silent.add(
                at=signal.at, collector=signal.collector, misses=signal.misses, reason=signal.reason
            )
        case _:
            assert_never(signal)


def _signals(tick: pb.Tick) -> Iterator[NodeSignal]:
    """In the order that breaks ties of time: a stop comes before the exits that it caused."""
    node = tick.node
    for started in tick.generation_started:
        yield _decode_started(node, started)
    for stopped in tick.generation_stopped:
        yield GenerationStopped(node, stopped.at, stopped.job, stopped.generation, finished=stopped.finished)
    for steps in tick.steps:
        yield _decode_steps(node, steps)
    for progress in tick.progress:
        yield _decode_progress(node, progress)
    for exited in tick.worker_exited:
        yield _decode_exit(node, exited)
    for line in tick.kernel_lines:
        yield machine.decode_line(node, line)
    for host in tick.host:
        yield machine.decode_host(node, host)
    for gpus in tick.gpus:
        yield machine.decode_gpus(node, gpus)
    for health in tick.gpu_health:
        yield machine.decode_gpu_health(node, health)
    for nics in tick.nics:
        yield machine.decode_nics(node, nics)
    for notice in tick.maintenance:
        yield machine.decode_notice(node, notice)
    for silent in tick.collectors_silent:
        yield CollectorSilent(
            node=node, at=silent.at, collector=silent.collector, misses=silent.misses, reason=silent.reason
        )


# ---------------------------------------------------------------- generations


def _encode_started(signal: GenerationStarted) -> pb.GenerationStarted:
    return pb.GenerationStarted(
        at=signal.at,
        job=signal.job,
        generation=signal.generation,
        mesh=types.encode_mesh(signal.mesh),
        ranks=signal.ranks,
        hang=types.encode_hang(signal.hang),
    )


def _decode_started(node: str, message: pb.GenerationStarted) -> GenerationStarted:
    if not message.HasField("hang"):
        raise MalformedMessage("generation_started.hang", "missing")
    return GenerationStarted(
        node=node,
        at=message.at,
        job=message.job,
        generation=message.generation,
        mesh=types.decode_mesh(message.mesh, "generation_started.mesh"),
        ranks=tuple(message.ranks),
        hang=types.decode_hang(message.hang),
    )


# ---------------------------------------------------------------- ranks


def _encode_steps(signal: StepColumns) -> pb.StepColumns:
    message = pb.StepColumns(
        at=signal.at,
        job=signal.job,
        generation=signal.generation,
        rank=signal.rank,
        step=signal.step,
        started_at=signal.started_at,
        ended_at=signal.ended_at,
        data_s=signal.data_s,
        stall_s=signal.stall_s,
        tokens=signal.tokens,
        loss=signal.loss,
        grad_norm=signal.grad_norm,
        comm_wait_s=signal.comm_wait_s,
    )
    _check_step_columns(message)
    return message


def _check_step_columns(message: pb.StepColumns) -> None:
    types.check_columns(
        "steps",
        rank=message.rank,
        step=message.step,
        started_at=message.started_at,
        ended_at=message.ended_at,
        data_s=message.data_s,
        stall_s=message.stall_s,
        tokens=message.tokens,
        loss=message.loss,
        grad_norm=message.grad_norm,
        comm_wait_s=message.comm_wait_s or message.rank,  # absent: nobody measured it
    )


def _decode_steps(node: str, message: pb.StepColumns) -> StepColumns:
    _check_step_columns(message)
    return StepColumns(
        node=node,
        at=message.at,
        job=message.job,
        generation=message.generation,
        rank=tuple(message.rank),
        step=tuple(message.step),
        started_at=tuple(message.started_at),
        ended_at=tuple(message.ended_at),
        data_s=tuple(message.data_s),
        stall_s=tuple(message.stall_s),
        tokens=tuple(message.tokens),
        loss=tuple(message.loss),
        grad_norm=tuple(message.grad_norm),
        comm_wait_s=tuple(message.comm_wait_s),
    )


def _encode_progress(signal: RankProgress) -> pb.RankProgress:
    message = pb.RankProgress(
        at=signal.at,
        job=signal.job,
        generation=signal.generation,
        rank=signal.rank,
        step=signal.step,
        phase=[types.PHASE.encode(phase) for phase in signal.phase],
        phase_at=signal.phase_at,
        process_state=signal.process_state,
        cpu_s=signal.cpu_s,
        collective_seq=signal.collective_seq,
    )
    _check_progress_columns(message)
    return message


def _check_progress_columns(message: pb.RankProgress) -> None:
    types.check_columns(
        "progress",
        rank=message.rank,
        step=message.step,
        phase=message.phase,
        phase_at=message.phase_at,
        process_state=message.process_state,
        cpu_s=message.cpu_s,
        collective_seq=message.collective_seq,
    )


def _decode_progress(node: str, message: pb.RankProgress) -> RankProgress:
    _check_progress_columns(message)
    return RankProgress(
        node=node,
        at=message.at,
        job=message.job,
        generation=message.generation,
        rank=tuple(message.rank),
        step=tuple(message.step),
        phase=tuple(types.PHASE.decode(phase, "progress.phase") for phase in message.phase),
        phase_at=tuple(message.phase_at),
        process_state=tuple(message.process_state),
        cpu_s=tuple(message.cpu_s),
        collective_seq=tuple(message.collective_seq),
    )


def _encode_exit(signal: WorkerExited) -> pb.WorkerExited:
    error = signal.error
    return pb.WorkerExited(
        at=signal.at,
        job=signal.job,
        generation=signal.generation,
        rank=signal.rank,
        pid=signal.pid,
        exit_code=signal.exit_code,
        signal=signal.signal,
        step=signal.step,
        expected=signal.expected,
        error=None
        if error is None
        else pb.WorkerError(type=error.type, message=error.message, frames=error.frames, at=error.at),
        log_tail=signal.log_tail,
        traceparent=signal.traceparent,
    )


def _decode_exit(node: str, message: pb.WorkerExited) -> WorkerExited:
    error = None
    if message.HasField("error"):
        error = WorkerError(
            type=message.error.type,
            message=message.error.message,
            frames=tuple(message.error.frames),
            at=types.check_time(message.error.at, "worker_exited.error.at"),
        )
    return WorkerExited(
        node=node,
        at=message.at,
        job=message.job,
        generation=message.generation,
        rank=message.rank,
        pid=message.pid,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        signal=message.signal if message.HasField("signal") else None,
        step=message.step,
        expected=message.expected,
        error=error,
        log_tail=tuple(message.log_tail),
        traceparent=message.traceparent,
    )
