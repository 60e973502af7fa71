"""Stream entries → events of the core. Nothing in a stream can hurt the leader: what cannot be read is set aside."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.findings import StepRecord
from holdfast.log.keys import DEAD_SUFFIX
from holdfast.log.names import FINDINGS, INBOX, STEPS
from holdfast.log.protocol import Delivery, Entry
from holdfast.supervisor.leader.inbox import InboxEvent
from holdfast.supervisor.protocol import Event, FindingArrived, StepsCompleted
from holdfast.supervisor.requests import OperatorRequest
from holdfast.wire import records
from holdfast.wire.events import decode_finding, decode_steps

STREAMS = (FINDINGS, STEPS, INBOX)


@dataclass(frozen=True, slots=True)
class Input:
    """One thing to fold, and the entry that it came in; None for what the shell itself has to say."""

    event: Event | OperatorRequest
    delivery: Delivery | None = None


@dataclass(slots=True)
class Intake:
    inputs: list[Input] = field(default_factory=list)
    positions: dict[str, list[str]] = field(default_factory=dict)  # stream → everything that was read
    poison: list[tuple[Delivery, str]] = field(default_factory=list)  # with what is wrong


def take(batch: Iterable[Delivery], at: float) -> Intake:
    """Decode a batch. Finished steps are coalesced: of each generation only the newest matters to the core."""
    intake = Intake()
    steps: dict[tuple[str, int], list[StepRecord]] = {}
    ages_s: dict[tuple[str, int], float] = {}  # of the newest entry
    for delivery in batch:
        intake.positions.setdefault(delivery.stream, []).append(delivery.position)
        try:
            match delivery.stream:
                case "findings":
                    finding = decode_finding(delivery.entry.data)
                    intake.inputs.append(
                        Input(FindingArrived(at, finding, delivery.age_s + finding.waited_s), delivery)
                    )
                case "steps":
                    for record in decode_steps(delivery.entry.data):
                        steps.setdefault((record.job, record.generation), []).append(record)
                        ages_s[record.job, record.generation] = delivery.age_s
                case _:
                    intake.inputs.append(Input(records.loads(delivery.entry.data, InboxEvent), delivery))
        except MalformedMessage as error:
            intake.poison.append((delivery, str(error)))
    intake.inputs.extend(Input(_completed(at, each, ages_s[key])) for key, each in steps.items())
    return intake


def epitaph(delivery: Delivery) -> tuple[str, Entry]:
    """(stream, entry) for the dead letters."""
    return delivery.stream + DEAD_SUFFIX, delivery.entry


def _completed(at: float, steps: list[StepRecord], age_s: float) -> StepsCompleted:
    newest = max(steps, key=lambda record: record.step)
    stalls = [record.stall_s for record in steps if record.stall_s > 0]
    told = [record for record in steps if record.loss is not None]
    return StepsCompleted(
        at=at,
        job=newest.job,
        generation=newest.generation,
        step=newest.step,
        ended_at=newest.ended_at,
        tokens=sum(record.tokens for record in steps),
        step_s=statistics.median(max(0.0, record.ended_at - record.started_at) for record in steps),
        saves=len(stalls),
        stall_s=statistics.fmean(stalls) if stalls else 0.0,
        age_s=age_s,
        loss=max(told, key=lambda record: record.step).loss if told else None,
    )
