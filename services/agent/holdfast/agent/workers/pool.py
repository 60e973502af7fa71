"""All workers of this node: forks, watches and stops them. At most one generation of a job has running ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent.workers import tracing
from holdfast.agent.workers.apart import make_places
from holdfast.agent.workers.doorkeeper import Doorkeeper
from holdfast.agent.workers.entry import Entry, entry_of
from holdfast.agent.workers.environment import Site, start_environment, worker_environment
from holdfast.agent.workers.ft_server import FtServer, Rank, append_to_log
from holdfast.agent.workers.generation import LocalGeneration, ended_from_outside, reserve_port
from holdfast.agent.workers.inbox import NotesInbox
from holdfast.agent.workers.log_limit import LOG_BYTES_MAX
from holdfast.agent.workers.logs import WorkerLogs, open_log
from holdfast.agent.workers.memory_limit import MemoryLimit
from holdfast.agent.workers.orphans import become_subreaper
from holdfast.agent.workers.ranks import Ranks
from holdfast.agent.workers.secrets import read_all
from holdfast.agent.workers.standstill import StandstillWatch
from holdfast.agent.workers.subprocess import run_subprocess
from holdfast.agent.workers.template import Template
from holdfast.agent.workers.templates import Templates
from holdfast.agent.workers.worker import Exit, Worker, WorkerIdentity
from holdfast.agent.workers.worker_set import WorkerSet
from holdfast.domain import worker as worker_protocol
from holdfast.domain.communication import is_communication
from holdfast.domain.errors import Conflict, NotFound, Unavailable
from holdfast.domain.job import LaunchSpec
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.notes import MissedNote, Note
from holdfast.domain.orders import Prepare, RanksStarted, Report, StepReached
from holdfast.domain.replication import StagedShard
from holdfast.domain.signals import KernelEvent, KernelLine, NodeSignal, WorkerExited
from holdfast.domain.template import PROGRAM
from holdfast.runtime import freeze
from holdfast.runtime.service import guarded

log = structlog.get_logger("holdfast.agent.workers")

READY_TIMEOUT_S = 20.0  # from fork to `ready`: milliseconds, unless the machine swaps
# A process in an uninterruptible wait (D state) can outlive SIGKILL; then the node cannot be used.
KILL_TIMEOUT_S = 30.0
CHECK_INTERVAL_S = 1.0
# A path, because importing the module would import torch into the agent.
SELF_TEST = Path(worker_protocol.__file__).parents[1] / "train" / "selftest" / "__main__.py"
KILL_BEFORE_END_S = 0.001  # by this the kernel's kill of a process is dated before its end


class WorkerPool:
    """`emit` receives signals, `report` receives reports. Both are called from the event loop and must not block."""

    def __init__(
        self,
        *,
        node: str,
        address: str,
        site: Site,
        inherited: Mapping[str, str],
        emit: Callable[[NodeSignal], None],
        report: Callable[[Report], None],
        ended: anyio.Event,
        assume_started_after_s: float = 5.0,
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        """`log_bytes_max`: of each rank's log; 0 = no limit while there is room. `ended` is set when `run` has ended and no
        worker is running."""
        self._node, self._address, self.site = node, address, site
        self._inherited = inherited
        self._emit, self._report = emit, report
        self._ended = ended
        self._assume_started_after_s = assume_started_after_s
        self._logs = WorkerLogs(site.agent_dir / "logs", bytes_max=log_bytes_max)
        user = site.user
        self._uid = None if user is None else user.uid
        self._inbox = NotesInbox(site.notes, self._take_note, user)
        self._doorkeeper = Doorkeeper(Path(site.replicator_notes)) if user is not None else None
        self._ft = FtServer(site.rank_monitor, self._monitored, self._overdue, user)
        self._standstill = StandstillWatch(
            node=node, generations=lambda: list(self._generations.values()), emit=emit, uid=self._uid
        )
        self._generations: dict[tuple[str, int], LocalGeneration] = {}
        self._memory_limit = MemoryLimit()
        self._templates = Templates(site, inherited, self._template_changed)
        self.worker_set = WorkerSet(self.running, report, template=self._templates.state)
        self._steps_dropped = 0  # of ended generations
        self._tasks: TaskGroup | None = None

    # ------------------------------------------------------------------ life

    async def run(self) -> None:
        """Run until cancelled. Every worker has exited before this returns."""
        become_subreaper()
        for socket in self.site.recorders():  # left by a killed agent
            socket.unlink(missing_ok=True)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._templates.open(tasks)
            guarded(tasks, "worker notes", self._inbox.run)
            guarded(tasks, "worker logs", self._check_regularly)
            guarded(tasks, "standstill", self._standstill.run)
            guarded(tasks, "rank monitor", self._ft.run)
            guarded(tasks, "worker set", self.worker_set.run)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end_all()
                self._templates.close()
                if self._doorkeeper is not None:
                    self._doorkeeper.close()
                self._ended.set()

    async def _end_all(self) -> None:
        for generation in list(self._generations.values()):
            self._kill(generation)
        await self._wait_gone(list(self._generations.values()))

    # ------------------------------------------------------------------ orders

    async def warm(self, job: str, launch: LaunchSpec) -> None:
        """Prepare a template for this job. Raises `Unavailable` with the reason if its imports fail."""
        await self._templates.of(job, launch)

    async def test_devices(self, budget_s: float, timeout_s: float) -> str:
        """Return the output of `holdfast.train.selftest`. Raises `Unavailable` if it does not end within `timeout_s`."""
        return await self._self_test(("--budget-s", str(budget_s)), timeout_s)

    async def test_quickly(self, within_s: float, timeout_s: float) -> str:
        """As `test_devices`, for all devices in parallel and the links between them (`holdfast.train.selftest.quick`)."""
        return await self._self_test(("--within-s", str(within_s)), timeout_s)

    async def _self_test(self, arguments: tuple[str, ...], timeout_s: float) -> str:
        template = await self._templates.any()
        return await run_subprocess(template, SELF_TEST, arguments, self._inherited, timeout_s)

    async def fork(self, order: Prepare) -> tuple[RunningWorker, ...]:
        """Fork this generation's workers, which then wait for `start`. If it raises `HoldfastError`, no worker is left."""
        launch = order.launch
        entry = entry_of(launch, self._job_environment(launch))
        logs = self._logs.create(order.job, order.generation)
        generation = LocalGeneration(self._node, order, logs, uid=self._uid)
        key = (order.job, order.generation)
        if key in self._generations:
            raise Conflict(f"generation {order.generation} of {order.job} already has workers on this node")
        self._generations[key] = generation
        self.worker_set.begin(order.job, order.generation)
        try:
            if order.placement.first_rank == 0:
                generation.master = reserve_port()
            secrets = (
                await read_all(launch.env_from, self._job_environment(launch), self.site.user)
                if launch.env_from
                else {}
            )
            template = await self._templates.for_start(generation)
            # a reaper forks its worker while the template forks the next one
            async with anyio.create_task_group() as forks:
                for local_rank in range(order.placement.nproc):
                    forks.start_soon(self._fork_one, template, generation, local_rank, entry, secrets)
            generation.workers = dict(sorted(generation.workers.items()))
            with freeze.patience(READY_TIMEOUT_S) as limit:
                for worker in generation.workers.values():
                    await worker.wait_ready()
            if limit.cancelled_caught:
                raise Unavailable(f"the workers of {order.job} were not ready {READY_TIMEOUT_S:g} s after the fork")
        except BaseException:
            with anyio.CancelScope(shield=True):
                self._kill(generation)
                await self._wait_gone([generation])
            raise
        return tuple(worker.running for worker in generation.workers.values())

    def master_of(self, job: str, generation: int) -> str:
        """Return the rendezvous endpoint reserved on this node; "" if rank 0 runs on another node."""
        master = self._find(job, generation).master
        return "" if master is None else f"{self._address}:{master.getsockname()[1]}"

    def start(self, job: str, number: int, master: tuple[str, int], staged: Iterable[StagedShard]) -> None:
        """Start the prepared workers. Raises `Conflict` that names the ranks if some have exited since the preparation."""
        generation = self._find(job, number)
        if generation.started_at is not None:
            raise Conflict(f"generation {number} of {job} has been started already")
        parts: dict[int, list[StagedShard]] = {}
        for shard in staged:
            parts.setdefault(shard.rank, []).append(shard)
        if not generation.complete:
            dead = [rank for rank, worker in generation.workers.items() if not worker.alive]
            raise Conflict(f"generation {number} of {job} cannot start: rank(s) {dead} died while waiting for it")
        # the directories may have been deleted since the fork, with the images of an ended run
        if self.site.user is not None:
            for worker in generation.workers.values():
                make_places(self.site, job, worker.identity.local_rank)
        self._emit(generation.begin(time.time()))
        for rank, worker in generation.workers.items():
            if not worker.tell("start", env=start_environment(generation.order, master, parts.get(rank, ()))):
                raise Conflict(f"generation {number} of {job} cannot start: rank {rank} does not take its start order")

    async def stop(self, job: str, through: int, grace_s: float = 0.0) -> None:
        """Stop the workers of generation `through` and older. Returns when they have exited.

        With `grace_s`, they are first requested to stop through the control channel. An unmodified script does not read the
        channel and receives SIGTERM. Raises `Unavailable` if a worker survives SIGKILL.
        """
        await self._end(job, lambda number: number <= through, grace_s)

    async def stop_all_but(self, job: str, number: int) -> None:
        """Stop the workers of every other generation: older ones, and those of an earlier run of this name."""
        await self._end(job, lambda other: other != number)

    async def _end(self, job: str, which: Callable[[int], bool], grace_s: float = 0.0) -> None:
        old = [each for (name, number), each in self._generations.items() if name == job and which(number)]
        if grace_s > 0:
            for generation in old:
                self._ask_to_stop(generation)
            with anyio.move_on_after(grace_s):
                for generation in old:
                    for worker in generation.alive:
                        await worker.gone.wait()
        for generation in old:
            self._kill(generation)
        await self._wait_gone(old)

    def ranks(self, job: str, number: int) -> Ranks:
        """Return the running ranks of a generation, to send them orders. Raises `NotFound` if there are none."""
        return Ranks(self._find(job, number).alive)

    def running(self) -> tuple[RunningWorker, ...]:
        return tuple(worker.running for generation in self._generations.values() for worker in generation.alive)

    def steps(self) -> tuple[StepReached, ...]:
        """Return the newest common step of each generation that runs on this node and reports its steps, or how many of them
        were observed."""
        active = [each for each in self._generations.values() if not each.stopping and each.alive]
        return tuple(reached for each in active if (reached := each.step_reached()) is not None)

    def begun(self) -> tuple[RanksStarted, ...]:
        """Return the generations whose ranks were started on this node, and whose first steps are not reported yet."""
        active = [each for each in self._generations.values() if not each.stopping and each.alive]
        return tuple(begun for each in active if (begun := each.begun) is not None)

    def running_generation(self, job: str, number: int) -> LocalGeneration | None:
        """Return the generation if its ranks have been started on this node and are not being stopped; otherwise None."""
        generation = self._generations.get((job, number))
        return None if generation is None or generation.started_at is None or generation.stopping else generation

    def newest_running(self, job: str) -> tuple[LocalGeneration, Mapping[str, str]] | None:
        """Return the newest generation of the job whose ranks run on this node, and the environment that its ranks inherit."""
        numbers = sorted(self.generations(job), reverse=True)
        found = next((each for number in numbers if (each := self.running_generation(job, number))), None)
        return None if found is None else (found, self._job_environment(found.order.launch))

    def generations(self, job: str) -> tuple[int, ...]:
        """Return the numbers of the generations with workers on this node."""
        return tuple(sorted(number for name, number in self._generations if name == job))

    # ------------------------------------------------------------------ telemetry

    def standing(self) -> list[NodeSignal]:
        """Return the start signals of the running generations again, for a diagnostics process that did not receive them."""
        generations = [generation for generation in self._generations.values() if not generation.stopping]
        return [each.announcement for each in generations if each.announcement is not None and each.alive]

    def sample(self, at: float) -> list[NodeSignal]:
        """Return the signals about ranks for a tick. Also reports first steps whose notes are late or lost."""
        signals: list[NodeSignal] = []
        for generation in self._generations.values():
            signals += generation.sample(at)
            self._report_stepping(generation)
        return signals

    def unheard(self, at: float) -> None:
        """Record that this agent was frozen until `at` (Unix s), so that missing messages of that time prove nothing."""
        for generation in self._generations.values():
            generation.unheard(at)
        self._ft.unheard()

    @property
    def notes_lost(self) -> int:
        """Number of malformed notes, and of steps dropped because they came faster than ticks can carry, since the start."""
        return (
            self._inbox.refused
            + self._standstill.refused
            + (self._doorkeeper.refused if self._doorkeeper is not None else 0)
            + self._steps_dropped
            + sum(
                generation.progress.dropped
                for generation in list(self._generations.values())  # metrics are read in another thread
                if generation.progress is not None
            )
        )

    def _template_changed(self) -> None:
        self.worker_set.template_changed()

    def _take_note(self, note: Note, sender: int, raw: bytes) -> None:
        generation = self._generations.get((note.sender.job, note.sender.generation))
        if generation is None or generation.stopping:
            return  # the note of an ended generation
        if self._doorkeeper is not None and not self._doorkeeper.admit(note, sender, raw, generation.workers):
            return
        if isinstance(note, MissedNote):
            log.warning(
                "checkpoint missed", job=note.sender.job, rank=note.sender.rank, step=note.step, reason=note.reason
            )
        generation.fold(note)
        if (trouble := generation.trouble(note, time.time())) is not None:
            self._emit(trouble)
        self._report_stepping(generation)

    def _report_stepping(self, generation: LocalGeneration) -> None:
        if (stepping := generation.stepping(time.time(), self._assume_started_after_s)) is not None:
            self._report(stepping)
            tracing.stepped(generation, stepping.at)
        if generation.has_stepped:
            self._templates.judge(generation, time.time())

    # ------------------------------------------------------------------ scripts with nvidia-resiliency-ext's client

    def _monitored(self) -> list[Rank]:
        return [
            Rank(
                job=generation.order.job,
                generation=generation.order.generation,
                rank=rank,
                pid=worker.pid,
                environment=self._job_environment(generation.order.launch),
                least_s=generation.order.hang.init_s,
            )
            for generation in self._generations.values()
            for rank, worker in generation.workers.items()
            if worker.alive
        ]

    def _overdue(self, who: Rank, reason: str) -> None:
        """Kill an overdue rank, as the client's own monitor does. The exit is handled like that of any failed worker."""
        generation = self.running_generation(who.job, who.generation)
        worker = None if generation is None else generation.workers.get(who.rank)
        if worker is None or worker.pid != who.pid or not worker.alive:
            return
        log.warning("rank is overdue by its own monitoring", job=who.job, rank=who.rank, reason=reason)
        _note(worker, f"rank {who.rank} is killed: {reason}")
        worker.kill()

    # ------------------------------------------------------------------ workers

    def _job_environment(self, launch: LaunchSpec) -> dict[str, str]:
        return {**self._inherited, **dict(launch.env)}

    async def _fork_one(
        self,
        template: Template,
        generation: LocalGeneration,
        local_rank: int,
        entry: Entry,
        secrets: Mapping[str, str],
    ) -> None:
        order, directory = generation.order, generation.log_directory
        rank = order.placement.first_rank + local_rank
        identity = WorkerIdentity(
            job=order.job,
            generation=order.generation,
            rank=rank,
            local_rank=local_rank,
            log_path=directory / f"rank-{rank}.log",
            error_path=self.site.error_file(order.job, order.generation, rank, directory),
        )
        generation.recorders[rank] = self.site.recorder(order.job, order.generation, rank)
        make_places(self.site, order.job, local_rank)
        environment = worker_environment(order, local_rank, self.site, identity.error_path, self._inherited, secrets)
        records = local_rank == 0 and entry.kind != PROGRAM
        if records and (imports := self._templates.imports_file(order.launch)) is not None:
            environment[worker_protocol.ENV_IMPORTS] = str(imports)
        log_fd = open_log(identity.log_path)
        try:
            if self.site.user is not None:  # so that a script can open /dev/stdout; the directory is closed to it
                os.fchown(log_fd, self.site.user.uid, self.site.user.gid)
            for note in _notes(entry, template, generation):
                os.write(log_fd, f"holdfast: {note}\n".encode(errors="replace"))
            worker = await Worker.launch(template, identity, entry=entry, env=environment, log_fd=log_fd)
        finally:
            os.close(log_fd)
        generation.workers[rank] = worker
        self.worker_set.changed()
        assert self._tasks is not None  # a template exists only while `run` does
        self._tasks.start_soon(partial(self._watch, generation, worker), name=f"rank {rank}")

    async def _watch(self, generation: LocalGeneration, worker: Worker) -> None:
        with anyio.CancelScope(shield=True):  # ends when the process exits; `run` kills it before it returns
            how = await worker.watch()
        self.worker_set.changed()
        if generation.started_at is not None:
            if not worker.expected:
                self.worker_set.add_ended(worker, how)
            self._emit_unsent_steps(generation)
            self._emit_memory_kill(worker, how)
            if how.left and not worker.expected:
                ended = f"rank {worker.identity.rank} has ended with exit code 0"
                _note(worker, f"{ended}, and the processes that it had started are killed: {', '.join(how.left)}")
            exited = generation.exited(worker, how)
            self._emit(exited)
            if not worker.expected and how.exit_code != 0 and not ended_from_outside(how):
                cascading = exited.error is not None and is_communication(exited.error)
                self._templates.judge(generation, time.time(), _failure(exited), cascading=cascading)
            if (finished := generation.finished()) is not None:
                self._report(finished)
                self._report_stopped(generation, finished=True)
        with anyio.CancelScope(shield=True):
            await worker.clear()
        if not generation.uncleared and (generation.stopping or generation.started_at is not None):
            self._forget(generation)

    def _ask_to_stop(self, generation: LocalGeneration) -> None:
        self._report_stopped(generation)
        for worker in generation.alive:
            worker.tell("stop", save=True)
            if generation.progress is None or generation.progress.silent:
                worker.kill(signal.SIGTERM)

    def _kill(self, generation: LocalGeneration) -> None:
        self._report_stopped(generation)
        for worker in generation.alive:
            worker.kill()

    def _emit_memory_kill(self, worker: Worker, how: Exit) -> None:
        """Emit the kernel's kill for lack of memory before the exit that it explains, of the rank or of a helper process."""
        if how.exit_code == 0 or worker.expected:
            return
        if text := self._memory_limit.killed(worker.pid if how.signal == signal.SIGKILL else None):
            # Before the exit, also in the order of a tick, which is that of the times.
            self._emit(KernelLine(self._node, how.at - KILL_BEFORE_END_S, text, event=KernelEvent.OOM_KILL))

    def _emit_unsent_steps(self, generation: LocalGeneration) -> None:
        """Emit the steps since the last tick, because the generation may be forgotten before the next tick."""
        self._inbox.drain()
        for step in generation.take_unsent_steps(time.time()):
            self._emit(step)

    def _report_stopped(self, generation: LocalGeneration, *, finished: bool = False) -> None:
        if not generation.stopping:
            self._emit_unsent_steps(generation)
            if not finished:
                self._templates.judge(generation, time.time())
        if (stopped := generation.stop(time.time(), finished=finished)) is not None:
            self._emit(stopped)

    async def _wait_gone(self, generations: Iterable[LocalGeneration]) -> None:
        with freeze.patience(KILL_TIMEOUT_S):
            for generation in generations:
                for worker in generation.uncleared:
                    await worker.cleared.wait()
        for generation in generations:
            if survivors := [worker.pid for worker in generation.uncleared]:
                raise Unavailable(
                    f"processes {survivors} of {generation.order.job}, or processes started by them, survived SIGKILL for "
                    f"{KILL_TIMEOUT_S:g} s (stuck in the kernel); this node cannot run another generation"
                )
            self._forget(generation)

    def _forget(self, generation: LocalGeneration) -> None:
        generation.release()
        forgotten = self._generations.pop((generation.order.job, generation.order.generation), None)
        if forgotten is not None and forgotten.progress is not None:
            self._steps_dropped += forgotten.progress.dropped

    def _find(self, job: str, number: int) -> LocalGeneration:
        generation = self._generations.get((job, number))
        if generation is None or generation.stopping:
            here = ", ".join(map(str, self.generations(job))) or "none"
            raise NotFound(f"generation {number} of {job} has no workers on this node (it has generations: {here})")
        return generation

    async def _check_regularly(self) -> None:
        """Bound the logs, and learn which modules the running scripts have imported."""
        while True:
            await anyio.sleep(CHECK_INTERVAL_S)
            active = (each for each in self._generations.values() if each.started_at is not None and not each.stopping)
            self._templates.learn(active)
            workers = (worker for each in self._generations.values() for worker in each.workers.values())
            self._logs.bound([worker.identity.log_path for worker in workers])


def _note(worker: Worker, line: str) -> None:
    try:
        append_to_log(worker.identity.log_path, line)
    except OSError as error:
        log.warning("worker log not written", path=str(worker.identity.log_path), reason=str(error))


def _failure(exit_: WorkerExited) -> str:
    how = f"exited with code {exit_.exit_code}" if exit_.signal is None else f"was ended by signal {exit_.signal}"
    return f"rank {exit_.rank} raised {exit_.error.type}" if exit_.error is not None else f"rank {exit_.rank} {how}"


def _notes(entry: Entry, template: Template, generation: LocalGeneration) -> list[str]:
    """Return notes for the user about the start of this worker. Only modules that the job names are mentioned."""
    named = generation.order.launch.preload
    left_out = [f"not preloaded: {name}, because {why}" for name, why in template.left_out.items() if name in named]
    return [note for note in (entry.note, generation.start_note, *left_out) if note]
