"""Parses the text of Xid lines, maps actions to severities, and writes the findings. Pure functions.

Not a detector: `gpu_error` calls it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.diagnostics.catalogue.xid import FirstAction, XidRow
from holdfast.domain.faults import INJECTED
from holdfast.domain.findings import Attribution, Finding, FindingKind, Remedy, Severity, blamed
from holdfast.domain.signals import CollectorSilent, GpuSample, KernelLine

Judgement = tuple[Severity, tuple[Remedy, ...]]

_UPWARDS = (Remedy.RESTART_PROCESS, Remedy.RESET_GPU, Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)
JUDGEMENTS: dict[FirstAction, Judgement] = {
    FirstAction.IGNORE: (Severity.INFO, (Remedy.WATCH,)),
    FirstAction.REPORT: (Severity.WARNING, (Remedy.WATCH,)),
    FirstAction.WATCH: (Severity.WARNING, (Remedy.WATCH,)),
    FirstAction.DIAG: (Severity.WARNING, (Remedy.WATCH,)),
    FirstAction.RESTART_PROCESS: (Severity.ERROR, _UPWARDS),
    FirstAction.GPU_RESET: (Severity.ERROR, _UPWARDS[1:]),
    FirstAction.DRAIN_THEN_GPU_RESET: (Severity.WARNING, (Remedy.WATCH, Remedy.RESET_GPU)),
    FirstAction.NODE_REBOOT: (Severity.FATAL, _UPWARDS[2:]),
    FirstAction.REPLACE_NODE: (Severity.FATAL, _UPWARDS[3:]),
}
RANK = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2, Severity.FATAL: 3}

# Values of NVML field 230, their texts in Xid 154, and the action. None = no action is necessary.
RECOVERY: dict[int, tuple[str, FirstAction | None]] = {
    0: ("none", None),
    1: ("GPU reset required", FirstAction.GPU_RESET),
    2: ("node reboot required", FirstAction.NODE_REBOOT),
    3: ("drain P2P", FirstAction.WATCH),
    4: ("drain and reset", FirstAction.DRAIN_THEN_GPU_RESET),
    5: ("recover the IMEX domain", FirstAction.WATCH),
    6: ("bus reset", FirstAction.GPU_RESET),
    7: ("system reboot", FirstAction.NODE_REBOOT),
}

# "149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000 …)"; drivers before R575: "XC 1 i 2 Link 01 [0x0000000a]".
_NVLINK5 = re.compile(
    r":\s*\d{1,4},?\s+(?P<unit>[A-Z][A-Z0-9_/]*)\s+(?:Link\s+)?(?P<fatal>Non-?_?fatal|Fatal)\b"
    r"(?:.*?\bLink\s+(?P<link>-?\d+))?(?:.*?[(\[](?P<info>0x[0-9a-fA-F]{1,8}))?",
    re.IGNORECASE,
)
_NONFATAL = re.compile(r"\bnon[-_]?fatal\b", re.IGNORECASE)
_LINK = re.compile(r"\blink\s+(-?\d{1,3})\b", re.IGNORECASE)
_UNIT = re.compile(r"\bGPC\s*(\d+)\W+TPC\s*(\d+)", re.IGNORECASE)
_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})")


@dataclass(frozen=True, slots=True)
class Details:
    """Details of an Xid line. `link` and `unit` are empty, and `subcode` is -1, if the line does not contain them."""

    link: str = ""
    unit: str = ""
    subcode: int = -1
    nonfatal: bool = False


def details_of(text: str) -> Details:
    if match := _NVLINK5.search(text):
        subcode = int(match["info"], 16) >> 20 & 0x3F if match["info"] else -1
        return Details(match["link"] or "", match["unit"], subcode, nonfatal=match["fatal"].lower().startswith("non"))
    link, unit = _LINK.search(text), _UNIT.search(text)
    where = f"GPC {unit[1]} TPC {unit[2]}" if unit else ""
    return Details(link[1] if link else "", where, -1, nonfatal=_NONFATAL.search(text) is not None)


def is_nvml_event(text: str) -> bool:
    """Whether NVML's event set reported the code, without a text. Codes that need the text are judged by the kernel log."""
    return text.startswith("NVML event")


def gpu_key(pci: str, gpu: int | None) -> str:
    """The key of a GPU, equal for all notations of its PCI address: "PCI:0000:3b:00", "00000000:3B:00.0"."""
    if match := _PCI.search(pci):
        domain, bus, device = match.groups()
        return f"{domain[-4:]}:{bus}:{device}".lower()
    return pci or (str(gpu) if gpu is not None else "")


def recovery_in(text: str) -> tuple[FirstAction | None, str]:
    """The action that an Xid 154 line names, with the reason; WATCH if the line names no action."""
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
            what, action = RECOVERY[4 if both else code]
            return action, f"the driver asks: {what}"
    return FirstAction.WATCH, "the driver's recovery action changed"


def actions_in_words(recommended_actions: tuple[Remedy, ...]) -> str:
    return " → ".join(remedy.value.replace("_", " ") for remedy in recommended_actions)


@dataclass(frozen=True, slots=True)
class Judged:
    action: FirstAction
    severity: Severity
    recommended_actions: tuple[Remedy, ...]
    why: str
    blame: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """The action that the driver requests for one GPU."""

    gpu: int
    uuid: str
    action: FirstAction
    what: str


# ---------------------------------------------------------------- findings


def of_line(
    id_: str, row: XidRow, line: KernelLine, judged: Judged, evidence: dict[str, str], now: float, supersedes: str = ""
) -> Finding:
    name = row.name.replace("ROBUST_CHANNEL_", "").replace("_", " ").lower()
    unit = f"GPU {line.gpu}" if line.gpu is not None else (f"GPU {line.pci}" if line.pci else "a GPU")
    cause = f", {row.usual_cause}" if row.usual_cause else ""
    confidence = 0.95 if row.is_hardware else 0.6
    return Finding(
        id=id_,
        kind=FindingKind.GPU_ERROR,
        severity=judged.severity,
        at=now,
        since=min(line.at, now),
        summary=f"Xid {row.xid} ({name}) on {unit} of {line.node}{cause}: {judged.why}.",
        node=line.node,
        gpu=line.gpu,
        confidence=0.4 if judged.blame else confidence,
        evidence=evidence,
        supersedes=supersedes,
        attribution=Attribution(blamed(judged.blame), from_outside=INJECTED in line.text),
        recommended_actions=judged.recommended_actions,
        traceparent=line.traceparent,
    )


def of_request(sample: GpuSample, request: Request, others: list[int], now: float) -> Finding:
    severity, recommended_actions = JUDGEMENTS[request.action]
    evidence = {
        "uuid": request.uuid,
        "first_action": request.action.value,
        "recommended_actions": actions_in_words(recommended_actions),
        "source": "NVML",
    }
    if others:
        evidence["other_gpus"] = ", ".join(str(gpu) for gpu in others)
    return Finding(
        id=f"gpu:{sample.node}:{request.uuid or request.gpu}:{request.action.value.lower()}:{sample.at:.0f}",
        kind=FindingKind.GPU_ERROR,
        severity=severity,
        at=now,
        since=min(sample.at, now),
        summary=f"GPU {request.gpu} of {sample.node}: {request.what}.",
        node=sample.node,
        gpu=request.gpu,
        evidence=evidence,
        recommended_actions=recommended_actions,
    )


def of_silence(item: CollectorSilent, now: float) -> Finding:
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
        recommended_actions=(Remedy.WATCH,),
    )
