"""Payloads of the event log that cross a service boundary: findings and finished steps ↔ `holdfast/v1/events.proto`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from holdfast.domain import told
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.findings import Attribution, Finding, FindingKind, Remedy, Severity, StepRecord, blamed
from holdfast.domain.nodes import Notice
from holdfast.log.protocol import Entry
from holdfast.v1 import events_pb2 as pb
from holdfast.wire import types

FINDING = "Finding"  # the entries' `type`
STEP_RECORDS = "StepRecords"

_KIND = types.EnumCodec(FindingKind, pb.FindingKind, "FINDING_KIND_")
_SEVERITY = types.EnumCodec(Severity, pb.Severity, "SEVERITY_")
_REMEDY = types.EnumCodec(Remedy, pb.Remedy, "REMEDY_")


def finding_entry(finding: Finding) -> Entry:
    """Ready to append. A finding published twice has one entry id; the same fault concluded again later has a new one."""
    return Entry(
        id=f"{finding.id}@{finding.at:.6f}",
        type=FINDING,
        data=encode_finding(finding),
        traceparent=finding.traceparent,
    )


def encode_finding(finding: Finding) -> bytes:
    return pb.Finding(
        id=finding.id,
        kind=_KIND.encode(finding.kind),
        severity=_SEVERITY.encode(finding.severity),
        at=finding.at,
        since=finding.since,
        summary=finding.summary,
        node=finding.node,
        job=finding.job,
        generation=finding.generation,
        rank=finding.rank,
        gpu=finding.gpu,
        confidence=finding.confidence,
        evidence=finding.evidence,
        supersedes=finding.supersedes,
        contradicts=finding.contradicts,
        verified_step=finding.verified_step,
        attribution=_attribution(finding.attribution),
        notice=_notice(finding.notice),
        ladder=[_REMEDY.encode(remedy) for remedy in finding.ladder],
        ttl_s=finding.ttl_s,
        traceparent=finding.traceparent,
        waited_s=finding.waited_s,
        repeat=finding.repeat,
    ).SerializeToString()


def _attribution(value: Attribution) -> pb.Attribution:
    message = pb.Attribution(
        blame=value.blame,
        error_class=value.error_class,
        prior_user=value.prior_user,
        tries=value.tries,
        nodes=value.nodes,
    )
    if value.from_outside is not None:
        message.from_outside = value.from_outside
    return message


def _notice(notice: Notice | None) -> pb.AnnouncedMaintenance | None:
    if notice is None:
        return None
    return pb.AnnouncedMaintenance(source=notice.source, event=notice.event, starts_at=notice.starts_at, at=notice.at)


def decode_finding(raw: bytes) -> Finding:
    """A version before said in the evidence what decides: then the fields are filled from there.

    Raises `MalformedMessage` for garbage, for a kind that is not known here and for a finding without an id.
    """
    message = types.parse(pb.Finding, raw)
    if not message.id:
        raise MalformedMessage("finding.id", "missing")
    finding = Finding(
        id=message.id,
        kind=_KIND.decode(message.kind, "finding.kind"),
        severity=_SEVERITY.decode(message.severity, "finding.severity"),
        at=types.check_time(message.at, "finding.at"),
        since=types.check_time(message.since, "finding.since"),
        summary=message.summary,
        node=message.node,
        job=message.job,
        generation=message.generation,
        rank=message.rank if message.HasField("rank") else None,
        gpu=message.gpu if message.HasField("gpu") else None,
        confidence=message.confidence,
        evidence=dict(message.evidence),
        supersedes=message.supersedes,
        contradicts=message.contradicts,
        verified_step=message.verified_step if message.HasField("verified_step") else None,
        attribution=_attribution_of(message.attribution),
        notice=_notice_of(message.notice) if message.HasField("notice") else None,
        ladder=tuple(_REMEDY.decode(remedy, "finding.ladder") for remedy in message.ladder),
        ttl_s=message.ttl_s,
        traceparent=message.traceparent,
        waited_s=types.check_time(message.waited_s, "finding.waited_s"),
        repeat=message.repeat,
    )
    return finding if message.HasField("attribution") else told.with_fields(finding)


def _attribution_of(message: pb.Attribution) -> Attribution:
    return Attribution(
        blame=blamed(message.blame),
        error_class=message.error_class,
        prior_user=message.prior_user,
        from_outside=message.from_outside if message.HasField("from_outside") else None,
        tries=message.tries,
        nodes=message.nodes,
    )


def _notice_of(message: pb.AnnouncedMaintenance) -> Notice:
    starts_at = (
        types.check_time(message.starts_at, "finding.notice.starts_at") if message.HasField("starts_at") else None
    )
    return Notice(message.source, message.event, types.check_time(message.at, "finding.notice.at"), starts_at)


def step_entries(records: Iterable[StepRecord]) -> list[Entry]:
    """Ready to append: one entry per run of records that share job, generation and world size."""
    batches = [list(batch) for _, batch in groupby(records, _batch_key)]
    return [
        Entry(
            id=f"{batch[0].job}/{batch[0].generation}/{batch[0].step}-{batch[-1].step}",
            type=STEP_RECORDS,
            data=encode_steps(batch),
        )
        for batch in batches
    ]


def encode_steps(records: Sequence[StepRecord]) -> bytes:
    """A columnar batch. Raises ValueError when it is empty or mixes jobs, generations or world sizes."""
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
    ).SerializeToString()


def decode_steps(raw: bytes) -> list[StepRecord]:
    """Raises `MalformedMessage` for garbage and for columns of unequal length."""
    message = types.parse(pb.StepRecords, raw)
    types.check_columns(
        "steps",
        step=message.step,
        started_at=message.started_at,
        ended_at=message.ended_at,
        tokens=message.tokens,
        loss=message.loss,
        stall_s=message.stall_s,
    )
    return [
        StepRecord(
            job=message.job,
            generation=message.generation,
            step=step,
            world_size=message.world_size,
            started_at=types.check_time(started_at, "steps.started_at"),
            ended_at=types.check_time(ended_at, "steps.ended_at"),
            tokens=tokens,
            loss=None if math.isnan(loss) else loss,
            stall_s=stall_s,
        )
        for step, started_at, ended_at, tokens, loss, stall_s in zip(
            message.step,
            message.started_at,
            message.ended_at,
            message.tokens,
            message.loss,
            message.stall_s,
            strict=True,
        )
    ]


def _batch_key(record: StepRecord) -> tuple[str, int, int]:
    return record.job, record.generation, record.world_size
