"""The workers of one generation on this node, from the fork to the last exit, and the signals about them."""

from __future__ import annotations

import hashlib
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.agent.workers.errors import read_error_file, read_printed
from holdfast.agent.workers.logs import tail
from holdfast.agent.workers.misses import Misses
from holdfast.agent.workers.procfs import process_facts
from holdfast.agent.workers.progress import Progress
from holdfast.agent.workers.worker import Exit, Worker
from holdfast.domain.notes import Note, SavedNote
from holdfast.domain.orders import Prepare, RanksFinished, RanksStarted, RanksStepping, StepReached
from holdfast.domain.replication import TroubleKind
from holdfast.domain.signals import (
    CheckpointTrouble,
    GenerationStarted,
    GenerationStopped,
    NodeSignal,
    WorkerError,
    WorkerExited,
)

# How long the report of first steps waits for the last `started` note, which may have been dropped.
STARTED_NOTE_GRACE_S = 0.05
BLIND_START_S = 300.0  # a script whose steps are not known has started well if it has run for so long


@dataclass(slots=True)
class LocalGeneration:
    """`order`: the `Prepare` of this generation. `workers`: by rank; complete after the preparation."""

    node: str
    order: Prepare
    log_directory: Path
    workers: dict[int, Worker] = field(default_factory=dict)
    recorders: dict[int, Path] = field(default_factory=dict)  # sockets of the flight recorders, by rank
    master: socket.socket | None = None  # the reserved rendezvous port, on the node of rank 0
    announcement: GenerationStarted | None = None  # from `start` on
    progress: Progress | None = None  # from `start` on
    stepping_reported: bool = False
    stopping: bool = False
    misses: Misses = field(default_factory=Misses)
    uid: int | None = None  # of the workers; None = the agent's
    has_learned: bool = False  # its workers are forked from a template with modules that earlier workers have imported
    start_note: str = ""  # for the log of the ranks: why they are not, although they could be
    judged: bool = False  # whether its start went well is known, and was told (`Templates.judge`)
    has_cascaded: bool = False  # the communication of a rank has failed before its first step
    _unheard_until: float = 0.0

    @property
    def started_at(self) -> float | None:
        return None if self.announcement is None else self.announcement.at

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    @property
    def uncleared(self) -> list[Worker]:
        """Workers with a remaining process: the worker itself, or a process that it has started."""
        return [worker for worker in self.workers.values() if not worker.cleared.is_set()]

    @property
    def complete(self) -> bool:
        """Whether every rank of this node has a running process."""
        return len(self.alive) == self.order.placement.nproc

    @property
    def completed(self) -> list[Worker]:
        """Workers that have ended by themselves with exit code 0."""
        ended = (worker for worker in self.workers.values() if not worker.alive and not worker.expected)
        return [worker for worker in ended if worker.exit is not None and worker.exit.exit_code == 0]

    @property
    def has_stepped(self) -> bool:
        """Whether a rank has reported a step, or an optimizer step was observed in every rank."""
        return self.progress is not None and (self.progress.has_stepped or self.progress.observed[0] > 0)

    def has_stepped_or_lasted(self, at: float) -> bool:
        """Whether the start went well, as far as that can be known of this script."""
        lasted = self.stepping_reported and self.started_at is not None and at - self.started_at >= BLIND_START_S
        return self.has_stepped or lasted

    @property
    def submission(self) -> str:
        """Identifies the run: a hash, because the token itself is the job's secret."""
        return hashlib.sha256(self.order.token.encode()).hexdigest()[:16]

    def begin(self, at: float) -> GenerationStarted:
        """Record the start of the ranks, and return its signal."""
        order = self.order
        ranks = tuple(order.placement.ranks)
        self.announcement = GenerationStarted(
            self.node,
            at,
            order.job,
            order.generation,
            order.mesh,
            ranks,
            order.hang,
            self.submission,
            order.warning_settles_s,
            self.has_learned,
        )
        self.progress = Progress(
            node=self.node, job=order.job, generation=order.generation, ranks=ranks, step=order.restore_step, at=at
        )
        return self.announcement

    def stop(self, at: float, *, finished: bool = False) -> GenerationStopped | None:
        """Mark later exits as expected, and return the signal. None if it was returned before, or if the ranks were never
        started."""
        if self.stopping:
            return None
        self.stopping = True
        for worker in self.alive:
            worker.expected = True
        if self.started_at is None:
            return None
        return GenerationStopped(self.node, at, self.order.job, self.order.generation, finished, self.submission)

    def fold(self, note: Note) -> None:
        if self.progress is not None and self.progress.knows(note.sender.rank):
            self.progress.fold(note)

    def trouble(self, note: Note, at: float) -> CheckpointTrouble | None:
        """Return a signal if this note shows that a rank repeatedly misses saves."""
        rank = note.sender.rank
        if self.progress is None or not self.progress.knows(rank):
            return None
        missed = self.misses.fold(note, at)
        if isinstance(note, SavedNote):
            finished = {each: self.progress.step_of(each) for each in self.order.placement.ranks}
            if (found := self.misses.without(note, finished, at)) is not None:
                rank, missed = found
        if missed is None:
            return None
        kind, place = TroubleKind.SAVES_MISSED.value, f"rank {rank}"
        return CheckpointTrouble(self.node, missed.since, note.sender.job, kind, place, missed.reason, rank)

    def unheard(self, at: float) -> None:
        """Record that the agent was frozen until `at` (Unix s) and received no messages of the ranks."""
        self._unheard_until = at
        if self.progress is not None:
            self.progress.unheard(at)

    def silent_s(self, at: float) -> float:
        """Return for how long the ranks have been silent if that is unusual; otherwise 0.0."""
        return 0.0 if self.progress is None or self.stopping else self.progress.silent_s(at)

    def stepping(self, at: float, assume_started_after_s: float) -> RanksStepping | None:
        """The report that every rank has finished a first step, once.

        An unmodified script reports no steps. Its ranks count as stepping, with step 0, when an optimizer step of each of them
        was observed, or when all of them have been running for `assume_started_after_s`; for the time that the order states, if
        the script has reported steps before, since it may still import modules. A script that uses the library, and ends no
        `run.step`, counts when its optimizer steps have been observed for `assume_started_after_s`. If only some ranks report
        steps, all count that long after the second step of these. Nothing is expected of a rank that has ended with exit code
        0: scripts let ranks go that have nothing to do.
        """
        if self.stepping_reported or self.progress is None or self.started_at is None or not self.alive:
            return None
        if len(self.alive) + len(self.completed) < self.order.placement.nproc:
            return None
        since = self.progress.stepping_since
        if since is not None and (self.progress.all_start_phases_known or at - since > STARTED_NOTE_GRACE_S):
            step, phases_s = self.progress.newest_common_step, self.progress.slowest_start()
        elif (observed_since := self._observed_since(at, assume_started_after_s)) is not None:
            since, step, phases_s = observed_since, 0, ()
        elif (apart_since := self.progress.stepping_apart_since(at, assume_started_after_s)) is not None:
            since, step, phases_s = apart_since, self.progress.least_reported_step, ()
        elif self.progress.silent and at - max(self.started_at, self._unheard_until) >= max(
            assume_started_after_s, self.order.first_message_s
        ):
            since, step, phases_s = at, 0, ()
        else:
            return None
        self.stepping_reported = True
        return RanksStepping(
            self.order.job, self.order.generation, tuple(self.order.placement.ranks), step, since, phases_s
        )

    def _observed_since(self, at: float, after_s: float) -> float | None:
        """Since when observed optimizer steps are known to be the steps of the script; None if they are not. Of a script that
        uses the library they may also be a warm-up before its first `run.step`."""
        progress = self.progress
        if progress is None or progress.has_stepped or (since := progress.observed_since) is None:
            return None
        is_certain = progress.silent or at - max(since, self._unheard_until) >= after_s
        return since if is_certain else None

    @property
    def begun(self) -> RanksStarted | None:
        """Set from the start of the ranks until the report of their first steps."""
        if self.started_at is None or self.stepping_reported:
            return None
        return RanksStarted(self.order.job, self.order.generation)

    def step_reached(self) -> StepReached | None:
        """The newest step of every rank, or how many optimizer steps were observed; None if neither is known."""
        progress = self.progress
        if progress is None:
            return None
        reached = StepReached(self.order.job, self.order.generation, progress.newest_common_step)
        if progress.has_stepped:
            apart = self.stepping_reported and progress.stepping_since is None
            return replace(reached, step=progress.least_reported_step) if apart else reached
        observed, step_s = progress.observed
        return replace(reached, observed=observed, observed_step_s=step_s) if observed else None

    def sample(self, at: float) -> list[NodeSignal]:
        """Return the steps since the last call, and the progress of every rank."""
        if self.progress is None or self.stopping or not self.alive:
            return []
        unsent = self.take_unsent_steps(at)
        facts = {rank: process_facts(worker.pid) for rank, worker in self.workers.items() if worker.alive}
        return [*unsent, self.progress.sample(at, facts)]

    def take_unsent_steps(self, at: float) -> list[NodeSignal]:
        """Return the steps and checks that were finished since the last call."""
        if self.progress is None:
            return []
        unsent = (self.progress.take_steps(at), self.progress.take_observed(at), self.progress.take_checks(at))
        return [signal for signal in unsent if signal is not None]

    def exited(self, worker: Worker, how: Exit) -> WorkerExited:
        """Return the signal for a worker that has exited. An end with exit code 0 is dated by the `done` of the library, if
        there was one: the process leaves its groups afterwards, and the other ranks may fail before it is gone."""
        identity = worker.identity
        at = how.at
        if self.progress is not None and worker in self.completed:
            at = min(how.at, self.progress.complete(identity.rank) or how.at)
        return WorkerExited(
            node=self.node,
            at=at,
            job=identity.job,
            generation=identity.generation,
            rank=identity.rank,
            pid=worker.pid,
            exit_code=how.exit_code,
            signal=how.signal,
            step=self.progress.step_of(identity.rank) if self.progress is not None else 0,
            expected=worker.expected,
            error=self._error(worker, how),
            log_tail=() if how.exit_code == 0 else tail(identity.log_path),
            step_ends=self.progress.step_ends_of(identity.rank) if self.progress is not None else (),
            uptime_s=how.uptime_s - (how.at - at),
            step_end_uptimes_s=self.progress.step_end_uptimes_of(identity.rank) if self.progress is not None else (),
            observed=self.progress.observed_of(identity.rank) if self.progress is not None else 0,
            learned_start=self.has_learned and not ended_from_outside(how) and not self.has_stepped_or_lasted(at),
            submission=self.submission,
        )

    def _error(self, worker: Worker, how: Exit) -> WorkerError | None:
        if how.exit_code == 0:
            return None
        error = read_error_file(worker.identity.error_path, self.uid)
        if error is not None or how.signal not in (None, signal.SIGABRT):
            return error
        return read_printed(worker.identity.log_path, aborted=how.signal is not None)

    def finished(self) -> RanksFinished | None:
        """Return the report that every rank has ended by itself with exit code 0; None if that is not the case."""
        ends = [worker.exit.at for worker in self.completed if worker.exit is not None]
        if len(ends) != self.order.placement.nproc:
            return None
        return RanksFinished(self.order.job, self.order.generation, tuple(self.order.placement.ranks), max(ends))

    def release(self) -> None:
        """Release the reserved port, and delete the sockets' files, and error files that are not with the logs."""
        apart = [worker.identity.error_path for worker in self.workers.values()] if self.uid is not None else []
        for path in (*self.recorders.values(), *apart):
            with suppress(IsADirectoryError):  # a worker of another user may put anything there
                path.unlink(missing_ok=True)
        if self.master is not None:
            self.master.close()
            self.master = None


def ended_from_outside(how: Exit) -> bool:
    """Whether a POSIX signal ended the worker that an operator or another program sends, and no failing process."""
    return how.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def reserve_port() -> socket.socket:
    """Return a bound socket that does not listen. It reserves the port for the worker, which can share it.

    Both sockets set SO_REUSEADDR (torch's store does). Linux then allows both to bind while at most one of them listens.
    """
    family, anywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.bind((anywhere, 0))
    except OSError:
        reserved.close()
        raise
    return reserved
