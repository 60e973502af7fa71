"""Detects lost nodes: the agent's telemetry stream broke and the agent did not reconnect, or its heartbeats stopped.

Theory of operation. A node is *connected* (ordered by last heartbeat), *in doubt* (the stream broke without a goodbye, or the
node has been silent for `silence_s`) or *gone* (the agent sent a goodbye, or the node was reported lost). A node in doubt is
reported as NODE_LOST

* at once if a new incarnation of the agent connects: the workers of the old incarnation ended with it;
* `corroborated_s` after the break, if ranks on other nodes of its generation fail in a collective and no rank has failed
  first: these nodes are the second witness;
* `reconnect_grace_s` after the break, if the steps of the other nodes of its generation have stopped with it;
* `unwitnessed_grace_s` after the break otherwise.

If the same incarnation reconnects before the report, nothing is reported. If it reconnects later, a finding of the same kind
and of severity info withdraws the report. Only a node that has been connected to this process can be reported as lost.

The other nodes of its generations are a third witness. A step needs every rank. While other nodes finish steps, a node without
contact therefore still trains, and only its agent or its connection has failed. The report is then delayed for as long as the
next step may take at the current step time; while steps continue, only a warning is reported. Failing collectives outweigh
this. Often the steps of other nodes are no evidence: in the first steps of a generation, in a pause (an evaluation, a save),
for a job on one node, for a script that reports no steps. A connection that is broken for seconds is then more likely than a
lost node, and must not stop a healthy run. Such a node has `unwitnessed_grace_s`, in which every running agent reconnects.

If many nodes become doubtful within one second, this process has more likely lost its own network. It reports one HOST_PRESSURE
finding, and nodes without a second witness have `mass_grace_s`, in which every running agent reconnects. A node that is still
missing then, while others are connected, is reported with low confidence, because a complete rack can fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import ClassVar

from holdfast.diagnostics.detectors.liveness_findings import NAMED_MAX, first_names, node_lost, withdraw
from holdfast.diagnostics.detectors.liveness_state import (
    Doubt,
    LivenessState,
    Pace,
    TrackedNode,
    advance,
    leave,
    note_collective_error,
    note_present,
    ranks_on,
)
from holdfast.diagnostics.detectors.protocol import Findings, Observed, TelemetryGap
from holdfast.diagnostics.roster import Placement, Roster, RunStarted
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
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

# The longest pause of an agent between two attempts, and half of it for the connection and the first tick.
RECONNECT_GRACE_S = 1.5 * TELEMETRY_RETRY_S_MAX
UNWITNESSED_GRACE_S = 15.0  # enough for many attempts of a running agent


@dataclass(frozen=True, slots=True)
class Liveness:
    """Reports NODE_LOST, and one HOST_PRESSURE if diagnostics has lost its own network."""

    reads: ClassVar = (
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
    initial = LivenessState
    reconnect_grace_s: float = RECONNECT_GRACE_S
    corroborated_s: float = 0.05
    silence_s: float = 5.0
    witness_s: float = 5.0  # a collective error older than this is not a witness
    mass_window_s: float = 1.0
    mass_fraction: float = 0.3
    mass_nodes_min: int = 3
    mass_grace_s: float = 15.0  # enough for many attempts of a running agent
    unwitnessed_grace_s: float = UNWITNESSED_GRACE_S  # if the steps of other nodes are no evidence about the node
    # Steps continue if the next step ends within `next_step` times the slowest recent step, at most `next_step_s_max`, and is
    # reported within `report_s` after that.
    next_step: float = 1.25
    report_s: float = 1.5
    next_step_s_max: float = 60.0
    excuse_s: float = 10.0  # if steps continue, a node without contact is reported as a warning after this time

    def observe(
        self, state: LivenessState, item: Observed, now: float, roster: Roster
    ) -> tuple[LivenessState, Findings]:
        findings: tuple[Finding, ...] = ()
        match item:
            case NodeBeat():
                findings = _beat(state, item.node, now)
            case RankProgress():
                note_present(state, item)
                advance(state, item, now)
            case GenerationStarted():
                note_present(state, item)
            case ClockTick():
                findings = self._conclude(state, now, roster)
            case NodeConnected():
                findings = self._connected(state, item, now, roster)
            case NodeDisconnected():
                self._disconnected(state, item, now, roster)
            case WorkerExited():
                note_collective_error(state, item, now)
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
            findings = withdraw(old, now)
        else:
            if old is not None and (running := ranks_on(old, item.node, roster)):
                why = "its agent has been restarted, so its workers have ended"
                findings = node_lost(item.node, old, running, old.last_beat, why, confidence=1.0, now=now)
            state.nodes[item.node] = TrackedNode(item.incarnation, now, absent=set(roster.on(item.node)))
        state.doubts.pop(item.node, None)
        state.connected[item.node] = None
        state.connected.move_to_end(item.node)
        return findings

    def _disconnected(self, state: LivenessState, item: NodeDisconnected, now: float, roster: Roster) -> None:
        node = state.nodes.get(item.node)
        if node is None or item.node not in state.connected:
            return
        if item.clean:
            leave(state, item.node, roster)
        else:
            del state.connected[item.node]
            state.doubts[item.node] = Doubt(
                since=node.last_beat, began=now, why="its telemetry stream broke", broken=True
            )

    def _conclude(self, state: LivenessState, now: float, roster: Roster) -> tuple[Finding, ...]:
        self._find_silent(state, now)
        if not state.doubts:
            return ()
        findings: list[Finding] = []
        for name, doubt in sorted(state.doubts.items()):
            node = state.nodes[name]
            running = ranks_on(node, name, roster)
            corroborated = self._is_corroborated(state, running, name, now)
            if not self._is_ripe(doubt, now, corroborated=corroborated):
                continue
            witnesses: list[str] = []
            confidence, why = 0.99, doubt.why
            if corroborated:
                witnesses, count = self._witnesses(state, running, name, now)
                why = f"{why}, and ranks on {first_names(witnesses, count)} fail in their collectives"
            elif doubt.suspended_until > now or (doubt.suspended_until and not state.connected):
                continue  # suspended in this pass, or no node is connected, so that silence proves nothing
            elif not doubt.suspended_until and (together := self._mass(state, doubt)):
                findings.append(self._suspend(state, together, now))
                continue
            elif self._steps_continue(state, running, now):
                findings += self._excuse(state, name, doubt, running, now)
                continue
            elif now - doubt.began < self.unwitnessed_grace_s and not self._is_witnessed(state, name, running, doubt):
                continue
            else:
                if doubt.broken:
                    why += f" and its agent did not reconnect within {now - doubt.began:.2f} s"
                confidence = 0.6 if doubt.suspended_until else 0.9
            lost = node_lost(name, node, running, doubt.since, why, confidence=confidence, now=now, witnesses=witnesses)
            findings += lost
            node.lost = tuple(finding for finding in lost if finding.job)
            leave(state, name, roster)
        return tuple(findings)

    def _steps_continue(self, state: LivenessState, running: Mapping[str, Placement], now: float) -> bool:
        """Whether other ranks of a generation in `running` still finish steps, which needs all ranks of the generation."""
        for job, placement in running.items():
            pace = state.paces.get((job, placement.generation))
            if pace is None or not pace.intervals_s:
                continue  # the step time is not known
            if now - max(pace.at, state.gap_until) < self._next_s(pace):
                return True
        return False

    def _is_witnessed(self, state: LivenessState, name: str, running: Mapping[str, Placement], doubt: Doubt) -> bool:
        """Whether a loss of the node would stop the steps of other nodes: in one of its generations another node sends reports,
        the step time is known, and steps had not stopped before the node's last heartbeat. (The stream of a node without power
        or network breaks seconds after that, by a keepalive.) An idle node needs no witness."""
        for job, placement in running.items():
            pace = state.paces.get((job, placement.generation))
            if pace is None or not pace.intervals_s or pace.reported_besides(name) <= doubt.began:
                continue
            if min(doubt.since, doubt.began) - pace.at <= self._next_s(pace):
                return True
        return not running

    def _next_s(self, pace: Pace) -> float:
        """How long the next step may take until it is reported, in seconds."""
        usual_s = nlargest(2, pace.intervals_s)[-1]  # not the slowest, which may include a compilation or a save
        return min(self.next_step * usual_s, self.next_step_s_max) + self.report_s

    def _excuse(
        self, state: LivenessState, name: str, doubt: Doubt, running: Mapping[str, Placement], now: float
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
                summary=f"Node {name} is disconnected ({doubt.why}), but the other ranks of {jobs} still finish steps, so its "
                "ranks train: check its agent and its network to the control plane.",
                node=name,
                confidence=0.9,
                evidence={"incarnation": state.nodes[name].incarnation, "last_beat": f"{doubt.since:.3f}"},
                recommended_actions=(Remedy.WATCH,),
            ),
        )

    def _find_silent(self, state: LivenessState, now: float) -> None:
        """Move nodes whose heartbeats stopped from connected to doubt. Nodes are ordered by their last heartbeat, so that only
        a few are checked."""
        while state.connected:
            name = next(iter(state.connected))
            last_beat = max(state.nodes[name].last_beat, state.gap_until)
            if now - last_beat < self.silence_s:
                return
            del state.connected[name]
            why = f"its agent sent nothing for {now - last_beat:.1f} s on an open stream"
            state.doubts[name] = Doubt(since=state.nodes[name].last_beat, began=last_beat, why=why)

    def _is_ripe(self, doubt: Doubt, now: float, *, corroborated: bool) -> bool:
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
        """Return some of the other nodes of its generations whose ranks fail in collectives, and their number.

        Only some, because 12,500 names would otherwise be sorted for each lost node of a rack.
        """
        witnessing = [*self._witnessing(state, running, name, now)]
        names = {each for nodes in witnessing for each in islice((each for each in nodes if each != name), NAMED_MAX)}
        if len(witnessing) == 1:
            return sorted(names), len(witnessing[0]) - (name in witnessing[0])
        return sorted(names), len(set().union(*witnessing) - {name})

    def _witnessing(
        self, state: LivenessState, running: Mapping[str, Placement], name: str, now: float
    ) -> Iterator[Mapping[str, None]]:
        """Yield for each generation in `running` the nodes whose ranks fail in collectives, unless a rank is known that failed
        first."""
        for job, placement in running.items():
            witness = state.witnesses.get((job, placement.generation))
            if witness is None or witness.explained or now - witness.at > self.witness_s:
                continue
            if len(witness.nodes) > (name in witness.nodes):
                yield witness.nodes

    def _mass(self, state: LivenessState, doubt: Doubt) -> list[str]:
        """The nodes that became doubtful together with this node; empty if few enough to have failed independently."""
        bar = self.mass_fraction * (len(state.connected) + len(state.doubts))
        if len(state.doubts) < self.mass_nodes_min or len(state.doubts) <= bar:
            return []  # too few in any case; an early return, because this may be called for each of thousands of nodes
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
            summary=f"Diagnostics lost contact with {len(names)} of {seen} nodes at once: probably its own network failed.",
            confidence=0.7,
            evidence={"nodes": ", ".join(names[:32]), "count": str(len(names)), "seen": str(seen)},
            recommended_actions=(Remedy.WATCH,),
        )


def _beat(state: LivenessState, name: str, now: float) -> tuple[Finding, ...]:
    node = state.nodes.get(name)
    if node is None:
        node = state.gone.pop(name, None)
        if node is None:
            return ()
        state.nodes[name] = node
    node.last_beat = now
    if name not in state.connected:  # the node was silent on an open stream
        state.doubts.pop(name, None)
        state.connected[name] = None
    state.connected.move_to_end(name)
    return withdraw(node, now) if node.lost else ()
