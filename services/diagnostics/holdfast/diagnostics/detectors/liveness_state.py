"""What the liveness detector remembers of nodes and of the step times of generations, and how reports change it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.exit_cause import Cause, cause_of, is_failure
from holdfast.diagnostics.roster import Placement, Roster
from holdfast.domain.findings import Finding
from holdfast.domain.signals import (
    GenerationStarted,
    RankProgress,
    WorkerExited,
)

_GONE_MAX = 4096  # nodes that are kept after they left, for the comparison of incarnations
_WITNESSES_MAX = 1024  # generations
_PACES_MAX = 4096  # generations
_PACE_STEPS = 20
Key = tuple[str, int]  # (job, generation)


@dataclass(slots=True)
class TrackedNode:
    incarnation: str
    last_beat: float
    # Jobs that the roster still places on the node although their workers have ended: the agent has not reported these jobs
    # since it started, sent a goodbye or was reported lost.
    absent: set[str] = field(default_factory=set)
    lost: tuple[Finding, ...] = ()  # findings about the loss of the node, until it reconnects


@dataclass(slots=True)
class Pace:
    """The step time of a generation, from the reports of connected nodes."""

    step: int = -1
    at: float = 0.0  # diagnostics' clock: when `step` was first reported
    stepped: bool = False  # a step was finished since this process receives reports
    # The node of the newest report, its time, and the time of the newest report of any other node.
    node: str = ""
    reported_at: float = 0.0
    other_reported_at: float = 0.0
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    def note_report(self, node: str, now: float) -> None:
        if node != self.node:
            self.node, self.other_reported_at = node, self.reported_at
        self.reported_at = now

    def reported_besides(self, node: str) -> float:
        """When any node other than `node` last sent a report, with or without new steps. 0 = never."""
        return self.other_reported_at if node == self.node else self.reported_at


@dataclass(slots=True)
class Doubt:
    since: float  # last heartbeat
    began: float
    why: str
    broken: bool = False  # the stream broke; otherwise the stream is open and silent
    suspended_until: float = 0.0  # 0 = the doubt is not part of a mass event
    excused: bool = False  # a warning about a node without contact that still trains was reported


@dataclass(slots=True)
class FailedNodes:
    """Nodes whose ranks failed in collectives of a generation. `explained`: a rank is known that failed first."""

    at: float
    nodes: dict[str, None] = field(default_factory=dict)  # in the order in which their errors arrived
    explained: bool = False


@dataclass(slots=True)
class LivenessState:
    nodes: dict[str, TrackedNode] = field(default_factory=dict)  # connected or in doubt
    gone: Bounded[str, TrackedNode] = field(default_factory=lambda: Bounded(_GONE_MAX))
    connected: OrderedDict[str, None] = field(default_factory=OrderedDict)  # oldest heartbeat first
    doubts: dict[str, Doubt] = field(default_factory=dict)
    witnesses: Bounded[Key, FailedNodes] = field(default_factory=lambda: Bounded(_WITNESSES_MAX))
    paces: Bounded[Key, Pace] = field(default_factory=lambda: Bounded(_PACES_MAX))
    gap_until: float = 0.0  # silence before this time proves nothing


def advance(state: LivenessState, item: RankProgress, now: float) -> None:
    """Record the steps of a node. The rank with the most steps counts, because it can finish them only together with
    all others."""
    key, step = (item.job, item.generation), max(item.step, default=-1)
    pace = state.paces.get(key)
    if pace is None:
        pace = state.paces[key] = Pace(step, now)
    elif step > pace.step:
        if pace.stepped:  # the start of the first reported step is not known
            pace.intervals_s.append((now - pace.at) / (step - pace.step))
        pace.step, pace.at, pace.stepped = step, now, True
    pace.note_report(item.node, now)


def note_present(state: LivenessState, item: RankProgress | GenerationStarted) -> None:
    """Record that the node reports ranks of this job."""
    node = state.nodes.get(item.node) or state.gone.get(item.node)
    if node is not None and node.absent:
        node.absent.discard(item.job)


def ranks_on(node: TrackedNode, name: str, roster: Roster) -> Mapping[str, Placement]:
    """Return the node's ranks from the roster, without jobs that its agent has not reported since it started."""
    placed = roster.on(name)
    if not node.absent:
        return placed
    return {job: placement for job, placement in placed.items() if job not in node.absent}


def note_collective_error(state: LivenessState, exit_: WorkerExited, now: float) -> None:
    if not is_failure(exit_):
        return
    key = (exit_.job, exit_.generation)
    witness = state.witnesses.get_or_add(key, lambda: FailedNodes(at=now))
    if cause_of(exit_) is Cause.OWN:
        witness.explained = True  # a rank failed by itself, so the others' errors are not about a lost node
    else:
        witness.at = now
        witness.nodes[exit_.node] = None


def leave(state: LivenessState, name: str, roster: Roster) -> None:
    """Drop the ranks of a node whose agent has sent a goodbye, or that is reported lost."""
    state.connected.pop(name, None)
    state.doubts.pop(name, None)
    node = state.gone[name] = state.nodes.pop(name)
    node.absent = set(roster.on(name))
