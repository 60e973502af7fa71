"""Executes the supervisor's orders on this node. Per job, a newer generation always takes precedence over an older one.

`Prepare` has two parts that overlap: the new workers are forked (they wait, and run no user code) while the old workers are
killed. When no old worker can write any more, the shards that the new workers restore are staged, and a suspected node tests
itself in parallel. Prepare is answered when all of this is done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import anyio

from holdfast.agent.directory import remove_images
from holdfast.agent.generations import Generations
from holdfast.agent.outcome import FailedTests, Outcome
from holdfast.agent.replicator import Replicator
from holdfast.agent.workers.environment import Site
from holdfast.agent.workers.pool import WorkerPool
from holdfast.domain import orders, spans, tracing
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.generations import OBJECT_STORE
from holdfast.domain.hosts import host_and_port
from holdfast.domain.nodes import Preflight, RunningWorker
from holdfast.domain.orders import Order
from holdfast.domain.replication import Configure, EndJob, PruneSteps, Stage, StagedShard, UploadNow
from holdfast.domain.tiers import NEARNESS, PEER
from holdfast.domain.tracing import TraceContext
from holdfast.runtime.telling import telemetry

T = TypeVar("T")

STAGE_TIMEOUT_S = 600.0  # the supervisor's deadline for `Prepare` applies; this only limits the replicator


@dataclass(slots=True)
class _Job:
    """What this node has staged for one job."""

    staged: tuple[StagedShard, ...] = ()
    # Path → source, of shards fetched since a generation last started.
    brought: dict[str, str] = field(default_factory=dict)
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class Node:
    """Executes orders. Raises `HoldfastError` with the reason if an order cannot be executed."""

    def __init__(
        self,
        pool: WorkerPool,
        replicator: Replicator,
        site: Site,
        *,
        self_test: Callable[[], Awaitable[None]],
        test_suspect: Callable[[float], Awaitable[Preflight]],
        reset_gpus: Callable[[orders.ResetGpu], Awaitable[Outcome]],
        reboot: Callable[[orders.RebootNode], Awaitable[Outcome]],
        restart: Callable[[orders.RestartAgent], Outcome],
        check_link: Callable[[orders.CheckLink], Awaitable[Outcome]],
        inject: Callable[[orders.Inject], Awaitable[object]],
    ) -> None:
        """`self_test` raises `HoldfastError` if this node's devices compute wrong results. `test_suspect` runs the quick tests
        within the given number of seconds. `inject` causes a fault; it raises `HoldfastError` if it refuses."""
        self._pool = pool
        self._replicator = replicator
        self._site = site
        self._self_test, self._test_suspect = self_test, test_suspect
        self._reset_gpus = reset_gpus
        self._reboot, self._restart, self._check_link = reboot, restart, check_link
        self._inject = inject
        self._generations = Generations()
        self._jobs: dict[str, _Job] = {}

    @property
    def is_preparing(self) -> bool:
        return self._generations.is_preparing

    async def carry_out(self, order: Order) -> Outcome:
        match order:
            case orders.PrepareTemplate():
                await self._pool.warm(order.job, order.launch)
                return Outcome()
            case orders.Prepare():
                return await self._prepare(order)
            case orders.Start():
                return self._start(order)
            case orders.Stop():
                return await self._stop(order)
            case orders.CheckpointNow():
                self._generations.refuse_older(order.job, order.generation)
                await self._save(order)
                return Outcome()
            case orders.SetInterval():
                self._generations.refuse_older(order.job, order.generation)
                self._pool.ranks(order.job, order.generation).set_interval(order.from_step, order.interval_steps)
                return Outcome()
            case orders.Prune():
                await self._replicator.prune(PruneSteps(order.job, order.steps))
                return Outcome()
            case orders.ResetGpu():
                return await self._reset_gpus(order)
            case orders.RebootNode():
                return await self._reboot(order)
            case orders.RestartAgent():
                return self._restart(order)
            case orders.CheckLink():
                return await self._check_link(order)
            case orders.Inject():
                await self._inject(order)
                return Outcome()

    async def _save(self, order: orders.CheckpointNow) -> None:
        """Have the ranks save, or agree on it first. Only a save that is certain is uploaded."""
        job, number, at_step = order.job, order.generation, order.at_step
        match order.stage:
            case orders.SaveStage.PROPOSED:
                await self._pool.ranks(job, number).agree_on_save(at_step, order.leaving)
                return
            case orders.SaveStage.VOID:
                self._pool.ranks(job, number).do_not_save(at_step)
                return
        if order.to_object_store:
            await self._replicator.archive(UploadNow(job, number, at_step))
        if order.to_object_store and number not in self._pool.generations(job):
            return  # the workers have already saved this step and ended
        if order.stage == orders.SaveStage.AGREED:
            self._pool.ranks(job, number).save_as_agreed(at_step, order.leaving)
        else:
            self._pool.ranks(job, number).save(at_step, order.leaving)

    # ------------------------------------------------------------------ prepare

    async def _prepare(self, order: orders.Prepare) -> Outcome:
        key = spans.prepare_key(order.placement.node, order.generation)
        with anyio.CancelScope() as scope:
            preparation = self._generations.prepare(order, scope.cancel)
            job = self._jobs.setdefault(order.job, _Job())
            job.staged = ()
            try:
                with _span(tracing.PREPARE, order, order.traceparent, key):
                    async with job.lock:
                        return await self._change_generation(job, order)
            finally:
                self._generations.over(preparation)
        raise self._generations.overtaken(order)

    async def _change_generation(self, job: _Job, order: orders.Prepare) -> Outcome:
        if order.generation in self._pool.generations(order.job):  # of an earlier run of this name
            await self._pool.stop(order.job, order.generation)
        phases = _Phases(order)
        forked: tuple[RunningWorker, ...] = ()
        tested: Preflight | None = None
        stopped = anyio.Event()

        async def fork() -> None:
            nonlocal forked
            forked = await phases.timed("fork", lambda: self._pool.fork(order))

        async def test() -> None:
            nonlocal tested
            await stopped.wait()  # until then the old workers have the devices open and use their memory
            tested = await phases.timed("self_test", lambda: self._test_suspect(order.suspect_test_s))
            if tested.failures:
                raise FailedTests(order.placement.node, tested)

        async def stage() -> None:
            await phases.timed("stop", lambda: self._pool.stop_all_but(order.job, order.generation))
            stopped.set()
            if order.self_test:
                await phases.timed("self_test", self._self_test)
            job.staged = _with_origins(await phases.timed("stage", lambda: self._stage(order)), job.brought)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fork)
                tasks.start_soon(stage)
                if order.suspect_test_s > 0:
                    tasks.start_soon(test)
        except BaseExceptionGroup as group:
            with anyio.CancelScope(shield=True):
                await self._pool.stop(order.job, order.generation)
            raise _first(group) from group
        master = self._pool.master_of(order.job, order.generation)
        shards, sizes = _sources(job.staged)
        return Outcome(master, phases.taken, forked, shards, sizes, tested=tested)

    async def _stage(self, order: orders.Prepare) -> tuple[StagedShard, ...]:
        await self._replicator.configure(Configure.of(order))
        if not order.restore:
            return ()
        return await self._replicator.stage(Stage(order.job, order.restore, STAGE_TIMEOUT_S))

    # ------------------------------------------------------------------ other orders

    def _start(self, order: orders.Start) -> Outcome:
        self._generations.refuse_older(order.job, order.generation)
        if (master := host_and_port(order.master)) is None:
            raise InvalidSpec("master", order.master, "host:port")
        job = self._jobs.get(order.job) or _Job()
        self._pool.start(order.job, order.generation, master, job.staged)
        job.brought.clear()
        return Outcome()

    async def _stop(self, order: orders.Stop) -> Outcome:
        self._generations.stop(order)
        await self._pool.stop(order.job, order.generation, order.grace_s)
        if order.forget:
            self._generations.forget(order.job)
            self._jobs.pop(order.job, None)
            await self._replicator.forget(order.job)
            remove_images(self._site.memory_dir, order.job)
        elif order.ended:
            await self._replicator.end(EndJob(order.job, order.generation))
        return Outcome()


def _span(
    name: str, order: orders.Prepare, parent: str = "", key: tuple[object, ...] = ()
) -> AbstractContextManager[TraceContext | None]:
    return telemetry.span(name, parent, key=key, job=order.job, node=order.placement.node, generation=order.generation)


_PHASES = ("stop", "fork", "stage", "self_test")


class _Phases:
    """The durations of the parts of an order."""

    def __init__(self, order: orders.Prepare) -> None:
        self._order = order
        self._seconds: dict[str, float] = {}

    async def timed(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        began = time.monotonic()
        try:
            with _span(name, self._order):
                return await work()
        finally:
            self._seconds[name] = time.monotonic() - began

    @property
    def taken(self) -> tuple[tuple[str, float], ...]:
        return tuple((name, self._seconds[name]) for name in _PHASES if name in self._seconds)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception that ended the group. The others are consequences of it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _with_origins(staged: Sequence[StagedShard], brought: dict[str, str]) -> tuple[StagedShard, ...]:
    """Set the source of shards that a replaced generation of the same recovery has fetched, because two nodes that are lost
    together are detected one after the other. Extends `brought`."""
    brought |= {shard.path: shard.source for shard in staged if shard.source not in NEARNESS}
    return tuple(replace(shard, source=brought.get(shard.path, shard.source)) for shard in staged)


_Counts = tuple[tuple[str, int], ...]


def _sources(staged: Sequence[StagedShard]) -> tuple[_Counts, _Counts]:
    """Return the number of shards and of bytes by source; every other node is a "peer". A shard that several ranks restore
    counts once per rank, but its bytes count once."""
    shards: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    seen: set[str] = set()
    for shard in staged:
        source = shard.source if shard.source in (*NEARNESS, OBJECT_STORE) else PEER
        shards[source] += 1
        sizes[source] += 0 if shard.path in seen else shard.size
        seen.add(shard.path)
    return tuple(sorted(shards.items())), tuple(sorted(sizes.items()))
