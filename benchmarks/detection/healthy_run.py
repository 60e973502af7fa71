"""One healthy run of suite `healthy`: the messages of its agents, through diagnostics' engine and the supervisor's core.

Nodes have eight ranks. Values of all nodes are drawn once, in columns, and folded node by node, as they would arrive:

* With the report of a step each node reports the progress of its ranks. In addition it sends a heartbeat every 4 s, which is
  enough for the liveness detector.
* When a step has taken half as long again as the job's steps do, and while a stream is broken, every node reports each second,
  as agents do. Only in these times can detectors draw conclusions from the activity of ranks.

The largest runs begin with a running generation 1, because the smaller runs cover its preparation. In the times above they
report every other second.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.deciding import answer, running_fleet
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.findings import Finding, Severity, StepRecord
from holdfast.domain.job import CheckpointSpec, HangSpec, JobSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import Hello, OrderDone, Prepare, RanksStepping, Report
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeBeat,
    NodeConnected,
    NodeDisconnected,
    Phase,
    RankProgress,
    Signal,
    StepColumns,
)
from holdfast.supervisor.core import State, step
from holdfast.supervisor.protocol import (
    Evaluate,
    Event,
    FindingArrived,
    JobPhase,
    JobSubmitted,
    NodeGone,
    NodeReported,
    Send,
    StepsCompleted,
    TimerFired,
)

JOB = "job0"
GPUS = 8
SPARES = 2
_LIFE = "a"  # incarnation of every agent
PREPARED_NODES_MAX = 1_024  # a larger run begins with a running generation
_T0 = 1_700_000_000.0
_TICK_S, _BEAT_S, _CLOCK_S = 1.0, 4.0, 0.5
_BLOCK = 8  # steps
_LOST = 0.01  # of the rows
_NAN = float("nan")

Floats = NDArray[np.float64]
_NOTHING = Counter[str]()


@dataclass(frozen=True, slots=True)
class Noise:
    """A recorded trace: `own` is each rank's work over its own median, steps × ranks; `longest` the slowest rank's over the
    median of the slowest."""

    own: Floats
    longest: Floats

    @classmethod
    def of(cls, work: Floats) -> Noise:
        longest = work.max(axis=1)
        return cls(work / np.median(work, axis=0), longest / np.median(longest))


@dataclass(frozen=True, slots=True)
class End:
    """The length of a run, and the wrong actions against it."""

    hours: float
    steps: int
    wrong: Counter[str]
    why: str
    errors: int  # findings of severity error or fatal, with or without consequences
    warnings: Counter[str]  # by kind
    signals: int


@dataclass(frozen=True, slots=True)
class Manner:
    """The random properties of a job."""

    step_s: float
    announces: bool
    recorders: bool  # the flight recorders of its ranks answer
    collectives: int  # number per step
    save_every_s: float
    eval_every_s: float

    @classmethod
    def drawn(cls, rng: np.random.Generator, *, small: bool) -> Manner:
        fast = rng.random() < 0.1 and small
        return cls(
            step_s=float(np.exp(rng.uniform(*np.log((0.5, 5.0) if fast else (5.0, 40.0))))),
            announces=bool(rng.random() < 0.5),
            recorders=bool(rng.random() < 0.5),
            collectives=int(rng.integers(1, 200)),
            save_every_s=float(rng.uniform(600, 1800)),
            eval_every_s=float(rng.uniform(1800, 3600)),
        )

    def __str__(self) -> str:
        answers = "recorders that answer" if self.recorders else "no recorders"
        return f"steps of {self.step_s:.1f} s, {'' if self.announces else 'un'}announced pauses, {answers}"


@dataclass(slots=True)
class Run:
    """One job, its agents, diagnostics and the supervisor."""

    nodes: int
    noise: Sequence[Noise]
    rng: np.random.Generator
    now: float = _T0
    state: State = field(default_factory=State)
    said: list[Finding] = field(default_factory=list)
    steps_done: int = 0
    signals: int = 0
    phase: Phase = Phase.STEP
    phase_at: float = _T0
    away: dict[int, float] = field(default_factory=dict)  # node → when its stream reconnects
    sent: list[Send] = field(default_factory=list)
    seq: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    engine: Engine = field(default_factory=lambda: Engine(detectors.standard(xid.load())))
    names: list[str] = field(default_factory=list)  # by place
    ranks: list[tuple[int, ...]] = field(default_factory=list)  # by place
    manner: Manner = field(init=False)
    skew_s: list[float] = field(init=False)  # by place
    next_clock: float = _T0
    next_report: float = _T0
    asked: bool = False  # snapshots of the silent ranks have been reported
    breaks: list[float] = field(init=False)
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        rng = self.rng
        self.manner = Manner.drawn(rng, small=self.nodes <= PREPARED_NODES_MAX)
        skew_s, odd = rng.normal(0.0, 0.05, self.nodes), rng.random(self.nodes) < 0.01
        self.skew_s = [float(each) for each in np.where(odd, rng.uniform(-60.0, 60.0, self.nodes), skew_s)]
        per_s = 50 / 86_400 * self.nodes / 12_500
        self.breaks = list(_T0 + np.cumsum(rng.exponential(1 / per_s, 64)))
        self.ranks = [tuple(range(first, first + GPUS)) for first in range(0, self.nodes * GPUS, GPUS)]
        self._start()

    # ------------------------------------------------------------ the supervisor

    def _core(self, event: Event) -> None:
        self.state, commands = step(self.state, event)
        for command in commands:
            match command:
                case Send():
                    self.sent.append(command)
                case Evaluate() if command.incident in self.state.incidents:
                    self._core(answer(self.state, command, self.now))
                case _:
                    pass

    def _report(self, node: str, report: Report) -> None:
        self.seq[node] += 1
        self._core(NodeReported(self.now, node, _LIFE, self.seq[node], report, self.sessions[node]))

    def _hello(self, node: str) -> None:
        self.sessions[node] += 1
        self._report(node, Hello(_facts(node)))

    def _start(self) -> None:
        """Connect the agents and start the job."""
        mesh = Mesh.of({"dp": self.nodes * GPUS})
        if self.nodes > PREPARED_NODES_MAX:
            self.state = running_fleet(self.nodes, self.nodes, SPARES, self.now, GPUS)
            self.names = [f"n{i}" for i in range(self.nodes)]
            for name in self.state.nodes:
                self.seq[name] = self.sessions[name] = 1
        else:
            self._prepare(mesh)
        for name in self.state.nodes:
            self._see(NodeConnected(name, self.now, _LIFE))
        for place, name in enumerate(self.names):
            self._see(GenerationStarted(name, self._clock(place), JOB, 1, mesh, self.ranks[place], HangSpec()))
        self.phase_at = self.now

    def _prepare(self, mesh: Mesh) -> None:
        for name in (f"n{i}" for i in range(self.nodes + SPARES)):
            self._hello(name)
        spec = JobSpec(
            JOB, LaunchSpec("/train.py"), self.nodes, GPUS, mesh, GPUS, self.nodes * GPUS, CheckpointSpec(100, 2)
        )
        self._core(JobSubmitted(self.now, spec, "token"))
        while self.sent:
            sent, self.sent = self.sent, []
            for send in sent:
                first = isinstance(send.order, Prepare) and send.order.placement.first_rank == 0
                self._report(
                    send.node, OrderDone(send.command_id, True, "", f"{send.node}:1" if first else "", self.now)
                )
        generation = self.state.jobs[JOB].running
        assert generation is not None
        self.names = list(generation.nodes)

    def _timers(self) -> None:
        while due := [(when, name) for name, when in self.state.timers.items() if when <= self.now]:
            self._core(TimerFired(self.now, min(due)[1]))

    # ------------------------------------------------------------ diagnostics

    def _see(self, signal: Signal) -> None:
        self.signals += 1
        folded = self.engine.fold(signal, self.now)
        for finding in folded.findings:
            self.said.append(finding)
            self._core(FindingArrived(self.now, finding))
        for record in folded.steps:
            self._stepped(record)

    def _stepped(self, record: StepRecord) -> None:
        step_s = record.ended_at - record.started_at
        self._core(StepsCompleted(self.now, JOB, record.generation, record.step, record.ended_at, 1, step_s))

    def _clock(self, place: int) -> float:
        return self.now + self.skew_s[place]

    # ------------------------------------------------------------ time

    def train(self, seconds: float) -> End:
        """Train for so many seconds, or until an action affects the run."""
        until, began, steps = self.now + seconds, self.now, self._steps()
        next_save, next_eval = self.now + self.manner.save_every_s, self.now + self.manner.eval_every_s
        if not self.steps_done:
            self._pass(float(self.rng.uniform(30, 90)), Phase.COMPILE if self.manner.announces else Phase.STEP)
            self._finish_step(self.now - began, np.full(self.nodes * GPUS, self.now - began))
            self._stepping()
        while self.now < until and not self.wrong():
            own_s = self.manner.step_s * next(steps)
            if self.rng.random() < self.nodes / 500 and self.rng.random() < 0.5:  # a pause of any rank delays all
                own_s[int(self.rng.integers(own_s.size))] += float(self.rng.uniform(0.1, 2.0))
            if self.rng.random() < 1e-3:
                own_s[int(self.rng.integers(own_s.size))] *= float(self.rng.uniform(1.5, 5.0))
            step_s = float(own_s.max())
            self._pass(step_s, Phase.STEP)
            self._finish_step(step_s, own_s)
            if self.now >= next_save:
                next_save = self.now + self.manner.save_every_s
                self._pause(float(self.rng.uniform(0.5, 10.0)), Phase.CHECKPOINT)
            if self.now >= next_eval:
                next_eval = self.now + self.manner.eval_every_s
                self._pause(float(self.rng.uniform(12.0, 300.0)), Phase.EVAL)
        return self._end(began)

    def _end(self, began: float) -> End:
        errors = [finding for finding in self.said if finding.severity in (Severity.ERROR, Severity.FATAL)]
        warnings = Counter(finding.kind.value for finding in self.said if finding.severity is Severity.WARNING)
        why = "; ".join(finding.summary for finding in errors[-2:]) or self.state.jobs[JOB].reason
        hours = (self.now - began) / 3600.0
        return End(hours, self.steps_done, self.wrong(), why, len(errors), warnings, self.signals)

    def _stepping(self) -> None:
        """Every rank has finished its first step."""
        for place, name in enumerate(self.names):
            self._report(name, RanksStepping(JOB, 1, self.ranks[place], 1, self.now))

    def _steps(self) -> Iterator[Floats]:
        """Work of each rank, as a multiple of the usual step. Each rank behaves as one rank of the trace."""
        size = self.nodes * GPUS
        like = [self.rng.integers(noise.own.shape[1], size=size) for noise in self.noise]
        while True:
            which = int(self.rng.integers(len(self.noise)))
            noise = self.noise[which]
            first = int(self.rng.integers(max(1, len(noise.own) - _BLOCK)))
            for own, longest in zip(
                noise.own[first : first + _BLOCK], noise.longest[first : first + _BLOCK], strict=True
            ):
                mine = own[like[which]]
                yield mine * (longest / mine.max())

    def _pause(self, seconds: float, phase: Phase) -> None:
        self._pass(seconds, phase if self.manner.announces else Phase.STEP)

    def _pass(self, seconds: float, phase: Phase) -> None:
        """Let time pass in which no step ends."""
        if phase is not self.phase:
            self.phase, self.phase_at = phase, self.now
        began, until, self.asked = self.now, self.now + seconds, False
        tick_s = _TICK_S if self.nodes <= PREPARED_NODES_MAX else 2 * _TICK_S
        usual_until = began + max(3.0, 1.5 * self.manner.step_s)
        while self.now < until - 1e-9 and not self.wrong():
            usual = self.now < usual_until - 1e-6 and not self.away
            if not usual:
                self.next_report = min(self.next_report, self.now + tick_s)
            if self.now >= self.next_report:
                self._beats()
                if not usual:
                    self._progress()
                    self._standstills(self.now - began)
                self.next_report = self.now + (_BEAT_S if usual else tick_s)
            coming = [until, self.next_clock, self.next_report, self.breaks[0], *self.away.values()]
            if usual:
                coming.append(usual_until)
            self.now = max(self.now, min(coming))
            self._streams()
            if self.now >= self.next_clock:
                self.next_clock = self.now + (_CLOCK_S if not self.away else 0.1)
                self._see(ClockTick(self.now))
            self._timers()
        self.phase = Phase.STEP if self.phase is phase else self.phase

    def _streams(self) -> None:
        """Let telemetry streams break and reconnect."""
        while self.breaks[0] <= self.now:
            heapq.heappop(self.breaks)
            if not self.breaks:
                self.breaks = [self.now + 86_400.0]
            place = int(self.rng.integers(self.nodes))
            if place in self.away:
                continue
            name, self.away[place] = self.names[place], self.now + float(self.rng.uniform(0.05, 5.0))
            self._see(NodeDisconnected(name, self.now, clean=False))
            if self.rng.random() < 0.5:
                self._core(NodeGone(self.now, name, _LIFE, self.sessions[name]))
            self.next_clock = self.now
        for place in [place for place, back in self.away.items() if back <= self.now]:
            del self.away[place]
            name = self.names[place]
            self._see(NodeConnected(name, self.now, _LIFE))
            if not self.state.nodes[name].connected:
                self._hello(name)

    # ------------------------------------------------------------ what agents send

    def _heard(self) -> Iterator[tuple[int, str]]:
        return ((place, name) for place, name in enumerate(self.names) if place not in self.away)

    def _beats(self) -> None:
        for place, name in self._heard():
            self._see(NodeBeat(name, self._clock(place)))
        for spare in self.state.nodes.keys() - set(self.names):
            self._see(NodeBeat(spare, self.now))

    def _progress(self) -> None:
        """Report the progress of every rank; each rank uses about one CPU."""
        self.cpu_s = 0.9 * (self.now - _T0)
        state = "R" if self.rng.random() < 0.5 else "S"
        count = self.steps_done * self.manner.collectives if self.manner.recorders else -1
        steps, phases, states = (self.steps_done,) * GPUS, (self.phase,) * GPUS, (state,) * GPUS
        cpu_s, counts = (self.cpu_s,) * GPUS, (count,) * GPUS
        for place, name in self._heard():
            since = (self.phase_at + self.skew_s[place],) * GPUS
            self._see(RankProgress(
                name, self._clock(place), JOB, 1, self.ranks[place], steps, phases, since, states, cpu_s, counts,
            ))  # fmt: skip

    def _standstills(self, still_s: float) -> None:
        """Report the answers of the flight recorders, once: no rank is inside a collective."""
        if self.asked or not self.manner.recorders or still_s < max(1.0, 1.5 * self.manner.step_s):
            return
        self.asked = True
        members, count = f"0-{self.nodes * GPUS - 1}", self.steps_done * self.manner.collectives
        true, free, empty = (True,) * GPUS, ("free",) * GPUS, ("",) * GPUS
        shared = ("dp",) * GPUS, (members,) * GPUS, empty, empty, (-1,) * GPUS, (count,) * GPUS, (-1,) * GPUS
        for place, name in self._heard():
            rows = CollectiveRows(self.ranks[place], *shared)
            at = self._clock(place)
            self._see(StallSnapshot(name, at, JOB, 1, self.ranks[place], true, free, empty, true, empty, rows))

    def _finish_step(self, duration_s: float, own_s: Floats) -> None:
        """Report that every rank has finished a step and waited for the slowest. Some rows are lost before the agent."""
        self.steps_done += 1
        self.phase_at = self.now
        lost = set(np.flatnonzero(self.rng.random(self.nodes) < _LOST).tolist())
        loss = 2.0 + 8.0 * float(np.exp(-self.steps_done / 500)) * (1 + float(self.rng.normal(0, 0.03)))
        norm = float(self.rng.lognormal(0.0, 0.2)) * (3.0 if self.rng.random() < 1e-3 else 1.0)
        steps, nothing, tokens = (self.steps_done,) * GPUS, (0.0,) * GPUS, (1,) * GPUS
        losses, unknown = (loss,) * GPUS, (_NAN,) * GPUS
        waits = map(tuple, (duration_s - own_s).reshape(self.nodes, GPUS).tolist())
        for (place, name), wait_s in zip(enumerate(self.names), waits, strict=True):
            if place in self.away or place in lost:
                continue
            at = self._clock(place)
            ended, norms = (at,) * GPUS, unknown if place else (norm, *unknown[1:])
            self._see(StepColumns(
                name, at, JOB, 1, self.ranks[place], steps, (at - duration_s,) * GPUS, ended, nothing, nothing,
                tokens, losses, norms, wait_s,
            ))  # fmt: skip
        self._progress()

    # ------------------------------------------------------------ wrong actions

    def wrong(self) -> Counter[str]:
        """Count the wrong actions against this healthy run."""
        job = self.state.jobs[JOB]
        if job.phase is JobPhase.RUNNING and job.number == 1 and not self.state.incidents:
            return _NOTHING
        out = [node for node in self.state.nodes.values() if node.unschedulable_reason or node.lost]
        wrong = Counter[str]()
        if job.phase in (JobPhase.FAILED, JobPhase.STOPPED, JobPhase.STOPPING):
            wrong["false_stops"] = 1
        elif job.number > 1 or job.phase is JobPhase.WAITING:
            wrong["false_restarts"] = 1
        if out:
            wrong["false_evictions"] = len(out)
        elif job.generation is not None and job.number > 1:
            wrong["false_evictions"] = len(set(self.names) - set(job.generation.nodes))
        return +wrong


def _facts(node: str) -> NodeFacts:
    return NodeFacts(node, _LIFE, node, "10.0.0.1", "", GPUS, f"{node}:9000", 1, "/var/holdfast", "/dev/kmsg")
