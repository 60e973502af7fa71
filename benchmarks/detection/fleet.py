"""Suite `fleet`: 100,000 GPUs for 30 days of virtual time, through the real detectors, from fault to fault.

Faults have the classes and rates of Llama 3's table (419 in 54 days on 16,384 GPUs: 1.97e-5 per GPU-hour). The hazards of nodes
are Gamma-mixed (shape 0.5, as in StepFun's trace), so that a few bad nodes have most of the faults. Between the faults there is
the ordinary noise of a fleet: links that flap for seconds, users' bugs with the Xids that they cause, telemetry that breaks and
reconnects, corrected memory errors. The detectors receive what agents would send, in the order of arrival.

Healthy nodes are not simulated tick by tick: they send no heartbeats and no progress (the detection of silence and of hangs is
off; the suites `storm` and `hang` cover these). A hit names the faulty node. Wrong: a machine without a fault is held
responsible. `false_per_day` counts all findings, including warnings, about nodes without an event.

The faults of each node are then passed to the supervisor's own quarantine rules, to find which nodes would have been
quarantined and how many of their faults this would have prevented.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.detection.score import Score
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.detectors.liveness import UNWITNESSED_GRACE_S, Liveness
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Incident, IncidentState
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    GenerationStopped,
    KernelEvent,
    KernelLine,
    MaintenanceNotice,
    NicSample,
    NodeConnected,
    NodeDisconnected,
    Signal,
    WorkerError,
    WorkerExited,
)
from holdfast.supervisor.core.rules import offenders
from holdfast.supervisor.offender_rules import OffenderRules

NODES, GPUS, DAYS = 12_500, 8, 30
HOUR_S, DAY_S = 3600.0, 86_400.0
SHAPE = 0.5  # of the Gamma mixture of hazards
REPAIR_S = 20 * HOUR_S  # StepFun's median
FLAPS_PER_DAY = 5_000  # Alibaba HPN: 5 to 60 thousand a day
BUGS_PER_DAY = 200  # failures of users' scripts
REDIALS_PER_DAY = 50  # telemetry streams that break and reconnect
_PER_JOB = 10
_T0 = 1_700_000_000.0
_NEVER_S = 1e12
_QUIET = HangSpec(floor_s=_NEVER_S, factor=3.0, init_s=_NEVER_S)
COLLECTIVE = WorkerError("torch.distributed.DistBackendError", "NCCL communicator was aborted")
DEVICE = WorkerError("torch.AcceleratorError", "CUDA error: unspecified launch failure", ("train.py:10 step",))
_HARDWARE = frozenset(
    {FindingKind.GPU_ERROR, FindingKind.NODE_LOST, FindingKind.NETWORK_FAULT, FindingKind.STORAGE_FAULT}
)
_K = FindingKind


@dataclass(frozen=True, slots=True)
class FaultClass:
    """A class of faults. `per_gpu_hour`: rate, from Llama 3. `kinds`: the right kinds of findings about the node."""

    name: str
    per_gpu_hour: float
    kinds: frozenset[FindingKind]


CLASSES = (
    FaultClass("gpu_off_the_bus", 7.0e-6, frozenset({_K.GPU_ERROR})),
    FaultClass("hbm", 3.4e-6, frozenset({_K.GPU_ERROR})),
    FaultClass("gsp_or_sram", 1.7e-6, frozenset({_K.GPU_ERROR})),
    FaultClass("switch_or_cable", 1.9e-6, frozenset({_K.NETWORK_FAULT})),
    FaultClass("host_lost", 1.0e-6, frozenset({_K.NODE_LOST})),
    FaultClass("maintenance", 1.5e-6, frozenset({_K.MAINTENANCE})),
    FaultClass("nic", 3.3e-7, frozenset({_K.NETWORK_FAULT})),
    FaultClass("disk", 1.4e-7, frozenset({_K.STORAGE_FAULT})),
)


@dataclass(slots=True)
class Fleet:
    """The engine, a heap of future events, and the true faults of each node."""

    rng: np.random.Generator
    engine: Engine = field(
        default_factory=lambda: Engine(
            detectors.standard(xid.load(), liveness=Liveness(silence_s=_NEVER_S)), gap_after_s=_NEVER_S
        )
    )
    now: float = _T0
    found: list[Finding] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)  # by job
    incarnations: dict[int, int] = field(default_factory=dict)  # by node
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._count), what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay_s, what)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] < until:
            self.now, _, what = heapq.heappop(self._heap)
            what()

    def tell(self, *signals: Signal) -> None:
        for signal in signals:
            self.found += self.engine.fold(signal, self.now).findings

    def ticks(self) -> None:
        """Fold clock ticks until every delayed conclusion is reported. Called only where needed, because a clock tick reads the
        state of every job."""
        for delay_s in (0.2, 0.6, UNWITNESSED_GRACE_S + 0.1):
            self.after(delay_s, self._tick)

    def _tick(self) -> None:
        self.found += self.engine.fold(ClockTick(self.now), self.now).findings

    # ------------------------------------------------------------ jobs

    def connect(self, i: int) -> None:
        self.incarnations[i] = self.incarnations.get(i, 0) + 1
        self.tell(NodeConnected(f"n{i}", self.now, f"life{self.incarnations[i]}"))

    def start(self, job: int) -> None:
        """Start a new generation of a job on all its nodes."""
        number = self.generations[job] = self.generations.get(job, 0) + 1
        mesh = Mesh.of({"dp": _PER_JOB})
        for rank in range(_PER_JOB):
            node = f"n{job * _PER_JOB + rank}"
            if number > 1:
                self.engine.fold(GenerationStopped(node, self.now, f"job{job}", number - 1), self.now)
            started = GenerationStarted(node, self.now, f"job{job}", number, mesh, (rank,), _QUIET)
            self.found += self.engine.fold(started, self.now).findings

    def crash(self, i: int, error: WorkerError) -> None:
        """Let the rank on node `i` fail, let the others fail after it, and restart the job."""
        job, rank = divmod(i, _PER_JOB)
        ranks = [rank, *(r for r in range(_PER_JOB) if r != rank)]
        number = self.generations[job]
        for each in ranks:
            self.tell(
                WorkerExited(
                    f"n{job * _PER_JOB + each}",
                    self.now,
                    f"job{job}",
                    number,
                    each,
                    100 + each,
                    1,
                    None,
                    50,
                    False,
                    error if each == rank else COLLECTIVE,
                )
            )
        self.after(10.0, lambda: self.start(job))


def suite(rng: np.random.Generator, days: float = DAYS) -> Score:
    score = Score("fleet")
    fleet = Fleet(rng)
    for i in range(NODES):
        fleet.connect(i)
        fleet.tell(port_sample(f"n{i}", _T0, "ACTIVE"))
    for job in range(NODES // _PER_JOB):
        fleet.start(job)
    # Gamma-mixed hazards: the mean of the mixture is 1, so that the fleet has the rate of the table.
    hazards = rng.gamma(SHAPE, 1 / SHAPE, NODES)
    faults = _plan_faults(fleet, hazards, days)
    bugs = _plan_noise(fleet, days)
    fleet.run(_T0 + days * DAY_S + 600.0)
    _judge(score, fleet, faults, bugs, days)
    _quarantine(score, faults, hazards)
    return score


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    node: int
    what: FaultClass


def _plan_faults(fleet: Fleet, hazards: np.ndarray, days: float) -> list[Fault]:
    """Schedule faults: Poisson arrivals per node and class. A node that is being repaired has no second fault."""
    rng, faults = fleet.rng, list[Fault]()
    for what in CLASSES:
        counts = rng.poisson(hazards * what.per_gpu_hour * GPUS * 24 * days)
        for node in np.flatnonzero(counts).tolist():
            times = _T0 + 60 + rng.random(int(counts[node])) * days * DAY_S
            faults += [Fault(float(at), node, what) for at in times.tolist()]
    faults.sort(key=lambda fault: fault.at)
    kept, down_until = list[Fault](), dict[int, float]()
    for fault in faults:
        if fault.at >= down_until.get(fault.node, 0.0):
            kept.append(fault)
            down_until[fault.node] = fault.at + REPAIR_S
            fleet.at(fault.at, lambda fault=fault: _cause(fleet, fault))  # type: ignore[misc]
    return kept


def _cause(fleet: Fleet, fault: Fault) -> None:
    i, node, at = fault.node, f"n{fault.node}", fleet.now
    gpu = int(fleet.rng.integers(GPUS))
    match fault.what.name:
        case "gpu_off_the_bus":
            fleet.tell(xid_line(node, at, gpu, 79))
            for other in range(GPUS):  # the driver reports the action for every GPU of the node
                fleet.tell(xid_line(node, at + 0.01, other, 154))
            fleet.after(2.0, lambda: fleet.crash(i, DEVICE))
        case "hbm":
            fleet.tell(xid_line(node, at, gpu, int(fleet.rng.choice([48, 94, 95, 64]))))
            fleet.after(1.0, lambda: fleet.crash(i, DEVICE))
        case "gsp_or_sram":
            fleet.tell(xid_line(node, at, gpu, int(fleet.rng.choice([119, 120, 140]))))
            fleet.after(1.0, lambda: fleet.crash(i, DEVICE))
        case "switch_or_cable":
            for k in range(6):
                fleet.after(60.0 * k, lambda: fleet.tell(port_sample(node, fleet.now, "DOWN")))
            fleet.after(REPAIR_S, lambda: fleet.tell(port_sample(node, fleet.now, "ACTIVE")))
        case "host_lost":
            fleet.tell(NodeDisconnected(node, at))
            fleet.ticks()
            fleet.after(REPAIR_S, lambda: fleet.connect(i))
        case "maintenance":
            fleet.tell(MaintenanceNotice(node, at, "file", "TERMINATE_ON_HOST_MAINTENANCE", at + HOUR_S))
        case "nic":
            text = "mlx5_core 0000:1a:00.0: health compromised - reached miss count"
            fleet.tell(KernelLine(node, at, text, event=KernelEvent.MLX5_HEALTH))
        case "disk":
            fleet.tell(
                KernelLine(node, at, "nvme nvme0: I/O 1 QID 2 timeout, aborting", event=KernelEvent.NVME_TIMEOUT)
            )
        case other:
            raise AssertionError(f"no class of faults is called {other}")


def _plan_noise(fleet: Fleet, days: float) -> list[tuple[float, int]]:
    """Schedule events that are not hardware faults. Returns the times and nodes at which users' scripts fail."""
    rng, span = fleet.rng, days * DAY_S
    bugs = list[tuple[float, int]]()
    for _ in range(int(FLAPS_PER_DAY * days)):
        at, i = _T0 + 60 + float(rng.random()) * span, int(rng.integers(NODES))
        back_s = min(20.0, float(rng.lognormal(1.0, 0.8)))  # seconds; a port that is down for longer is a fault
        fleet.at(at, lambda i=i: fleet.tell(port_sample(f"n{i}", fleet.now, "DOWN")))  # type: ignore[misc]
        fleet.at(at + back_s, lambda i=i: fleet.tell(port_sample(f"n{i}", fleet.now, "ACTIVE")))  # type: ignore[misc]
    for _ in range(int(BUGS_PER_DAY * days)):
        at, i = _T0 + 60 + float(rng.random()) * span, int(rng.integers(NODES))
        bugs.append((at, i))
        fleet.at(at, lambda i=i: _bug(fleet, i))  # type: ignore[misc]
    for _ in range(int(REDIALS_PER_DAY * days)):
        at, i = _T0 + 60 + float(rng.random()) * span, int(rng.integers(NODES))
        fleet.at(at, lambda i=i: _redial(fleet, i))  # type: ignore[misc]
    return bugs


def _bug(fleet: Fleet, i: int) -> None:
    """Let a script fail; every second failure produces an Xid of the application class."""
    if fleet.rng.random() < 0.5:
        fleet.tell(xid_line(f"n{i}", fleet.now, 0, int(fleet.rng.choice([13, 31, 43, 45]))))
    error = WorkerError("ValueError", "bad batch", (f"train.py:{fleet.rng.integers(1000)} step",))
    fleet.after(0.5, lambda: fleet.crash(i, error))


def _redial(fleet: Fleet, i: int) -> None:
    fleet.tell(NodeDisconnected(f"n{i}", fleet.now))
    fleet.ticks()
    life = f"life{fleet.incarnations[i]}"
    fleet.after(0.25, lambda: fleet.tell(NodeConnected(f"n{i}", fleet.now, life)))


def xid_line(node: str, at: float, gpu: int, code: int) -> KernelLine:
    pci = f"0000:{0x1A + gpu:02x}:00"
    return KernelLine(node, at, f"NVRM: Xid (PCI:{pci}): {code}, pid=1, name=python", code, pci, gpu, KernelEvent.XID)


def port_sample(node: str, at: float, state: str) -> NicSample:
    zeros = ((0,),) * 7
    physical = "LinkUp" if state == "ACTIVE" else "Polling"
    return NicSample(node, at, ("mlx5_0",), (1,), ("InfiniBand",), (state,), (physical,), *zeros)


# ---------------------------------------------------------------- judging


def _judge(score: Score, fleet: Fleet, faults: list[Fault], bugs: list[tuple[float, int]], days: float) -> None:
    of_node: dict[str, list[Fault]] = {}
    for fault in faults:
        of_node.setdefault(f"n{fault.node}", []).append(fault)
    failed: dict[int, list[float]] = {}  # by job: users' bugs
    for at, i in bugs:
        failed.setdefault(i // _PER_JOB, []).append(at)
    rows = {what.name: score.row(what.name) for what in CLASSES}
    reported: set[int] = set()
    false, wrong = 0, 0
    for finding in fleet.found:
        cause = _explains(finding, of_node.get(finding.node, []))
        if cause is not None:
            if finding.kind in cause.what.kinds and id(cause) not in reported:
                reported.add(id(cause))
                rows[cause.what.name].hit(finding.at - cause.at)
            continue
        blames = finding.severity is Severity.FATAL or finding.evidence.get("blame") == "hardware"
        machine = blames or (finding.kind in _HARDWARE and finding.severity is not Severity.INFO)
        job = int(finding.node[1:]) // _PER_JOB if finding.node else -1
        bug = any(0 <= finding.since - at <= 60.0 for at in failed.get(job, []))
        if machine and finding.severity is not Severity.WARNING:
            wrong += 1
            score.fail(f"{finding.kind} of {finding.node}: {finding.summary}", wrong=1)
        if machine or not (bug or finding.severity is Severity.INFO):
            false += 1
            score.fail(f"false: {finding.kind} {finding.severity} of {finding.node}: {finding.summary}")
    for fault in faults:
        if id(fault) not in reported:
            rows[fault.what.name].fail(f"{fault.what.name} of n{fault.node} not found", missed=1)
    score.total()
    score.facts |= {
        "gpus": NODES * GPUS,
        "days": days,
        "faults": len(faults),
        "noise": f"{FLAPS_PER_DAY} flaps, {BUGS_PER_DAY} bugs, {REDIALS_PER_DAY} redials a day",
        "wrong_node": wrong,
        "false_per_day": round(false / days, 3),
    }


def _explains(finding: Finding, faults: list[Fault]) -> Fault | None:
    """The newest fault of the node that the finding may be about: its lines arrive within minutes, its repair after hours.
    Until then, a warning that lasts is repeated, for example at a port that is down and flaps."""
    for fault in reversed(faults):
        if fault.at - 1.0 <= finding.at <= fault.at + 600.0 or abs(finding.at - fault.at - REPAIR_S) < 60.0:
            return fault
        if finding.kind in fault.what.kinds and fault.at <= finding.since and finding.at <= fault.at + REPAIR_S:
            return fault
    return None


def _quarantine(score: Score, faults: list[Fault], hazards: np.ndarray) -> None:
    """Pass each node's faults to the supervisor's quarantine rules. A lemon is one of the 2 % of nodes with the most hazard."""
    rules = OffenderRules()
    lemons = set(np.argsort(hazards)[-NODES // 50 :].tolist())
    past: dict[int, tuple[offenders.Fault, ...]] = {}
    out, avoided = set[int](), 0
    counted = [fault for fault in faults if fault.what.name != "maintenance"]
    for number, fault in enumerate(counted):
        if fault.node in out:
            avoided += 1
            continue
        incident = Incident(
            f"i-{number}",
            f"job{fault.node // _PER_JOB}",
            next(iter(fault.what.kinds)),
            fault.what.name,
            IncidentState.RESOLVED,
            1,
            node=f"n{fault.node}",
        )
        weight = offenders.weight_of(incident, rules)
        if not weight:
            continue
        new = offenders.Fault(fault.at, incident.id, incident.job, weight)
        past[fault.node] = offenders.added(past.get(fault.node, ()), new, rules)
        if offenders.offence(past[fault.node], fault.at, rules):
            out.add(fault.node)
    score.facts |= {
        "quarantined": len(out),
        "of_them_lemons": len(out & lemons),
        "faults_avoided": f"{avoided} of {len(counted)}",
        "faults_on_lemons": sum(fault.node in lemons for fault in counted),
    }
