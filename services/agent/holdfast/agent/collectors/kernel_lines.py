"""Recognises relevant kernel-log lines. Pure.

The forms are those of the NVIDIA driver (NVRM) and of the kernel; the regular expressions follow gpud and NVSentinel, which
are used on large fleets. Diagnostics interprets the lines; this module only parses them.

Any user's program can put text into the kernel log, because messages contain the names of processes, threads and files. Only
the beginning of a message is always text of the kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.domain.faults import INJECTED
from holdfast.domain.signals import KernelEvent

TEXT_CHARS_MAX = 1024
FALLEN_OFF_THE_BUS = 79

# Text before the message: the priority as in /proc/kmsg, the level's name (dmesg -x), a date or a time in the formats of
# syslog, dmesg and journalctl, in any language, host and tag, the time since the boot, the caller. Only the kernel's tag is
# accepted, because messages of programs to syslog have other tags.
_WORD = r"[^\s\[\]:]{1,16}"
_DATE = (
    r"(?:[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8}(?:\.[0-9]{1,9})?|[0-9]{10}\.[0-9]{1,9}"
    rf"|(?:{_WORD} )?[0-9]{{4}}-[0-9-]{{5}}[T ][0-9:.,+Z-]{{8,24}}(?: [A-Z0-9+-]{{1,6}}(?= \S{{1,255}} kernel:))?)"
)
_TIME = (
    r"\[(?: {0,8}\+?[0-9]{1,10}(?:\.[0-9]{1,9})?(?: < {0,8}[0-9.]{1,20}>)?"
    rf"|(?:{_WORD} {{1,2}}){{1,3}}[0-9:]{{5,8}}(?: [0-9]{{4}})?)\] ?"
)
_PREFIX = re.compile(
    rf"(?:<[0-9]{{1,3}}>)?(?:1 )?(?:kern {{1,3}}:[a-z]{{3,6}} {{0,3}}: )?"
    rf"(?:(?:{_DATE} |{_TIME})(?:[^\s:\[]{{1,255}} kernel(?:: ?| - - - ))?)?(?:{_TIME})?(?:\[ {{0,8}}[TC][0-9]{{1,10}}\] ?)?"
)
# Messages about a program contain names that the program chooses: its own (15 characters, at the start) and those of its files
# and threads. So every pattern starts at the beginning of the kernel's message and is as strict as the kernel's format.
_ABOUT_A_PROCESS = re.compile(r".{0,15}\[[0-9]{1,10}\](?::| )")

# "NVRM: Xid (PCI:0000:18:00): 79, pid=…"; with MIG "(PCI:0000:18:00 GPU-I:05)"; NVLink5: "…: 149, NETIR_LINK_EVT Fatal XC0 i0
# Link 08 (0x004505c6 …)", which some drivers write without the comma.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F]{2,8}(?::[0-9a-fA-F]{2}){1,2}(?:\.[0-9a-fA-F])?)(?: [^)]{0,32})?\): "
    r"(?P<xid>[0-9]{1,4})(?:,|\s|$)"
)
_XID_MARK = "NVRM: Xid"
# The driver also logs this without a code: "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", or on several lines:
# "NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2330) installed in this system has", "NVRM: fallen off the bus …".
_FALLEN = re.compile(r"NVRM: .{0,160}fallen off the bus")
_NAMED = re.compile(r"NVRM: The NVIDIA GPU (?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?)")
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?")
_NCCL_SEGFAULT = re.compile(
    r".{0,15}\[[0-9]{1,10}\]: segfault at [0-9a-f]{1,16} ip [0-9a-f]{1,16} sp [0-9a-f]{1,16} error [0-9a-f]{1,16} in libnccl"
)
_DEVICE = r"[\w-]{1,16} [0-9a-f:.]{7,16}(?: \S{1,16})?: "  # driver and address; after them the name of a network device
_OTHERS: tuple[tuple[KernelEvent, re.Pattern[str]], ...] = (
    (
        KernelEvent.OOM_KILL,
        re.compile(r"Out of memory: Kill(?:ed)? process|Memory cgroup out of memory|oom-kill:constraint="),
    ),
    (
        KernelEvent.SOFT_LOCKUP,
        re.compile(
            r"(?:NMI )?(?:watchdog: )?(?:BUG: soft lockup|(?:CPU[0-9]{1,6}: )?Watchdog detected hard LOCKUP)"
            r"|(?:rcu: )?INFO: rcu_\w{1,16} (?:self-)?detected stalls? on CPU"
        ),
    ),
    (
        KernelEvent.HUNG_TASK,
        re.compile(r"(?:INFO: )?task .{1,64}:[0-9]{1,10} blocked for more than [0-9]{1,10} seconds"),
    ),
    (
        KernelEvent.OOPS,
        re.compile(
            r"BUG: (?:unable to handle (?:kernel |page )|kernel NULL pointer)|Oops: [0-9a-f]{4} \[#"
            r"|general protection fault, |kernel BUG at \S{1,255}!"
            r"|Unable to handle kernel |Internal error: Oops|Kernel panic - not syncing"
        ),
    ),
    (
        KernelEvent.PCIE,
        # Not errors that were corrected, and not the non-fatal ones, which healthy machines log as well.
        re.compile(
            rf"{_DEVICE}(?:AER: )?(?:PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)|can't recover \("
            r"|device recovery failed|DPC: containment event"
            r"|pciehp: Slot\([^)]{1,16}\): (?:Link Down|Card not present)|PCIe link lost)"
        ),
    ),
    (
        KernelEvent.NVME_TIMEOUT,
        # Not "nvme nvme1: Shutdown timeout set to 8 seconds", which a healthy disk logs when it is attached or reset.
        re.compile(
            r"nvme\S{0,32}:? (?!(?:nvme[0-9]{1,6}: )?Shutdown timeout set to )"
            r".*(?:timeout|controller is down|not ready|Device not responding|frozen state error detected"
            r"|Removing after probe failure)"
        ),
    ),
    (
        KernelEvent.DISK_ERROR,
        re.compile(
            r"(?:(?:blk_update|end|print)_req(?:uest|_error): )?(?:I/O|critical medium|critical target) error, dev "
            r"(?:nvme|sd|dm-|md)|Buffer I/O error on dev(?:ice)? (?:nvme|sd|dm-|md)"
            r"|nvme\S{1,16}: I/O Cmd\(.{1,160}, I/O Error \(|md/\S{1,32}: Disk failure on "
        ),
    ),
    (
        KernelEvent.READ_ONLY,
        re.compile(
            r"[\w-]{1,16}(?: \w{1,16})? \([^)]{1,64}\): [Rr]emounting file ?system read-only"
            r"|XFS \([^)]{1,64}\): .*(?:[Ss]hutting down filesystem|[Ff]ilesystem has been shut down)"
        ),
    ),
    (
        KernelEvent.FILE_SYSTEM,
        re.compile(
            r"EXT4-fs error \(device |Aborting journal on device |BTRFS (?:error|critical) \(device "
            r"|XFS \([^)]{1,64}\): (?:[Mm]etadata (?:corruption|I/O [Ee]rror|CRC error)|log I/O error|Corruption )"
        ),
    ),
    (
        KernelEvent.MLX5_HEALTH,
        re.compile(
            r"mlx5_\w{1,16} .*(?:health compromised|device's health|poll_health.*(?:[Ff]atal|miss)"
            r"|health recovery flow aborted|firmware internal error|handling bad device)"
        ),
    ),
    (
        KernelEvent.MLX5_COMMAND,
        re.compile(r"mlx5_\w{1,16} .*(?:[Ww]ill cause a leak of a command resource|No done completion)"),
    ),
    (
        KernelEvent.ADAPTER_HARDWARE,
        re.compile(
            rf"{_DEVICE}(?:Port module event\[error\]: |(?:\w{{1,32}}:[0-9]{{1,6}}:\(pid [0-9]{{1,10}}\): )?"
            r"(?:Detected insufficient power on the PCIe slot|High temperature on sensors))"
        ),
    ),
    (
        KernelEvent.MACHINE_CHECK,
        re.compile(
            r"(?:mce: )?(?:\{[0-9]{1,10}\})?(?:(?:\[Hardware Error\]: )?Machine check events logged"
            r"|\[Hardware Error\]: (?:.*Machine [Cc]heck|event severity: (?:fatal|recoverable))"
            r"|Uncorrected (?:hardware memory )?error)"
            r"|EDAC (?:\w{1,16} )?\w{1,16}: [0-9]{1,10} UE |Memory failure: 0x[0-9a-f]{1,16}: (?:Sending SIGBUS|[Kk]illing) "
        ),
    ),
    (
        KernelEvent.ADAPTER_STALL,
        re.compile(
            r"(?:\w{1,16} [0-9a-f:.]{7,16} \S{1,16}: )?"
            r"(?:NETDEV WATCHDOG: .*transmit queue [0-9]{1,5} timed out|TX timeout detected|Keep alive watchdog timeout)"
        ),
    ),
    (KernelEvent.NVSWITCH, re.compile(r"nvidia-nvswitch[0-9]{1,3}: SXid \([^)]{1,32}\): [0-9]{1,6}, Fatal\b")),
    (
        KernelEvent.ACCELERATOR,
        re.compile(
            r"amdgpu [0-9a-f:.]{7,16}: (?:amdgpu: )?(?:GPU reset begin!|GPU reset\([0-9]{1,6}\) failed|HW Exception by GPU "
            r"|(?:socket: [0-9]{1,3},? (?:die: [0-9]{1,3},? )?)?[0-9]{1,10} uncorrectable hardware errors detected)"
            r"|NVRM: (?:GPU [0-9a-fA-F:.]{7,16}: )?(?:RmInitAdapter|rm_init_adapter) failed"
            r"|habanalabs \S{1,16}: (?:hl[0-9]{1,3}: )?Device is going to be hard-reset"
        ),
    ),
)
# /dev/kmsg: "priority,sequence,microseconds,flags[,…];text", then indented lines that repeat structured fields.
# The kernel's numbers have 64 bits; text with a longer number is not a record.
_RECORD = re.compile(
    r"^(?P<priority>[0-9]{1,20}),(?P<sequence>[0-9]{1,20}),[0-9]{1,20},[^;]{0,256};(?P<text>.*)", re.DOTALL
)
_PRIORITY = re.compile(r"<(?P<priority>[0-9]{1,3})>")
_FACILITY_SHIFT = 3  # the lower bits of a priority are the level; facility 0 is the kernel's
_NO_NUMBER = re.compile(r"[0-9]{21}")


@dataclass(frozen=True, slots=True)
class Recognised:
    text: str
    event: KernelEvent
    xid: int | None = None
    pci: str = ""  # "0000:18:00" or "0000:18:00.0", as the driver wrote it


@dataclass(frozen=True, slots=True)
class Record:
    """One line, with its number in the kernel's log and its priority (facility × 8 + level) if it has them."""

    text: str
    sequence: int | None = None
    priority: int | None = None

    @property
    def is_of_the_kernel(self) -> bool:
        """Whether the kernel has written the line, or an operator who injects a fault. Lines that a program writes to /dev/kmsg
        have another facility. Lines without a priority, from a file, count as the kernel's."""
        by_kernel = self.priority is None or self.priority >> _FACILITY_SHIFT == 0
        return by_kernel or self.text.rstrip().endswith(INJECTED)


def parse_record(raw: str) -> Record:
    """Parse a kmsg record or plain text; files of local stacks and of syslog contain either."""
    first = raw.split("\n", 1)[0]
    if (match := _RECORD.match(first)) is None:
        level = _PRIORITY.match(first)
        return Record(first, priority=int(level["priority"]) if level else None)
    return Record(match["text"], int(match["sequence"]), int(match["priority"]))


def gpu_named(text: str) -> str:
    """Return the PCI address if the line names the GPU of the following lines; otherwise ""."""
    match = _NAMED.match(_message(text[:TEXT_CHARS_MAX]))
    return match["pci"] if match else ""


def recognise(text: str, named: str = "") -> Recognised | None:
    """Return the health event in the line; None for all other lines.

    `named`: the GPU named by the preceding lines.
    """
    text = text[:TEXT_CHARS_MAX]
    message = _message(text)
    if _ABOUT_A_PROCESS.match(message):
        return Recognised(text, KernelEvent.NCCL_SEGFAULT) if _NCCL_SEGFAULT.match(message) else None
    if match := _XID.match(message):
        return Recognised(text, KernelEvent.XID, int(match["xid"]), match["pci"])
    if _FALLEN.match(message):
        address = _PCI.search(message)
        return Recognised(text, KernelEvent.OFF_THE_BUS, FALLEN_OFF_THE_BUS, address[0] if address else named)
    for event, pattern in _OTHERS:
        if pattern.match(message):
            return Recognised(text, event)
    return None


def is_garbled(text: str) -> bool:
    """Whether an unrecognised line looks like a relevant one, or is not text. They are counted and logged: a file may have
    a prefix that is not known."""
    text = text[:TEXT_CHARS_MAX]
    if _NO_NUMBER.match(text) or "\x00" in text or "\ufffd" in text:
        return True
    message = _message(text)
    return _XID_MARK in message and _XID.match(message) is None


def _message(text: str) -> str:
    """Return the kernel's message without the prefix of the log."""
    prefix = _PREFIX.match(text)
    return text[prefix.end() :] if prefix else text
