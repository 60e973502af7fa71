"""Suite `healthy`: 1,000 virtual hours of runs that nothing is wrong with, and that are as noisy as real ones, through all
detectors and the supervisor's core. Whatever is stopped, restarted or put out of service was healthy.

What is simulated is what agents send: steps, progress, beats, phases, sessions. No number here was chosen by what it leads to:

* step times: the median from 5 to 40 s, of one job in ten from 0.5 to 5 s; from step to step the slowest rank's time over its
  median, resampled in blocks of eight steps (so that it keeps its autocorrelation) from the two recorded traces of
  tests/data/stragglers;
* pauses of 0.1 to 2 s that hold up a step, the more ranks the more often: Python's garbage collection (MegaScale, NSDI'24);
* a tail of 1 step in 1,000 that takes 1.5 to 5 times as long: a slow fetch (Dean and Barroso, The Tail at Scale);
* saves every 10 to 30 minutes for 0.5 to 10 s, evaluations every 30 to 60 minutes for 12 to 300 s: half of the jobs announce
  them (`run.phase`), half do not, as people's scripts do;
* the first step takes 30 to 90 s more: torch.compile;
* 1 % of the rows of steps are lost: datagrams from a worker to its agent;
* telemetry streams break 50 times a day per 12,500 nodes (as in suite `fleet`) and come back after 0.05 to 5 s, which agents'
  back-off allows; half of the time the control session breaks with it;
* clocks are off by 50 ms (one sigma; NTP), of one node in 100 by up to a minute.

A node has one rank: what differs between the ranks of a node is not the subject. While a step takes no longer than steps do,
nodes report every 3 s instead of every second (nothing can be concluded then); from then on every second, as agents do.

`false_stops`: the job ended. `false_evictions`: a node was condemned, lost or replaced. `false_restarts`: a new generation
began. After any of them the run ends and another one begins, so that one cause is not counted for ever.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.score import Score, progress
from benchmarks.detection.stragglers import read_trace
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
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
from holdfast.policy import default
from holdfast.supervisor.core import State, step, view
from holdfast.supervisor.protocol import (
    Evaluate,
    Event,
    FindingArrived,
    JobPhase,
    JobSubmitted,
    NodeGone,
    NodeReported,
    PolicyAnswered,
    Send,
    StepsCompleted,
    TimerFired,
)

# Virtual hours by number of nodes; a run of one job lasts RUN_H. What a size has not done within DEADLINE_S of this machine's
# time is left out, and `virtual_hours` says so.
HOURS: Mapping[int, float] = {64: 940.0, 1_024: 50.0, 12_500: 10.0}
RUN_H = 2.0
DEADLINE_S = 1800.0
ANNOUNCED = 0.5
SPARES = 2
_JOB = "job"
_T0 = 1_700_000_000.0
_TICK_S, _SELDOM_S, _CLOCK_S = 1.0, 3.0, 0.5
_BLOCK = 8  # steps
_NAN = float("nan")

Trace = NDArray[np.float64]  # one step after the other
_NOTHING = Counter[str]()


def suite(
    data: Path, rng: np.random.Generator, hours: Mapping[int, float] = HOURS, announced: float = ANNOUNCED
) -> Score:
    """`announced`: the share of jobs that announce their pauses."""
    score, wrong = Score("healthy"), Counter[str]()
    noise = recorded_noise(data)
    done: dict[str, float] = {}
    for nodes, wanted_h in hours.items():
        row, left_h, began = score.row(f"{nodes} nodes"), wanted_h, time.monotonic()
        while left_h > 1e-6 and time.monotonic() < began + DEADLINE_S:
            run = Run(nodes, noise, rng, announced)
            end = run.train(min(RUN_H, left_h) * 3600.0)
            left_h -= max(end.hours, 1 / 60)
            wrong.update(end.wrong)
            warnings = {f"warning: {name}": count for name, count in end.warnings.items()}
            row.facts |= {name: row.facts.get(name, 0) + count for name, count in warnings.items()}
            if end.wrong:
                row.fail(f"{nodes} nodes after {end.hours:.2f} h, {run.manner}: {end.why}", spoiled=True)
            else:
                row.clean += 1
        done[str(nodes)] = round(wanted_h - max(0.0, left_h), 2)
        progress(f"{nodes} nodes, {done[str(nodes)]:g} h: {time.monotonic() - began:.0f} s")
    score.facts |= {name: wrong[name] for name in ("false_stops", "false_evictions", "false_restarts")}
    score.facts |= {"virtual_hours": round(sum(done.values()), 2), "virtual_hours_by_nodes": done}
    return score.total()


def recorded_noise(data: Path) -> list[Trace]:
    """Of each recorded trace: the slowest rank's time of each step, over its median."""
    slowest = [read_trace(path)[1].max(axis=1) for path in sorted((data / "stragglers").glob("trace-*.parquet"))]
    return [times / np.median(times) for times in slowest]


@dataclass(frozen=True, slots=True)
class End:
    """How far a run came, and what was done to it that should not have been."""

    hours: float
    wrong: Counter[str]
    why: str
    warnings: Counter[str]


@dataclass(frozen=True, slots=True)
class Manner:
    """What kind of job it is."""

    step_s: float
    announces: bool
    save_every_s: float
    eval_every_s: float

    def __str__(self) -> str:
        return f"steps of {self.step_s:.1f} s, {'' if self.announces else 'un'}announced pauses"


@dataclass(slots=True)
class Run:
    """One job from its start on, its agents, diagnostics and the supervisor."""

    nodes: int
    noise: list[Trace]
    rng: np.random.Generator
    announced: float = ANNOUNCED
    now: float = _T0
    state: State = field(default_factory=State)
    said: list[Finding] = field(default_factory=list)
    steps_done: int = 0
    phase: Phase = Phase.STEP
    phase_at: float = _T0
    away: dict[int, float] = field(default_factory=dict)  # node → when its stream is back
    sent: list[Send] = field(default_factory=list)
    seq: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    engine: Engine = field(default_factory=lambda: Engine(detectors.standard(xid.load())))
    names: list[str] = field(default_factory=list)  # by rank
    manner: Manner = field(init=False)
    skew_s: list[float] = field(init=False)  # by rank
    next_clock: float = _T0
    next_report: float = _T0
    breaks: list[float] = field(init=False)
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        rng = self.rng
        self.manner = Manner(
            step_s=float(np.exp(rng.uniform(*np.log((0.5, 5.0) if rng.random() < 0.1 else (5.0, 40.0))))),
            announces=bool(rng.random() < self.announced),
            save_every_s=float(rng.uniform(600, 1800)),
            eval_every_s=float(rng.uniform(1800, 3600)),
        )
        skew_s, odd = rng.normal(0.0, 0.05, self.nodes), rng.random(self.nodes) < 0.01
        self.skew_s = [float(each) for each in np.where(odd, rng.uniform(-60.0, 60.0, self.nodes), skew_s)]
        per_s = 50 / 86_400 * self.nodes / 12_500
        self.breaks = list(_T0 + np.cumsum(rng.exponential(1 / per_s, 64)))
        self._start()

    # ------------------------------------------------------------ the supervisor

    def _core(self, event: Event) -> None:
        self.state, commands = step(self.state, event)
        for command in commands:
            match command:
                case Send():
                    self.sent.append(command)
                case Evaluate() if command.incident in self.state.incidents:
                    incident = self.state.incidents[command.incident]
                    action = default(incident, view(self.state, _JOB, self.now))
                    self._core(PolicyAnswered(self.now, incident.id, action, "default policy"))
                case _:
                    pass

    def _report(self, node: str, report: Report) -> None:
        self.seq[node] += 1
        self._core(NodeReported(self.now, node, f"{node}-a", self.seq[node], report, self.sessions[node]))

    def _hello(self, node: str) -> None:
        self.sessions[node] += 1
        facts = NodeFacts(node, f"{node}-a", node, "10.0.0.1", "", 1, f"{node}:9000", 1, "/var/holdfast", "/dev/kmsg")
        self._report(node, Hello(facts))

    def _start(self) -> None:
        """Agents connect, the job is submitted, prepared and started, and every rank has stepped."""
        for name in (f"n{i}" for i in range(self.nodes + SPARES)):
            self._hello(name)
            self.engine.fold(NodeConnected(name, self.now, f"{name}-a"), self.now)
        mesh = Mesh.of({"dp": self.nodes})
        spec = JobSpec(_JOB, LaunchSpec("/train.py"), self.nodes, 1, mesh, 1, self.nodes, CheckpointSpec(100, 2))
        self._core(JobSubmitted(self.now, spec, "token"))
        while self.sent:
            sent, self.sent = self.sent, []
            for send in sent:
                first = isinstance(send.order, Prepare) and send.order.placement.first_rank == 0
                self._report(
                    send.node, OrderDone(send.command_id, True, "", f"{send.node}:1" if first else "", self.now)
                )
        generation = self.state.jobs[_JOB].running
        assert generation is not None
        self.names = list(generation.nodes)
        for rank, name in enumerate(self.names):
            self.engine.fold(GenerationStarted(name, self._clock(rank), _JOB, 1, mesh, (rank,), HangSpec()), self.now)
        self.phase_at = self.now

    def _timers(self) -> None:
        while due := [(when, name) for name, when in self.state.timers.items() if when <= self.now]:
            self._core(TimerFired(self.now, min(due)[1]))

    # ------------------------------------------------------------ diagnostics

    def _see(self, signal: Signal) -> None:
        folded = self.engine.fold(signal, self.now)
        for finding in folded.findings:
            self.said.append(finding)
            self._core(FindingArrived(self.now, finding))
        for record in folded.steps:
            self._stepped(record)

    def _stepped(self, record: StepRecord) -> None:
        step_s = record.ended_at - record.started_at
        self._core(StepsCompleted(self.now, _JOB, record.generation, record.step, record.ended_at, 1, step_s))

    def _clock(self, node: int) -> float:
        return self.now + self.skew_s[node]

    # ------------------------------------------------------------ time

    def train(self, seconds: float) -> End:
        """Train until then, or until something is done to the run."""
        until = self.now + seconds
        began, noise = self.now, self._noise()
        next_save, next_eval = self.now + self.manner.save_every_s, self.now + self.manner.eval_every_s
        self._pass(float(self.rng.uniform(30, 90)), Phase.COMPILE if self.manner.announces else Phase.STEP)
        self._finish_step(self.now - began)
        for rank, name in enumerate(self.names):
            self._report(name, RanksStepping(_JOB, 1, (rank,), 1, self.now))
        while self.now < until and not self._wrong():
            step_s = self.manner.step_s * next(noise)
            if self.rng.random() < self.nodes / 500 and self.rng.random() < 0.5:  # any rank's pause holds up all
                step_s += float(self.rng.uniform(0.1, 2.0))
            if self.rng.random() < 1e-3:
                step_s *= float(self.rng.uniform(1.5, 5.0))
            self._pass(step_s, Phase.STEP)
            self._finish_step(step_s)
            if self.now >= next_save:
                next_save = self.now + self.manner.save_every_s
                self._pause(float(self.rng.uniform(0.5, 10.0)), Phase.CHECKPOINT)
            if self.now >= next_eval:
                next_eval = self.now + self.manner.eval_every_s
                self._pause(float(self.rng.uniform(12.0, 300.0)), Phase.EVAL)
        errors = [finding for finding in self.said if finding.severity in (Severity.ERROR, Severity.FATAL)]
        others = Counter(finding.kind.value for finding in self.said if finding not in errors)
        why = "; ".join(finding.summary for finding in errors[-2:]) or self.state.jobs[_JOB].reason
        return End((self.now - began) / 3600.0, self._wrong(), why, others)

    def _noise(self) -> Iterator[float]:
        while True:
            trace = self.noise[int(self.rng.integers(len(self.noise)))]
            first = int(self.rng.integers(max(1, len(trace) - _BLOCK)))
            yield from map(float, trace[first : first + _BLOCK])

    def _pause(self, seconds: float, phase: Phase) -> None:
        self._pass(seconds, phase if self.manner.announces else Phase.STEP)

    def _pass(self, seconds: float, phase: Phase) -> None:
        """Let time pass in which no step ends."""
        if phase is not self.phase:
            self.phase, self.phase_at = phase, self.now
        began, until = self.now, self.now + seconds
        while self.now < until - 1e-9 and not self._wrong():
            usual = self.now - began < max(3.0, 1.5 * self.manner.step_s) and not self.away
            if self.now >= self.next_report:
                self._progress()
                self.next_report = self.now + (_SELDOM_S if usual else _TICK_S)
            elif not usual:
                self.next_report = min(self.next_report, self.now + _TICK_S)
            coming = [until, self.next_clock, self.next_report, self.breaks[0], *self.away.values()]
            self.now = max(self.now, min(coming))
            self._streams()
            if self.now >= self.next_clock:
                self.next_clock = self.now + (_CLOCK_S if not self.away else 0.1)
                self._see(ClockTick(self.now))
            self._timers()
        self.phase = Phase.STEP if self.phase is phase else self.phase

    def _streams(self) -> None:
        """Telemetry streams break and come back."""
        while self.breaks[0] <= self.now:
            heapq.heappop(self.breaks)
            rank = int(self.rng.integers(self.nodes))
            if rank in self.away:
                continue
            name, self.away[rank] = self.names[rank], self.now + float(self.rng.uniform(0.05, 5.0))
            self._see(NodeDisconnected(name, self.now, clean=False))
            if self.rng.random() < 0.5:
                self._core(NodeGone(self.now, name, f"{name}-a", self.sessions[name]))
            self.next_clock = self.now
        for rank in [rank for rank, back in self.away.items() if back <= self.now]:
            del self.away[rank]
            name = self.names[rank]
            self._see(NodeConnected(name, self.now, f"{name}-a"))
            if not self.state.nodes[name].connected:
                self._hello(name)
        if not self.breaks:
            self.breaks = [self.now + 86_400.0]

    def _progress(self) -> None:
        self.cpu_s += 0.9 * _TICK_S
        state = "R" if self.rng.random() < 0.5 else "S"
        shown = (self.steps_done,), (self.phase,)
        for rank, name in enumerate(self.names):
            if rank not in self.away:
                at, since = self._clock(rank), (self.phase_at + self.skew_s[rank],)
                self._see(NodeBeat(name, at))
                self._see(RankProgress(name, at, _JOB, 1, (rank,), *shown, since, (state,), (self.cpu_s,), (-1,)))

    def _finish_step(self, took_s: float) -> None:
        """Every rank has finished a step; some rows are lost on the way to the agent."""
        self.steps_done += 1
        kept = self.rng.random(self.nodes) >= 0.01
        loss = 2.0 + 8.0 * float(np.exp(-self.steps_done / 500)) * (1 + float(self.rng.normal(0, 0.03)))
        for rank, name in enumerate(self.names):
            if kept[rank] and rank not in self.away:
                at = self._clock(rank)
                one = (rank,), (self.steps_done,), (at - took_s,), (at,), (0.0,), (0.0,), (1,), (loss,), (_NAN,)
                self._see(StepColumns(name, at, _JOB, 1, *one))

    def _wrong(self) -> Counter[str]:
        """What has been done to a run that nothing was wrong with."""
        job = self.state.jobs[_JOB]
        if job.phase is JobPhase.RUNNING and job.number == 1 and not self.state.incidents:
            return _NOTHING
        out = [node for node in self.state.nodes.values() if node.condemned or node.lost]
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
