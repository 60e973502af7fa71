"""Lost nodes: the agent's telemetry stream broke and the agent did not reconnect, or its heartbeats stopped.

Theory of operation. A node is *connected* (in order of its last heartbeat), *in doubt* (the stream broke without a goodbye,
or it has been silent for `silence_s`) or *gone* (said goodbye, or reported lost). Doubt becomes NODE_LOST

* at once when a new incarnation of the agent connects: the workers of the old one died with it;
* `corroborated_s` after the break, if ranks on other nodes of its generation fail in a collective and no rank has failed
  first: these nodes are the second witness;
* `reconnect_grace_s` after the break, if the steps of its generation's other nodes have stopped with it;
* `unwitnessed_grace_s` after the break otherwise.

If the same incarnation reconnects before that, nothing is reported. If it reconnects later, the finding is withdrawn by
another one of the same kind and severity info. Only nodes that this process has itself been connected to are ever lost.

The other nodes of its generations are a third witness. A step needs every rank, so while they finish steps, a node without
contact still trains, and only its agent or its connection has failed. The doubt then waits for as long as the next step may
take at the present step time; while steps continue, only a warning is reported. Failing collectives outweigh this. Often no
other node can testify: in the first steps of a generation, in a pause (an evaluation, a save), for a job on one node, for a
script that reports no steps. A broken connection of seconds is then more likely than a lost node, and a healthy run must not
be stopped for it: such a node has `unwitnessed_grace_s`, in which every running agent reconnects.

If many nodes become doubtful within one second, this process has more likely lost its own network. That is one HOST_PRESSURE
finding, and doubts without a second witness wait for `mass_grace_s`, in which every running agent reconnects. A node that is
still missing then, while others are connected, is reported with low confidence, because a complete rack can fail.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.exit_cause import Cause, cause_of, is_failure
from holdfast.diagnostics.detectors.protocol import Findings, Observed, TelemetryGap
from holdfast.diagnostics.roster import Placement, Roster, RunStarted
from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Remedy, Severity
from holdfast.domain.nodes import TELEMETRY_RETRY_S_MAX
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeBeat,
    NodeConnected,
    NodeDisconnected,
    RankProgress,
    WorkerExited,
)

_GONE_MAX = 4096  # nodes remembered after they left, for the comparison of incarnations
_WITNESSES_MAX = 1024  # generations
_PACES_MAX = 4096  # generations
_PACE_STEPS = 20
_NAMED_MAX = 32  # nodes in the evidence
# The longest pause that an agent makes between two tries, and half of it to connect and speak.
RECONNECT_GRACE_S = 1.5 * TELEMETRY_RETRY_S_MAX
UNWITNESSED_GRACE_S = 15.0  # every running agent has tried many times

Key = tuple[str, int]  # (job, generation)


@dataclass(slots=True)
class _Node:
    incarnation: str
    last_beat: float
    # Jobs that the roster still places here, although their workers are gone: this agent has not reported them since it
    # started, said goodbye or was reported lost.
    absent: set[str] = field(default_factory=set)
    lost: tuple[Finding, ...] = ()  # the findings about its loss, until it reconnects


@dataclass(slots=True)
class _Pace:
    """The step time of a generation, from the connected nodes."""

    step: int = -1
    at: float = 0.0  # diagnostics' clock: when `step` was first reported
    stepped: bool = False  # a step was finished while this process listened
    # The node that reported last and the last one before it: is there a report since some time from any node but this one?
    node: str = ""
    heard_at: float = 0.0
    other_heard_at: float = 0.0
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    def heard(self, node: str, now: float) -> None:
        if node != self.node:
            self.node, self.other_heard_at = node, self.heard_at
        self.heard_at = now

    def heard_besides(self, node: str) -> float:
        """When any other node reported last, whether steps or none. 0 = never."""
        return self.other_heard_at if node == self.node else self.heard_at


@dataclass(slots=True)
class _Doubt:
    since: float  # last heartbeat
    began: float
    why: str
    broken: bool = False  # otherwise the stream is open and silent
    suspended_until: float = 0.0  # part of a mass event
    excused: bool = False  # reported as a node without contact that still trains


@dataclass(slots=True)
class _FailedNodes:
    """Nodes whose ranks failed in collectives of a generation. `explained`: some rank is known to have failed first."""

    at: float
    nodes: dict[str, None] = field(default_factory=dict)  # in the order in which their errors came
    explained: bool = False


@dataclass(slots=True)
class LivenessState:
    nodes: dict[str, _Node] = field(default_factory=dict)  # connected or in doubt
    gone: Bounded[str, _Node] = field(default_factory=lambda: Bounded(_GONE_MAX))
    connected: OrderedDict[str, None] = field(default_factory=OrderedDict)  # oldest heartbeat first
    doubts: dict[str, _Doubt] = field(default_factory=dict)
    witnesses: Bounded[Key, _FailedNodes] = field(default_factory=lambda: Bounded(_WITNESSES_MAX))
    paces: Bounded[Key, _Pace] = field(default_factory=lambda: Bounded(_PACES_MAX))
    gap_until: float = 0.0  # silence before this time proves nothing


@dataclass(frozen=True, slots=True)
class Liveness:
    """NODE_LOST, and one HOST_PRESSURE if diagnostics has lost its own network."""

    reconnect_grace_s: float = RECONNECT_GRACE_S
    corroborated_s: float = 0.05
    silence_s: float = 5.0
    witness_s: float = 5.0  # a collective error older than this is not a witness
    mass_window_s: float = 1.0
    mass_fraction: float = 0.3
    mass_nodes_min: int = 3
    mass_grace_s: float = 15.0  # by then every running agent has tried many times
    unwitnessed_grace_s: float = UNWITNESSED_GRACE_S  # while the steps of other nodes tell nothing of this one
    next_step: float = 1.25  # steps continue if the next one comes within this many times the slowest recent one,
    report_s: float = 1.5  # and the time that an agent may need to report it
    next_step_s_max: float = 60.0  # the longest wait for a step
    excuse_s: float = 10.0  # a node without contact is a warning after this time if steps continue

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (
            NodeBeat,
            ClockTick,
            NodeConnected,
            NodeDisconnected,
            GenerationStarted,
            RankProgress,
            WorkerExited,
            TelemetryGap,
            RunStarted,
        )

    def initial(self) -> LivenessState:
        return LivenessState()

    def observe(
        self, state: LivenessState, item: Observed, now: float, roster: Roster
    ) -> tuple[LivenessState, Findings]:
        findings: tuple[Finding, ...] = ()
        match item:
            case NodeBeat():
                findings = _beat(state, item.node, now)
            case RankProgress():
                _present(state, item)
                _advance(state, item, now)
            case GenerationStarted():
                _present(state, item)
            case ClockTick():
                findings = self._conclude(state, now, roster)
            case NodeConnected():
                findings = self._connected(state, item, now, roster)
            case NodeDisconnected():
                self._disconnected(state, item, now, roster)
            case WorkerExited():
                _note_collective_error(state, item, now)
            case RunStarted():
                for table in (state.witnesses, state.paces):
                    for key in [key for key in table if key[0] == item.job]:
                        del table[key]
            case TelemetryGap():
                state.gap_until = now
                for doubt in state.doubts.values():
                    doubt.began = now
            case _:
                pass
        return state, findings

    def _connected(self, state: LivenessState, item: NodeConnected, now: float, roster: Roster) -> tuple[Finding, ...]:
        old = state.gone.pop(item.node, None) or state.nodes.get(item.node)
        findings: tuple[Finding, ...] = ()
        if old is not None and old.incarnation == item.incarnation:
            state.nodes[item.node] = old
            old.last_beat = now
            findings = _withdraw(old, now)
        else:
            if old is not None and (running := _running(old, item.node, roster)):
                why = "its agent has been restarted, so its workers are gone"
                findings = _lost(item.node, old, running, old.last_beat, why, confidence=1.0, now=now)
            state.nodes[item.node] = _Node(item.incarnation, now, absent=set(roster.on(item.node)))
        state.doubts.pop(item.node, None)
        state.connected[item.node] = None
        state.connected.move_to_end(item.node)
        return findings

    def _disconnected(self, state: LivenessState, item: NodeDisconnected, now: float, roster: Roster) -> None:
        node = state.nodes.get(item.node)
        if node is None or item.node not in state.connected:
            return
        if item.clean:
            _leave(state, item.node, roster)
        else:
            del state.connected[item.node]
            state.doubts[item.node] = _Doubt(
                since=node.last_beat, began=now, why="its telemetry stream broke", broken=True
            )

    def _conclude(self, state: LivenessState, now: float, roster: Roster) -> tuple[Finding, ...]:
        self._find_silent(state, now)
        if not state.doubts:
            return ()
        findings: list[Finding] = []
        for name, doubt in sorted(state.doubts.items()):
            node = state.nodes[name]
            running = _running(node, name, roster)
            corroborated = self._is_corroborated(state, running, name, now)
            if not self._is_ripe(doubt, now, corroborated=corroborated):
                continue
            witnesses: list[str] = []
            confidence, why = 0.99, doubt.why
            if corroborated:
                witnesses, count = self._witnesses(state, running, name, now)
                why = f"{why}, and ranks on {_some(witnesses, count)} fail in their collectives"
            elif doubt.suspended_until > now or (doubt.suspended_until and not state.connected):
                continue  # suspended in this pass; or no node is connected, so that silence proves nothing
            elif not doubt.suspended_until and (together := self._mass(state, doubt)):
                findings.append(self._suspend(state, together, now))
                continue
            elif self._goes_on(state, running, now):
                findings += self._excuse(state, name, doubt, running, now)
                continue
            elif now - doubt.began < self.unwitnessed_grace_s and not self._is_witnessed(state, name, running, doubt):
                continue
            else:
                if doubt.broken:
                    why += f" and it did not come back within {now - doubt.began:.2f} s"
                confidence = 0.6 if doubt.suspended_until else 0.9
            lost = _lost(name, node, running, doubt.since, why, confidence=confidence, now=now, witnesses=witnesses)
            findings += lost
            node.lost = tuple(finding for finding in lost if finding.job)
            _leave(state, name, roster)
        return tuple(findings)

    def _goes_on(self, state: LivenessState, running: Mapping[str, Placement], now: float) -> bool:
        """Whether the other ranks of a generation in `running` still finish steps, which takes all of its ranks."""
        for job, placement in running.items():
            pace = state.paces.get((job, placement.generation))
            if pace is None or not pace.intervals_s:
                continue  # its step time is not known
            if now - max(pace.at, state.gap_until) < self._next_s(pace):
                return True
        return False

    def _is_witnessed(self, state: LivenessState, name: str, running: Mapping[str, Placement], doubt: _Doubt) -> bool:
        """Whether the node's loss would show in the steps of others: in one of its generations another node is heard, the
        step time is known, and steps had not stopped before. An idle node needs no witness."""
        for job, placement in running.items():
            pace = state.paces.get((job, placement.generation))
            if pace is None or not pace.intervals_s or pace.heard_besides(name) <= doubt.began:
                continue
            if doubt.began - pace.at <= self._next_s(pace):
                return True
        return not running

    def _next_s(self, pace: _Pace) -> float:
        """How long the next step may take, until it is reported."""
        usual_s = nlargest(2, pace.intervals_s)[-1]  # the slowest may include a compilation or a save
        return min(self.next_step * usual_s, self.next_step_s_max) + self.report_s

    def _excuse(
        self, state: LivenessState, name: str, doubt: _Doubt, running: Mapping[str, Placement], now: float
    ) -> tuple[Finding, ...]:
        """Report once that a node without contact still trains."""
        if doubt.excused or now - doubt.began < self.excuse_s:
            return ()
        doubt.excused = True
        jobs = ", ".join(sorted(running))
        return (
            Finding(
                id=f"unheard:{name}:{doubt.began:.3f}",
                kind=FindingKind.NODE_LOST,
                severity=Severity.WARNING,
                at=now,
                since=min(doubt.since, now),
                summary=f"Node {name} is not heard ({doubt.why}), but the other ranks of {jobs} go on finishing steps, so its "
                "ranks train: look at its agent and at its network to the control plane.",
                node=name,
                confidence=0.9,
                evidence={"incarnation": state.nodes[name].incarnation, "last_beat": f"{doubt.since:.3f}"},
                ladder=(Remedy.WATCH,),
            ),
        )

    def _find_silent(self, state: LivenessState, now: float) -> None:
        """Move nodes whose heartbeats stopped from connected to doubt. The oldest heartbeat is first, so few are looked at."""
        while state.connected:
            name = next(iter(state.connected))
            last_beat = max(state.nodes[name].last_beat, state.gap_until)
            if now - last_beat < self.silence_s:
                return
            del state.connected[name]
            why = f"its agent sent nothing for {now - last_beat:.1f} s on an open stream"
            state.doubts[name] = _Doubt(since=state.nodes[name].last_beat, began=last_beat, why=why)

    def _is_ripe(self, doubt: _Doubt, now: float, *, corroborated: bool) -> bool:
        waited_s = now - doubt.began
        if waited_s >= self.corroborated_s and corroborated:
            return True
        if doubt.suspended_until:
            return now >= doubt.suspended_until
        return waited_s >= self.reconnect_grace_s

    def _is_corroborated(self, state: LivenessState, running: Mapping[str, Placement], name: str, now: float) -> bool:
        return any(True for _ in self._witnessing(state, running, name, now))

    def _witnesses(
        self, state: LivenessState, running: Mapping[str, Placement], name: str, now: float
    ) -> tuple[list[str], int]:
        """Some of the other nodes of its generations whose ranks fail in collectives, and how many there are.

        All of 12,500 names would be sorted once for each of the nodes that a rack takes with it.
        """
        witnessing = [*self._witnessing(state, running, name, now)]
        names = {each for nodes in witnessing for each in islice((each for each in nodes if each != name), _NAMED_MAX)}
        if len(witnessing) == 1:
            return sorted(names), len(witnessing[0]) - (name in witnessing[0])
        return sorted(names), len(set().union(*witnessing) - {name})

    def _witnessing(
        self, state: LivenessState, running: Mapping[str, Placement], name: str, now: float
    ) -> Iterator[Mapping[str, None]]:
        """For each generation in `running` the nodes whose ranks fail in collectives, if no rank is known to have failed
        first."""
        for job, placement in running.items():
            witness = state.witnesses.get((job, placement.generation))
            if witness is None or witness.explained or now - witness.at > self.witness_s:
                continue
            if len(witness.nodes) > (name in witness.nodes):
                yield witness.nodes

    def _mass(self, state: LivenessState, doubt: _Doubt) -> list[str]:
        """The nodes that became doubtful together with this one, if they are too many to have failed independently."""
        bar = self.mass_fraction * (len(state.connected) + len(state.doubts))
        if len(state.doubts) < self.mass_nodes_min or len(state.doubts) <= bar:
            return []  # too few in any case; in a storm this is called for each of thousands of nodes
        together = [
            name for name, other in sorted(state.doubts.items()) if abs(other.began - doubt.began) <= self.mass_window_s
        ]
        return together if len(together) >= self.mass_nodes_min and len(together) > bar else []

    def _suspend(self, state: LivenessState, names: list[str], now: float) -> Finding:
        doubts = [state.doubts[name] for name in names]
        for doubt in doubts:
            doubt.suspended_until = doubt.suspended_until or now + self.mass_grace_s
        seen = len(state.connected) + len(state.doubts)
        since = min(doubt.began for doubt in doubts)
        return Finding(
            id=f"blind:{since:.3f}",
            kind=FindingKind.HOST_PRESSURE,
            severity=Severity.WARNING,
            at=now,
            since=since,
            summary=f"Diagnostics lost sight of {len(names)} of {seen} nodes at once: more likely its own network than theirs.",
            confidence=0.7,
            evidence={"nodes": ", ".join(names[:32]), "count": str(len(names)), "seen": str(seen)},
            ladder=(Remedy.WATCH,),
        )


def _beat(state: LivenessState, name: str, now: float) -> tuple[Finding, ...]:
    node = state.nodes.get(name)
    if node is None:
        node = state.gone.pop(name, None)
        if node is None:
            return ()
        state.nodes[name] = node
    node.last_beat = now
    if name not in state.connected:  # it was silent on an open stream
        state.doubts.pop(name, None)
        state.connected[name] = None
    state.connected.move_to_end(name)
    return _withdraw(node, now) if node.lost else ()


def _withdraw(node: _Node, now: float) -> tuple[Finding, ...]:
    """Withdraw the loss of a node whose agent has reconnected."""
    reported, node.lost = node.lost, ()
    return tuple(
        Finding(
            id=f"{lost.id}:back:{now:.3f}",
            kind=FindingKind.NODE_LOST,
            severity=Severity.INFO,
            at=now,
            since=now,
            summary=f"Node {lost.node} is heard again, from the same agent: it was not lost.",
            node=lost.node,
            job=lost.job,
            generation=lost.generation,
            contradicts=lost.id,
            evidence={"contradicts": lost.id, "incarnation": node.incarnation, "away_s": f"{now - lost.since:.3f}"},
        )
        for lost in reported
    )


def _advance(state: LivenessState, item: RankProgress, now: float) -> None:
    """Record the steps of a node. The rank with the most steps counts, because it can finish them only together with
    all others."""
    key, step = (item.job, item.generation), max(item.step, default=-1)
    pace = state.paces.get(key)
    if pace is None:
        pace = state.paces[key] = _Pace(step, now)
    elif step > pace.step:
        if pace.stepped:  # the first one began before it was heard of
            pace.intervals_s.append((now - pace.at) / (step - pace.step))
        pace.step, pace.at, pace.stepped = step, now, True
    pace.heard(item.node, now)


def _present(state: LivenessState, item: RankProgress | GenerationStarted) -> None:
    """Record that the node reports running ranks of this job."""
    node = state.nodes.get(item.node) or state.gone.get(item.node)
    if node is not None and node.absent:
        node.absent.discard(item.job)


def _running(node: _Node, name: str, roster: Roster) -> Mapping[str, Placement]:
    """Return the node's ranks: those of the roster, without the jobs that its agent has not reported since it started."""
    placed = roster.on(name)
    if not node.absent:
        return placed
    return {job: placement for job, placement in placed.items() if job not in node.absent}


def _note_collective_error(state: LivenessState, exit_: WorkerExited, now: float) -> None:
    if not is_failure(exit_):
        return
    key = (exit_.job, exit_.generation)
    witness = state.witnesses.get_or_add(key, lambda: _FailedNodes(at=now))
    if cause_of(exit_) is Cause.OWN:
        witness.explained = True  # a rank failed by itself, so the others' errors are not about a lost node
    else:
        witness.at = now
        witness.nodes[exit_.node] = None


def _leave(state: LivenessState, name: str, roster: Roster) -> None:
    """Drop the ranks of a node that has said goodbye or is reported lost."""
    state.connected.pop(name, None)
    state.doubts.pop(name, None)
    node = state.gone[name] = state.nodes.pop(name)
    node.absent = set(roster.on(name))


def _lost(
    name: str,
    node: _Node,
    running: Mapping[str, Placement],
    since: float,
    why: str,
    *,
    confidence: float,
    now: float,
    witnesses: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """One finding per job that the node ran. For an idle node one warning without a job."""
    evidence = {"incarnation": node.incarnation, "last_beat": f"{since:.3f}", "silent_s": f"{now - since:.3f}"}
    evidence[DATED] = f"{ESTIMATE}its last sign of life"
    if witnesses:
        evidence["witnesses"] = ", ".join(witnesses[:_NAMED_MAX])
    findings = []
    for job, placement in sorted(running.items()) or [("", Placement(0, ()))]:
        generation, ranks = placement.generation, placement.ranks
        lost = f" with rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))} of {job}" if job else ""
        findings.append(
            Finding(
                id=f"node_lost:{name}:{node.incarnation}:{job}:{generation}:{since:.0f}",
                kind=FindingKind.NODE_LOST,
                severity=Severity.ERROR if job else Severity.WARNING,
                at=now,
                since=min(since, now),
                summary=f"Node {name} is lost{lost}: {why}.",
                node=name,
                job=job,
                generation=generation,
                rank=ranks[0] if len(ranks) == 1 else None,
                confidence=confidence,
                evidence=evidence,
                ladder=(Remedy.REPLACE_NODE,) if job else (Remedy.WATCH,),
            )
        )
    return tuple(findings)


def _some(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:3]) + (f" and {count - 3} more nodes" if count > 3 else "")
