"""The supervisor's part of a storm: from findings to decisions, on a virtual clock that advances by the real CPU time.

The real folder (decode, fold by the core, encode the commit), the real event log on a Redis of its own, and the real default
policy run as one server. A batch begins when the previous one is done, takes the findings that have arrived by then, and ends
after the CPU time that it used, in this process and in Redis. The reading of the streams is not counted.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import redis

from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation, Placement
from holdfast.domain.job import JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts, NodeState
from holdfast.domain.numbers import Numbers
from holdfast.log.embedded import EmbeddedRedis
from holdfast.log.names import LEADER_LEASE
from holdfast.log.redis import RedisLog
from holdfast.policy import default
from holdfast.supervisor.core import Job, Node, State, view
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.job import JobProgress, Numbering
from holdfast.supervisor.core.model.lifecycle import Running
from holdfast.supervisor.leader.fold import Folder
from holdfast.supervisor.leader.intake import Input
from holdfast.supervisor.leader.term import BATCH_MAX
from holdfast.supervisor.policies.questions import Questions
from holdfast.supervisor.protocol import (
    Evaluate,
    FindingArrived,
    FindingJudged,
    GenerationChanged,
    GenerationStage,
    IncidentChanged,
    NodeGone,
    PolicyAnswered,
)
from holdfast.wire.events import decode_finding, encode_finding

_LEASE_S = 3600.0  # longer than any storm


def answer(state: State, question: Evaluate, at: float) -> PolicyAnswered:
    """The decision of the default policy."""
    incident = state.incidents[question.incident]
    return PolicyAnswered(at, incident.id, default(incident, view(state, question.job, at)), "default policy")


def running_fleet(nodes: int, per_job: int, spares: int, at: float, per_node: int = 1) -> State:
    """A state with `nodes` nodes `n0`, `n1` … of `per_node` ranks each, in running jobs `job0`, `job1` …, and spares `s0` …"""
    mesh = Mesh.of({"dp": per_job * per_node})
    jobs, members = dict[str, Job](), dict[str, str]()
    for j in range(nodes // per_job):
        name = f"job{j}"
        hosts = [f"n{j * per_job + slot}" for slot in range(per_job)]
        placements = tuple(Placement(slot, host, slot * per_node, per_node) for slot, host in enumerate(hosts))
        generation = Generation(1, 1, mesh, placements)
        spec = JobSpec(name, LaunchSpec("/train.py"), per_job, per_node, mesh, min_dp=per_node, max_dp=mesh.dp)
        jobs[name] = Job(
            spec,
            "token",
            at,
            "",
            mesh.dp,
            Numbering(1),
            Running(),
            generation,
            generation,
            progress=JobProgress(50, 50),
        )
        members |= dict.fromkeys(hosts, name)
    names = [*(f"n{i}" for i in range(nodes)), *(f"s{i}" for i in range(spares))]
    table = {name: _node(name, number, members.get(name, ""), at, per_node) for number, name in enumerate(names)}
    live = {
        name: {1: Numbers(table[node].number for node in job.generation.nodes)}
        for name, job in jobs.items()
        if job.generation is not None
    }
    state = State(born=at, nodes=table, jobs=jobs, live=live)
    return state.indexed(index_of(state))


def _node(name: str, number: int, job: str, at: float, capacity: int) -> Node:
    facts = NodeFacts(name, "a", name, "10.0.0.1", "", capacity, f"{name}:9000", 1, "/var/holdfast", "/dev/kmsg")
    state = NodeState.ACTIVE if job else NodeState.SPARE
    return Node(facts, True, state, 1, at, number=number, announced=(), known_since=at)


@dataclass(slots=True)
class Decisions:
    """When each finding was processed, and when its incident was decided or deferred by the circuit breaker."""

    judged: dict[str, float] = field(default_factory=dict)  # by node
    decided: dict[str, float] = field(default_factory=dict)  # by node; nodes without an incident are missing
    undecided: set[str] = field(default_factory=set)  # nodes whose incident has no decision
    held: int = 0  # findings whose incident the breaker has deferred
    asked: int = 0  # requests to the policy
    changes: int = 0  # planned generations
    batches: int = 0
    spent_s: dict[str, float] = field(default_factory=dict)  # CPU time by purpose
    commit_bytes: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.spent_s.values())

    def spend(self, what: str, seconds: float) -> None:
        self.spent_s[what] = self.spent_s.get(what, 0.0) + seconds

    def spend_since(self, began: float, what: str) -> float:
        """Add the CPU time since `began` to the purpose `what`. Returns the current CPU time."""
        now = time.process_time()
        self.spend(what, now - began)
        return now


def decide(
    state: State, findings: Sequence[tuple[float, Finding]], gone: Sequence[tuple[float, str]], until: float
) -> Decisions:
    """Process published `findings` and lost control sessions (`gone`), each with its time in Unix seconds. Ends at `until` (the
    monotonic clock) and returns the decisions made by then."""
    with EmbeddedRedis() as server:
        return anyio.run(_decide, server.url, state, findings, gone, until)


async def _decide(
    url: str,
    state: State,
    findings: Sequence[tuple[float, Finding]],
    gone: Sequence[tuple[float, str]],
    until: float,
) -> Decisions:
    log, server = RedisLog(url, "storm"), redis.Redis.from_url(url)
    server_s = _cpu_s(server)
    lease = await log.acquire(LEADER_LEASE, "storm", _LEASE_S)
    assert lease is not None
    count = itertools.count()
    waiting: list[tuple[float, int, NodeGone | bytes]] = [
        *((at, next(count), NodeGone(at, node, "a", 1)) for at, node in gone),
        *((at, next(count), encode_finding(finding)) for at, finding in findings),
    ]
    heapq.heapify(waiting)
    folder, result = Folder(state, 1, committed=state), Decisions()
    clock, internal = waiting[0][0] if waiting else 0.0, list[Input]()
    of_incident: dict[str, list[str]] = {}  # incident → nodes of its findings
    when_decided: dict[str, float] = {}
    opened_at: float | None = None  # when the breaker opened
    questions = Questions()
    while (waiting or internal or questions) and time.monotonic() < until:
        if not internal and not questions:
            clock = max(clock, waiting[0][0])
        raw = list[NodeGone | bytes]()
        while waiting and waiting[0][0] <= clock and len(raw) < BATCH_MAX:
            raw.append(heapq.heappop(waiting)[2])
        spent_s, now = result.total_s, time.process_time()
        facts = [_input(each, clock) for each in raw]
        now = result.spend_since(now, "decode")
        folded = folder.fold([*facts, *internal], clock)
        now = result.spend_since(now, "fold")
        commit = folder.commit(folded, {})
        now = result.spend_since(now, "encode")
        await log.commit(lease, commit)
        result.spend_since(now, "redis")
        server_s, before_s = _cpu_s(server), server_s
        result.spend("redis", server_s - before_s)
        folder.keep(folded)
        now = time.process_time()
        internal = []
        for command in folded.commands:
            if isinstance(command, Evaluate):
                questions.add(command)
        behind = bool(waiting) and waiting[0][0] <= clock
        for question in questions.due(folded.state, behind=behind):
            internal.append(Input(answer(folded.state, question, clock)))
        result.spend_since(now, "policy")
        clock += result.total_s - spent_s
        result.asked += len(internal)
        result.batches += 1
        result.commit_bytes += sum(len(value or b"") for value in commit.snapshot.values())
        if opened_at is None and folded.state.breaker.open_until is not None:
            opened_at = clock
        for record in folded.published:
            match record:
                case FindingJudged(finding=finding, incident=incident_id):
                    result.judged.setdefault(finding.node, clock)
                    if incident_id:
                        of_incident.setdefault(incident_id, []).append(finding.node)
                case IncidentChanged(incident=changed) if changed.action is not None or changed.closed:
                    when_decided.setdefault(changed.id, clock)
                case GenerationChanged(stage=GenerationStage.PLANNED):
                    result.changes += 1
                case _:
                    pass
    for incident_id, nodes in of_incident.items():
        for node in nodes:
            when = when_decided.get(incident_id, opened_at)
            if when is not None:
                result.decided.setdefault(node, max(result.judged[node], when))
                result.held += incident_id not in when_decided
            else:
                result.undecided.add(node)
    await log.aclose()
    server.close()
    return result


def _cpu_s(server: redis.Redis) -> float:
    """CPU time that this Redis has used so far, in seconds."""
    used: Any = server.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def _input(raw: NodeGone | bytes, at: float) -> Input:
    return Input(FindingArrived(at, decode_finding(raw)) if isinstance(raw, bytes) else raw)
