"""Worker logs: `<agent_dir>/logs/<job>/g<generation>/rank-<r>.log`, standard output and error in one file, in order.

The worker writes directly to the file, so that a step never waits for the agent and the last lines of a killed process are
included. The agent limits the size: if a file exceeds its limit, its oldest part is removed by punching a hole, which does not
affect the appending writer. If the file system does not support that, the file is emptied. Only the newest generations are
kept."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import shutil
import stat
from pathlib import Path

from holdfast.agent.workers.errors import read_error_file
from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.rank_reads import ERRORS_MAX, RaisedError
from holdfast.domain.worker import TORCH_SERVER_LINE
from holdfast.domain.worker_logs import LogPart, LogRequest

LOG_BYTES_MAX = 64 << 20  # on disk per rank; output between two checks may exceed it
KEPT_BYTES = LOG_BYTES_MAX // 2  # remaining size after a trim
GENERATIONS_KEPT = 5
TAIL_LINES = 40
TAIL_BYTES = 8 << 10

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
_BLOCK_BYTES = 512  # the unit of st_blocks, independent of the file system's block size
_GENERATION = re.compile(r"g(\d+)")
_ERROR_FILE = re.compile(r"rank-(\d+)\.error\.json")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class WorkerLogs:
    """The logs of all jobs of one agent."""

    def __init__(self, directory: Path, *, bytes_max: int = LOG_BYTES_MAX, kept_bytes: int = KEPT_BYTES) -> None:
        self._directory = directory
        self._bytes_max, self._kept_bytes = bytes_max, kept_bytes

    def create(self, job: str, generation: int) -> Path:
        """Create the directory of a generation's logs, and delete those of old generations. Raises `HoldfastError` that names
        the path."""
        directory = self._directory / job / f"g{generation}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HoldfastError(f"cannot create the log directory {directory}: {error.strerror}") from error
        self._prune(directory.parent)
        return directory

    def _prune(self, directory: Path) -> None:
        generations = sorted(
            (int(match[1]), path) for path in directory.iterdir() if (match := _GENERATION.fullmatch(path.name))
        )
        for _, path in generations[:-GENERATIONS_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def trim(self, path: Path) -> int:
        """Trim one log that exceeds its limit. Returns the number of bytes dropped. Raises OSError."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            status = os.fstat(fd)
            held = status.st_blocks * _BLOCK_BYTES
            if held <= self._bytes_max:
                return 0
            if not _punch(fd, status.st_size - self._kept_bytes):
                os.ftruncate(fd, 0)  # the writer appends, so it continues at the new end
            return held - os.fstat(fd).st_blocks * _BLOCK_BYTES
        finally:
            os.close(fd)


def open_log(path: Path) -> int:
    """Open a log for appending and return the descriptor. Raises `HoldfastError` that names the path."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HoldfastError(f"the log file {path} cannot be opened: {error.strerror}") from error


def log_path(logs: Path, job: str, generation: int, rank: int) -> Path:
    """`logs`: the directory of all logs of an agent."""
    return logs / job / f"g{generation}" / f"rank-{rank}.log"


def read_part(logs: Path, request: LogRequest) -> LogPart:
    """Read a part of a rank's log. Raises `NotFound` if there is no such log, and `HoldfastError` if it cannot be read.

    Scripts can write to the directory, so only regular files are opened, and links are not followed."""
    path = log_path(logs, request.job, request.generation, request.rank)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFound(
            f"there is no {path}: an agent keeps the logs of a job's newest {GENERATIONS_KEPT} generations"
        ) from None
    except OSError as error:
        raise HoldfastError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise HoldfastError(f"{path} is not a file")
        start = request.offset if request.offset >= 0 else max(0, status.st_size + request.offset)
        start = data_from(file, min(start, status.st_size))
        return LogPart(start, status.st_size, os.pread(file, request.bytes_max, start))
    except OSError as error:
        raise HoldfastError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def read_errors(logs: Path, job: str, generation: int) -> tuple[RaisedError, ...]:
    """Read the exceptions that ranks of a generation have recorded here, earliest first. `generation` 0 = the newest generation
    with such a record. Raises `HoldfastError` if the directory cannot be read."""
    try:
        numbers = [int(match[1]) for path in (logs / job).iterdir() if (match := _GENERATION.fullmatch(path.name))]
        for number in sorted(numbers, reverse=True):
            if generation in (0, number) and (found := _errors_of(logs / job / f"g{number}", number)):
                return found
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise HoldfastError(f"the logs of {job} in {logs / job} cannot be read: {error.strerror}") from error
    return ()


def _errors_of(directory: Path, generation: int) -> tuple[RaisedError, ...]:
    """Return the exceptions in the order of their times; those without a time come last."""
    found = []
    for path in directory.iterdir():
        match = _ERROR_FILE.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink() and (error := read_error_file(path)) is not None:
            found.append(RaisedError(generation, int(match[1]), error))
    found.sort(key=lambda each: (each.error.at or math.inf, each.rank))
    return tuple(found[:ERRORS_MAX])


def data_from(file: int, position: int) -> int:
    """Return the position of the next bytes that still exist, because the dropped part of a log can be large."""
    try:
        return os.lseek(file, position, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no data after this position. EINVAL: a file system without holes.
        return os.fstat(file).st_size if error.errno == errno.ENXIO else position


def tail(path: Path, lines_max: int = TAIL_LINES, bytes_max: int = TAIL_BYTES) -> tuple[str, ...]:
    """Return the last lines, oldest first; empty if the file cannot be read. A line that the byte limit cuts is omitted."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - bytes_max))
            raw = file.read(bytes_max)
    except OSError:
        return ()
    lines = raw.lstrip(b"\0").decode(errors="replace").splitlines()
    if size > bytes_max and len(lines) > 1:
        lines = lines[1:]
    return tuple([line for line in lines if not TORCH_SERVER_LINE.search(line)][-lines_max:])


def _punch(fd: int, length: int) -> bool:
    """Free the first `length` bytes. Returns False if the file system does not support it."""
    if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, 0, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))
