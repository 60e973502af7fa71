"""Which kernel-log lines matter, and what they say. Pure.

The forms are the NVIDIA driver's (NVRM); regular expressions after gpud's and NVSentinel's, which are fed by whole fleets. What
a code *means* is diagnostics' catalogue; here it is only read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TEXT_CHARS_MAX = 1024
FALLEN_OFF_THE_BUS = 79

# "NVRM: Xid (PCI:0000:18:00): 79, pid=…"; NVLink5: "NVRM: Xid (PCI:0000:18:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (…)".
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\).*?: (?P<xid>\d{1,4}),")
# The driver also says it without a code: "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."
_FALLEN = re.compile(r"NVRM:.*fallen off the bus")
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?")
_OTHERS = re.compile(
    r"Out of memory: Killed process|oom-kill:|soft lockup|blocked for more than \d+ seconds"
    r"|nvme.*(?:timeout|controller is down)|Remounting filesystem read-only|health compromised|Machine check events logged"
)
# /dev/kmsg: "priority,sequence,microseconds,flags[,…];text", then indented lines that repeat structured fields.
_RECORD = re.compile(r"^(?P<priority>\d+),(?P<sequence>\d+),(?P<microseconds>\d+),[^;]*;(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Recognised:
    text: str
    xid: int | None = None
    pci: str = ""  # "0000:18:00" or "0000:18:00.0", as the driver wrote it


@dataclass(frozen=True, slots=True)
class Record:
    """One line, and its number in the kernel's own log when it has one."""

    text: str
    sequence: int | None = None


def parse_record(raw: str) -> Record:
    """A raw kmsg record or bare text: local stacks and syslog files have either."""
    first = raw.split("\n", 1)[0]
    if (match := _RECORD.match(first)) is None:
        return Record(first)
    return Record(match["text"], int(match["sequence"]))


def recognise(text: str) -> Recognised | None:
    """What the line says of this node's health; None for the thousands that say nothing of it."""
    text = text[:TEXT_CHARS_MAX]
    if match := _XID.search(text):
        return Recognised(text, int(match["xid"]), match["pci"])
    if _FALLEN.search(text):
        address = _PCI.search(text)
        return Recognised(text, FALLEN_OFF_THE_BUS, address[0] if address else "")
    if _OTHERS.search(text):
        return Recognised(text)
    return None
