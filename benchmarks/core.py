"""Measures the cost of a lost node, a save and a change of leader for one large job in one supervisor.

    python -m benchmarks.core [--nodes 128,1024] [--out out/bench] [--log memory|redis]

A job of N nodes with 8 ranks each runs. The leader consists of production code: decoding of the agents' messages, entries of
the inbox, the event log, the folder with its batches, the core, the default policy, the snapshot's parts and the encoding of
orders. The agents are simulated, and their work is not counted. They send the messages of real agents, in random order. CPU
time is that of this process; with `--log redis`, that of the server is a separate row. Each size runs in a separate process.

* incident: from the loss of a node (finding and end of its session) until every rank steps again on a spare.
* save: every node reports the shards of one more checkpoint, in place of the last one, until all nodes are notified that it is
  complete.
* difference: the same for a checkpoint beside the last one, reported as a difference.
* start: a new leader reads the snapshot, folds its first event, and writes its first commit.
* beats: one second of heartbeats, two per agent, and their evaluation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import anyio
import redis

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.generations import Generation, Placement, ShardKey, ShardRecord
from holdfast.domain.incidents import IncidentState
from holdfast.domain.inventories import difference
from holdfast.domain.job import CheckpointSpec, JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts, NodeState, RunningWorker
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import (
    Inventory,
    OrderDone,
    Prepare,
    RanksStepping,
    Report,
    Start,
    StepReached,
)
from holdfast.domain.replication import CommonCheckpoint
from holdfast.domain.runs import Shards, Workers, shard_runs, worker_runs
from holdfast.log.embedded import EmbeddedRedis
from holdfast.log.memory import MemoryLog
from holdfast.log.names import FINDINGS, INBOX, LEADER_LEASE, STEPS, SUPERVISOR_GROUP, SUPERVISOR_STREAMS
from holdfast.log.protocol import Commit, Entry, FencedLog, Lease
from holdfast.log.redis import RedisLog
from holdfast.policy import default
from holdfast.runtime.garbage import collect_at_rest, collect_seldom
from holdfast.supervisor import inbox
from holdfast.supervisor.agents import beats
from holdfast.supervisor.core import Job, Node, State, view
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.job import Checkpoints, JobProgress, Membership, Numbering
from holdfast.supervisor.core.model.lifecycle import Running
from holdfast.supervisor.core.rules.election import Segment
from holdfast.supervisor.core.rules.planner import peers
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.fold import Folder
from holdfast.supervisor.leader.intake import Input, take
from holdfast.supervisor.leader.term import BATCH_MAX
from holdfast.supervisor.protocol import (
    CancelTimer,
    Evaluate,
    JobPhase,
    LeaderStarted,
    NodeGone,
    PolicyAnswered,
    Post,
    Send,
    SendNotification,
    SetTimer,
    TimerFired,
    node_reported,
)
from holdfast.supervisor.published import Published
from holdfast.supervisor.timers import RetentionDue, Timer
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import records
from holdfast.wire.control import (
    SlotOrders,
    decode_first_steps,
    decode_report,
    decode_started,
    decode_steps_reached,
    decode_telemetry_cut_s,
    encode_beat,
    encode_order,
    encode_report,
)
from holdfast.wire.events import encode_finding, encode_steps
from holdfast.wire.retention import encode_saved_by_all

SIZES = (128, 1024, 4096, 12_500)
GOALS_S = {"incident_cpu_s": 1.0, "save_cpu_s": 0.5, "snapshot_load_s": 5.0}  # at the largest of SIZES
RANKS = 8  # per node
JOB = "llm"
ZONES = 8
_T0 = 1_700_000_000.0
_ATTEMPT = 1000
_SAVED = 50  # the step that is saved when the benchmark begins
_LEASE_S = 1e6
_JUDGED = 10  # further steps after a save, whose losses verify it
_SEED = 7
WAITING = 256  # reports that accumulate while the log writes the previous ones
STEPPING = 2500  # heartbeats with first steps that accumulate during a commit


# ---------------------------------------------------------------- a running job


def running_job(nodes: int) -> State:
    """Return a state in which `n0` … run one job, whose step 50 is saved in memory, on disk and at a peer. There is one spare
    per fifty nodes."""
    mesh = Mesh.of({"dp": nodes // 4, "pp": 4, "tp": RANKS})
    placements = tuple(Placement(slot, f"n{slot}", slot * RANKS, RANKS) for slot in range(nodes))
    generation = Generation(1, _ATTEMPT, mesh, placements)
    spec = JobSpec(
        JOB, LaunchSpec("/train.py", ("--size", "70b"), preload=("torch",)), nodes, RANKS, mesh, min_dp=1, max_dp=nodes // 4,
        checkpoint=CheckpointSpec(10, 2),
    )  # fmt: skip
    job = Job(
        spec, "token", _T0, "", mesh.dp, Numbering(_ATTEMPT - 1, _ATTEMPT), Running(), generation, generation,
        membership=Membership(_T0),
        progress=JobProgress(55, 55, 1.0, furthest_step=55, progressed=True, seen_step=55, seen_at=_T0),
        checkpoints=Checkpoints((Segment(_ATTEMPT),), _SAVED, _T0, ever_saved=True),
    )  # fmt: skip
    zones = {f"n{i}": f"z{i % ZONES}" for i in range(nodes)}
    copies = peers(placements, zones)
    table = {}
    for placement in placements:
        held = shards(generation, _SAVED, placement, generation.placement_of(copies[placement.node][0]))
        table[placement.node] = _node(placement.node, zones[placement.node], generation, placement, held)
    for i in range(max(2, nodes // 50)):
        table[f"s{i}"] = _node(f"s{i}", f"z{i % ZONES}", generation, None, ())
    live = {JOB: {generation.number: Numbers.below(nodes)}}
    # Every node has changed since it joined.
    table = {name: evolve(node, number=number) for number, (name, node) in enumerate(table.items())}
    state = State(
        born=_T0, folded_at=_T0, epoch=1, secret="secret", nodes=table, jobs={JOB: job}, live=live, diagnostics_at=_T0
    )
    return state.indexed(index_of(state))


def shards(generation: Generation, step: int, own: Placement | None, peer: Placement | None) -> tuple[ShardRecord, ...]:
    """Return a node's shards of one step: its own in memory and on disk, a peer's on disk."""
    kept = [(own, "memory"), (own, "disk"), (peer, "disk")]
    return tuple(
        ShardRecord(
            ShardKey(generation.attempt, step, rank), generation.mesh, tier, 10**9,
            f"crc32c:{rank % generation.mesh.replica_size:08x}{step:08x}", placement.node,
            f"{step:016x}{rank:016x}",
        )
        for placement, tier in kept
        if placement is not None
        for rank in placement.ranks
    )  # fmt: skip


def _node(
    name: str, zone: str, generation: Generation, placement: Placement | None, held: Sequence[ShardRecord]
) -> Node:
    facts = NodeFacts(
        name, f"{name}-1", f"{name}.cluster", "10.0.0.1", zone, RANKS, f"{name}:9000", 100, "/var/holdfast", "/dev/kmsg"
    )
    mine = placement is not None
    return Node(
        facts, True, NodeState.ACTIVE if mine else NodeState.SPARE, 1, _T0, announced=(), known_since=_T0,
        inventory={JOB: Shards(shard_runs(held))} if held else {},
        inventory_from={JOB: 1} if held else {},
        warmed=() if mine else (JOB,),
        workers=Workers(worker_runs(_workers(generation.number, placement.ranks))) if placement is not None else (),
        workers_version=1, workers_at=_T0, ranks_at=_T0 if mine else 0.0,
    )  # fmt: skip


def _workers(generation: int, ranks: Iterable[int]) -> tuple[RunningWorker, ...]:
    return tuple(RunningWorker(JOB, generation, rank, 1000 + rank, _T0) for rank in ranks)


# ---------------------------------------------------------------- the agents


class Agents:
    """The shards of the nodes, and the messages that they send, as encoded bytes."""

    def __init__(self, state: State) -> None:
        self.held = {name: (1, node.inventory.get(JOB, ())) for name, node in state.nodes.items()}  # (report, shards)
        self.seq = dict.fromkeys(state.nodes, 1)
        self.version = dict.fromkeys(state.nodes, 1)
        self.placed: dict[str, Placement] = {}

    def say(self, node: str, report: Report) -> tuple[str, bytes]:
        self.seq[node] += 1
        return node, encode_report(report, self.seq[node]).SerializeToString()

    def answer(self, send: Send, at: float) -> Iterator[tuple[str, bytes]]:
        node, command_id, order = send.node, send.command_id, send.order
        if isinstance(order, Prepare):
            self.placed[node] = order.placement
            workers = _workers(order.generation, order.placement.ranks)
            master = "10.0.0.1:29500" if order.placement.first_rank == 0 else ""
            phases = (("stop", 0.02), ("fork", 0.01), ("stage", 0.03))
            self.version[node] += 1
            done = OrderDone(
                command_id, True, "", master, at, phases, workers, (("memory", RANKS),),
                restored_bytes=(("memory", 8 * 10**9),), workers_version=self.version[node],
            )  # fmt: skip
            yield self.say(node, done)
        elif not isinstance(order, Start):  # its answer is the heartbeat with the first steps, or an earlier one
            yield self.say(node, OrderDone(command_id, True, at=at))

    def step(self, generation: int, step: int, at: float) -> Iterator[tuple[str, bytes]]:
        phases = (("process_group", 0.5), ("restore", 0.3), ("first_step", 0.9))
        for node, placement in self.placed.items():
            stepping = RanksStepping(JOB, generation, tuple(placement.ranks), step, at, phases)
            reached = (StepReached(JOB, generation, step),)
            beat = encode_beat(at, self.version[node], reached, first_steps=(stepping,))
            yield node, beat.SerializeToString()

    def save(self, generation: Generation, step: int, kept: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        """Yield every node's inventory after a save: one more step, beside those that are kept."""
        copies = peers(generation.placements, dict.fromkeys(generation.nodes, ""))
        slots = {placement.node: placement for placement in generation.placements}
        for node, placement in slots.items():
            base, before = self.held[node]
            peer = slots[copies[node][0]]
            after = tuple(
                itertools.chain.from_iterable(shards(generation, each, placement, peer) for each in (*kept, step))
            )
            report = difference(Inventory(JOB, before), Inventory(JOB, after), base)
            assert bool(report.base) is bool(kept)
            yield self.say(node, report)
            self.held[node] = self.seq[node], after


# ---------------------------------------------------------------- the leader


@dataclass
class Spent:
    """CPU seconds by activity, and the number of written bytes."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    commits: int = 0
    written: int = 0  # bytes of snapshot parts and records
    largest: int = 0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.seconds[what] += time.process_time() - began


class Leader:
    """Works like the supervisor's `term`: streams → fold → commit → act, without sockets. Collects orders and timers."""

    def __init__(self, log: FencedLog, lease: Lease, state: State) -> None:
        self.log, self.lease = log, lease
        self.folder = Folder(state, lease.epoch, committed=state)
        self.now = _T0 + 1.0
        self.spent = Spent()
        self.sent: list[Send | Post] = []
        self.timers: dict[Timer, float] = {}
        self._batches = log.subscribe(
            *SUPERVISOR_STREAMS, group=SUPERVISOR_GROUP, consumer="leader", batch_max=BATCH_MAX
        )
        self._inbox = inbox.InboxWriter(log)
        self._saved_by_all = lru_cache(partial(encode_saved_by_all, lease.epoch))

    @property
    def job(self) -> Job:
        return self.folder.state.jobs[JOB]

    async def hear(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Do the work of the sessions: decode, check, and append to the inbox."""
        incarnations = {name: node.facts.incarnation for name, node in self.folder.state.nodes.items()}
        for batch in _batched(messages, WAITING):
            with self.spent.on("receive"):
                for node, raw in batch:
                    message = pb.AgentMessage.FromString(raw)  # as gRPC does
                    event = node_reported(self.now, node, incarnations[node], message.seq, decode_report(message), 1)
                    self._inbox.report(event, raw)
            with self.spent.on("log"):
                await self._inbox.write()

    async def hear_first_steps(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Do the work of the sessions for heartbeats with first steps, and fold `STEPPING` of them at a time."""
        incarnations = {name: node.facts.incarnation for name, node in self.folder.state.nodes.items()}
        for batch in _batched(messages, STEPPING):
            heard: list[Input] = []
            with self.spent.on("receive"):
                for node, raw in batch:
                    message = pb.AgentMessage.FromString(raw)
                    assert message.WhichOneof("report") == "beat"
                    beat = message.beat
                    decode_steps_reached(beat), decode_started(beat), decode_telemetry_cut_s(beat)
                    for report in decode_first_steps(beat):
                        heard.append(Input(node_reported(self.now, node, incarnations[node], 0, report, 1)))
            await self.work(heard)

    async def put(self, stream: str, *entries: Entry) -> None:
        with self.spent.on("log"):
            await self.log.append(stream, *entries)

    async def work(self, internal: Sequence[Input] = ()) -> None:
        """Fold until no input is left."""
        questions: list[Evaluate] = []
        waiting = list(internal)
        while True:
            with self.spent.on("log"):
                batch = await anext(self._batches)
            if not (batch or waiting or questions):
                return
            with self.spent.on("policy"):
                waiting += [self._decide(each) for each in questions]
            with self.spent.on("read"):
                intake = take(batch, self.now, self._inbox.decoded)
            with self.spent.on("fold"):
                folded = self.folder.fold([*intake.inputs, *waiting], self.now)
            assert not folded.dead, folded.dead
            with self.spent.on("encode"):
                commit = self.folder.commit(folded, intake.positions)
            with self.spent.on("log"):
                await self.log.commit(self.lease, commit)
            self.folder.keep(folded)
            size = sum(len(value or b"") for value in commit.snapshot.values())
            size += sum(len(entry.data) for _, entry in commit.append)
            self.spent.commits += 1
            self.spent.written += size
            self.spent.largest = max(self.spent.largest, size)
            waiting, questions = [], [each for each in folded.commands if isinstance(each, Evaluate)]
            with self.spent.on("send"):
                for command in folded.commands:
                    match command:
                        case Send(command_id=command_id, order=order):
                            encode_order(self.lease.epoch, command_id, order).SerializeToString()
                            self.sent.append(command)
                        case Post(broadcast=broadcast, slots=slots):
                            orders = SlotOrders(self.lease.epoch, broadcast.order)
                            for slot in slots:
                                place, command_id = broadcast.placements[slot], broadcast.id_of(slot)
                                restore, peers = broadcast.of(slot)
                                orders.encode(command_id, place, restore, peers, in_runs=True)
                            self.sent.append(command)
                        case SendNotification(message=CommonCheckpoint() as word):
                            self._saved_by_all(word)  # encoded once for all nodes, as in a session
                        case SetTimer(timer=timer, due=due):
                            self.timers[timer] = due
                        case CancelTimer(timer=timer):
                            self.timers.pop(timer, None)
                        case _:
                            pass

    async def wait(self, seconds: float) -> None:
        """Advance the time, and fire the timers that become due."""
        self.now += seconds
        due = sorted(timer for timer, when in self.timers.items() if when <= self.now)
        for timer in due:
            del self.timers[timer]
        await self.work([Input(TimerFired(self.now, timer)) for timer in due])

    def _decide(self, question: Evaluate) -> Input:
        state = self.folder.state
        incident = state.incidents[question.incident]
        action = default(incident, view(state, question.job, self.now))
        return Input(PolicyAnswered(self.now, incident.id, action, "default policy"))


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


# ---------------------------------------------------------------- measurements


async def lose_node(leader: Leader, agents: Agents, lost: str, rng: random.Random) -> Spent:
    leader.spent = Spent()
    at, number = leader.now, leader.job.number
    finding = Finding(
        f"lost:{lost}:1", FindingKind.NODE_LOST, Severity.ERROR, at, at, f"{lost} is gone", lost, JOB, number
    )
    await leader.put(INBOX, inbox.gone_entry(NodeGone(at, lost, f"{lost}-1", 1)))
    await leader.put(FINDINGS, Entry(finding.id, "Finding", encode_finding(finding)))
    await leader.work()
    for phase in (JobPhase.PREPARING, JobPhase.STARTING):
        assert leader.job.phase is phase, (leader.job.phase, leader.job.reason)
        await leader.wait(0.05)
        sent, leader.sent = leader.sent, []
        sends = itertools.chain.from_iterable(each.sends() if isinstance(each, Post) else (each,) for each in sent)
        said = [message for send in sends for message in agents.answer(send, leader.now)]
        await leader.hear(_shuffled(said, rng))
        await leader.work()
    generation = leader.job.running
    assert generation is not None
    step = generation.restore.step + 1
    await leader.wait(0.05)
    await leader.hear_first_steps(_shuffled(list(agents.step(generation.number, step, leader.now)), rng))
    await leader.put(STEPS, _steps(generation, step, leader.now))
    await leader.work()
    assert leader.job.phase is JobPhase.RUNNING, leader.job.reason
    [incident] = leader.folder.state.closed
    assert incident.state is IncidentState.RESOLVED, incident
    assert generation.restore.step == _SAVED, generation.restore
    return leader.spent


async def save(leader: Leader, agents: Agents, step: int, rng: random.Random, kept: Sequence[int] = ()) -> Spent:
    generation = leader.job.running
    assert generation is not None
    leader.spent = Spent()
    leader.now += 10.0
    await leader.put(STEPS, _steps(generation, step, leader.now))
    await leader.work()
    told = list(agents.save(generation, step, kept))
    rng.shuffle(told)
    await leader.hear(told)
    await leader.work()
    assert leader.job.checkpoints.step == step
    await leader.put(STEPS, _steps(generation, step + _JUDGED, leader.now))
    await leader.work()
    await leader.wait(leader.timers[RetentionDue(JOB)] - leader.now)
    assert leader.job.checkpoints.saved_by_all == (generation.attempt, step)
    return leader.spent


async def start(log: FencedLog, lease: Lease, at: float) -> tuple[float, int]:
    """Return the CPU seconds until a new leader has written its first commit, and the bytes of the snapshot."""
    began = time.process_time()
    parts = await log.snapshot(LEADER_LEASE)
    state = snapshot.load(parts)
    folder = Folder(state, lease.epoch + 1, committed=state)
    folded = folder.fold([Input(LeaderStarted(at, lease.epoch + 1, "another"))], at)
    await log.commit(lease, folder.commit(folded, {}))
    folder.keep(folded)
    took_s = time.process_time() - began
    return took_s, sum(len(part) + len(raw) for part, raw in parts.items())


def beat(state: State) -> float:
    """Return the CPU seconds for one second of heartbeats."""
    running = state.jobs[JOB].running
    assert running is not None
    beat = encode_beat(_T0, 2, (StepReached(JOB, running.number, 99),)).SerializeToString()
    raw = [(node, beat) for node in running.nodes for _ in range(2)]
    began = time.process_time()
    seen: list[beats.NodeSteps] = []
    for node, each in raw:
        message = pb.AgentMessage.FromString(each)
        if message.WhichOneof("report") == "beat":
            seen += [(node, reached) for reached in decode_steps_reached(message.beat)]
    beats.steps_to_fold(seen, state, _T0)
    return time.process_time() - began


def _steps(generation: Generation, step: int, at: float) -> Entry:
    record = StepRecord(JOB, generation.number, step, generation.mesh.world_size, at - 1.0, at, 10**6, 2.0, 0.1)
    return Entry(f"step-{step}", "steps", encode_steps([record]))


def _shuffled(messages: list[tuple[str, bytes]], rng: random.Random) -> list[tuple[str, bytes]]:
    """Shuffle the messages of different nodes; those of one node keep their order."""
    by_node: dict[str, list[tuple[str, bytes]]] = {}
    for message in messages:
        by_node.setdefault(message[0], []).append(message)
    order = [node for node, told in by_node.items() for _ in told]
    rng.shuffle(order)
    rest = {node: iter(told) for node, told in by_node.items()}
    return [next(rest[node]) for node in order]


async def measure(nodes: int, url: str | None) -> dict[str, Any]:
    snapshot.prepare()
    records.prepare(Published, inbox.InboxEvent)
    before_mb = _memory_mb()
    state = running_job(nodes)
    log: FencedLog = (
        MemoryLog(stream_bytes_max=2**31, block_s=0.01) if url is None else RedisLog(url, "core", block_s=0.01)
    )
    lease = await log.acquire(LEADER_LEASE, "benchmark", _LEASE_S)
    assert lease is not None
    leader, agents, rng = Leader(log, lease, state), Agents(state), random.Random(_SEED)
    await log.commit(lease, Commit(snapshot=snapshot.changes(None, state)))
    collect_at_rest()  # as an idle leader does
    incident = await lose_node(leader, agents, "n3", rng)
    leader.sent = []
    collect_at_rest()
    saved = await save(leader, agents, 60, rng)
    load_s, snapshot_bytes = await start(log, lease, leader.now)
    collect_at_rest()
    beside = await save(leader, agents, 80, rng, kept=[60])
    result = {
        "incident_cpu_s": round(sum(incident.seconds.values()), 3),
        "save_cpu_s": round(sum(saved.seconds.values()), 3),
        "difference_cpu_s": round(sum(beside.seconds.values()), 3),
        "snapshot_load_s": round(load_s, 3),
        "memory_mb": round(_memory_mb() - before_mb, 1),
        "commits": incident.commits,
        "bytes_per_commit": incident.written // max(1, incident.commits),
        "bytes_of_largest_commit": incident.largest,
        "save_bytes_per_commit": saved.written // max(1, saved.commits),
        "snapshot_bytes": snapshot_bytes,
        "beats_cpu_s": round(beat(leader.folder.state), 3),
        "incident": {what: round(spent, 3) for what, spent in sorted(incident.seconds.items())},
        "save": {what: round(spent, 3) for what, spent in sorted(saved.seconds.items())},
    }
    if url is not None:
        server: Any = redis.Redis.from_url(url).info("cpu")
        result["redis_cpu_s"] = round(float(server["used_cpu_user"] + server["used_cpu_sys"]), 3)
    await log.aclose()
    return result


def _memory_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------- the table


def exponent(results: dict[str, dict[str, Any]], what: str) -> float:
    """Return the exponent of the growth with the number of nodes: the slope of a straight line through the logarithms."""
    points = [(math.log(int(nodes)), math.log(each[what])) for nodes, each in results.items() if each[what] > 0]
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def print_table(results: dict[str, dict[str, Any]]) -> None:
    rows = [what for what, value in next(iter(results.values())).items() if not isinstance(value, dict)]
    rows += [f"{of}: {part}" for of in ("incident", "save") for part in next(iter(results.values()))[of]]
    flat = {
        nodes: {**each, **{f"{of}: {part}": s for of in ("incident", "save") for part, s in each[of].items()}}
        for nodes, each in results.items()
    }
    print(f"{'nodes':28}" + "".join(f"{nodes:>13}" for nodes in flat) + f"{'exponent':>10}{'goal':>7}")
    for row in rows:
        values = "".join(f"{each[row]:>13}" for each in flat.values())
        goal = f"{GOALS_S[row]:g}" if row in GOALS_S else ""
        print(f"{row:28}{values}{exponent(flat, row):>10.2f}{goal:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)), help="sizes, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--log", choices=("memory", "redis"), default="memory")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        collect_seldom()  # as the service does
        with ExitStack() as stack:
            url = stack.enter_context(EmbeddedRedis()).url if args.log == "redis" else None
            print(json.dumps(anyio.run(measure, args.one, url)))
        return
    results: dict[str, dict[str, Any]] = {}
    for nodes in args.nodes.split(","):
        command = [sys.executable, "-m", "benchmarks.core", "--one", nodes, "--log", args.log]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[nodes] = json.loads(output.splitlines()[-1])
        print(f"{nodes} nodes: done", file=sys.stderr)
    print_table(results)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "core.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
