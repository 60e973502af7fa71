"""Time in which no window of a step lies: which class its parts belong to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from holdfast.domain.incidents import Incident
from holdfast.policy import ACTIONS, Effect
from holdfast.supervisor.history.time_classes import Book, Class, History, Span, Window


def gaps(history: History, windows: Sequence[Window]) -> Iterator[tuple[float, float, bool]]:
    """(begin, end, before the first window) of the time that no window covers."""
    if not windows:
        yield history.started_at, history.ended_at, True
        return
    yield history.started_at, windows[0].begin, True
    for before, after in pairwise(windows):
        yield before.end, after.begin, False
    yield windows[-1].end, history.ended_at, False


def book_gap(book: Book, history: History, begin: float, end: float, *, startup: bool) -> None:
    for span in spans_of_gap(history, begin, end, startup=startup):
        book.add(span.kind, span.end - span.begin)


def spans_of_gap(history: History, begin: float, end: float, *, startup: bool) -> Iterator[Span]:
    """Divide the gap at every time of an incident or a wait within it, and classify the pieces."""
    if end <= begin:
        return
    marks = {begin, end}
    for incident in history.incidents:
        marks.update(mark for mark in _marks(incident) if mark is not None and begin < mark < end)
    for span in (*history.waits, *history.unmeasured):
        marks.update(mark for mark in span if begin < mark < end)
    causes = [incident for incident in history.incidents if _may_cause_gap(incident, begin, end)]
    for piece_begin, piece_end in pairwise(sorted(marks)):
        kind = _class_of(history, causes, (piece_begin + piece_end) / 2, startup=startup)
        yield Span(piece_begin, piece_end, kind)


def _may_cause_gap(incident: Incident, begin: float, end: float) -> bool:
    """Whether the incident may have caused a gap. A planned change or a warning that led to no change may not."""
    if incident.planned and incident.closed and incident.first_step_at is None:
        return False
    return _began(incident) < end and (incident.first_step_at is None or incident.first_step_at > begin)


def _began(incident: Incident) -> float:
    """When the incident may have stopped the run: a planned change does so once it is decided."""
    if not incident.planned:
        return incident.fault_at
    return math.inf if incident.decided_at is None else incident.decided_at


def _class_of(history: History, causes: Sequence[Incident], at: float, *, startup: bool) -> Class:
    if any(begin <= at < end for begin, end in history.waits):
        return Class.WAIT
    present = [incident for incident in causes if _began(incident) <= at]
    if _runs_unmeasured(history, present, at):
        return Class.RUNNING
    if not present:
        if startup:
            return Class.STARTUP
        # between the last finished step and the fault, the ranks worked on a step that was lost
        return Class.REWORK if causes else Class.OTHER
    # of several incidents at once, the one in the latest stage decides: its change of generation is under way
    return max((_stage(incident, at) for incident in present), key=_STAGES.index)


def _runs_unmeasured(history: History, present: Iterable[Incident], at: float) -> bool:
    """Whether all ranks of a script that reports no steps ran then, and no fault among `present` had stopped them."""
    if not any(begin <= at < end for begin, end in history.unmeasured):
        return False
    return not any(
        not incident.planned and (incident.first_step_at is None or at < incident.first_step_at) for incident in present
    )


_STAGES = (Class.DETECT, Class.DECIDE, Class.WAIT, Class.RECOVER)


def _stage(incident: Incident, at: float) -> Class:
    if at < incident.detected_at:
        return Class.DETECT
    if incident.decided_at is None or at < incident.decided_at:
        return Class.DECIDE
    if incident.action is not None and ACTIONS[incident.action.kind].effect is Effect.WAIT:
        return Class.WAIT
    return Class.RECOVER


def _marks(incident: Incident) -> tuple[float | None, ...]:
    return (incident.fault_at, incident.detected_at, incident.decided_at, incident.first_step_at)
