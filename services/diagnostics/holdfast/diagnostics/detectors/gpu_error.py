"""GPU errors: Xid lines judged by the catalogue, and the driver's own verdict (NVML's recovery action, a lost GPU).

One finding per physical fault. A fault makes many lines: a burst of the same code, 43 and 45 as aftermath, 154 on all eight
GPUs of a node after one 79. Within `burst_s` the same code on the same GPU says nothing new; side effects say nothing new
while any other hardware fault of the node is that fresh; and killing a process that uses a GPU makes a 45 by itself.

Codes of the application class never condemn a node, however often they come.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

from holdfast.diagnostics.catalogue.xid import Catalogue, FirstAction, XidRow
from holdfast.diagnostics.detectors.protocol import Observed
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import (
    CollectorSilent,
    GenerationStopped,
    GpuSample,
    KernelLine,
    WorkerExited,
)

_NODES_MAX = 20_000
_FAULTS_PER_NODE_MAX = 64
_SIDE_EFFECTS = frozenset({43, 45, 137})
_AFTER_A_KILL = 45
_OFF_THE_BUS = 79
_REMAP_FAILED = 64
_DOUBLE_BIT = 48
_RECOVERY_CHANGED = 154
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)

Judgement = tuple[Severity, tuple[Remedy, ...]]

_JUDGEMENTS: dict[FirstAction, Judgement] = {
    FirstAction.IGNORE: (Severity.INFO, (Remedy.WATCH,)),
    FirstAction.REPORT: (Severity.WARNING, (Remedy.WATCH,)),
    FirstAction.WATCH: (Severity.WARNING, (Remedy.WATCH,)),
    FirstAction.DIAG: (Severity.WARNING, (Remedy.WATCH,)),
    FirstAction.RESTART_PROCESS: (Severity.ERROR, (Remedy.RESTART_PROCESS, Remedy.RESET_GPU)),
    FirstAction.GPU_RESET: (Severity.ERROR, (Remedy.RESET_GPU, Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)),
    FirstAction.DRAIN_THEN_GPU_RESET: (Severity.WARNING, (Remedy.WATCH, Remedy.RESET_GPU)),
    FirstAction.NODE_REBOOT: (Severity.FATAL, (Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)),
    FirstAction.REPLACE_NODE: (Severity.FATAL, (Remedy.REPLACE_NODE,)),
}
# NVML field 230, and the words that Xid 154 uses for it. None = nothing to do.
_RECOVERY: dict[int, tuple[str, FirstAction | None]] = {
    0: ("none", None),
    1: ("GPU reset required", FirstAction.GPU_RESET),
    2: ("node reboot required", FirstAction.NODE_REBOOT),
    3: ("drain P2P", FirstAction.WATCH),
    4: ("drain and reset", FirstAction.DRAIN_THEN_GPU_RESET),
    5: ("recover the IMEX domain", FirstAction.WATCH),
    6: ("bus reset", FirstAction.GPU_RESET),
    7: ("system reboot", FirstAction.NODE_REBOOT),
}


@dataclass(frozen=True, slots=True)
class _Fault:
    xid: int  # 0 = not from an Xid
    gpu: str
    at: float  # agent's clock, newest line of the burst
    hardware: bool


@dataclass(slots=True)
class _Node:
    faults: list[_Fault] = field(default_factory=list)  # newest last
    killed_at: float = float("-inf")  # agent's clock: a worker of ours was killed
    lost: frozenset[str] = frozenset()
    recovery: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class GpuState:
    nodes: OrderedDict[str, _Node] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class GpuError:
    catalogue: Catalogue
    burst_s: float = 60.0
    memory_s: float = 86_400.0  # a second fault of the same code on the same GPU within this is a repeat

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (KernelLine, GpuSample, WorkerExited, GenerationStopped, CollectorSilent)

    def initial(self) -> GpuState:
        return GpuState()

    def observe(self, state: GpuState, item: Observed, now: float) -> tuple[GpuState, tuple[Finding, ...]]:
        findings: tuple[Finding, ...] = ()
        match item:
            case KernelLine():
                findings = self._line(_node(state, item.node), item, now)
            case GpuSample():
                findings = self._sample(_node(state, item.node), item, now)
            case WorkerExited() if item.signal is not None:
                node = _node(state, item.node)
                node.killed_at = max(node.killed_at, item.at)
            case GenerationStopped():
                node = _node(state, item.node)
                node.killed_at = max(node.killed_at, item.at)
            case CollectorSilent(collector="nvml"):
                findings = (_silent(item, now),)
            case _:
                pass
        return state, findings

    def _line(self, node: _Node, line: KernelLine, now: float) -> tuple[Finding, ...]:
        xid = line.xid
        if xid is None:
            if "fallen off the bus" not in line.text:
                return ()
            xid = _OFF_THE_BUS
        row = self.catalogue.get(xid) or XidRow(xid, "not in the catalogue", "unknown", FirstAction.REPORT)
        gpu = line.pci or (str(line.gpu) if line.gpu is not None else "")
        if self._is_echo(node, line, xid, gpu):
            return ()
        action, why = self._action(node, row, line, gpu)
        if action is None:
            return ()
        earlier = self._remember(node, _Fault(xid, gpu, line.at, row.is_hardware))
        severity, ladder = _JUDGEMENTS[action]
        if not row.is_hardware and severity in (Severity.ERROR, Severity.FATAL) and row.source == "catalogue":
            severity, ladder, why = Severity.INFO, (Remedy.WATCH,), "the program's own error as a rule"
        name = row.name.replace("ROBUST_CHANNEL_", "").replace("_", " ").lower()
        unit = f"GPU {line.gpu}" if line.gpu is not None else (f"GPU {line.pci}" if line.pci else "a GPU")
        cause = f", {row.usual_cause}" if row.usual_cause else ""
        return (
            Finding(
                id=f"xid:{line.node}:{gpu}:{xid}:{line.at:.0f}",
                kind=FindingKind.GPU_ERROR,
                severity=severity,
                at=now,
                since=min(line.at, now),
                summary=f"Xid {xid} ({name}) on {unit} of {line.node}{cause}: {why}.",
                node=line.node,
                gpu=line.gpu,
                confidence=0.95 if row.is_hardware else 0.6,
                evidence={
                    "xid": str(xid),
                    "line": line.text[:500],
                    "class": row.class_,
                    "first_action": action.value,
                    "source": row.source,
                    "earlier_in_24h": str(earlier),
                },
                ladder=ladder,
            ),
        )

    def _is_echo(self, node: _Node, line: KernelLine, xid: int, gpu: str) -> bool:
        """A line that belongs to a fault already known. A burst keeps itself alive."""
        recent = [fault for fault in node.faults if abs(line.at - fault.at) <= self.burst_s]
        for fault in recent:
            if fault.xid == xid and fault.gpu == gpu:
                node.faults.remove(fault)
                node.faults.append(_Fault(xid, gpu, max(fault.at, line.at), fault.hardware))
                return True
        if xid == _AFTER_A_KILL and abs(line.at - node.killed_at) <= self.burst_s:
            return True
        if xid == _RECOVERY_CHANGED:
            return any(fault.hardware for fault in recent)  # it speaks on every GPU of the node
        return xid in _SIDE_EFFECTS and any(fault.xid not in _SIDE_EFFECTS for fault in recent)

    def _action(self, node: _Node, row: XidRow, line: KernelLine, gpu: str) -> tuple[FirstAction | None, str]:
        """What the catalogue says, made concrete by the line and by what this GPU did before."""
        before = [fault for fault in node.faults if fault.gpu == gpu]
        if row.xid == _DOUBLE_BIT and any(fault.xid == _REMAP_FAILED for fault in before):
            return FirstAction.REPLACE_NODE, "its memory could not be remapped before, so it must be replaced"
        again = any(fault.xid == row.xid and line.at - fault.at <= self.memory_s for fault in before)
        if row.is_hardware and row.on_repeat is not None and again:
            return row.on_repeat, "the second time within a day on this GPU"
        match row.first_action:
            case FirstAction.FOLLOW_NVML_RECOVERY_ACTION:
                return _recovery_in(line.text)
            case FirstAction.BY_SUBCODE if _NONFATAL.search(line.text):
                return FirstAction.IGNORE, "the line says that it is not fatal"
            case FirstAction.BY_SUBCODE:
                return FirstAction.GPU_RESET, "a fatal link error"
            case FirstAction.FOLLOW_48:
                return FirstAction.GPU_RESET, "the detail of a double-bit error"
            case action:
                return action, f"first action {action.value.lower().replace('_', ' ')}"

    def _remember(self, node: _Node, fault: _Fault) -> int:
        """Keep the fault; returns how many of the same code and GPU the last day has seen before it."""
        node.faults = [known for known in node.faults if fault.at - known.at <= self.memory_s]
        earlier = sum(known.xid == fault.xid and known.gpu == fault.gpu for known in node.faults)
        node.faults.append(fault)
        del node.faults[:-_FAULTS_PER_NODE_MAX]
        return earlier

    def _sample(self, node: _Node, sample: GpuSample, now: float) -> tuple[Finding, ...]:
        findings = []
        lost = frozenset(uuid for uuid, gone in zip(sample.uuid, sample.lost, strict=True) if gone)
        fresh = any(fault.hardware and abs(sample.at - fault.at) <= self.burst_s for fault in node.faults)
        for gpu, uuid, code in zip(sample.gpu, sample.uuid, sample.recovery_action, strict=True):
            before, node.recovery[uuid] = node.recovery.get(uuid, 0), code
            if uuid in lost and uuid not in node.lost:
                action, what = FirstAction.REPLACE_NODE, "the driver has lost it"
            elif code > 0 and code != before:
                what, known = _RECOVERY.get(code, (f"recovery action {code}, not known here", FirstAction.WATCH))
                action, what = known or FirstAction.IGNORE, f"the driver asks: {what}"
            else:
                continue
            if fresh:
                continue  # the Xid line of the same fault has already been judged
            self._remember(node, _Fault(0, uuid, sample.at, hardware=True))
            findings.append(_verdict(sample, gpu, uuid, action, what, now))
        node.lost = lost
        return tuple(findings)


def _node(state: GpuState, name: str) -> _Node:
    node = state.nodes.get(name)
    if node is None:
        node = state.nodes[name] = _Node()
        while len(state.nodes) > _NODES_MAX:
            state.nodes.popitem(last=False)
    return node


def _recovery_in(text: str) -> tuple[FirstAction | None, str]:
    """The action that an Xid 154 line names; without words it is only worth a look."""
    words = text.lower().rpartition(" to ")[2]  # "… changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    if "(none)" in words:
        return None, ""
    both = "drain" in words and "reset" in words
    for sign, code in (
        ("drain p2p", 3),
        ("imex", 5),
        ("bus reset", 6),
        ("system reboot", 7),
        ("reboot", 2),
        ("reset", 1),
    ):
        if sign in words:
            what, action = _RECOVERY[4 if both else code]
            return action, f"the driver asks: {what}"
    return FirstAction.WATCH, "the driver's recovery action changed"


def _verdict(sample: GpuSample, gpu: int, uuid: str, action: FirstAction, what: str, now: float) -> Finding:
    severity, ladder = _JUDGEMENTS[action]
    return Finding(
        id=f"gpu:{sample.node}:{uuid or gpu}:{action.value.lower()}:{sample.at:.0f}",
        kind=FindingKind.GPU_ERROR,
        severity=severity,
        at=now,
        since=min(sample.at, now),
        summary=f"GPU {gpu} of {sample.node}: {what}.",
        node=sample.node,
        gpu=gpu,
        evidence={"uuid": uuid, "first_action": action.value, "source": "NVML"},
        ladder=ladder,
    )


def _silent(item: CollectorSilent, now: float) -> Finding:
    return Finding(
        id=f"gpu_silent:{item.node}:{item.at - item.at % 300:.0f}",
        kind=FindingKind.GPU_ERROR,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"The GPU driver of {item.node} has not answered {item.misses} times in a row.",
        node=item.node,
        confidence=0.5,
        evidence={"collector": item.collector, "misses": str(item.misses), "reason": item.reason[:500]},
        ladder=(Remedy.WATCH,),
    )
