"""Reports kernel messages about the machine: out of memory, stalls, disks and network adapters that fail.

There is one finding per node, event and subject (the process, the disk, the adapter) until no line has arrived for `quiet_s`.
While lines arrive, the finding is repeated. All findings are warnings, because systems that act on a kernel line alone have
stopped healthy jobs. A fault that stops a job is also detected as an exit, a hang or a lost node; the warning then explains it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.faults import INJECTED
from holdfast.domain.findings import Attribution, Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import KernelEvent, KernelLine


@dataclass(frozen=True, slots=True)
class _Meaning:
    kind: FindingKind
    severity: Severity
    words: str
    recommended_actions: tuple[Remedy, ...]
    # The pattern's first group is the subject, which distinguishes faults of one node.
    subject: re.Pattern[str] | None = None


_PCI = r"\b([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)"  # address of a device
_NODE = (Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)
_MEANINGS: dict[KernelEvent, _Meaning] = {
    KernelEvent.OOM_KILL: _Meaning(
        FindingKind.HOST_OOM,
        Severity.WARNING,
        "ran out of memory and the kernel killed a process",
        (Remedy.RESTART_PROCESS,),
        re.compile(r"[Pp]rocess (\d+)|pid=(\d+)"),
    ),
    KernelEvent.SOFT_LOCKUP: _Meaning(
        FindingKind.KERNEL_STALL,
        Severity.WARNING,
        "has a CPU that its kernel cannot schedule on",
        _NODE,
        re.compile(r"(?:CPU#?|on cpu)(?: \{)?\s*(\d+)"),
    ),
    KernelEvent.HUNG_TASK: _Meaning(
        FindingKind.KERNEL_STALL,
        Severity.WARNING,
        "has a task that has been blocked in the kernel for minutes",
        _NODE,
        re.compile(r"task (\S+?):\d+"),
    ),
    KernelEvent.OOPS: _Meaning(
        FindingKind.KERNEL_STALL,
        Severity.WARNING,
        "has a kernel that met an error of its own: what follows on this node cannot be trusted until it is rebooted",
        _NODE,
    ),
    KernelEvent.PCIE: _Meaning(
        FindingKind.HOST_PRESSURE,
        Severity.WARNING,
        "has a device whose PCIe link failed",
        _NODE,
        re.compile(_PCI),
    ),
    KernelEvent.NVME_TIMEOUT: _Meaning(
        FindingKind.STORAGE_FAULT,
        Severity.WARNING,
        "has a disk that responds late or not at all",
        (Remedy.WATCH, Remedy.REPLACE_NODE),
        re.compile(r"\b(nvme\d+)"),
    ),
    KernelEvent.DISK_ERROR: _Meaning(
        FindingKind.STORAGE_FAULT,
        Severity.WARNING,
        "has a disk on which reads or writes fail",
        (Remedy.WATCH, Remedy.REPLACE_NODE),
        re.compile(r"dev(?:ice)? ([\w-]+)|\b(nvme\w+)"),
    ),
    KernelEvent.FILE_SYSTEM: _Meaning(
        FindingKind.STORAGE_FAULT,
        Severity.WARNING,
        "has a damaged file system, or one whose disk fails",
        _NODE,
        re.compile(r"\((?:device )?([\w-]+)\)|device ([\w-]+)"),
    ),
    KernelEvent.READ_ONLY: _Meaning(
        FindingKind.STORAGE_FAULT,
        Severity.WARNING,
        "has a file system that became read-only or was shut down: nothing can be saved there",
        _NODE,
        re.compile(r"\(([\w-]+)\)"),
    ),
    KernelEvent.MLX5_HEALTH: _Meaning(
        FindingKind.NETWORK_FAULT,
        Severity.WARNING,
        "has a network adapter that its driver reports as failed",
        _NODE,
        re.compile(_PCI),
    ),
    KernelEvent.MLX5_COMMAND: _Meaning(
        FindingKind.NETWORK_FAULT,
        Severity.WARNING,
        "has a network adapter whose firmware does not answer commands",
        _NODE,
        re.compile(_PCI),
    ),
    KernelEvent.ADAPTER_HARDWARE: _Meaning(
        FindingKind.NETWORK_FAULT,
        Severity.WARNING,
        "has a network adapter with a bad cable, too much heat or too little power",
        (Remedy.WATCH, Remedy.REPLACE_NODE),
        re.compile(_PCI),
    ),
    KernelEvent.ADAPTER_STALL: _Meaning(
        FindingKind.NETWORK_FAULT,
        Severity.WARNING,
        "has a network adapter that does not send",
        _NODE,
        re.compile(rf"{_PCI}|WATCHDOG: (\S+)"),
    ),
    KernelEvent.NVSWITCH: _Meaning(
        FindingKind.NETWORK_FAULT,
        Severity.WARNING,
        "has an NVSwitch with a fatal error",
        _NODE,
        re.compile(r"(nvswitch\d+)"),
    ),
    KernelEvent.ACCELERATOR: _Meaning(
        FindingKind.GPU_ERROR,
        Severity.WARNING,
        "has an accelerator that failed or is reset by its driver",
        (Remedy.WATCH, Remedy.REPLACE_NODE),
        re.compile(r"\b([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d|hl\d+)"),
    ),
    KernelEvent.MACHINE_CHECK: _Meaning(
        FindingKind.HOST_PRESSURE,
        Severity.WARNING,
        "has logged machine check events: memory or CPU errors",
        (Remedy.WATCH, Remedy.REPLACE_NODE),
    ),
    KernelEvent.NCCL_SEGFAULT: _Meaning(
        FindingKind.HOST_PRESSURE,
        Severity.INFO,
        "had a process that crashed inside libnccl",
        (Remedy.RESTART_PROCESS,),
    ),
}


@dataclass(slots=True)
class KernelState:
    lasting: Lasting[tuple[str, KernelEvent, str]] = field(default_factory=Lasting)  # by node, event, subject


@dataclass(frozen=True, slots=True)
class KernelFault:
    reads: ClassVar = (KernelLine,)
    initial = KernelState
    quiet_s: float = 600.0  # the kernel repeats a hung task every 120 s, a soft lockup every 20 s

    def observe(self, state: KernelState, item: Observed, now: float, roster: Roster) -> tuple[KernelState, Findings]:
        if not isinstance(item, KernelLine) or (meaning := _MEANINGS.get(item.event)) is None:
            return state, ()
        match = meaning.subject.search(item.text) if meaning.subject else None
        subject = next((group for group in match.groups() if group), "") if match else ""
        key = (item.node, item.event, subject)
        finding = partial(_finding, item, meaning, subject, now)
        return state, tuple(state.lasting.seen(key, now, finding, quiet_s=self.quiet_s))


def _finding(line: KernelLine, meaning: _Meaning, subject: str, now: float) -> Finding:
    about = f" ({subject})" if subject else ""
    return Finding(
        id=f"kernel:{line.node}:{line.event.value}:{subject}:{line.at:.0f}",
        kind=meaning.kind,
        severity=meaning.severity,
        at=now,
        since=min(line.at, now),
        summary=f"{line.node} {meaning.words}{about}.",
        node=line.node,
        confidence=0.9,
        evidence={"line": line.text[:500], "event": line.event.value, "subject": subject},
        attribution=Attribution(from_outside=INJECTED in line.text),
        recommended_actions=meaning.recommended_actions,
        traceparent=line.traceparent,
    )
