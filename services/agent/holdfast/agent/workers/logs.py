"""Worker logs: `<agent_dir>/logs/<job>/g<generation>/rank-<r>.log`, standard output and error in one file, in order.

The worker writes directly to the file, so that a step never waits for the agent and the last lines of a killed process are
included. The agent limits the size (`log_limit`): the middle of a large log is cut. Only the newest generations are kept."""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from holdfast.agent.workers.errors import read_error_file
from holdfast.agent.workers.log_limit import LOG_BYTES_MAX, Limit, cut, limit_here
from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.rank_reads import ERRORS_MAX, RaisedError
from holdfast.domain.worker import TORCH_SERVER_LINE
from holdfast.domain.worker_logs import LogPart, LogRequest

log = structlog.get_logger("holdfast.agent.workers")

GENERATIONS_KEPT = 5
TAIL_LINES = 40
TAIL_BYTES = 8 << 10

_FRAME = re.compile(r'  File ".+", line \d+')  # of a traceback
_GENERATION = re.compile(r"g(\d+)")
_ERROR_FILE = re.compile(r"rank-(\d+)\.error\.json")


class WorkerLogs:
    """The logs of all jobs of one agent."""

    def __init__(self, directory: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        """`bytes_max`: of each log on disk; 0 = no limit while there is room."""
        self._directory = directory
        self._bytes_max = bytes_max

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

    def bound(self, current: Sequence[Path]) -> None:
        """Cut the logs that exceed the limit which applies now. `current`: those that are being written."""
        if not current:
            return
        try:
            limit = limit_here(self._directory, self._bytes_max)
        except OSError as error:  # retried at the next check; workers do not depend on it
            log.warning("worker logs not checked", reason=str(error))
            return
        for path in self.limited(limit, current):
            try:
                if freed := cut(path, limit):
                    log.warning("worker log cut", path=str(path), freed_bytes=freed, limit=limit.why)
            except OSError as error:
                log.warning("worker log not cut", path=str(path), reason=str(error))

    def limited(self, limit: Limit, current: Iterable[Path]) -> Iterable[Path]:
        """Return the logs that may exceed the limit. Near a full disk those of earlier generations count as well."""
        return self._directory.glob("*/g*/rank-*.log") if limit.scarce else current


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
        return LogPart(
            start, status.st_size, os.pread(file, min(request.bytes_max, hole_from(file, start) - start), start)
        )
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


def hole_from(file: int, position: int) -> int:
    """Return where the bytes that exist from `position` on end: at a dropped part, or at the end of the file."""
    try:
        return os.lseek(file, position, os.SEEK_HOLE)
    except OSError:
        return os.fstat(file).st_size  # no data after this position, or a file system without holes


def last_words(lines: Sequence[str], lines_max: int = 3) -> str:
    """Return in one line what a failed program printed last; of a traceback only the message of the exception."""
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if frames:
        message = itertools.dropwhile(lambda line: line.startswith(" "), lines[frames[-1] :])
        return "; ".join(itertools.islice(message, lines_max))
    return "; ".join(lines[-lines_max:])


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
