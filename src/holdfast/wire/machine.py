"""Signals about the machine itself (kernel, host, GPUs, NICs) ↔ their messages in `holdfast/v1/telemetry.proto`.

Columns of one name on both sides are listed once and copied; -1 = not known travels as -1.
"""

from __future__ import annotations

from dataclasses import fields

from holdfast.domain.signals import (
    GpuHealth,
    GpuSample,
    HostSample,
    KernelEvent,
    KernelLine,
    MaintenanceNotice,
    NicSample,
)
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire import types

_HEALTH_COLUMNS = tuple(field.name for field in fields(GpuHealth) if field.name not in ("node", "at", "expected"))
_NIC_COLUMNS = tuple(field.name for field in fields(NicSample) if field.name not in ("node", "at"))
_EVENTS = {event.value: event for event in KernelEvent}


def encode_line(signal: KernelLine) -> pb.KernelLine:
    return pb.KernelLine(
        at=signal.at,
        text=signal.text,
        xid=signal.xid,
        pci=signal.pci,
        gpu=signal.gpu,
        event=signal.event.value,
        traceparent=signal.traceparent,
    )


def decode_line(node: str, message: pb.KernelLine) -> KernelLine:
    """An event that is not known here is `OTHER`: its text may still say enough."""
    return KernelLine(
        node=node,
        at=message.at,
        text=message.text,
        xid=message.xid if message.HasField("xid") else None,
        pci=message.pci,
        gpu=message.gpu if message.HasField("gpu") else None,
        event=_EVENTS.get(message.event, KernelEvent.OTHER),
        traceparent=message.traceparent,
    )


def encode_host(signal: HostSample) -> pb.HostSample:
    return pb.HostSample(
        at=signal.at,
        load1=signal.load1,
        cpus=signal.cpus,
        memory_used_bytes=signal.memory_used,
        memory_total_bytes=signal.memory_total,
        disks=[pb.Disk(path=path, used_bytes=used, total_bytes=total) for path, used, total in signal.disks],
        disk_latency=[pb.DiskLatency(path=path, write_s=write_s) for path, write_s in signal.disk_latency],
        blocked=signal.blocked,
        clock_offset_s=signal.clock_offset_s,
    )


def decode_host(node: str, message: pb.HostSample) -> HostSample:
    return HostSample(
        node=node,
        at=message.at,
        load1=message.load1,
        cpus=message.cpus,
        memory_used=message.memory_used_bytes,
        memory_total=message.memory_total_bytes,
        disks=tuple((disk.path, disk.used_bytes, disk.total_bytes) for disk in message.disks),
        disk_latency=tuple((disk.path, disk.write_s) for disk in message.disk_latency),
        blocked=message.blocked if message.HasField("blocked") else None,
        clock_offset_s=message.clock_offset_s if message.HasField("clock_offset_s") else None,
    )


def encode_gpus(signal: GpuSample) -> pb.GpuSample:
    message = pb.GpuSample(
        at=signal.at,
        gpu=signal.gpu,
        uuid=signal.uuid,
        temperature_c=signal.temperature_c,
        power_w=signal.power_w,
        memory_used_bytes=signal.memory_used,
        ecc_uncorrected=signal.ecc_uncorrected,
        recovery_action=signal.recovery_action,
        lost=signal.lost,
    )
    _check_gpu_columns(message)
    return message


def _check_gpu_columns(message: pb.GpuSample) -> None:
    types.check_columns(
        "gpus",
        gpu=message.gpu,
        uuid=message.uuid,
        temperature_c=message.temperature_c,
        power_w=message.power_w,
        memory_used=message.memory_used_bytes,
        ecc_uncorrected=message.ecc_uncorrected,
        recovery_action=message.recovery_action,
        lost=message.lost,
    )


def decode_gpus(node: str, message: pb.GpuSample) -> GpuSample:
    _check_gpu_columns(message)
    return GpuSample(
        node=node,
        at=message.at,
        gpu=tuple(message.gpu),
        uuid=tuple(message.uuid),
        temperature_c=tuple(message.temperature_c),
        power_w=tuple(message.power_w),
        memory_used=tuple(message.memory_used_bytes),
        ecc_uncorrected=tuple(message.ecc_uncorrected),
        recovery_action=tuple(message.recovery_action),
        lost=tuple(message.lost),
    )


def encode_gpu_health(signal: GpuHealth) -> pb.GpuHealth:
    columns = {name: getattr(signal, name) for name in _HEALTH_COLUMNS}
    types.check_columns("gpu_health", **columns)
    return pb.GpuHealth(at=signal.at, expected=signal.expected, **columns)


def decode_gpu_health(node: str, message: pb.GpuHealth) -> GpuHealth:
    columns = {name: tuple(getattr(message, name)) for name in _HEALTH_COLUMNS}
    types.check_columns("gpu_health", **columns)
    return GpuHealth(node=node, at=message.at, expected=message.expected, **columns)


def encode_nics(signal: NicSample) -> pb.NicSample:
    columns = {name: getattr(signal, name) for name in _NIC_COLUMNS}
    types.check_columns("nics", **columns)
    return pb.NicSample(at=signal.at, **columns)


def decode_nics(node: str, message: pb.NicSample) -> NicSample:
    columns = {name: tuple(getattr(message, name)) for name in _NIC_COLUMNS}
    types.check_columns("nics", **columns)
    return NicSample(node=node, at=message.at, **columns)


def decode_notice(node: str, message: pb.MaintenanceNotice) -> MaintenanceNotice:
    return MaintenanceNotice(
        node=node,
        at=message.at,
        source=message.source,
        event=message.event,
        starts_at=types.check_time(message.starts_at, "maintenance.starts_at")
        if message.HasField("starts_at")
        else None,
    )
