"""Detects GPU errors: Xid lines judged by the catalogue, and requests of the driver (NVML's recovery action, a lost GPU).

Each physical fault leads to one finding, although it produces many lines: a burst of the same code, other codes of the failing
GPU, 43 and 45 afterwards, and 154 on all eight GPUs of a node after one 79. Within a burst, a line of the same GPU that does
not require a stronger action is ignored; a line that does replaces the finding (`supersedes`). A 45 is also produced when a
process that uses a GPU is killed.

Errors of the application class in one job never count against a node, however often they occur, because a bug affects the same
rank, and therefore the same GPU, each time. They count against a GPU if they occur on it in *several* jobs, each of which had
them on no other GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.catalogue.xid import (
    JOB_GOES_ON,
    Catalogue,
    Escalation,
    FirstAction,
    Role,
    Scope,
    XidRow,
)
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.detectors.xid_judgement import (
    JUDGEMENTS,
    RANK,
    RECOVERY,
    Details,
    Judged,
    Request,
    actions_in_words,
    details_of,
    gpu_key,
    is_nvml_event,
    of_line,
    of_request,
    of_silence,
    recovery_in,
)
from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain.findings import Finding, Remedy, Severity
from holdfast.domain.signals import (
    CollectorSilent,
    GenerationStopped,
    GpuSample,
    KernelEvent,
    KernelLine,
    WorkerExited,
)

_NODES_MAX = 20_000
_JOBS_MAX = 4096
_PLACES_MAX = 64  # GPUs kept per job
_FAULTS_PER_NODE_MAX = 64
_AFTER_A_KILL = 45
_OFF_THE_BUS = 79
_REMAP_FAILED = 64
_DOUBLE_BIT = 48
_DECIDED_BY_THE_LINE = (FirstAction.BY_SUBCODE, FirstAction.FOLLOW_NVML_RECOVERY_ACTION)


@dataclass(slots=True)
class _Fault:
    xid: int  # 0 = not from an Xid
    role: Role
    gpu: str
    at: float  # agent's clock, newest line of the burst
    severity: Severity
    finding: str
    job: str = ""
    link: str = ""
    unit: str = ""


@dataclass(slots=True)
class _Node:
    faults: list[_Fault] = field(default_factory=list)  # newest last
    killed_at: float = float("-inf")  # agent's clock: a worker was killed or stopped
    lost: frozenset[str] = frozenset()
    recovery: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class GpuState:
    nodes: Bounded[str, _Node] = field(default_factory=lambda: Bounded(_NODES_MAX))
    places: Bounded[str, set[tuple[str, str]]] = field(default_factory=lambda: Bounded(_JOBS_MAX))
    """Job → (node, GPU) on which application errors of the job occurred."""


@dataclass(frozen=True, slots=True)
class GpuError:
    reads: ClassVar = (KernelLine, GpuSample, WorkerExited, GenerationStopped, CollectorSilent, RunStarted)
    initial = GpuState
    catalogue: Catalogue
    # lines of different codes within this time belong to one fault; reference: ±60 s around the first failure
    burst_s: float = 60.0
    memory_s: float = 86_400.0  # faults are kept for the longest window of rules.csv

    def observe(self, state: GpuState, item: Observed, now: float, roster: Roster) -> tuple[GpuState, Findings]:
        findings: tuple[Finding, ...] = ()
        match item:
            case KernelLine():
                findings = self._line(state, item, now, roster.last_job(item.node))
            case GpuSample():
                findings = self._sample(_node(state, item.node), item, now, roster.last_job(item.node))
            case WorkerExited() if item.signal is not None:
                node = _node(state, item.node)
                node.killed_at = max(node.killed_at, item.at)
            case GenerationStopped():
                node = _node(state, item.node)
                node.killed_at = max(node.killed_at, item.at)
            case RunStarted():
                state.places.pop(item.job, None)
            case CollectorSilent(collector="nvml"):
                findings = (of_silence(item, now),)
            case _:
                pass
        return state, findings

    # ---------------------------------------------------------------- lines

    def _line(self, state: GpuState, line: KernelLine, now: float, job: str) -> tuple[Finding, ...]:
        xid = line.xid
        if xid is None:
            if line.event is not KernelEvent.OFF_THE_BUS and "fallen off the bus" not in line.text:
                return ()
            xid = _OFF_THE_BUS
        node, row, details = _node(state, line.node), self.catalogue.row(xid), details_of(line.text)
        if is_nvml_event(line.text) and row.first_action in _DECIDED_BY_THE_LINE:
            return ()
        gpu = gpu_key(line.pci, line.gpu)
        recent = [fault for fault in node.faults if abs(line.at - fault.at) <= max(self.burst_s, row.burst_s)]
        if self._is_known(node, row, line, gpu, details, recent):
            return ()
        if row.role is Role.APPLICATION and job:
            _remember_place(state, job, (line.node, gpu))
        node.faults = [known for known in node.faults if line.at - known.at <= self.memory_s]
        judged = self._judge(state, node, job, row, line, gpu, details)
        if judged is None:
            return ()
        same = [fault for fault in recent if _same_gpu(fault.gpu, gpu) or fault.role is Role.VERDICT]
        superseded = max(same, key=lambda fault: RANK[fault.severity], default=None)
        request_first = superseded is not None and superseded.role is Role.VERDICT and row.role is Role.HARDWARE
        if superseded is not None and RANK[judged.severity] <= RANK[superseded.severity] and not request_first:
            return ()  # the same fault; its finding already requires this action or a stronger one
        earlier = sum(known.xid == xid and known.gpu == gpu for known in node.faults)
        id_ = f"xid:{line.node}:{gpu}:{xid}:{line.at:.0f}"
        node.faults.append(_Fault(xid, row.role, gpu, line.at, judged.severity, id_, job, details.link, details.unit))
        del node.faults[:-_FAULTS_PER_NODE_MAX]
        evidence = self._evidence(row, line, details, judged, earlier)
        if superseded is not None:
            evidence["supersedes"] = superseded.finding
        supersedes = superseded.finding if superseded is not None else ""
        return (of_line(id_, row, line, judged, evidence, now, supersedes),)

    def _is_known(
        self, node: _Node, row: XidRow, line: KernelLine, gpu: str, details: Details, recent: list[_Fault]
    ) -> bool:
        """Whether the line belongs to a known fault. Each line of a burst prolongs the burst."""
        for fault in recent:
            same_link = fault.link == details.link or not details.link
            close = abs(line.at - fault.at) <= row.burst_s
            if close and fault.xid == row.xid and _same_gpu(fault.gpu, gpu) and same_link:
                fault.at = max(fault.at, line.at)
                return True
        if row.xid == _AFTER_A_KILL and abs(line.at - node.killed_at) <= self.burst_s:
            return True
        if row.role is Role.VERDICT:
            return any(fault.role in (Role.HARDWARE, Role.VERDICT) for fault in recent)
        return row.role is Role.AFTERMATH and any(fault.role is not Role.AFTERMATH for fault in recent)

    def _judge(
        self, state: GpuState, node: _Node, job: str, row: XidRow, line: KernelLine, gpu: str, details: Details
    ) -> Judged | None:
        """The catalogue's judgement, refined by the line and by earlier faults of the GPU; None if no action is necessary."""
        action, why, blame = self._first_action(row, line, details)
        if action is None:
            return None
        severity, recommended_actions = JUDGEMENTS[action]
        if row.source != "catalogue":
            return Judged(action, severity, recommended_actions, f"as configured in {row.source}", blame)
        if blame:
            why = f"{why}; the fault is the {blame}'s" if blame != "cable" else f"{why}; check the cable"
            return Judged(action, severity, recommended_actions[:1], why, blame)
        if row.xid == _DOUBLE_BIT and any(fault.xid == _REMAP_FAILED and fault.gpu == gpu for fault in node.faults):
            why = "its memory could not be remapped before, so it must be replaced"
            return Judged(FirstAction.REPLACE_NODE, *JUDGEMENTS[FirstAction.REPLACE_NODE], why)
        if row.role not in (Role.HARDWARE, Role.VERDICT):
            severity, recommended_actions = Severity.INFO, (Remedy.WATCH,)
            if row.first_action is FirstAction.REPORT:
                severity = Severity.WARNING
            if row.first_action is FirstAction.RESTART_PROCESS:
                recommended_actions = (Remedy.RESTART_PROCESS,)
            if row.role is Role.APPLICATION:
                why = _programs_own(state, job)
        for rule in row.escalations:
            count = self._count(state, node, job, row, rule, line, gpu, details)
            if count >= rule.count:
                action = rule.then
                worse, recommended_actions = JUDGEMENTS[action]
                if row.first_action in JOB_GOES_ON and row.role is Role.HARDWARE:
                    worse = Severity.WARNING  # the job continues; the action follows when the job next stops
                scope = {Scope.JOBS: "job with it on this GPU alone"}.get(
                    rule.scope, f"time on this {rule.scope.value}"
                )
                why = f"the {_ordinal(count)} {scope} within {rule.window_s / 3600:.0f} h ({rule.source})"
                return Judged(action, worse, recommended_actions, why)
        return Judged(action, severity, recommended_actions, why)

    def _first_action(self, row: XidRow, line: KernelLine, details: Details) -> tuple[FirstAction | None, str, str]:
        """Return (action, reason, the part that is responsible instead of this GPU)."""
        rule = self.catalogue.link_rule(row.xid, details.unit, details.subcode)
        if rule is not None and row.first_action is FirstAction.BY_SUBCODE and not details.nonfatal:
            return rule.first_action, f"sub-code {details.subcode} of {details.unit}", rule.blame
        match row.first_action:
            case FirstAction.FOLLOW_NVML_RECOVERY_ACTION:
                return *recovery_in(line.text), ""
            case FirstAction.BY_SUBCODE if details.nonfatal:
                return FirstAction.IGNORE, "a nonfatal link error", ""
            case FirstAction.BY_SUBCODE:
                return FirstAction.GPU_RESET, "a fatal link error", ""
            case FirstAction.FOLLOW_48:
                return FirstAction.GPU_RESET, "the detail of a double-bit error", ""
            case action:
                return action, f"first action {action.value.lower().replace('_', ' ')}", ""

    def _count(
        self,
        state: GpuState,
        node: _Node,
        job: str,
        row: XidRow,
        rule: Escalation,
        line: KernelLine,
        gpu: str,
        details: Details,
    ) -> int:
        """The number of occurrences in the rule's scope, including this one."""
        before = [fault for fault in node.faults if fault.gpu == gpu and line.at - fault.at <= rule.window_s]
        match rule.scope:
            case Scope.JOBS:
                jobs = {fault.job for fault in before if fault.role is Role.APPLICATION} | {job}
                return sum(_only_here(state, each, (line.node, gpu)) for each in jobs if each)
            case Scope.LINK:
                return 1 + sum((fault.xid, fault.link) == (row.xid, details.link) for fault in before)
            case Scope.UNIT:
                same = [f for f in before if f.xid == row.xid and f.unit == details.unit]
                return 1 + len(same) if details.unit else 1
            case Scope.GPU:
                return 1 + sum(fault.xid == row.xid for fault in before)

    def _evidence(
        self, row: XidRow, line: KernelLine, details: Details, judged: Judged, earlier: int
    ) -> dict[str, str]:
        evidence = {
            "xid": str(row.xid),
            "line": line.text[:500],
            "class": row.class_,
            "role": row.role.value,
            "first_action": judged.action.value,
            "recommended_actions": actions_in_words(judged.recommended_actions),
            "rule": judged.why,
            "source": row.source,
            "catalogue": self.catalogue.version,
            "earlier_in_24h": str(earlier),
        }
        if line.pci:
            evidence["pci"] = line.pci
        if details.link:
            evidence["link"] = details.link
        if details.unit:
            evidence["unit"] = details.unit
        if details.subcode >= 0:
            evidence["subcode"] = str(details.subcode)
        if judged.blame:
            evidence["blame"] = judged.blame
        return evidence

    # ---------------------------------------------------------------- requests of the driver

    def _sample(self, node: _Node, sample: GpuSample, now: float, job: str) -> tuple[Finding, ...]:
        """Return at most one finding, about the GPU with the most severe action, because a fault changes the recovery action of
        every GPU of its node."""
        requests = list[Request]()
        lost = frozenset(uuid for uuid, gone in zip(sample.uuid, sample.lost, strict=True) if gone)
        for gpu, uuid, code in zip(sample.gpu, sample.uuid, sample.recovery_action, strict=True):
            before, node.recovery[uuid] = node.recovery.get(uuid, 0), code
            if uuid in lost and uuid not in node.lost:
                requests.append(Request(gpu, uuid, FirstAction.REPLACE_NODE, "the driver has lost it"))
            elif code > 0 and code != before:
                what, action = RECOVERY.get(code, (f"unknown recovery action {code}", FirstAction.WATCH))
                requests.append(Request(gpu, uuid, action or FirstAction.IGNORE, f"the driver asks: {what}"))
        node.lost = lost
        node.recovery = {uuid: node.recovery[uuid] for uuid in sample.uuid}
        if not requests or any(
            fault.role in (Role.HARDWARE, Role.VERDICT) and abs(sample.at - fault.at) <= self.burst_s
            for fault in node.faults
        ):
            return ()  # unchanged, or the Xid line of the same fault has been judged
        worst = max(requests, key=_gravity)
        finding = of_request(sample, worst, [request.gpu for request in requests if request is not worst], now)
        node.faults.append(_Fault(0, Role.VERDICT, worst.uuid, sample.at, finding.severity, finding.id, job))
        del node.faults[:-_FAULTS_PER_NODE_MAX]
        return (finding,)


# ---------------------------------------------------------------- memory


def _same_gpu(one: str, other: str) -> bool:
    """Whether both are the same GPU. A line that names no GPU is about the GPU that other lines name at the same time."""
    return one == other or not one or not other


def _remember_place(state: GpuState, job: str, place: tuple[str, str]) -> None:
    places = state.places[job] = state.places.get(job, set())
    if len(places) < _PLACES_MAX:
        places.add(place)


def _only_here(state: GpuState, job: str, place: tuple[str, str]) -> bool:
    return state.places.get(job) == {place}


def _programs_own(state: GpuState, job: str) -> str:
    count = len(state.places.get(job, ())) if job else 0
    if count > 1:
        return f"an error of the program: it occurred on {count} GPUs"
    return "usually an error of the program"


def _node(state: GpuState, name: str) -> _Node:
    return state.nodes.get_or_add(name, _Node)


def _gravity(request: Request) -> tuple[int, bool]:
    """Sort key by severity: a lost GPU is worse than a node that must reboot, although both stop the job."""
    return RANK[JUDGEMENTS[request.action][0]], request.action is FirstAction.REPLACE_NODE


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")
