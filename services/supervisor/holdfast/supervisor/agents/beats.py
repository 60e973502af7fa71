"""What agents' beats say against what is known: which of their steps are passed to the core, and when a report was lost. Pure.

Every agent says twice a second how far its ranks have come. Finished steps reach the core by diagnostics; beats are the second
witness, wanted when diagnostics is silent, or when it is in doubt whether a generation is alive. A start whose first step
only beats have reported is over with its second step, and may have less time left than diagnostics is given.

From a start until its first step is reported, beats also name the started generation: that answers the order to start it. First
steps in beats do not wait for a comparison: each session passes them on at once (`sessions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import RanksStarted, Start, StepReached
from holdfast.supervisor.core import State
from holdfast.supervisor.core.binding import has_stepped_there
from holdfast.supervisor.core.model.lifecycle import Starting
from holdfast.supervisor.core.progress import SECOND_WITNESS_S, has_stepped
from holdfast.supervisor.protocol import StartsSeen

DIFFERS_S = 3.0  # a report is on its way for less, unless the log is away
# The same for a Hello: a node whose Hello was lost has the time for a second one before a new leader stops waiting for it.
UNHEARD_S = 2.0


NodeSteps = tuple[str, StepReached]  # a node, and how far its ranks have come
NodeStarted = tuple[str, RanksStarted]  # a node, and a generation whose ranks were started there


@dataclass(frozen=True, slots=True)
class Reported:
    """What has been folded of a node: the session whose Hello was the newest, and the version of its workers."""

    session: int
    version: int


def patience_s(session: int, known: Reported | None) -> float:
    """How long what is `known` of a node may differ from what the beats of `session` say."""
    return DIFFERS_S if known is not None and known.session == session else UNHEARD_S


def steps_to_fold(reported: Iterable[NodeSteps], state: State, at: float) -> list[NodeSteps]:
    """The newest step of each running generation, where it is newer than what the core knows and the core needs it."""
    newest: dict[str, NodeSteps] = {}
    for node, each in reported:
        job = state.jobs.get(each.job)
        if job is None or each.step <= job.progress.seen_step or not has_stepped_there(job, node, each):
            continue
        begun = isinstance(job.doing, Starting) and has_stepped(job)
        if begun or job.membership.absent or at - job.progress.seen_at >= SECOND_WITNESS_S:
            known = newest.get(each.job)
            newest[each.job] = (node, each) if known is None or each.step > known[1].step else known
    return [newest[name] for name in sorted(newest)]


def starts_to_fold(started: Iterable[NodeStarted], state: State, at: float) -> list[StartsSeen]:
    """What answers the `Start` orders that are not answered, by job."""
    slots_of: dict[str, list[int]] = {}
    for node, each in started:
        broadcast = state.broadcasts.get(each.job)
        if broadcast is None or not isinstance(broadcast.order, Start) or broadcast.order.generation != each.generation:
            continue
        generation = state.jobs[each.job].generation
        slot = None if generation is None else generation.slot_of(node)
        if slot is not None:
            slots_of.setdefault(each.job, []).append(slot)
    seen = []
    for job, slots in sorted(slots_of.items()):
        if new := Numbers(slots) & state.unanswered[job]:
            seen.append(StartsSeen(at, job, state.broadcasts[job].order.generation, new))
    return seen
