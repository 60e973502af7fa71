"""Folds inputs into the state and computes what must be written with it. No I/O: `term` commits and carries out the result."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from holdfast.domain import spans
from holdfast.domain.errors import HoldfastError
from holdfast.domain.evolve import evolve
from holdfast.log.names import EVENTS, SUPERVISOR_GROUP
from holdfast.log.protocol import Commit, Delivery, Entry
from holdfast.supervisor.core import Batch, State, Written
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.intake import Input, dead_letter_entry
from holdfast.supervisor.protocol import (
    Answer,
    CheckpointRequested,
    Command,
    Event,
    FaultRequested,
    IncidentChanged,
    NodeReported,
    Publish,
)
from holdfast.supervisor.published import OperationDone, Published
from holdfast.supervisor.requests import OperatorRequest, accepted, check, fingerprint
from holdfast.wire import records

OPERATIONS_MAX = 10_000  # kept as done; older ones are in the history

log = structlog.get_logger("holdfast.supervisor.leader.fold")

ANSWERED_LATER = (CheckpointRequested, FaultRequested)


@dataclass(frozen=True, slots=True)
class Folded:
    """The result of one batch: the contents of one commit, and the commands that follow it."""

    state: State
    changed: bool
    commands: tuple[Command, ...]
    published: tuple[Published, ...]
    dead: tuple[tuple[str, Entry], ...]
    written: Written  # rows of the state's tables that may have changed


@dataclass(slots=True)
class _Batch:
    core: Batch
    commands: list[Command] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    dead: list[tuple[str, Entry]] = field(default_factory=list)


class Folder:
    """The state of one term. `fold` computes a result; `keep` makes it the present state after it has been committed."""

    def __init__(
        self,
        state: State,
        epoch: int,
        *,
        committed: State | None = None,
        obsolete: Iterable[str] = (),
        batch: Callable[[State], Batch] = Batch,
    ) -> None:
        """`committed`: the state that the snapshot's parts represent. None = there are none, or they are an earlier version's:
        then these are `obsolete`, and all parts are written. `batch` begins each fold; the simulator observes it."""
        self.state = state
        self._begin = batch
        self._committed = committed
        self._obsolete = tuple(obsolete)
        self._epoch = epoch
        self._written = 0
        self._at = 0.0
        self._operations: OrderedDict[str, None] = OrderedDict()

    def knows(self, operation: str) -> bool:
        return operation in self._operations

    def remember(self, operation: str) -> None:
        self._operations[operation] = None
        if len(self._operations) > OPERATIONS_MAX:
            self._operations.popitem(last=False)

    def fold(self, inputs: Iterable[Input], now: float) -> Folded:
        """Fold the inputs. All get the present time of the leader's clock, which never runs backwards."""
        self._at = max(self._at, now)
        batch = _Batch(self._begin(self.state))
        reports: list[Input] = []
        for each in inputs:
            if isinstance(each[0], NodeReported):
                reports.append(each)
                continue
            self._fold_reports(batch, reports)
            reports = []
            self._fold_alone(batch, each)
        self._fold_reports(batch, reports)
        for command in batch.commands:
            match command:
                case Publish(record=record):
                    batch.published.append(record)
                case Answer(operation=operation, ok=ok, reason=reason, request=request):
                    batch.published.append(OperationDone(self._at, operation, ok, reason, fingerprint(request)))
                case _:
                    pass
        state = batch.core.state  # a new object each time
        return Folded(
            state=state,
            changed=state is not self.state,
            commands=tuple(batch.commands),
            published=tuple(batch.published),
            dead=tuple(batch.dead),
            written=batch.core.written,
        )

    def keep(self, folded: Folded) -> None:
        self.state = self._committed = folded.state
        self._obsolete = ()

    def commit(self, folded: Folded, acknowledge: dict[str, list[str]]) -> Commit:
        """The one atomic write. Of the state, it contains the parts that have changed since the last one."""
        changes = snapshot.changes(self._committed, folded.state, folded.written)
        return Commit(
            snapshot={**dict.fromkeys(self._obsolete), **changes},
            append=[*((EVENTS, self._entry(record)) for record in folded.published), *folded.dead],
            acknowledge={(stream, SUPERVISOR_GROUP): positions for stream, positions in acknowledge.items()},
        )

    # ------------------------------------------------------------------ single inputs

    def _fold_reports(self, batch: _Batch, inputs: Sequence[Input]) -> None:
        """Fold reports of nodes together, or one by one if one of them cannot be folded."""
        if not inputs:
            return
        reports = [event for event, _, _, _ in inputs if isinstance(event, NodeReported)]
        try:
            batch.commands.extend(batch.core.reports(self._at, reports))
        except Exception as error:
            log.warning("folding reports one by one, because one of them cannot be folded", error=repr(error))
            for each in inputs:
                self._fold_alone(batch, each)

    def _fold_alone(self, batch: _Batch, each: Input) -> None:
        try:
            self._fold_one(batch, each)
        except Exception as error:
            self._refuse(batch, each, error)

    def _fold_one(self, batch: _Batch, each: Input) -> None:
        if isinstance(each.event, OperatorRequest):
            self._fold_request(batch, each.event)
            return
        self._step(batch, each.event)
        if each.asked is not None:
            batch.published.append(each.asked)

    def _fold_request(self, batch: _Batch, request: OperatorRequest) -> None:
        if self.knows(request.operation):
            return  # a repeat, by a client, or by an event log that lost the answer
        self.remember(request.operation)
        try:
            check(batch.core.state, request.event)
            event = request.event
            if isinstance(event, ANSWERED_LATER):
                event = evolve(event, operation=request.operation)
            self._step(batch, event)
            if isinstance(event, ANSWERED_LATER):
                return  # when the tiers of the checkpoint, or the agent's answer, are known
            ok, reason = True, accepted(event)
        except HoldfastError as error:
            ok, reason = False, str(error)
        done = OperationDone(self._at, request.operation, ok, reason, request.fingerprint)
        batch.published.append(done)

    def _step(self, batch: _Batch, event: Event) -> None:
        batch.commands.extend(batch.core.step(evolve(event, at=self._at)))

    def _refuse(self, batch: _Batch, each: Input, error: Exception) -> None:
        """A bug in the core must not stop the leader. An event that could not be folded has not changed the state."""
        log.error("an event could not be folded", what=repr(each.event), exc_info=error)
        if isinstance(each.event, OperatorRequest):
            reason = f"a bug in the supervisor: {error!r}; its log has the traceback"
            request = each.event
            batch.published.append(OperationDone(self._at, request.operation, False, reason, request.fingerprint))
        if each.delivery is not None:
            batch.dead.append(dead_letter_entry(each.delivery, each.place))

    def dead_letter(self, folded: Folded, poison: Iterable[tuple[Delivery, str]]) -> Folded:
        """Add entries that could not be decoded to the dead letters."""
        dead = []
        for delivery, reason in poison:
            log.error("an entry cannot be read", stream=delivery.stream, position=delivery.position, reason=reason)
            dead.append(dead_letter_entry(delivery))
        return evolve(folded, dead=(*folded.dead, *dead)) if dead else folded

    def _entry(self, record: Published) -> Entry:
        self._written += 1
        traceparent = ""
        if isinstance(record, IncidentChanged):
            context = spans.context_of(record.incident)
            traceparent = context.traceparent if context else ""
        return records.entry(f"{self._epoch}-{self._written}", record, Published, traceparent)
