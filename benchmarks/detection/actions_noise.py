"""Noise of suite `actions`: counts the runs that are changed because of warnings, in 10,000 hours of 12,500 nodes.

Only events that lead to warnings are simulated. The noise of machines passes through the real detectors, and every finding
through the supervisor's core with the default policy. Agents save, stop, start and reset GPUs as ordered. The rates are public
ones for 100,000 GPUs; none was chosen by its effect on the result:

* ports that go down for seconds: 5,000 a day (Alibaba HPN: 5 to 60 thousand);
* Xids of users' programs (13, 31, 43, 45): 200 a day, as in suite `fleet`;
* processes killed for lack of memory: 10.1 %, and disks that time out: 5.0 %, of 55,000 incidents in three months (ByteRobust);
* nodes that are slow for some time because their CPUs are overloaded: 11.0 % of the same incidents, for ten minutes on average
  (Greyhound: slow computation), 10 to 50 % slower;
* nodes that stay slow: 4 of 504 GPUs in 73 days (504 B200), 10 to 50 % slower: a hot swap is right, and removes the node;
* ranks that a detector reports as slow once although they are not: 3 in 1,000 hours of a job, which is the 95 % bound if suite
  `healthy` finds none in as many hours;
* memory rows that wait for a reset to be remapped (Xid 63): 72 in 21.2 million GPU-hours (HBM in Llama 3's table): a planned
  reset is right.

Slow ranks are not simulated step by step. Their reports follow the detector's own limits (its window of steps, how often it
repeats a condition). A condition that has ended is reported until it has left the window. Jobs have ten nodes, and steps of ten
seconds.

`false_planned_changes_per_day`: changes because of nodes without any condition in the hour before. `late_…`: changes because of
a condition that had ended when the workers were stopped, because the change waited for the next checkpoint.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.detection.deciding import answer, running_fleet
from benchmarks.detection.fleet import port_sample, xid_line
from benchmarks.detection.score import Score, progress
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.diagnostics.thresholds import StragglerThresholds
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.incidents import Incident
from holdfast.domain.job import HangSpec
from holdfast.domain.orders import CheckpointNow, Inventory, OrderDone, Prepare, RanksStepping, Report, ResetGpu
from holdfast.domain.signals import GenerationStarted, KernelEvent, KernelLine, Signal
from holdfast.policy import ACTIONS
from holdfast.restore.lineage import Segment
from holdfast.supervisor.core import State, step
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.job import Checkpoints
from holdfast.supervisor.protocol import (
    CancelTimer,
    Evaluate,
    Event,
    FindingArrived,
    GenerationChanged,
    GenerationStage,
    NodeReported,
    Publish,
    Send,
    SetTimer,
    StepsCompleted,
    TimerFired,
)
from holdfast.supervisor.timers import Timer

NODES, PER_JOB, GPUS, SPARES = 12_500, 10, 8, 125
HOURS = 10_000.0
STEP_S = 10.0
DAY_S = 86_400.0
_T0 = 1_700_000_000.0
_BYTEROBUST_PER_DAY = 55_000 / 91.0
FLAPS_PER_DAY = 5_000.0
USER_XIDS_PER_DAY = 200.0
OOM_PER_DAY = 0.101 * _BYTEROBUST_PER_DAY
DISKS_PER_DAY = 0.050 * _BYTEROBUST_PER_DAY
OVERLOADS_PER_DAY, OVERLOAD_S = 0.110 * _BYTEROBUST_PER_DAY, 600.0
SLOW_FOR_GOOD_PER_DAY = 4 / (504 * 73.0) * 100_000
MISTAKES_PER_DAY = 3 / 1000.0 * 24.0 * NODES / PER_JOB
REMAPS_PER_DAY = 72 / 21.23e6 * 24.0 * 100_000
SLOWDOWN = (0.10, 0.50)
_BEFORE_S = 3600.0
_PROGRESS_H = 1000.0


@dataclass(slots=True)
class Condition:
    """A true condition of a node, from `began` to `ended` (inf = until an action removes it)."""

    kind: str
    began: float
    ended: float


@dataclass(slots=True)
class Noise:
    """The fleet, a heap of future events, and the true conditions of each node."""

    rng: np.random.Generator
    nodes: int = NODES
    now: float = _T0
    state: State = field(init=False)
    engine: Engine = field(default_factory=lambda: Engine(detectors.standard(xid.load()), gap_after_s=1e12))
    conditions: dict[str, list[Condition]] = field(default_factory=dict)  # by node
    changes: Counter[str] = field(default_factory=Counter)  # planned changes, by class
    evicted: Counter[str] = field(default_factory=Counter)  # nodes removed because of a warning, by class
    warnings: Counter[str] = field(default_factory=Counter)  # by kind
    mistakes: list[str] = field(default_factory=list)
    _queue: list[Send] = field(default_factory=list)
    _seq: Counter[str] = field(default_factory=Counter)
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _serving: bool = False

    def __post_init__(self) -> None:
        spares = max(1, self.nodes * SPARES // NODES)
        bare = running_fleet(self.nodes, PER_JOB, spares, self.now, GPUS)
        able = {name: replace(node, facts=replace(node.facts, resets_gpus=True)) for name, node in bare.nodes.items()}
        line = Checkpoints((Segment(1),))
        jobs = {name: replace(job, checkpoints=line) for name, job in bare.jobs.items()}
        state = replace(bare, nodes=able, jobs=jobs)
        self.state = state.indexed(index_of(state))
        self._seq.update(dict.fromkeys(able, 1))
        for job in bare.jobs.values():
            assert job.generation is not None
            for place in job.generation.placements:
                ranks = tuple(place.ranks)
                started = GenerationStarted(place.node, self.now, job.name, 1, job.generation.mesh, ranks, HangSpec())
                self.engine.fold(started, self.now)
            self.core(StepsCompleted(self.now, job.name, 1, 60, self.now, 10, STEP_S))

    # ------------------------------------------------------------ time

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._count), what))

    def every(self, per_day: float, what: Callable[[], None]) -> None:
        """Schedule a Poisson process with this rate, scaled to the size of the fleet."""
        rate = per_day * self.nodes / NODES / DAY_S

        def again() -> None:
            self.at(self.now + float(self.rng.exponential(1 / rate)), again)
            what()

        self.at(self.now + float(self.rng.exponential(1 / rate)), again)

    def run(self, hours: float) -> None:
        until, shown_at = _T0 + hours * 3600.0, _T0
        while self._heap and self._heap[0][0] < until:
            self.now, _, what = heapq.heappop(self._heap)
            what()
            if self.now >= shown_at + _PROGRESS_H * 3600.0:
                shown_at = self.now
                progress(
                    f"actions: {(self.now - _T0) / 3600:.0f} of {hours:g} h; planned changes: {dict(self.changes)}"
                )
        self.now = until

    # ------------------------------------------------------------ the supervisor

    def core(self, event: Event) -> None:
        self.state, commands = step(self.state, event)
        for command in commands:
            match command:
                case Send():
                    self._queue.append(command)
                case SetTimer(timer=timer, due=due):
                    self.at(due, lambda timer=timer, due=due: self._fire(timer, due))  # type: ignore[misc]
                case Evaluate() if command.incident in self.state.incidents:
                    self.core(answer(self.state, command, self.now))
                case Publish(record=GenerationChanged(stage=GenerationStage.PLANNED, job=job, generation=planned)):
                    self._changed(job, planned.number)
                case CancelTimer() | _:
                    pass
        self._serve()

    def _fire(self, timer: Timer, due: float) -> None:
        if self.state.timers.get(timer) == due:
            self.core(TimerFired(self.now, timer))

    def report(self, node: str, report: Report) -> None:
        self._seq[node] += 1
        self.core(NodeReported(self.now, node, "a", self._seq[node], report, 1))

    def _serve(self) -> None:
        """Let agents execute their orders immediately; steps take their usual time."""
        if self._serving:
            return
        self._serving = True
        while self._queue:
            sent = self._queue.pop(0)
            order = sent.order
            if isinstance(order, ResetGpu):
                self._end(sent.node, "waits for a reset")
            if isinstance(order, CheckpointNow):
                left = max(1, order.at_step - self.state.jobs[order.job].progress.step)
                at = self.now + left * STEP_S
                self.at(at, lambda order=order, node=sent.node: self._save(order, node))  # type: ignore[misc]
            first = isinstance(order, Prepare) and order.placement.first_rank == 0
            done = OrderDone(sent.command_id, True, "", f"{sent.node}:29500" if first else "", self.now)
            self.report(sent.node, done)
            if isinstance(order, Prepare):
                self.at(self.now + 20.0, lambda job=order.job: self._step(job))  # type: ignore[misc]
        self._serving = False

    def _save(self, order: CheckpointNow, node: str) -> None:
        job = self.state.jobs[order.job]
        generation = job.generation
        if generation is None or generation.number != order.generation:
            return
        if job.progress.step < order.at_step:
            self.core(StepsCompleted(self.now, job.name, job.number, order.at_step, self.now, 10, STEP_S))
        hosts = generation.nodes
        shards = tuple(
            ShardRecord(
                ShardKey(generation.attempt, order.at_step, rank), generation.mesh, "memory", 1,
                f"{order.at_step}@{generation.mesh.position_of(rank)}", place.node,
            )
            for place in generation.placements
            if place.node in (node, hosts[hosts.index(node) - 1])  # its own shards, and copies of its neighbour's
            for rank in place.ranks
        )  # fmt: skip
        self.report(node, Inventory(job.name, shards))

    def _step(self, name: str) -> None:
        """Let every rank of the newest generation finish a step, if the generation was started."""
        job = self.state.jobs[name]
        generation = job.generation
        if generation is None or job.change is None:
            return
        done = max(1, generation.restore.step + 1)
        for place in generation.placements:
            ranks, mesh = tuple(place.ranks), generation.mesh
            self.report(place.node, RanksStepping(name, generation.number, ranks, done, self.now))
            started = GenerationStarted(place.node, self.now, name, generation.number, mesh, ranks, HangSpec())
            self.engine.fold(started, self.now)
        self.core(StepsCompleted(self.now, name, generation.number, done, self.now, 1, STEP_S))

    # ------------------------------------------------------------ diagnostics

    def see(self, signal: Signal) -> None:
        for finding in self.engine.fold(signal, self.now).findings:
            self.find(finding)

    def find(self, finding: Finding) -> None:
        self.warnings[f"{finding.kind} {finding.severity}"] += 1
        self.core(FindingArrived(self.now, finding))

    # ------------------------------------------------------------ judging

    def affect(self, node: str, kind: str, seconds: float) -> Condition:
        condition = Condition(kind, self.now, self.now + seconds)
        self.conditions.setdefault(node, []).append(condition)
        return condition

    def _end(self, node: str, kind: str) -> None:
        for condition in self.conditions.get(node, ()):
            if condition.kind == kind:
                condition.ended = min(condition.ended, self.now)

    def _changed(self, job: str, number: int) -> None:
        """Record that a new generation is planned, and judge the warning that caused it."""
        for incident in self.state.incidents.values():
            if (incident.job, incident.new_generation) == (job, number) and incident.warning:
                self._judge(incident)

    def _judge(self, incident: Incident) -> None:
        assert incident.action is not None
        kind = "waits for a reset" if incident.wants_reset_later else "slow"
        mine = [each for each in self.conditions.get(incident.node, ()) if each.kind == kind]
        if any(each.began <= self.now <= each.ended + (0.0 if kind == "slow" else _BEFORE_S) for each in mine):
            verdict = "right"
        elif any(each.ended >= self.now - _BEFORE_S for each in mine):
            verdict = "late"
        else:
            verdict = "false"
        self.changes[f"{verdict}: {incident.action.kind} of a node that is {kind}"] += 1
        if ACTIONS[incident.action.kind].removes:
            self.evicted[verdict] += 1
        if verdict == "false" and len(self.mistakes) < 20:
            self.mistakes.append(f"{incident.action.kind} of {incident.node}: {incident.cause}")
        for each in mine:  # a node that was removed is repaired
            each.ended = min(each.ended, self.now)

    # ------------------------------------------------------------ events

    def any_node(self) -> str:
        return f"n{int(self.rng.integers(self.nodes))}"

    def flap(self) -> None:
        """Let a port go down for seconds; a port that is down for longer is a fault."""
        node, back_s = self.any_node(), min(20.0, float(self.rng.lognormal(1.0, 0.8)))
        self.see(port_sample(node, self.now, "DOWN"))
        self.at(self.now + back_s, lambda: self.see(port_sample(node, self.now, "ACTIVE")))

    def user_xid(self) -> None:
        self.see(
            xid_line(self.any_node(), self.now, int(self.rng.integers(GPUS)), int(self.rng.choice([13, 31, 43, 45])))
        )

    def out_of_memory(self) -> None:
        pid = int(self.rng.integers(1000, 60_000))
        text = f"Out of memory: Killed process {pid} (python) total-vm:1kB"
        self.see(KernelLine(self.any_node(), self.now, text, event=KernelEvent.OOM_KILL))

    def disk(self) -> None:
        text = f"nvme nvme0: I/O {int(self.rng.integers(1000))} QID 2 timeout, aborting"
        self.see(KernelLine(self.any_node(), self.now, text, event=KernelEvent.NVME_TIMEOUT))

    def remap(self) -> None:
        node = self.any_node()
        self.affect(node, "waits for a reset", float("inf"))
        self.see(xid_line(node, self.now, int(self.rng.integers(GPUS)), 63))

    def overload(self) -> None:
        self._slow(float(self.rng.exponential(OVERLOAD_S)))

    def slow_for_good(self) -> None:
        self._slow(float("inf"))

    def mistake(self) -> None:
        """Let a detector report a healthy rank as slow once."""
        self._slow_rank(self.any_node(), None, float(self.rng.uniform(*SLOWDOWN)), 0)

    def _slow(self, seconds: float) -> None:
        node = self.any_node()
        self._slow_rank(node, self.affect(node, "slow", seconds), float(self.rng.uniform(*SLOWDOWN)), 0)

    def _slow_rank(self, node: str, condition: Condition | None, excess: float, times: int) -> None:
        """Report a slow rank in the same way and as often as the straggler detector."""
        limits = StragglerThresholds()
        window_s = limits.window * STEP_S
        if condition is not None:
            # A rank is reported while at least this part of the window is slow.
            seen_s = window_s * max(limits.lasting, limits.floor / excess)
            if times == 0:
                if condition.ended - condition.began > seen_s:
                    again = lambda: self._slow_rank(node, condition, excess, 1)  # noqa: E731
                    self.at(condition.began + seen_s, again)
                return
            if self.now > condition.ended + window_s - seen_s:
                return
        member = next(iter(self.state.live_on(self.state.nodes[node])), "")
        job = self.state.jobs.get(member)
        if job is None or job.running is None or job.running.slot_of(node) is None:
            return  # the node is a spare
        place = next(place for place in job.running.placements if place.node == node)
        share = excess / (1 + excess)
        found = f"steps:{job.name}:{job.number}:straggler:{place.first_rank}"
        if times <= 1:
            ends = self.now if condition is None else condition.ended + window_s - seen_s
            if ends < float("inf"):
                self.at(max(self.now, ends) + limits.over_steps * STEP_S, lambda: self._over(node, found))
        self.find(
            Finding(
                id=found,
                kind=FindingKind.STRAGGLER,
                severity=Severity.WARNING,
                at=self.now,
                since=self.now - window_s,
                summary=f"Rank {place.first_rank} of {job.name} on {node} works {excess:.0%} longer than its peers.",
                node=node,
                job=job.name,
                generation=job.number,
                rank=place.first_rank,
                confidence=0.9,
                cost_share=share,
                recommended_actions=(Remedy.WATCH, Remedy.REPLACE_NODE),
                repeat=max(0, times - 1),
            )
        )
        if condition is not None:
            again = lambda: self._slow_rank(node, condition, excess, times + 1)  # noqa: E731
            self.at(self.now + limits.repeat_s, again)

    def _over(self, node: str, found: str) -> None:
        """Let the detector report that a condition has ended."""
        self.find(
            Finding(
                id=f"{found}:over:{self.now:.0f}",
                kind=FindingKind.STRAGGLER,
                severity=Severity.INFO,
                at=self.now,
                since=self.now,
                summary=f"{found} is over.",
                node=node,
                contradicts=found,
            )
        )


def judge(score: Score, rng: np.random.Generator, hours: float = HOURS, nodes: int = NODES) -> None:
    """Count a case for every planned change because of a warning. The facts contain the rates at 100,000 GPUs."""
    noise = Noise(rng, nodes)
    for per_day, what in (
        (FLAPS_PER_DAY, noise.flap),
        (USER_XIDS_PER_DAY, noise.user_xid),
        (OOM_PER_DAY, noise.out_of_memory),
        (DISKS_PER_DAY, noise.disk),
        (OVERLOADS_PER_DAY, noise.overload),
        (SLOW_FOR_GOOD_PER_DAY, noise.slow_for_good),
        (MISTAKES_PER_DAY, noise.mistake),
        (REMAPS_PER_DAY, noise.remap),
    ):
        noise.every(per_day, what)
    noise.run(hours)
    days = hours / 24.0 * nodes / NODES  # of a fleet of 100,000 GPUs
    verdicts = Counter[str]()
    for name, count in noise.changes.items():
        verdicts[name.partition(":")[0]] += count
    score.clean += verdicts["right"] + verdicts["late"]
    for mistake in noise.mistakes:
        score.fail(mistake)
    score.wrong += verdicts["false"]
    score.spoiled += verdicts["false"]
    score.facts |= {
        "virtual_hours": hours,
        "nodes": nodes,
        "false_planned_changes_per_day": round(verdicts["false"] / days, 4),
        "late_planned_changes_per_day": round(verdicts["late"] / days, 4),
        "planned_changes_per_day": {name: round(count / days, 4) for name, count in sorted(noise.changes.items())},
        "evicted_per_day": {name: round(count / days, 4) for name, count in sorted(noise.evicted.items())},
        "findings_per_day": {name: round(count / days, 2) for name, count in sorted(noise.warnings.items())},
    }
