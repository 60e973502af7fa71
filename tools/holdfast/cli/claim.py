"""The directory of a stack: used by one stack at a time, with a path short enough for Unix sockets.

The claim is a file lock. It ends with the process that holds it, and also works between processes in different pid
namespaces.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from holdfast.domain.errors import Conflict, InvalidSpec

PID_FILE = "stack.pid"
SOCKET_PATH_BYTES_MAX = 60  # length of the stack's own directory, out of the 107 bytes of a Unix socket's path


class Claim:
    """Locks `directory` until `release`. `path` is the path to use for everything inside it."""

    def __init__(self, directory: Path) -> None:
        """Raises `Conflict` if another stack runs there, `InvalidSpec` if the directory cannot be created or written."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._pid_file = directory / PID_FILE
            self._lock = _locked(self._pid_file)
        except OSError as error:
            raise InvalidSpec(
                "--dir", str(directory), f"a directory that can be created and written ({error.strerror})"
            ) from error
        self.path = directory.resolve()
        self._short: Path | None = None
        if not _fits(self.path):
            self._short = _short_directory() / "s"
            self._short.symlink_to(self.path, target_is_directory=True)
            self.path = self._short

    def use(self, path: Path) -> None:
        """Use the path of the directory that the processes of an earlier stack use."""
        if path != self.path:
            self._drop_short()
            self._short = path if path.is_symlink() else None
            self.path = path

    def release(self, *, keep_path: bool = False) -> None:
        """Safe to call twice. `keep_path`: remaining processes continue to use `path`."""
        if self._lock.closed:
            return
        if not keep_path:
            self._drop_short()
        self._pid_file.unlink(missing_ok=True)
        self._lock.close()

    def _drop_short(self) -> None:
        if self._short is not None:
            self._short.unlink(missing_ok=True)
            self._short.parent.rmdir()
            self._short = None


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _short_directory() -> Path:
    made = Path(tempfile.mkdtemp(prefix="hf-"))
    if _fits(made / "s"):
        return made
    made.rmdir()  # TMPDIR itself is too long
    return Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))


def _locked(path: Path) -> IO[str]:
    """Raises `Conflict` if another process holds the lock, `OSError` if the file cannot be written."""
    while True:
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is(lock, path):  # the last holder removed the file between our open and our lock
                lock.close()
                continue
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise Conflict(
                f"a stack is already running in {path.parent} (pid {holder}); stop it, or choose another directory with --dir"
            ) from None
        except OSError:
            lock.close()
            raise
        return lock


def _is(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
