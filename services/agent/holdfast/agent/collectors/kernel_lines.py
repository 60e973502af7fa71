"""Recognises relevant kernel-log lines. Pure.

The forms are those of the NVIDIA driver (NVRM) and of the kernel; the regular expressions follow gpud and NVSentinel, which
are used on large fleets. Diagnostics interprets the lines; this module only parses them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.domain.signals import KernelEvent

TEXT_CHARS_MAX = 1024
FALLEN_OFF_THE_BUS = 79

# "NVRM: Xid (PCI:0000:18:00): 79, pid=…"; with MIG "(PCI:0000:18:00 GPU-I:05)"; NVLink5: "…: 149, NETIR_LINK_EVT Fatal XC0 i0
# Link 08 (0x004505c6 …)", which some drivers write without the comma.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]{0,32}\).*?: (?P<xid>[0-9]{1,4})(?:,|\s|$)")
_XID_MARK = "NVRM: Xid"
# The driver also logs this without a code: "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", or on lines of their own:
# "NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2330) installed in this system has", "NVRM: fallen off the bus …".
_FALLEN = re.compile(r"NVRM:.*fallen off the bus")
_NAMED = re.compile(r"NVRM: The NVIDIA GPU (?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?)")
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?")
_OTHERS: tuple[tuple[KernelEvent, re.Pattern[str]], ...] = (
    (KernelEvent.OOM_KILL, re.compile(r"Out of memory: Kill(?:ed)? process|Memory cgroup out of memory|oom-kill:")),
    (KernelEvent.SOFT_LOCKUP, re.compile(r"BUG: soft lockup|watchdog: .*(?:soft|hard) (?:lockup|LOCKUP)")),
    (KernelEvent.HUNG_TASK, re.compile(r"task .{1,64} blocked for more than \d+ seconds")),
    (
        KernelEvent.NVME_TIMEOUT,
        re.compile(r"\bnvme\S*:? .*(?:timeout|controller is down|not ready|Device not responding)"),
    ),
    (KernelEvent.READ_ONLY, re.compile(r"[Rr]emounting filesystem read-only|Remounting file ?system read-only")),
    (
        KernelEvent.MLX5_HEALTH,
        re.compile(r"\bmlx5_\w+.*(?:health compromised|device's health|poll_health.*(?:fatal|miss))"),
    ),
    (KernelEvent.MLX5_COMMAND, re.compile(r"\bmlx5_\w+.*[Ww]ill cause a leak of a command resource")),
    (KernelEvent.MACHINE_CHECK, re.compile(r"Machine check events logged|\[Hardware Error\]: .*Machine check")),
    (KernelEvent.NCCL_SEGFAULT, re.compile(r"segfault at .* in libnccl")),
)
# /dev/kmsg: "priority,sequence,microseconds,flags[,…];text", then indented lines that repeat structured fields.
# The kernel's numbers have 64 bits; text with a longer number is not a record.
_RECORD = re.compile(r"^[0-9]{1,20},(?P<sequence>[0-9]{1,20}),[0-9]{1,20},[^;]{0,256};(?P<text>.*)", re.DOTALL)
_NO_NUMBER = re.compile(r"[0-9]{21}")


@dataclass(frozen=True, slots=True)
class Recognised:
    text: str
    event: KernelEvent
    xid: int | None = None
    pci: str = ""  # "0000:18:00" or "0000:18:00.0", as the driver wrote it


@dataclass(frozen=True, slots=True)
class Record:
    """One line, with its number in the kernel's log if it has one."""

    text: str
    sequence: int | None = None


def parse_record(raw: str) -> Record:
    """Parse a kmsg record or plain text; files of local stacks and of syslog contain either."""
    first = raw.split("\n", 1)[0]
    if (match := _RECORD.match(first)) is None:
        return Record(first)
    return Record(match["text"], int(match["sequence"]))


def gpu_named(text: str) -> str:
    """Return the PCI address if the line names the GPU of the following lines; otherwise ""."""
    match = _NAMED.search(text[:TEXT_CHARS_MAX])
    return match["pci"] if match else ""


def recognise(text: str, named: str = "") -> Recognised | None:
    """Return the health event in the line; None for all other lines.

    `named`: the GPU named by the preceding lines.
    """
    text = text[:TEXT_CHARS_MAX]
    if match := _XID.search(text):
        return Recognised(text, KernelEvent.XID, int(match["xid"]), match["pci"])
    if _FALLEN.search(text):
        address = _PCI.search(text)
        return Recognised(text, KernelEvent.OFF_THE_BUS, FALLEN_OFF_THE_BUS, address[0] if address else named)
    for event, pattern in _OTHERS:
        if pattern.search(text):
            return Recognised(text, event)
    return None


def is_garbled(text: str) -> bool:
    """Whether an unrecognised line looks like a relevant one, or is not text. Such lines are counted and logged."""
    text = text[:TEXT_CHARS_MAX]
    if _NO_NUMBER.match(text) or "\x00" in text or "\ufffd" in text:
        return True
    return _XID_MARK in text and _XID.search(text) is None
