"""Payloads of the event log that cross a service boundary: findings and finished steps ↔ `holdfast/v1/events.proto`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from holdfast.domain import old_evidence
from holdfast.domain.findings import Attribution, Finding, FindingKind, Remedy, Severity, StepRecord, blamed
from holdfast.domain.nodes import Notice
from holdfast.log.protocol import Entry
from holdfast.v1 import events_pb2 as pb
from holdfast.wire import types
from holdfast.wire.derived import Codec, Through, check_time

FINDING = "Finding"  # the entries' `type`
STEP_RECORDS = "StepRecords"
_STEP_COLUMNS = ("step", "started_at", "ended_at", "tokens", "loss", "stall_s")

types.EnumCodec(FindingKind, pb.FindingKind, "FINDING_KIND_")
types.EnumCodec(Severity, pb.Severity, "SEVERITY_")
types.EnumCodec(Remedy, pb.Remedy, "REMEDY_")
Codec(Attribution, pb.Attribution, "finding.attribution", through={"blame": Through(str, blamed)})
Codec(Notice, pb.AnnouncedMaintenance, "finding.notice", times=["at", "starts_at"])
_FINDING = Codec(
    Finding,
    pb.Finding,
    "finding",
    named=["id"],
    times=["at", "since", "waited_s"],
    renamed={"recommended_actions": "ladder"},
)


def finding_entry(finding: Finding) -> Entry:
    """Return the entry of a finding. A finding that is published twice has the same entry id; if the same fault is found again
    later, the new finding has another one."""
    return Entry(
        id=f"{finding.id}@{finding.at:.6f}",
        type=FINDING,
        data=encode_finding(finding),
        traceparent=finding.traceparent,
    )


def encode_finding(finding: Finding) -> bytes:
    return _FINDING.encode(finding).SerializeToString()


def decode_finding(raw: bytes) -> Finding:
    """Decode a finding. If it is of an earlier version, some fields are filled from its evidence.

    Raises `MalformedMessage` for invalid bytes, for an unknown kind and for a finding without an id.
    """
    message = types.parse(pb.Finding, raw)
    finding = _FINDING.decode(message)
    return finding if message.HasField("attribution") else old_evidence.with_fields(finding)


def step_entries(records: Iterable[StepRecord], at: float = 0.0) -> list[Entry]:
    """Return one entry for each run of records with the same job, generation and world size. `at`: now, by the clock of their
    times; 0 = unknown."""
    batches = [list(batch) for _, batch in groupby(records, _batch_key)]
    return [
        Entry(
            id=f"{batch[0].job}/{batch[0].generation}/{batch[0].step}-{batch[-1].step}",
            type=STEP_RECORDS,
            data=encode_steps(batch, at),
        )
        for batch in batches
    ]


def encode_steps(records: Sequence[StepRecord], at: float = 0.0) -> bytes:
    """Encode a columnar batch. Raises ValueError if it is empty, or if it mixes jobs, generations or world sizes."""
    keys = {_batch_key(record) for record in records}
    if len(keys) != 1:
        raise ValueError(f"a batch holds one job, generation and world size, not {sorted(keys)}")
    [(job, generation, world_size)] = keys
    return pb.StepRecords(
        job=job,
        generation=generation,
        world_size=world_size,
        step=[record.step for record in records],
        started_at=[record.started_at for record in records],
        ended_at=[record.ended_at for record in records],
        tokens=[record.tokens for record in records],
        loss=[math.nan if record.loss is None else record.loss for record in records],
        stall_s=[record.stall_s for record in records],
        flops=[record.flops for record in records] if any(record.flops for record in records) else (),
        published_at=at,
    ).SerializeToString()


def decode_steps(raw: bytes) -> list[StepRecord]:
    """Decode the records of a batch. Raises `MalformedMessage` for invalid bytes and for columns of unequal length."""
    return _decode_batch(raw)[1]


def decode_published_steps(raw: bytes) -> tuple[list[StepRecord], float]:
    """Decode a batch: its records, and when it was published, by the clock of their times; 0.0 = unknown. Raises
    `MalformedMessage` as `decode_steps` does, and for an invalid time."""
    message, steps = _decode_batch(raw)
    return steps, check_time(message.published_at, "steps.published_at")


def _decode_batch(raw: bytes) -> tuple[pb.StepRecords, list[StepRecord]]:
    message = types.parse(pb.StepRecords, raw)
    columns = {name: getattr(message, name) for name in _STEP_COLUMNS}
    columns["flops"] = message.flops or [0.0] * len(message.step)  # of an earlier version, or not reported
    types.check_columns("steps", **columns)
    return message, [
        StepRecord(
            job=message.job,
            generation=message.generation,
            step=step,
            world_size=message.world_size,
            started_at=check_time(started_at, "steps.started_at"),
            ended_at=check_time(ended_at, "steps.ended_at"),
            tokens=tokens,
            loss=None if math.isnan(loss) else loss,
            stall_s=stall_s,
            flops=flops,
        )
        for step, started_at, ended_at, tokens, loss, stall_s, flops in zip(*columns.values(), strict=True)
    ]


def _batch_key(record: StepRecord) -> tuple[str, int, int]:
    return record.job, record.generation, record.world_size
