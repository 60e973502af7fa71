"""The agent's side of a worker template: starts it, and requests forks from it (`holdfast.domain.template`)."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import structlog

from holdfast.agent.workers.forked import Forked, refuse_foreign
from holdfast.agent.workers.learned import Imports
from holdfast.agent.workers.logs import last_words, open_log, tail
from holdfast.domain import template as protocol
from holdfast.domain.errors import HoldfastError, InvalidSpec, Unavailable
from holdfast.runtime import freeze
from holdfast.runtime.processes.children import Child, spawn
from holdfast.runtime.processes.training_user import TrainingUser

log = structlog.get_logger("holdfast.agent.template")

# Variables that take effect when a module is imported, so that a template can only serve workers that agree on them. The
# rest of a job's environment is applied after the fork; OMP_NUM_THREADS too, since the child resizes torch's pool.
IMPORT_TIME_NAMES = frozenset({"TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "MALLOC_ARENA_MAX"})
IMPORT_TIME_PREFIXES = ("PYTHON", "LD_", "MKL_", "KMP_", "GOMP_", "TORCHDYNAMO_", "TORCHINDUCTOR_")

FORK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """Key of a template. Templates with equal keys are interchangeable."""

    preload: tuple[str, ...] = ()
    path: tuple[str, ...] = ()  # where to look for them first
    env: tuple[tuple[str, str], ...] = ()
    learned: Imports | None = None  # what earlier workers have imported; what may be is imported, after `preload`

    @classmethod
    def of(
        cls,
        directory: str,
        preload: tuple[str, ...],
        env: Mapping[str, str],
        inherited: Mapping[str, str],
        learned: Imports | None = None,
    ) -> TemplateKey:
        """The template for a job; modules in `directory` can be preloaded. Variables that equal
        `inherited` are not part of the key."""
        sees_all = learned is not None or any(":" in name for name in preload)  # prepare functions are code of the job
        differing = {
            name: value
            for name, value in env.items()
            if (sees_all or name in IMPORT_TIME_NAMES or name.startswith(IMPORT_TIME_PREFIXES))
            and inherited.get(name) != value
        }  # learned modules and prepare functions may read any variable of the job
        return cls(preload, (directory,) if preload and directory else (), tuple(sorted(differing.items())), learned)


class Template:
    """One template process. Requests are answered only while `run` runs, which returns when the process has ended."""

    def __init__(
        self, key: TemplateKey, log_path: Path, environment: Mapping[str, str], user: TrainingUser | None = None
    ) -> None:
        """Starts the process; from the main thread only. `user`: that of the process and its workers, if it is not this
        process's. Raises `HoldfastError` when it cannot be started."""
        self._user = user
        self.key = key
        self.failure = ""  # why it cannot serve, once it cannot
        self.left_out: Mapping[str, str] = {}  # modules that it has not imported, and why
        self._log_path = log_path
        self._ready = anyio.Event()
        self._draining = False
        self._sending, self._checking = anyio.Lock(), anyio.Lock()
        self._checked = anyio.Event()
        self._changed = ""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with closing(theirs):
            self._process = _spawn(key, log_path, environment, theirs, user)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether the template can fork now."""
        return self._ready.is_set() and self.usable

    @property
    def usable(self) -> bool:
        """Whether the template can fork, or is still starting."""
        return not self.failure and not self._draining

    async def wait_ready(self) -> None:
        """Raises `Unavailable` with the template's own reason when it will never be."""
        await self._ready.wait()
        if self.failure:
            raise Unavailable(f"the worker template cannot serve: {self.failure}")

    async def fork(
        self,
        *,
        kind: str,
        target: str,
        args: tuple[str, ...],
        cwd: str,
        env: Mapping[str, str],
        fds: tuple[int, int, int],
    ) -> Forked:
        """Fork one worker on `fds` (control, stdout, stderr).

        Raises `Unavailable`, or `InvalidSpec` for a request that does not fit a message.
        """
        try:
            raw = protocol.encode("fork", runs=kind, target=target, args=args, cwd=cwd, env=dict(env))
        except ValueError as error:
            raise InvalidSpec("args, env", f"{len(args)} arguments, {len(env)} variables", str(error)) from error
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        message: Mapping[str, Any] = {"type": "fork_failed", "reason": f"no answer within {FORK_TIMEOUT_S:g} s"}
        received: list[int] = []
        try:
            # Shielded: without this wait, the forked child would belong to no worker. It takes milliseconds.
            with freeze.patience(FORK_TIMEOUT_S, shield=True):
                try:
                    await self._send(raw, (theirs.fileno(), *fds))
                finally:
                    theirs.close()
                raw, received = await receive(link, descriptors=2)
                message = _decoded(raw) or {"type": "fork_failed", "reason": self.failure or "it died"}
            if message["type"] == "forked" and len(received) == 2:
                forked = Forked(int(message.get("pid", 0)), received[0], received[1], link)
                refused = "" if self._user is None else await refuse_foreign(forked, self._user.uid)
                if not refused:
                    return forked
                message, received = {"type": "fork_failed", "reason": refused}, []
        except BaseException:
            link.close()
            raise
        for fd in received:
            os.close(fd)
        link.close()  # a worker that is forked all the same finds its control channel closed, and ends
        why = message.get("reason", "this process has no free file descriptors for it")
        raise Unavailable(f"the worker template could not fork: {why}")

    async def changed(self) -> str:
        """Return why workers must not be forked from it: a file of what it has imported has changed since. Empty = none has.
        Raises `Unavailable`."""
        async with self._checking:
            self._checked, self._changed = anyio.Event(), "it does not answer"
            await self._send(protocol.encode("check"))
            with freeze.patience(FORK_TIMEOUT_S):
                await self._checked.wait()
            if self.failure:
                raise Unavailable(f"the worker template cannot serve: {self.failure}")
            return self._changed

    async def drain(self) -> None:
        """Let the template exit without further forks; its workers continue."""
        if not self._draining and not self.failure:
            self._draining = True
            await self._send(protocol.encode("drain"))

    async def run(self) -> None:
        """Receive the messages of the template until its process has ended. Pending requests to it then fail."""
        try:
            while message := _decoded(await self._receive()):
                self._take(message)
            code = await self._process.wait()
            self._fail(self.failure or self._end_reason(code))
        finally:
            self._fail(self.failure or "the agent is stopping")
            self._channel.close()
            with anyio.CancelScope(shield=True):
                await self._process.stop(grace_s=0.0)

    async def _send(self, raw: bytes, fds: tuple[int, ...] = ()) -> None:
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._channel, [raw], fds)
                except BlockingIOError:
                    await anyio.wait_writable(self._channel)
                except OSError as error:  # the template has ended or closed its end; `run` reports the reason
                    raise Unavailable(f"the worker template (pid {self.pid}) does not listen: {error}") from error
                else:
                    return

    async def _receive(self) -> bytes:
        """The next message; empty at the end."""
        return (await receive(self._channel))[0]

    def _take(self, message: Mapping[str, Any]) -> None:
        match message["type"]:
            case "ready":
                left_out = message.get("left_out")
                if isinstance(left_out, dict):
                    self.left_out = {str(name): str(why) for name, why in left_out.items()}
                log.info(
                    "worker template ready",
                    learned=len(self.key.learned.modules) if self.key.learned else 0,
                    left_out=dict(self.left_out),
                    pid=self.pid,
                    preload=self.key.preload,
                    import_s=_rounded(message.get("import_s")),
                )
                self._ready.set()
            case "checked":
                changed = str(message.get("changed") or "")
                self._changed = changed and f"the file of {changed} has changed since it was imported"
                self._checked.set()
            case "failed":
                self._fail(str(message.get("reason")))

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._ready.set()
        self._checked.set()

    def _end_reason(self, code: int) -> str:
        if self._draining:
            return "it was replaced by another one"
        said = last_words(tail(self._log_path))
        return f"the worker template exited with code {code}{f': {said}' if said else ' without an error message'}"


def _decoded(raw: bytes) -> Mapping[str, Any]:
    """The message; empty at the end, and for what a template does not send: code of the job runs in the process as well."""
    try:
        return protocol.decode(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        log.error("message of a worker template refused", reason=str(error))
        return {}


def _rounded(seconds: object) -> float:
    return round(seconds, 2) if isinstance(seconds, int | float) else 0.0


async def receive(channel: socket.socket, descriptors: int = 0) -> tuple[bytes, list[int]]:
    """The next message and what came with it; empty when the other side has ended."""
    while True:
        try:
            raw, fds, _, _ = socket.recv_fds(channel, protocol.MESSAGE_BYTES_MAX, descriptors, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await anyio.wait_readable(channel)
        except ConnectionResetError:  # it ended without reading our last messages
            return b"", []
        else:
            return raw, fds


def _spawn(
    key: TemplateKey,
    log_path: Path,
    environment: Mapping[str, str],
    channel: socket.socket,
    user: TrainingUser | None,
) -> Child:
    output = open_log(log_path)
    learned: list[int] = []
    try:
        if key.learned is not None:
            learned.append(os.memfd_create("learned"))
            content = {"modules": key.learned.modules, "variables": dict(key.learned.variables)}
            with os.fdopen(os.dup(learned[0]), "w") as file:
                json.dump(content, file)
        return spawn(
            "template",
            [sys.executable, "-m", "holdfast.train.warm.template"],
            env={
                **environment,
                **dict(key.env),
                **protocol.IMPORT_ENVIRONMENT,
                protocol.ENV_SOCKET_FD: str(channel.fileno()),
                protocol.ENV_PRELOAD: json.dumps(key.preload),
                protocol.ENV_PATH: json.dumps(key.path),
                **({protocol.ENV_LEARNED_FD: str(learned[0])} if learned else {}),
            },
            output=output,
            pass_fds=(channel.fileno(), *learned),
            user=user,
        )
    except OSError as error:
        raise HoldfastError(f"the worker template cannot be started: {error}") from error
    finally:
        for fd in (output, *learned):
            os.close(fd)
