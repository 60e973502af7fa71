"""Decodes stream entries into events of the core. Malformed entries become dead letters, so they cannot stop the leader."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.findings import StepRecord
from holdfast.log.keys import DEAD_SUFFIX
from holdfast.log.protocol import Delivery, Entry
from holdfast.supervisor.inbox import REPORTS, InboxEvent
from holdfast.supervisor.protocol import Event, FindingArrived, NodeReported, StepsCompleted
from holdfast.supervisor.published import PolicyAsked
from holdfast.supervisor.requests import OperatorRequest
from holdfast.wire import records
from holdfast.wire.control import decode_reports, encode_reports
from holdfast.wire.events import decode_finding, decode_steps


class Input(NamedTuple):
    """One event to fold, and the entry that it arrived in; None for events of the shell itself."""

    event: Event | OperatorRequest
    delivery: Delivery | None = None
    place: int | None = None  # among the reports of the entry, if it has several
    asked: PolicyAsked | None = None  # of a policy's answer: published with it


_input: Callable[[tuple[Any, ...]], Input] = partial(tuple.__new__, Input)  # in half of the time that the class takes


@dataclass(slots=True)
class Intake:
    inputs: list[Input] = field(default_factory=list)
    positions: dict[str, list[str]] = field(default_factory=dict)  # stream → positions of all entries that were read
    poison: list[tuple[Delivery, str]] = field(default_factory=list)  # malformed entries, each with the error


Decoded = Callable[[str], tuple[NodeReported, ...] | None]


def take(batch: Iterable[Delivery], at: float, decoded: Decoded = lambda _: None) -> Intake:
    """Decode a batch. Finished steps are coalesced: of each generation, only the newest step matters to the core. `decoded`:
    returns the known reports of an entry, by its id."""
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
                case _ if delivery.entry.type == REPORTS:
                    if (known := decoded(delivery.entry.id)) is None:
                        _take_reports(intake, delivery)
                    else:
                        intake.inputs += [_input((event, delivery, place, None)) for place, event in enumerate(known)]
                case _:
                    intake.inputs.append(Input(records.loads(delivery.entry.data, InboxEvent), delivery))
        except MalformedMessage as error:
            intake.poison.append((delivery, str(error)))
    intake.inputs.extend(Input(_completed(at, each, ages_s[key])) for key, each in steps.items())
    return intake


def _take_reports(intake: Intake, delivery: Delivery) -> None:
    """Decode an entry of reports that another leader wrote. A malformed report becomes a dead letter on its own."""
    for place, each in enumerate(decode_reports(delivery.entry.data)):
        try:
            seq, report = each.decode()
        except MalformedMessage as error:
            intake.poison.append((replace(delivery, entry=_alone(delivery.entry, place)), str(error)))
        else:
            event = NodeReported(each.at, each.node, each.incarnation, seq, report, each.session)
            intake.inputs.append(Input(event, delivery, place))


def _alone(entry: Entry, place: int) -> Entry:
    """An entry with only this report."""
    return replace(entry, id=f"{entry.id}/{place}", data=encode_reports([decode_reports(entry.data)[place]]))


def dead_letter_entry(delivery: Delivery, place: int | None = None) -> tuple[str, Entry]:
    """(stream, entry) for the dead-letter stream; `place`: the one report that it is about."""
    return delivery.stream + DEAD_SUFFIX, delivery.entry if place is None else _alone(delivery.entry, place)


def _completed(at: float, steps: list[StepRecord], age_s: float) -> StepsCompleted:
    newest = max(steps, key=lambda record: record.step)
    stalls = [record.stall_s for record in steps if record.stall_s > 0]
    with_loss = [record for record in steps if record.loss is not None]
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
        loss=max(with_loss, key=lambda record: record.step).loss if with_loss else None,
        pace_s=_pace_s(steps),
    )


def _pace_s(steps: list[StepRecord]) -> float:
    """Median time from the end of one step to the end of the next, work between them included. 0.0 if no two steps are
    consecutive."""
    pairs = pairwise(sorted(steps, key=lambda record: record.step))
    gaps = [after.ended_at - before.ended_at for before, after in pairs if after.step == before.step + 1]
    return max(0.0, statistics.median(gaps)) if gaps else 0.0
