"""A simulated node's telemetry: production's outbox, and the signals that a real agent derives from its workers.

An exit, a start and a stop are sent within `URGENT_S`; steps, progress and snapshots once a second. Ranks that wait for a hung
rank sleep inside the next all-reduce, which the hung rank has not entered, and their flight recorders show that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, repeat
from math import nan
from typing import Any, NamedTuple, TypeVar

from holdfast.agent.connection.outbox import Outbox
from holdfast.domain.collectives import CollectiveRows, StallSnapshot, compact
from holdfast.domain.evolve import evolve
from holdfast.domain.orders import Prepare
from holdfast.domain.signals import (
    RELIABLE,
    GenerationStarted,
    GenerationStopped,
    NodeSignal,
    Phase,
    RankProgress,
    StepColumns,
    Tick,
    WorkerError,
    WorkerExited,
)
from holdfast.sim.agent import Agent
from holdfast.sim.workers import Workers

T = TypeVar("T")

STILL_S = 1.5  # time without a step after which agents read the flight recorders
STILL_STEPS = 2.0  # … or as many steps
SNAPSHOT_EVERY_S = 5.0
_RELIABLE = frozenset(RELIABLE)
CPU_S = 0.4  # of a rank, per step
STEPS_MAX = 64  # finished steps in one tick
STEP_ENDS = 3  # in the signal of an exit
COLLECTIVE = WorkerError(
    "torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error"
)


class Finished(NamedTuple):
    """A step that all ranks of a generation have finished, by the world's time."""

    step: int
    started_at: float
    ended_at: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ends."""

    signal: int | None = None
    exit_code: int | None = None
    error: WorkerError | None = None


KILLED = Ending(signal=9)
CASCADING = Ending(exit_code=1, error=COLLECTIVE)

Steps = Callable[[Prepare], Sequence[Finished]]  # the finished steps of a generation, oldest first


@dataclass(slots=True)
class _Reported:
    """What this life of the agent has reported of its workers."""

    workers: Workers
    ranks: tuple[int, ...]
    started: GenerationStarted | None = None
    ended: set[int] = field(default_factory=set)
    sent: int = 0  # of the finished steps
    began_at: float = 0.0  # the world's time, as those that follow
    first_at: float = 0.0  # end of the first step
    still_since: float = 0.0  # the start, or the end of the last step
    shown_at: float = 0.0  # when the flight recorders were read
    stopped: bool = False


@lru_cache
def _digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()[:16]


@lru_cache
def _members(world_size: int) -> str:
    """The group of all ranks. Every node names it in every snapshot."""
    return compact(range(world_size))


@lru_cache(maxsize=8)
def _columns(steps: tuple[Finished, ...], ranks: int, ahead_s: float) -> tuple[tuple[Any, ...], ...]:
    """The columns of finished steps, which are equal for all ranks, from `step` to `grad_norm`. All nodes with equal clocks
    report the same."""
    count = ranks * len(steps)

    def column(values: Iterable[T]) -> tuple[T, ...]:
        """Each value once for every rank."""
        return tuple(chain.from_iterable(map(repeat, values, repeat(ranks))))

    return (
        column(each.step for each in steps),
        column(each.started_at + ahead_s for each in steps),
        column(each.ended_at + ahead_s for each in steps),
        (0.0,) * count,
        column(each.stall_s for each in steps),
        (1,) * count,
        (nan,) * count,
        (nan,) * count,
    )


class Telemetry:
    def __init__(self, agent: Agent, steps: Steps) -> None:
        self.agent, self._steps = agent, steps
        self.endings: dict[int, Ending] = {}  # of ranks that are about to end
        self.frozen: set[int] = set()  # hung ranks whose processes are stopped
        self.life = 0
        self.sent_seq = 0  # number of the last tick
        self.outbox = Outbox(agent.name, "")
        # By identity: the signals of this life that must not be lost, and that no process of diagnostics has folded.
        self.unread: dict[int, NodeSignal] = {}
        self._reported: _Reported | None = None

    # ------------------------------------------------------------ signals

    def add(self, signal: NodeSignal) -> None:
        """Add a signal of a collector."""
        self._begin_life()
        self._emit(signal)

    def changed(self) -> bool:
        """Report what has changed about the workers. Returns whether something is to be sent at once."""
        if not self.agent.alive:
            self._reported = None
            return False
        self._begin_life()
        workers, reported = self.agent.workers, self._reported
        if reported is not None and reported.workers is not workers:
            self._stop(reported)
            reported = self._reported = None
        if workers is None:
            return self.outbox.urgent
        if reported is None:
            reported = self._reported = _Reported(workers, tuple(workers.order.placement.ranks))
            self.frozen.clear()
        if workers.started and reported.started is None:
            self._start(reported)
        if workers.dead or workers.done:
            self._end(reported)
        if len(workers.done) == workers.order.placement.nproc:
            self._stop(reported, finished=True)
        return self.outbox.urgent

    def _end(self, reported: _Reported) -> None:
        workers = reported.workers
        for rank in sorted(workers.dead - reported.ended):
            reported.ended.add(rank)
            self._emit(self._exited(reported, rank, self.endings.pop(rank, KILLED)))
        for rank in sorted(workers.done - reported.ended):
            reported.ended.add(rank)
            self._emit(self._exited(reported, rank, Ending(exit_code=0)))

    def _begin_life(self) -> None:
        if self.life != self.agent.life:
            self.life, self._reported = self.agent.life, None
            self.outbox = Outbox(self.agent.name, self.agent.incarnation)
            self.unread.clear()

    @property
    def settled(self) -> bool:
        """Whether diagnostics has folded and acknowledged all signals that must not be lost."""
        is_kept = self.outbox.urgent or self.outbox._unacknowledged
        return self.agent.alive and self.life == self.agent.life and not is_kept

    def continue_as(self, other: Telemetry, ahead: int) -> None:
        """Take the state of `other`, which is settled, for an agent that has taken the state of its agent. `ahead`: number of
        the last tick, compared with that of the other."""
        workers, known, name = self.agent.workers, other._reported, self.agent.name
        assert workers is not None
        assert known is not None
        ranks = tuple(workers.order.placement.ranks)
        started = None if known.started is None else evolve(known.started, node=name, ranks=ranks)
        self.sent_seq = other.sent_seq + ahead
        self.outbox = Outbox(name, self.agent.incarnation)
        self.outbox._seq = self.sent_seq
        self.outbox.acknowledge(self.sent_seq)
        self._reported = replace(known, workers=workers, ranks=ranks, started=started, ended=set())

    def _emit(self, signal: NodeSignal) -> None:
        self.outbox.add(signal)
        if type(signal) in _RELIABLE:
            self.unread[id(signal)] = signal

    def _start(self, reported: _Reported) -> None:
        order, now = reported.workers.order, self.agent.world.now
        reported.started = GenerationStarted(
            self.agent.name,
            self.agent.clock.now(),
            order.job,
            order.generation,
            order.mesh,
            reported.ranks,
            order.hang,
            _digest(order.token),
            order.warning_settles_s,
        )
        reported.began_at = reported.still_since = reported.shown_at = now
        self._emit(reported.started)

    def _stop(self, reported: _Reported, *, finished: bool = False) -> None:
        if reported.started is not None and not reported.stopped:
            reported.stopped, order = True, reported.workers.order
            for signal in self._finished(reported, self._steps(order)):
                self._emit(signal)
            at = self.agent.clock.now()
            self._emit(
                GenerationStopped(self.agent.name, at, order.job, order.generation, finished, _digest(order.token))
            )

    def _exited(self, reported: _Reported, rank: int, ending: Ending) -> WorkerExited:
        order, clock = reported.workers.order, self.agent.clock
        steps = self._steps(order)[-STEP_ENDS:]
        ends = tuple(finished.ended_at for finished in reversed(steps))
        return WorkerExited(
            self.agent.name,
            clock.now(),
            order.job,
            order.generation,
            rank,
            rank + 1,
            ending.exit_code,
            ending.signal,
            reported.workers.step,
            expected=False,
            error=ending.error,
            step_ends=tuple(end + clock.ahead_s for end in ends),
            uptime_s=clock.world.now,
            step_end_uptimes_s=ends,
            submission=_digest(order.token),
        )

    # ------------------------------------------------------------ ticks

    def standing(self) -> tuple[GenerationStarted, ...]:
        """The starts that each new stream repeats."""
        reported = self._reported
        return (
            (reported.started,)
            if reported is not None and reported.started is not None and not reported.stopped
            else ()
        )

    def tick(self, fresh: Sequence[NodeSignal] = ()) -> Tick:
        tick = self.outbox.compose(self.agent.clock.now(), fresh)
        self.sent_seq = tick.seq
        return tick

    def sample(self) -> list[NodeSignal]:
        """The steps since the last call, the progress of every rank, and the flight recorders if the ranks are still."""
        reported = self._reported
        if reported is None or reported.started is None or reported.stopped:
            return []
        now, steps = self.agent.world.now, self._steps(reported.workers.order)
        found = self._finished(reported, steps)
        step_s = steps[-1].ended_at - steps[-1].started_at if steps else 0.0
        is_still = bool(steps) and now - reported.still_since > STILL_STEPS * step_s
        found.append(self._progress(reported, is_still=is_still))
        if is_still and now - reported.still_since > STILL_S and now - reported.shown_at > SNAPSHOT_EVERY_S:
            reported.shown_at = now
            found.append(self._snapshot(reported))
        return found

    def _finished(self, reported: _Reported, steps: Sequence[Finished]) -> list[NodeSignal]:
        order, clock = reported.workers.order, self.agent.clock
        if len(steps) == reported.sent:
            return []
        fresh, reported.sent = steps[reported.sent :][-STEPS_MAX:], len(steps)
        reported.first_at = reported.first_at or fresh[0].ended_at
        reported.still_since = fresh[-1].ended_at
        reported.shown_at = reported.still_since - SNAPSHOT_EVERY_S
        ranks = reported.ranks if self.agent.cohort is None else self.agent.cohort.ranks
        return [
            StepColumns(
                self.agent.name,
                clock.now(),
                order.job,
                order.generation,
                ranks * len(fresh),
                *_columns(tuple(fresh), len(ranks), clock.ahead_s),
            )
        ]

    def _progress(self, reported: _Reported, *, is_still: bool) -> RankProgress:
        workers, order, agent = reported.workers, reported.workers.order, self.agent
        ranks, stepped = reported.ranks, workers.step > order.restore_step
        count, step = len(ranks), max(workers.step, order.restore_step)
        entered = (step + is_still if stepped else -1,) * count
        states = ("S",) * count
        if not workers.running:
            states = tuple(self._state(workers, rank) for rank in ranks)
            entered = tuple(
                step if stepped and rank in workers.hung else each for rank, each in zip(ranks, entered, strict=True)
            )
        return RankProgress(
            agent.name,
            agent.clock.now(),
            order.job,
            order.generation,
            ranks,
            (step,) * count,
            (Phase.STEP,) * count,  # also in the first step, which takes the longest
            (reported.first_at + agent.clock.ahead_s if stepped else reported.began_at + agent.clock.ahead_s,) * count,
            states,
            (CPU_S * step,) * count,
            entered,
        )

    def _state(self, workers: Workers, rank: int) -> str:
        if rank in workers.dead or rank in workers.done:
            return ""
        return "T" if rank in self.frozen else "S"

    def _snapshot(self, reported: _Reported) -> StallSnapshot:
        """Read the flight recorders: every rank that runs has entered the all-reduce after the last step."""
        workers, order, agent = reported.workers, reported.workers.order, self.agent
        ranks = tuple(rank for rank in order.placement.ranks if self._state(workers, rank))
        answered = tuple(rank not in self.frozen for rank in ranks)
        rows = tuple(rank for rank in ranks if rank not in self.frozen)
        inside = tuple(rank not in workers.hung for rank in rows)
        members, entered = _members(order.mesh.world_size), workers.step + 1
        count = len(ranks)
        return StallSnapshot(
            agent.name,
            agent.clock.now(),
            order.job,
            order.generation,
            ranks,
            answered,
            ("free",) * count,
            tuple("futex_wait_queue" if rank not in workers.hung else "hrtimer_nanosleep" for rank in ranks),
            (True,) * count,
            ("",) * count,
            CollectiveRows(
                rows,
                ("0",) * len(rows),
                (members,) * len(rows),
                tuple("all_reduce" if each else "" for each in inside),
                ("[1024]",) * len(rows),
                (-1,) * len(rows),
                tuple(entered if each else entered - 1 for each in inside),
                tuple(entered if each else -1 for each in inside),
            ),
        )
