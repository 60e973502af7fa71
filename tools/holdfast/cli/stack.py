"""The local stack: every service of Holdfast as real processes on this machine.

One Redis (embedded unless a URL is given), one diagnostics, one supervisor, and any number of nodes: each node is a real
agent process with its own directory, its own memory tier under /dev/shm and its own kernel-log file, so that all of its
processes can be killed together. All processes are children of this process and end with it (PR_SET_PDEATHSIG).

The processes of a stack with `stays` (`holdfast up`) outlive it. Ctrl-C and SIGTERM stop them in order. If the starter is
killed or fails, they continue, and the next stack of the same directory takes them over (`stack_record`).

    <directory>/redis/ diagnostics/ supervisor/     logs and state of the services
    <directory>/join-token                          the fleet's secret, with which agents of other machines join
    <directory>/api-token                           the token of the API, while the stack runs (`api_token`)
    <directory>/nodes/<node>/                       the agent's directory: agent.log, kernel.log, worker logs, disk tier
    /dev/shm/holdfast-stack-<pid>-<id>/<node>/                  the node's memory tier; gone when the node loses power
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from rich.markup import escape

from holdfast.cli import api_token, memory_root, protection, stack_record
from holdfast.cli.claim import Claim
from holdfast.cli.client import Client
from holdfast.cli.connection import ENV_API, ENV_TOKEN
from holdfast.cli.memory_root import MemoryRoot
from holdfast.cli.preflight import redis_version
from holdfast.cli.processes import STOP_TIMEOUT_S, Process, kill_tree, stop_all
from holdfast.cli.stack_options import (
    Say,
    StackOptions,
    agent_settings,
    inherited,
    join_settings,
    node_name,
    settings_of,
)
from holdfast.cli.stack_power import StackPower
from holdfast.cli.stack_record import SERVICES, StackRecord, pid_file
from holdfast.cli.stack_services import Services
from holdfast.cli.tending import Part, Tender
from holdfast.domain.errors import Conflict, NotFound
from holdfast.log.embedded import EmbeddedRedis
from holdfast.runtime.private import close_to_others, let_pass, make_passable
from holdfast.runtime.processes.children import tied
from holdfast.runtime.processes.survivors import noted
from holdfast.runtime.trust.fleet import JOIN_TOKEN_FILE

REDIS_START_TIMEOUT_S = 60.0  # includes loading its data


class LocalStack:
    """Start with `with LocalStack(options) as stack:`; all processes are stopped when the block ends, also after Ctrl-C.

    Exception: with `stays`, an error that ends the block leaves the processes to the next stack of the directory.
    """

    def __init__(self, options: StackOptions, say: Say = lambda _: None) -> None:
        """`say` receives lines of markup."""
        self._options = options
        self._say = say
        self._directory = options.directory
        self._services = Services(options, self._spawn_service)
        self._agents: dict[str, Process] = {}  # of the nodes that are switched on
        self._redis: EmbeddedRedis | None = None
        self._stack_power: StackPower | None = None
        self._memory: MemoryRoot | None = None
        self._claim: Claim | None = None
        self.joining: dict[str, str] = {}  # settings with the fleet's join token
        self._api_token = ""  # made by this stack; empty: it was given one, or has none
        self._tender = Tender(say)
        # The stack power thread stops and starts nodes while another thread restarts parts.
        self._switching = threading.RLock()
        self._leaves_on_error = False
        self._closing = False
        self.redis_url = options.redis_url

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._end(error)
            raise
        self._leaves_on_error = self._options.stays
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)
        if isinstance(error, Exception) and self._leaves_on_error:
            with contextlib.suppress(OSError):  # the terminal may be what failed
                self._say("[yellow]running parts continue[/]: run the same command again to take them over")

    def _start(self) -> None:
        if self.redis_url:
            redis_version(self.redis_url)
        self._claim = Claim(self._options.directory)
        self._directory = self._services.directory = self._claim.path
        if self._options.stays:
            self._take_over(self._claim)
        self.joining = join_settings(self._options.directory, taken_over=bool(self._services.processes or self._agents))
        self._api_token = self._made_token()
        memory_root.sweep()
        self._memory = self._memory or MemoryRoot()
        if self._options.user:
            self._let_training_pass(self._memory)
        self._stack_power = StackPower(self._directory, {"power_off": self.power_off, "power_on": self.power_on})
        if not self.redis_url:  # none was given, and none was taken over
            self._say("[dim]starting Redis (embedded) …[/]")
            self._redis = self._embedded_redis()
            self._redis.start()
            self.redis_url = self._redis.url
        self._note()
        if missing := self._services.missing:
            self._say(f"[dim]starting {' and '.join(missing)} …[/]")
        for name in missing:
            self.start_service(name)
            self._note()
        self._tell_commands()
        if self._options.nodes_on:
            self.power_on_all()

    def _end(self, error: BaseException | None) -> None:
        if self._leaves_on_error and isinstance(error, Exception):
            self._leave()
        else:
            self.stop()

    def stop(self) -> None:
        """Stop all processes, nodes first. Safe to call twice and after an incomplete start. Ctrl-C and SIGTERM are ignored."""
        previous = _ignore_signals()
        try:
            with self._switching:
                self._closing = True
            stop_all(list(self._agents.values()))
            self._agents.clear()
            if self._stack_power is not None:
                self._stack_power.close()
                self._stack_power = None
            self._services.stop()
            if self._redis is not None:
                self._redis.stop()
                self._redis = None
            if self._memory is not None:
                self._memory.remove()
                self._memory = None
            if self._api_token and "supervisor" in self._services.endpoints:
                api_token.forget(self.api_url, self._api_token_file)
            if self._claim is not None:
                if self._options.stays:
                    stack_record.forget(self._directory)
                self._claim.release()
                self._claim = None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------------ what outlives its starter

    def _take_over(self, claim: Claim) -> None:
        """Take over the processes of a killed stack of this directory. Raises `Conflict` if it had other options."""
        record, running = stack_record.read(self._directory), stack_record.survivors(self._directory)
        redis = self._embedded_redis()
        pids = ({"Redis": redis.pid} if redis.adopt() else {}) | {name: each.pid for name, each in running.items()}
        if record is not None:
            self._memory = MemoryRoot(Path(record.memory))
        if not pids:
            return
        self._leaves_on_error = True
        shown = ", ".join(f"{name} (pid {pid})" for name, pid in pids.items())
        if record is None:
            raise Conflict(
                f"--dir: {shown} of a killed stack are running in {self._options.directory}, and there is no record of their "
                "options; stop them, or choose another directory"
            )
        if other := [
            f"{flag} {value}"
            # older records do not say
            for flag, value in (protection.shown({}) | {"--insecure": False, "--user": ""} | dict(record.flags)).items()
            if self._options.flags.get(flag) != value
        ]:
            raise Conflict(
                f"--dir: {shown} of a killed stack are running in {self._options.directory}; it was started with "
                f"{', '.join(other)}. Run `holdfast up` with the same options and settings to take it over; Ctrl-C then "
                "stops it"
            )
        claim.use(Path(record.path))
        self._directory = self._services.directory = claim.path
        self._services.endpoints = {name: dict(each) for name, each in record.endpoints.items()}
        for name, process in running.items():
            if name in SERVICES:
                self._services.adopt(name, process)
            else:
                self._agents[name] = process
        if "Redis" in pids:
            self._redis, self.redis_url = redis, redis.url
        self._say(f"took over {shown} of the last `holdfast up` of this directory, which was killed")

    def _note(self) -> None:
        """Write the record with which the next stack of the directory can take over the processes."""
        if self._options.stays and self._memory is not None:
            StackRecord(
                flags=self._options.flags,
                path=str(self._directory),
                memory=str(self._memory.path),
                endpoints=self._services.endpoints,
            ).write(self._directory)

    def _leave(self) -> None:
        """Leave the running processes to the next stack of this directory."""
        with self._switching:
            self._closing = True
        if self._stack_power is not None:
            self._stack_power.close()
        if self._memory is not None:
            self._memory.leave()
        if self._claim is not None:
            self._claim.release(keep_path=True)

    # ------------------------------------------------------------------ the fleet's secret

    @property
    def agent_command(self) -> str:
        """Return the command that joins another machine to this fleet."""
        file = self.joining.get(JOIN_TOKEN_FILE, "")
        return f"holdfast agent --supervisor {self.control_endpoint}" + (
            f" --join-token-file {shlex.quote(file)}" if file else ""
        )

    def _let_training_pass(self, memory: MemoryRoot) -> None:
        """Let the training user reach the directories of the nodes, and none of the services'."""
        for name in ("redis", *SERVICES):
            (self._directory / name).mkdir(exist_ok=True)
            close_to_others(self._directory / name)
        for path in (self._directory.resolve(), self._directory / "nodes", memory.path):
            make_passable(path)
        if self._directory.is_symlink():  # a short path in a directory made for it
            let_pass(self._directory.parent)

    # ------------------------------------------------------------------ the API's token

    @property
    def _api_token_file(self) -> Path:
        return self._options.directory.absolute() / api_token.FILE

    def _made_token(self) -> str:
        """Return the token of a supervisor that was taken over, or a new one; empty if this stack makes none."""
        if not self._options.makes_token:
            return ""
        return (
            api_token.read(self._api_token_file)
            if "supervisor" in self._services.processes
            else api_token.make(self._api_token_file)
        )

    def _tell_commands(self) -> None:
        try:
            if self._api_token:
                api_token.note(self.api_url, self._api_token_file)
            else:
                api_token.unnote(self.api_url)
        except OSError as error:
            if not self._api_token:
                return
            self._say(
                f"[yellow]commands do not find the API's token[/] ({escape(str(error))}). Set {ENV_TOKEN} to what is in "
                f"{escape(str(self._api_token_file))}"
            )

    @property
    def for_commands(self) -> dict[str, str]:
        """Settings of a command in another home directory, which would not find this stack."""
        return {ENV_API: self.api_url} | ({ENV_TOKEN: self._api_token} if self._api_token else {})

    def connect(self) -> Client:
        """Return a client of the API, with the token of this stack; it does not have to be in this user's home."""
        return Client(self.api_url, token=self.for_commands.get(ENV_TOKEN))

    def dashboard(self, *, for_terminal: bool) -> str:
        """Return how to open the dashboard. For a terminal, the address signs the browser in; a file may be read by others."""
        if not self._api_token:
            return self.api_url
        if for_terminal:
            return api_token.sign_in_link(self.api_url, self._api_token)
        return f"{self.api_url} (`holdfast dashboard` prints an address that signs you in)"

    # ------------------------------------------------------------------ watching

    def tend(self) -> None:
        """Restart parts that have exited. Call it regularly, from the thread that started the stack."""
        with self._switching:
            if self._closing:
                return
            if (redis := self._redis) is not None and not self._tender.tend(
                Part(
                    "Redis",
                    lambda: redis.exit_code,
                    self._start_redis_again,
                    self._directory / "redis" / "redis.log",
                    lambda: redis.pid,
                    keeps="data that it has not written to disk would be lost",
                )
            ):
                return  # the other parts need Redis
            for name, service in list(self._services.processes.items()):
                start, log = partial(self._services.spawn, name), self._directory / name / f"{name}.log"
                self._tender.tend(Part(name, service.poll, start, log, partial(_pid, service)))
            for node in list(self._agents):
                log = self._node_directory(node) / "agent.log"
                agent, start = self._agents[node], partial(self._spawn_agent, node)
                keeps = "its workers would exit with it"
                self._tender.tend(Part(node, agent.poll, start, log, partial(_pid, agent), keeps=keeps))

    def check(self) -> None:
        """Raise `Unavailable`, with the end of its log, if a service has exited. Agents are not checked."""
        self._services.check()

    # ------------------------------------------------------------------ what callers need

    @property
    def api_url(self) -> str:
        return self._services.api_url

    @property
    def control_endpoint(self) -> str:
        return self._services.control_endpoint

    @property
    def directory(self) -> Path:
        return self._options.directory

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(map(node_name, range(self._options.nodes)))

    def service_pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in (self._services.processes | self._agents).items()}

    # ------------------------------------------------------------------ nodes

    def power_on_all(self) -> None:
        """Start the agent of every node that is off."""
        if off := [node for node in self.node_names if node not in self._agents]:
            self._say(f"[dim]starting {len(off)} node{'s' if len(off) > 1 else ''} …[/]")
        for node in off:
            self.power_on(node)

    def power_on(self, node: str) -> None:
        """Start the agent of `node`. Raises `Conflict` when it is running."""
        self._know(node)
        with self._switching:
            if self._closing:
                raise Conflict("the stack is stopping")
            if (old := self._agents.get(node)) is not None and old.poll() is None:
                raise Conflict(f"{node} is already running (agent pid {old.pid})")
            self._spawn_agent(node)

    def _spawn_agent(self, node: str) -> int:
        directory, memory = self._node_directory(node), self._node_memory(node)
        for path in (directory, memory, directory / "disk"):
            path.mkdir(parents=True, exist_ok=True)
        (directory / "kernel.log").touch()
        self._agents[node] = self._spawn(
            node,
            "holdfast.agent",
            directory / "agent.log",
            {
                "HOLDFAST_SUPERVISOR": self.control_endpoint,
                **agent_settings(self._options, self.node_names.index(node), directory, memory),
            },
        )
        return self._agents[node].pid

    def power_off(self, *nodes: str) -> None:
        """Simulate a power failure: SIGKILL the agents and all their descendants, and delete their memory tiers."""
        with self._switching:
            agents = {}
            for node in nodes:
                self._know(node)
                process = self._agents.get(node)
                if process is None or process.poll() is not None:
                    raise Conflict(f"{node} is not running")
                agents[node] = process
            for process in agents.values():  # all of them before any slow operation
                kill_tree(process.pid)
            for node, process in agents.items():
                process.wait(STOP_TIMEOUT_S)
                del self._agents[node]  # not restarted before `power_on`
                shutil.rmtree(self._node_memory(node), ignore_errors=True)

    def _know(self, node: str) -> None:
        if node not in self.node_names:
            raise NotFound(f"this stack has no node {node!r}; its nodes are: {', '.join(self.node_names) or 'none'}")

    def _node_directory(self, node: str) -> Path:
        return self._directory / "nodes" / node

    def _node_memory(self, node: str) -> Path:
        assert self._memory is not None, "the stack has not been started"
        return self._memory.path / node

    # ------------------------------------------------------------------ services

    def kill_service(self, name: str) -> None:
        """SIGKILL `redis`, `diagnostics` or `supervisor`; it stays down until `start_service`."""
        with self._switching:
            if name == "redis" and self._redis is not None:
                os.kill(self._redis.pid, signal.SIGKILL)
                self._redis.stop()
                return
            self._services.kill(name)

    def start_service(self, name: str) -> None:
        """Start a killed service again, with its address and data. Raises `Conflict` if it is running."""
        if name == "redis" and self._redis is not None:
            self._redis.start()
        else:
            self._services.start(name)

    def _embedded_redis(self) -> EmbeddedRedis:
        return EmbeddedRedis(
            self._directory / "redis", outlives_us=self._options.stays, start_timeout_s=REDIS_START_TIMEOUT_S
        )

    def _start_redis_again(self) -> int:
        assert self._redis is not None, "only an embedded Redis is restarted"
        self._redis.stop()
        self._redis.start()
        return self._redis.pid

    def _spawn_service(self, part: str, module: str, log: Path, environment: Mapping[str, str]) -> Process:
        return self._spawn(part, module, log, {"HOLDFAST_REDIS_URL": self.redis_url, **environment})

    def _spawn(self, part: str, module: str, log: Path, environment: Mapping[str, str]) -> Process:
        whole = {
            **inherited(os.environ),
            "HOLDFAST_FLEET": self._options.fleet,
            **self.joining,
            **settings_of(self._options, part, self._api_token),
            **environment,
        }
        with log.open("ab") as output:
            return self._run(part, module, whole, output)

    def _run(self, part: str, module: str, environment: Mapping[str, str], output: IO[bytes]) -> Process:
        command = [sys.executable, "-m", module]
        return subprocess.Popen(
            # tied also from the stack power thread, which ends after the last agent
            noted(command, pid_file(self._directory, part))
            if self._options.stays
            else tied(command, thread_lasts=True),
            env=environment,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # agents hold the lock, so that no other stack deletes their memory tier
            pass_fds=(self._memory.lock,) if self._options.stays and self._memory is not None else (),
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the children in order
        )


def _ignore_signals() -> dict[signal.Signals, Any]:
    """Ignore stop signals. Returns the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # only the main thread receives signals
    return {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def _pid(process: Process) -> int:
    return process.pid
