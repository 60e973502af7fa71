"""The kernel log: `/dev/kmsg`, or a plain file with records in the same form.

Reading continues where the previous agent of this directory stopped, so each line is reported once, also if the agent was not
running when it was written. A log that this directory has never read is read from its end. The position is stored with the
identity of its source (the boot, or the file) and is ignored for another source.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

import anyio
import anyio.lowlevel
import structlog

from holdfast.agent.collectors.inotify import FileWatch
from holdfast.agent.collectors.kernel_lines import gpu_named, is_garbled, parse_record, recognise
from holdfast.agent.collectors.protocol import Emit, Surroundings
from holdfast.agent.gpus.gpu_devices import MINOR
from holdfast.domain.signals import KernelLine
from holdfast.runtime.files import write_whole
from holdfast.runtime.processes.survivors import BOOT_ID

log = structlog.get_logger("holdfast.agent.kernel_log")

RECORD_BYTES_MAX = 8192  # the kernel's own limit for one kmsg record
LOOK_INTERVAL_S = 1.0  # of a plain file without reported changes
ROTATION_POLL_S = 0.02
RECORDS_IN_A_ROW = 64  # of a device
READ_BYTES_MAX = 1 << 20  # per read of a plain file; the rest is read next time
SENTENCE_LINES = 3  # a message of the driver that spans several lines
GPUS = Path("/proc/driver/nvidia/gpus")


def build(surroundings: Surroundings) -> KernelLog:
    return KernelLog(surroundings.node, surroundings.kernel_log, surroundings.agent_dir / "kernel-log.json")


class KernelLog:
    name = "kernel-log"

    def __init__(self, node: str, path: Path, position: Path) -> None:
        self._node, self._path = node, path
        self._position = position
        self.garbled = 0  # unreadable lines since the start

    async def run(self, emit: Emit) -> None:
        device = stat.S_ISCHR(os.stat(self._path).st_mode)
        named, since = "", 0
        async for text in self._device() if device else self._file():
            named, since = (pci, 0) if (pci := gpu_named(text)) else (named, since + 1)
            if (found := recognise(text, named if since <= SENTENCE_LINES else "")) is not None:
                log.info("kernel line", text=found.text, about=found.event.value, xid=found.xid)
                gpu = gpu_of(found.pci)
                emit(KernelLine(self._node, time.time(), found.text, found.xid, found.pci, gpu, found.event))
            elif is_garbled(text):
                self.garbled += 1
                if self.garbled.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …, to limit the log
                    log.warning("kernel line not parsed", text=text[:200], so_far=self.garbled)

    async def _device(self) -> AsyncIterator[str]:
        """Yield records of /dev/kmsg; each read returns one complete record."""
        boot = _boot_id()
        seen = self._load(boot)
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if seen is None:
                os.lseek(fd, 0, os.SEEK_END)
            for count in itertools.count():
                if count % RECORDS_IN_A_ROW == 0:  # during a flood of records, other tasks must run as well
                    await anyio.lowlevel.checkpoint()
                try:
                    raw = os.read(fd, RECORD_BYTES_MAX)
                except BlockingIOError:
                    await anyio.wait_readable(fd)
                    continue
                # Records were overwritten before they were read. Reading continues with the oldest remaining one.
                except BrokenPipeError:
                    log.warning("kernel log overrun: lines lost")
                    continue
                if not raw:
                    log.warning(
                        "no kernel log", path=str(self._path), reason="this device has an end, as /dev/null has"
                    )
                    await anyio.sleep_forever()
                record = parse_record(raw.decode(errors="replace"))
                if record.sequence is None or (seen is not None and record.sequence <= seen):
                    continue
                seen = record.sequence
                if not record.is_of_the_kernel:
                    continue
                yield record.text
                if recognise(record.text) is not None:  # only these must not be reported twice
                    self._save(boot, seen)
        finally:
            os.close(fd)

    async def _file(self) -> AsyncIterator[str]:
        """Yield lines of a plain file. A rotated file is read to its end before its successor, a truncated one from its
        start."""
        first = True
        while True:
            try:
                file = self._path.open("rb")
            except FileNotFoundError:  # during a rotation
                await anyio.sleep(ROTATION_POLL_S)
                continue
            with file, FileWatch(Path(f"/proc/self/fd/{file.fileno()}")) as watch:
                inode = os.fstat(file.fileno()).st_ino
                offset = self._offset_in(file, inode) if first else 0
                first = False
                self._save(str(inode), offset)
                replaced = False
                while not replaced:
                    # Checked before reading, so that all earlier lines are read below.
                    replaced = _inode(self._path) != inode
                    if os.fstat(file.fileno()).st_size < offset:
                        offset = 0
                        self._save(str(inode), offset)
                    lines, end = _read_lines(file, offset)
                    for line in lines:
                        if (record := parse_record(line)).is_of_the_kernel:
                            yield record.text
                    if end != offset:
                        offset = end
                        self._save(str(inode), offset)
                    elif not replaced:
                        await watch.changed(LOOK_INTERVAL_S)

    def _offset_in(self, file: IO[bytes], inode: int) -> int:
        """Return the position at which this directory's last agent stopped reading this file; otherwise the end of the
        file."""
        size, saved = os.fstat(file.fileno()).st_size, self._load(str(inode))
        return saved if saved is not None and saved <= size else size

    def _load(self, place: str) -> int | None:
        try:
            saved = json.loads(self._position.read_text())
            position = saved["position"]
            return position if saved["place"] == place and type(position) is int and position >= 0 else None
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None  # missing or damaged by a crash: start at the end

    def _save(self, place: str, position: int) -> None:
        write_whole(self._position, json.dumps({"place": place, "position": position}).encode())


def gpu_of(pci: str, gpus: Path = GPUS) -> int | None:
    """Return the number of the GPU with a PCI address, from the driver's files; None if there is no such GPU.

    GPUs are numbered in the order of their PCI addresses, as in NVML and nvidia-smi. The number of the device file
    (`Device Minor`) may differ.
    """
    if not pci:
        return None
    try:
        for index, directory in enumerate(sorted(_entries(gpus), key=lambda path: path.name)):
            if directory.name.lower().startswith(pci.lower().removesuffix(".0")):
                match = MINOR.search((directory / "information").read_text(errors="replace"))
                return index if match else None
    except OSError as error:  # the driver is failing; its error line counts without an index
        log.warning("GPU index unknown", pci=pci, reason=str(error))
    return None


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _entries(directory: Path) -> Iterator[Path]:
    return directory.iterdir() if directory.is_dir() else iter(())


def _inode(path: Path) -> int:
    """Return the file's inode; 0 if there is no file."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


def _read_lines(file: IO[bytes], offset: int) -> tuple[list[str], int]:
    """Return the complete lines from `offset`, and the offset of the next one. An incomplete line is read later."""
    file.seek(offset)
    raw = file.read(READ_BYTES_MAX)
    end = raw.rfind(b"\n") + 1
    if end == 0:
        if len(raw) < RECORD_BYTES_MAX:
            return [], offset
        end = len(raw)  # longer than any real line: skip it
    # Split only at line feeds, because a file name in a message may contain other line separators of Unicode.
    lines = raw[:end].decode(errors="replace").removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines], offset + end
