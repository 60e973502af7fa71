"""Runs one allocation on its batch node: control plane, an agent on every node, and the launcher, which has the job's exit
code.

    batch node    holdfast slurm allocation ─┬─ Redis, diagnostics, supervisor      state in the shared directory
                                             ├─ holdfast run --attach               its exit code ends the allocation
                                             ├─ srun                                one `holdfast slurm node` per node
                                             └─ watches sinfo                       drain → notice, resume → withdrawn
    every node    holdfast slurm node ── holdfast agent

How an allocation ends:

| event | result |
|---|---|
| the job has ended | the agents end and free their memory, the rest of the chain is cancelled, exit code of `holdfast run` |
| the time limit is near: SIGUSR1, or by the clock | a file notifies all nodes; the job is saved and suspended; 75 |
| `holdfast slurm cancel`: SIGUSR2 | the same, at once |
| `scancel`, preemption: SIGTERM to this process and to the nodes' | agents are notified: the same, within KillWait |
| the same, if workers receive SIGTERM as well (`node.py`) | workers end; the job continues from its last checkpoint |
| the batch node is lost | Slurm ends the allocation; the next one continues from the newest complete checkpoint |
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape

from holdfast.cli.client import Client
from holdfast.cli.connection import ENV_API, ENV_TOKEN
from holdfast.cli.endings import COMPLETED, DO_NOT_RESTART, ENDED, SIGNALLED, SUSPENDED, UNAVAILABLE
from holdfast.cli.follow import settled
from holdfast.cli.last_upload import wait_for_upload
from holdfast.cli.launcher import ENV_LAUNCHER, start_options
from holdfast.cli.processes import stop_all
from holdfast.cli.protection import settings_for_parts
from holdfast.cli.secret_file import secret_in
from holdfast.cli.slurm import chain as chains
from holdfast.cli.slurm import tools
from holdfast.cli.slurm.drains import Announce, Change, Drains
from holdfast.cli.slurm.ending import Ending, EndWatch
from holdfast.cli.slurm.script import doubts
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound
from holdfast.runtime.files import write_whole
from holdfast.runtime.processes.children import tied

CHECK_S = 0.2
WATCH_S = 10.0  # between two queries of sinfo, and attempts to notify the nodes
WITHOUT_AGENTS_S = 120.0
CANCELLED_S = 15.0  # limit of the time without agents after a cancellation
LAUNCHER_PAUSE_S = 1.0
STOP_WAIT_S = 30.0  # for the end of a suspended job, which has no workers
AGENTS_END_S = 15.0  # includes the time until the nodes read the shared file
SOURCE = "slurm"  # of notices
CONTROL_FILE = "control.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`notice_s`: how long before the allocation's end the nodes are notified; `grace_s`: how long before the end their agents
    begin to leave. `local`, `memory`: directories on each node. `start`: how the run begins, "resume", "fresh" or nothing."""

    directory: Path
    chain: str
    job_file: Path
    job_name: str
    workers_per_node: int
    local: Path
    memory: Path
    notice_s: float
    grace_s: float
    drains_condemned: bool
    start: str = ""


@dataclass(frozen=True, slots=True)
class Here:
    """The allocation, as Slurm describes it in the environment of its batch script."""

    job: str
    nodelist: str
    nodes: int

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Here:
        """Raises `InvalidSpec` outside of a batch script."""
        job, nodelist = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
        count = environ.get("SLURM_JOB_NUM_NODES", "")
        if not job.isdecimal() or not nodelist or not count.isdecimal():
            raise InvalidSpec(
                "SLURM_JOB_ID",
                job,
                "to be run in a batch script of Slurm, which `holdfast slurm submit` creates",
            )
        return cls(job, nodelist, int(count))


class AllocationRun:
    """Runs one allocation in the main thread."""

    def __init__(self, plan: Plan, here: Here, console: Console) -> None:
        self._plan, self._here, self._console = plan, here, console
        self._over = threading.Event()
        self._end = EndWatch(plan.notice_s, plan.grace_s)
        self._terminated_at: float | None = None
        self._termination_logged = False
        self._errors: dict[str, str] = {}  # last error of each kind, which is logged once

    def run(self) -> int:
        """Return the exit code."""
        signal.signal(signal.SIGUSR1, self._on_notice)
        signal.signal(signal.SIGUSR2, self._on_cancel)
        signal.signal(signal.SIGTERM, self._on_terminate)
        plan = self._plan
        chain = chains.read(plan.directory, plan.chain)
        if chain.over is not None:
            self._log(f"{plan.job_name} is over since allocation {chain.ended[-1].slurm_job}: nothing to do")
            return chain.over
        self._check_script()
        code = UNAVAILABLE
        try:
            # state that was lost since is no reason to begin at step 0 again
            code = self._run("resume" if self._plan.start and chain.ended else self._plan.start)
        finally:
            chain = chains.read(plan.directory, plan.chain).ended_by(chains.Link(self._here.job, code))
            chain.write(plan.directory)
        if chain.over is not None:
            self._cancel_rest(chain)
        return code

    def _run(self, start: str) -> int:
        plan = self._plan
        token = secret_in(plan.directory / "api-token")
        options = StackOptions(
            directory=plan.directory / "state",
            host="0.0.0.0",  # so that agents of other nodes can connect; they need the join token
            api_host="127.0.0.1",
            stop_signal="SIGINT",  # Slurm sends SIGTERM to every process of the batch step while the services are still needed
            environment={**settings_for_parts(os.environ), ENV_TOKEN: token, **self._replacing()},
        )
        with LocalStack(options, say=self._log) as stack:
            self._publish(stack)
            environment = {**os.environ, ENV_API: stack.api_url, ENV_TOKEN: token, ENV_LAUNCHER: plan.chain}
            agents = self._start_agents(stack)
            watching = threading.Thread(target=self._watch, args=(stack.api_url, token), name="slurm watch")
            watching.start()
            try:
                with Client(stack.api_url, token=token) as client:
                    how = self._start_options(client, start)
                    code = self._follow(stack, environment, agents, how)
                    self._end_agents(client, code, agents)
                return code
            finally:
                self._over.set()
                stop_all([agents])
                watching.join(tools.TIMEOUT_S)

    def _start_options(self, client: Client, start: str) -> list[str]:
        """Return the options of the launcher. A suspended job of an earlier submission is stopped if the new one says how to
        begin: the directory, with the supervisor's state, is this submission's now."""
        name = self._plan.job_name
        try:
            found = client.attach(name, self._plan.chain)
        except Conflict:
            found = None
            if start and client.job(name)["phase"] not in ENDED:
                client.stop(name, f"submitted again with --{start}", save=False)
                until = time.monotonic() + STOP_WAIT_S
                while client.job(name)["phase"] not in ENDED and time.monotonic() < until:
                    time.sleep(CHECK_S)
        return start_options(found, start, lambda: any(client.checkpoints(name)))

    def _follow(
        self,
        stack: LocalStack,
        environment: Mapping[str, str],
        agents: subprocess.Popen[bytes],
        how: Sequence[str],
    ) -> int:
        """Run the launcher until the job has ended or is suspended. A killed launcher is started again. If there are no agents
        for some time, end the allocation, which otherwise would wait for its time limit."""
        command = [*holdfast("run"), "--attach", *how, str(self._plan.job_file)]
        agents_ended_at: float | None = None
        while True:
            # a separate process group: SIGTERM from Slurm must not end the launcher before the job is suspended
            launcher = subprocess.Popen(tied(command), env=dict(environment), stdin=subprocess.DEVNULL, process_group=0)
            while (code := launcher.poll()) is None:
                stack.tend()
                self._log_termination()
                if agents.poll() is not None and agents_ended_at is None:
                    agents_ended_at = time.monotonic()
                    self._log(f"srun, which runs the agents, ended with {agents.returncode}: see {self._logs}")
                cancelled = self._end.cancelled_at is not None or self._terminated_at is not None
                limit_s = CANCELLED_S if cancelled else WITHOUT_AGENTS_S
                if agents_ended_at is not None and time.monotonic() - agents_ended_at > limit_s:
                    self._log(f"no agents for {limit_s:g} s: the allocation ends")
                    stop_all([launcher])
                    return SUSPENDED if cancelled else UNAVAILABLE
                time.sleep(CHECK_S)
            if 0 <= code < SIGNALLED:
                return code
            self._log(f"[yellow]the launcher was ended by a signal ({code})[/]; it is started again")
            time.sleep(LAUNCHER_PAUSE_S)

    def _end_agents(self, client: Client, code: int, agents: subprocess.Popen[bytes]) -> None:
        """End the agents in good order, in which they free their memory tier. srun ends tasks by SIGKILL: then the memory stays
        occupied for the next user of the node, which is right only if it has the only copy of the newest checkpoint."""
        ended = lambda: agents.poll() is not None or self._terminated_at is not None  # noqa: E731
        name = self._plan.job_name
        with self._logging_errors("the memory of the nodes is not freed"), contextlib.suppress(NotFound):
            if code in (COMPLETED, DO_NOT_RESTART):  # no later allocation makes the copy in the store
                wait_for_upload(client, name, self._console, ended=ended)
            if agents.poll() is not None:
                return
            if not settled(client.job(name)):
                self._log("the newest checkpoint is not on every node's disk: the memory of the nodes is retained")
                return
            Ending(self._here.job, time.time(), over=True).write(self._plan.directory)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agents.wait(AGENTS_END_S)

    # ------------------------------------------------------------------ parts

    @property
    def _logs(self) -> Path:
        return self._plan.directory / "logs"

    def _start_agents(self, stack: LocalStack) -> subprocess.Popen[bytes]:
        plan = self._plan
        self._logs.mkdir(exist_ok=True)
        node = [
            *holdfast("slurm", "node"),
            *("--supervisor", stack.control_endpoint),
            *("--dir", str(plan.local), "--memory", str(plan.memory), "--workers", str(plan.workers_per_node)),
            *("--shared", str(plan.directory), "--grace", f"{plan.grace_s:g}"),
        ]
        srun = [
            *("srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--export=ALL", "--cpu-bind=none"),
            *("--ntasks-per-node=1", f"--ntasks={self._here.nodes}", f"--nodes={self._here.nodes}"),
            *("--job-name=holdfast-agents", f"--output={self._logs}/%j-%N-%t.log"),
        ]
        environment = {**os.environ, **stack.joining, "HOLDFAST_TERMINATION_GRACE_S": f"{plan.grace_s:g}"}
        return subprocess.Popen(tied([*srun, *node]), env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def _publish(self, stack: LocalStack) -> None:
        """Write the endpoints of this allocation's control plane to a file for users. Programs of the allocation get them as
        arguments."""
        endpoints = {
            "slurm_job": self._here.job,
            "host": socket.gethostname(),
            "api": stack.api_url,
            "control": stack.control_endpoint,
            "since": time.time(),
        }
        write_whole(self._plan.directory / CONTROL_FILE, json.dumps(endpoints, indent=1).encode())
        self._log(f"allocation {self._here.job}: {self._here.nodes} nodes, {self._here.nodelist}; logs in {self._logs}")

    def _replacing(self) -> dict[str, str]:
        """Return the supervisor's command for a node that it has taken out of service, if such nodes are drained."""
        if not self._plan.drains_condemned:
            return {}
        command = shlex.join([*holdfast("slurm", "drain"), "{node}", "{reason}"])
        return {"HOLDFAST_REPLACE_COMMAND": command, "HOLDFAST_REPLACE_AFTER_S": "0"}

    # ------------------------------------------------------------------ notices

    def _on_notice(self, *_: int | FrameType | None) -> None:
        self._end.signalled_at = self._end.signalled_at or time.time()

    def _on_cancel(self, *_: int | FrameType | None) -> None:
        self._end.cancelled_at = self._end.cancelled_at or time.time()

    def _on_terminate(self, *_: int | FrameType | None) -> None:
        """Record a SIGTERM. The tasks of all nodes get it as well, and notify their agents. SIGKILL follows after Slurm's
        KillWait."""
        self._terminated_at = self._terminated_at or time.time()

    def _log_termination(self) -> None:
        if self._terminated_at is not None and not self._termination_logged:
            self._termination_logged = True
            self._log(
                "[yellow]Slurm ends the allocation[/] (scancel or preemption); the job is saved, if there is time"
            )

    def _watch(self, api: str, token: str) -> None:
        """Announce and withdraw notices at the supervisor as Slurm drains and resumes nodes, until the allocation ends."""
        drains = Drains()
        self._query_end()
        with Client(api, token=token) as client:
            while not self._over.is_set():
                self._announce_end()
                changes: list[Change] = []
                with self._logging_errors("the states of nodes are unknown"):
                    changes = drains.changes(tools.node_states(self._here.nodelist))
                for change in changes:
                    with self._logging_errors(f"the supervisor has not been notified of {change.node}"):
                        self._notify(client, change)
                        drains.done(change)
                self._wait()

    def _notify(self, client: Client, change: Change) -> None:
        if isinstance(change, Announce):
            client.announce(change.node, SOURCE, change.event, None)
            self._log(f"[yellow]{change.node}[/]: {escape(change.event)}")
        else:
            client.withdraw(change.node, SOURCE)
            self._log(f"{change.node}: Slurm no longer drains it")

    def _wait(self) -> None:
        """Wait until the next query; not at all if the end is near and has not been announced."""
        until = time.monotonic() + WATCH_S
        while not self._over.wait(CHECK_S) and time.monotonic() < until:
            if self._end.announced is None and self._end.is_near(time.time()):
                return
            if self._end.cancelled_at is not None and self._end.due(time.time()) is not None:
                return

    def _announce_end(self) -> None:
        """Notify the nodes of the allocation's end, if it is near."""
        if not self._end.is_near(time.time()):
            return
        if self._end.cancelled_at is None:
            self._query_end()
        if (ends_at := self._end.due(time.time())) is None:
            return
        with self._logging_errors("the nodes have not been notified of the end"):
            Ending(self._here.job, ends_at).write(self._plan.directory)
            self._end.announced = ends_at
            left_s, grace_s = ends_at - time.time(), self._plan.grace_s
            self._log(f"the allocation ends in {left_s:.0f} s; {grace_s:.0f} s before, the job is saved and suspended")

    def _query_end(self) -> None:
        with self._logging_errors("the end of the allocation is unknown until Slurm's signal"):
            self._end.ends_at = tools.ends_at(self._here.job)

    @contextlib.contextmanager
    def _logging_errors(self, what: str) -> Iterator[None]:
        """Log an error and continue, because the operation is tried again. An error that repeats is logged once."""
        try:
            yield
        except (HoldfastError, OSError) as error:
            if not self._over.is_set() and self._errors.get(what) != str(error):
                self._errors[what] = str(error)
                self._log(f"[yellow]{what}[/]: {escape(str(error))}")
        else:
            self._errors.pop(what, None)

    # ------------------------------------------------------------------ the chain

    def _check_script(self) -> None:
        with self._logging_errors("the batch script cannot be read"):
            for doubt in doubts(tools.script_of(self._here.job)):
                self._log(f"[yellow]warning:[/] {escape(doubt)}")

    def _cancel_rest(self, chain: chains.Chain) -> None:
        past = {link.slurm_job for link in chain.ended}
        if rest := [job for job in chain.slurm_jobs if job not in past]:
            with self._logging_errors(f"allocations {', '.join(rest)} of the chain will start and end at once"):
                tools.run("scancel", *rest)

    def _log(self, text: str) -> None:
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", soft_wrap=True)


def holdfast(*arguments: str) -> list[str]:
    """Return a command of this installation, which every node finds at the same path."""
    return [sys.executable, "-m", "holdfast.cli.main", *arguments]
