"""Telemetry: one agent's tick ↔ `holdfast/v1/telemetry.proto`.

A tick groups its signals by kind, so it does not contain their order across kinds; `decode_tick` sorts them by their times.
`data_s`, `stall_s`, `comm_wait_s`, temperature and power are 32-bit floats; -1 means unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from operator import attrgetter
from typing import Any, get_args

from holdfast.domain.collectives import CollectiveRows, StallSnapshot, check_members
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.signals import (
    RELIABLE,
    CheckpointTrouble,
    CollectorSilent,
    GenerationStarted,
    GenerationStopped,
    GpuHealth,
    GpuSample,
    HealthChecks,
    HostSample,
    KernelEvent,
    KernelLine,
    MaintenanceNotice,
    Measurements,
    NicSample,
    NodeSignal,
    NodeTested,
    ObservedSteps,
    RankProgress,
    ReplicaChecks,
    StepColumns,
    Tick,
    Verdict,
    WorkerError,
    WorkerExited,
)
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire import checks, types  # noqa: F401  # with the codecs of parts
from holdfast.wire.derived import Codec, Through, check_time

_EVENTS = {event.value: event for event in KernelEvent}
_by_time: Callable[[NodeSignal], float] = attrgetter("at")

# ---------------------------------------------------------------- parts that are not plain values


def _decode_event(event: str) -> KernelEvent:
    """Return the event; `OTHER` for an unknown one, whose text may still be useful."""
    return _EVENTS.get(event, KernelEvent.OTHER)


_ERROR = Codec(WorkerError, pb.WorkerError, "worker_exited.error", times=["at"])
_VERDICTS = types.EnumCodec(Verdict, pb.Verdict, "VERDICT_")
_VERDICT = Through(_VERDICTS.encode_all, partial(_VERDICTS.decode_all, field="health_checks.verdict"))


def _check_members(members: tuple[str, ...]) -> tuple[str, ...]:
    try:
        check_members(set(members))
    except ValueError as error:
        raise MalformedMessage("standstills.rows.members", str(error)) from error
    return members


_ROWS = Codec(
    CollectiveRows,
    pb.CollectiveRows,
    "standstills.rows",
    columns=True,
    through={"members": Through(tuple, _check_members)},
)

# ---------------------------------------------------------------- one line per signal


def _codec(domain: type[NodeSignal], message: type[Any], field: str, **options: Any) -> Codec[Any, Any]:
    return Codec(domain, message, field, apart=("node",), **options)  # the node is a field of the tick


_CODECS = (
    _codec(GenerationStarted, pb.GenerationStarted, "generation_started"),
    _codec(GenerationStopped, pb.GenerationStopped, "generation_stopped"),
    _codec(StepColumns, pb.StepColumns, "steps", columns=True),
    _codec(
        RankProgress,
        pb.RankProgress,
        "progress",
        columns=True,
        through={"phase": Through(types.PHASE.encode_all, partial(types.PHASE.decode_all, field="progress.phase"))},
    ),
    _codec(WorkerExited, pb.WorkerExited, "worker_exited"),
    _codec(KernelLine, pb.KernelLine, "kernel_lines", through={"event": Through(str, _decode_event)}),
    _codec(
        HostSample,
        pb.HostSample,
        "host",
        renamed={"memory_used": "memory_used_bytes", "memory_total": "memory_total_bytes"},
    ),
    _codec(GpuSample, pb.GpuSample, "gpus", columns=True, renamed={"memory_used": "memory_used_bytes"}),
    _codec(CollectorSilent, pb.CollectorSilent, "collectors_silent"),
    _codec(GpuHealth, pb.GpuHealth, "gpu_health", columns=True),
    _codec(NicSample, pb.NicSample, "nics", columns=True),
    _codec(HealthChecks, pb.HealthChecks, "health_checks", columns=True, through={"verdict": _VERDICT}),
    _codec(Measurements, pb.Measurements, "measurements", columns=True),
    _codec(MaintenanceNotice, pb.MaintenanceNotice, "maintenance", times=["starts_at"]),
    _codec(CheckpointTrouble, pb.CheckpointTrouble, "checkpoint_troubles"),
    _codec(ReplicaChecks, pb.ReplicaChecks, "replica_checks", columns=True, renamed={"duration_s": "took_s"}),
    _codec(ObservedSteps, pb.ObservedSteps, "observed_steps", columns=True),
    _codec(StallSnapshot, pb.Standstill, "standstills", columns=True),
    _codec(NodeTested, pb.NodeTested, "node_tested"),
)
_BY_FIELD: Mapping[str, Codec[Any, Any]] = {codec.label: codec for codec in _CODECS}
_BY_TYPE: Mapping[type, Codec[Any, Any]] = {codec.domain: codec for codec in _CODECS}
if _BY_TYPE.keys() != set(get_args(NodeSignal)):
    raise TypeError(f"signals without a codec: {set(get_args(NodeSignal)) ^ _BY_TYPE.keys()}")
_RELIABLE_FIELDS = tuple(_BY_TYPE[kind].label for kind in RELIABLE)
_DROPPABLE_FIELDS = tuple(field for field in _BY_FIELD if field not in _RELIABLE_FIELDS)


def encode_tick(tick: Tick, *, goodbye: bool = False, wants_ack: bool = False) -> pb.Tick:
    """Encode a tick as one message. `goodbye`: the agent leaves intentionally, so its absence is not a fault.

    Raises ValueError for another node's signal, `MalformedMessage` for columns of unequal length.
    """
    message = pb.Tick(
        node=tick.node,
        incarnation=tick.incarnation,
        seq=tick.seq,
        at=tick.at,
        dropped=tick.dropped,
        protocol_version=PROTOCOL_VERSION,
        goodbye=goodbye,
        wants_ack=wants_ack,
    )
    for signal in tick.signals:
        if signal.node != tick.node:
            raise ValueError(f"a {type(signal).__name__} of node {signal.node!r} in a tick of {tick.node!r}")
        codec = _BY_TYPE[type(signal)]
        getattr(message, codec.label).append(codec.encode(signal))
    return message


def decode_tick(message: pb.Tick) -> Tick:
    """Decode a tick. Raises `IncompatibleVersion` for an agent of another protocol version, and `MalformedMessage` that names
    the wrong field.

    Signals of equal time are in the order of their fields, so that a stop precedes the exits that it caused.
    """
    node = message.node
    if message.protocol_version != PROTOCOL_VERSION:
        types.check_protocol(message.protocol_version, f"the agent of node {node!r}")
    if not node or not message.incarnation:
        raise MalformedMessage("tick", "a node name and an incarnation are required")
    signals: list[NodeSignal] = [
        codec.decode(part, node)
        for field, parts in message.ListFields()  # the fields that are set, in the order of their numbers
        if (codec := _BY_FIELD.get(field.name)) is not None
        for part in parts
    ]
    for signal in signals:
        if not isfinite(signal.at):
            check_time(signal.at, f"{type(signal).__name__}.at")
    return Tick(
        node=node,
        incarnation=message.incarnation,
        seq=message.seq,
        at=check_time(message.at, "tick.at"),
        signals=tuple(sorted(signals, key=_by_time)),
        dropped=message.dropped,
    )


def is_reliable(message: pb.Tick) -> bool:
    """Whether the tick contains signals that must not be dropped."""
    return any(getattr(message, field) for field in _RELIABLE_FIELDS)


def count_droppable(message: pb.Tick) -> int:
    """Return the number of droppable signals in the tick."""
    return sum(len(getattr(message, field)) for field in _DROPPABLE_FIELDS)
