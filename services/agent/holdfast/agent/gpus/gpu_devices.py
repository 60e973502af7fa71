"""The device files of this node's GPUs, and the processes that have them open.

GPUs are numbered as in NVML, in the order of their PCI addresses. The number of a device file (`/dev/nvidia3`) may differ. The
driver's file `/proc/driver/nvidia/gpus/ADDRESS/information` contains it as `Device Minor`. Without that directory both numbers
are assumed to be equal.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REAL = Path("/dev")
NVIDIA_MAJOR = 195  # major number of the device files, from the Linux kernel's Documentation/admin-guide/devices.txt
COMMAND_CHARS_MAX = 80
MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,4})\s*$", re.MULTILINE)
_DEVICE = re.compile(r"nvidia([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has the device of a GPU open."""

    pid: int
    command: str  # its command line, truncated
    name: str  # of its program, at most 15 characters (proc(5), comm)
    gpu: int

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command or self.name or 'command not readable'}) has GPU {self.gpu} open"


@dataclass(frozen=True, slots=True)
class GpuDevices:
    """`devices` and `proc` are directories such as /dev and /proc. If `devices` is not /dev, only the files in it count,
    because they simulate devices that this machine does not have."""

    devices: Path = REAL
    proc: Path = Path("/proc")

    def minors(self) -> dict[int, int]:
        """Return GPU → number of its device file, for every GPU of this node."""
        known = (self.proc / "driver/nvidia/gpus").glob("*/information") if self.devices == REAL else ()
        found = sorted(known, key=lambda path: path.parent.name)
        texts = [match[1] if (match := MINOR.search(_text(path))) else "" for path in found]
        if found and all(texts):
            return {gpu: int(minor) for gpu, minor in enumerate(texts)}
        names = (match[1] for path in self.devices.glob("nvidia*") if (match := _DEVICE.fullmatch(path.name)))
        return {minor: minor for minor in sorted(map(int, names))}

    def holders(self, gpus: Iterable[int], *, except_for: Sequence[str] = ()) -> list[Holder]:
        """Return the processes that have one of `gpus` open, by process id, except programs in `except_for`.

        A process whose descriptors cannot be read (of another user, unless the agent is root) is not found.
        """
        minors = self.minors()
        wanted = {minors.get(gpu, gpu): gpu for gpu in gpus}
        found = []
        for directory in self.proc.iterdir():
            if not directory.name.isdecimal():
                continue
            open_here = {minor for minor in _open_minors(directory, self.devices) if minor in wanted}
            if not open_here or (name := _text(directory / "comm").strip()) in except_for:
                continue
            command = _text(directory / "cmdline").replace("\0", " ").strip()[:COMMAND_CHARS_MAX]
            found.append(Holder(int(directory.name), command, name, wanted[min(open_here)]))
        return sorted(found, key=lambda holder: holder.pid)


def _open_minors(process: Path, devices: Path) -> set[int]:
    """Return the numbers of the GPUs' device files that a process has open, by file name or by device number."""
    found = set[int]()
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # the process has ended, or belongs to another user
        return found
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        path = Path(target.removesuffix(" (deleted)"))
        if path.parent == devices and (match := _DEVICE.fullmatch(path.name)):
            found.add(int(match[1]))
        elif devices == REAL and target.startswith("/"):  # in a container the file may have another name
            found |= _minor_of_device(descriptor)
    return found


def _minor_of_device(descriptor: Path) -> set[int]:
    try:
        status = descriptor.stat()
    except OSError:
        return set()
    is_gpu = stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == NVIDIA_MAJOR
    return {os.minor(status.st_rdev)} if is_gpu and os.minor(status.st_rdev) < 254 else set()  # 254, 255: for all GPUs


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
