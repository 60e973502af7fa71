"""Generations of one job overtake each other; whatever the order of events, the newest wins and the old is gone first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from waiting import VIRTUAL_TIME

from holdfast.agent.node import Node
from holdfast.agent.outcome import FailedTests, Outcome
from holdfast.agent.workers.environment import Site
from holdfast.agent.workers.pool import WorkerPool
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, InvalidSpec, Unavailable
from holdfast.domain.generations import Placement, RankRestore, ShardKey
from holdfast.domain.job import CheckpointSpec, HangSpec, LaunchSpec
from holdfast.domain.links import LinkMeasured, MeasureLink, OpenLink
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Check, Preflight, RunningWorker
from holdfast.domain.orders import (
    CheckLink,
    CheckpointNow,
    Inject,
    Prepare,
    Prune,
    RebootNode,
    ResetGpu,
    RestartAgent,
    SaveStage,
    Start,
    Stop,
)
from holdfast.domain.replication import CommonCheckpoint, Configure, EndJob, PruneSteps, Stage, StagedShard, UploadNow

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

RESTORE = RankRestore(0, ShardKey(1, 40, 0), "digest", ())
ORDER = Prepare(
    job="gpt",
    generation=2,
    attempt=2,
    mesh=Mesh.of({"dp": 1}),
    placement=Placement(0, "n", 0, 1),
    nnodes=1,
    launch=LaunchSpec("/train.py"),
    checkpoint=CheckpointSpec(),
    hang=HangSpec(),
    token="t",
    restore_step=40,
    restore=(RESTORE,),
)


class FakePool:
    """Remembers what was done, in order; old workers take `dying_s` to go, new ones `forking_s` to come."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.alive: set[int] = set()
        self.dying_s, self.forking_s = 0.02, 0.01
        self.fork_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.computes_wrongly = False
        self.testing_s = 0.03
        self.started: dict[int, tuple[StagedShard, ...]] = {}
        self.injected: list[Inject] = []

    async def fork(self, order: Prepare) -> tuple[RunningWorker, ...]:
        await anyio.sleep(self.forking_s)
        if self.fork_error is not None:
            raise self.fork_error
        self.alive.add(order.generation)
        self.done.append(f"forked {order.generation}")
        return (RunningWorker("gpt", order.generation, 0, 99),)

    async def stop(self, job: str, through: int, grace_s: float = 0.0) -> None:
        if self.stop_error is not None:
            raise self.stop_error
        await self._end({generation for generation in self.alive if generation <= through})

    async def stop_all_but(self, job: str, number: int) -> None:
        await self._end(self.alive - {number})

    async def self_test(self) -> None:
        self.done.append(f"tested with {sorted(self.alive)}")
        if self.computes_wrongly:
            raise Conflict("n computes wrongly")

    async def test_suspect(self, budget_s: float) -> Preflight:
        self.done.append(f"suspect tested with {sorted(self.alive)}")
        await anyio.sleep(min(budget_s, self.testing_s))
        checks = (Check("products", not self.computes_wrongly, "of cuda:0"),)
        return Preflight(1.0, self.testing_s, checks)

    async def reset_gpus(self, order: ResetGpu) -> Outcome:
        raise AssertionError("no order is about it")

    def restart(self, order: RestartAgent) -> Outcome:
        raise AssertionError(order)

    async def inject(self, order: Inject) -> None:
        self.injected.append(order)

    async def check_link(self, order: CheckLink) -> Outcome:
        raise AssertionError(order)

    async def reboot(self, order: RebootNode) -> Outcome:
        raise AssertionError("no order is about it")

    async def _end(self, generations: set[int]) -> None:
        await anyio.sleep(self.dying_s)
        for generation in sorted(generations):
            if generation in self.alive:
                self.alive.discard(generation)
                self.done.append(f"gone {generation}")

    def start(self, job: str, number: int, master: tuple[str, int], staged: tuple[StagedShard, ...]) -> None:
        self.started[number] = staged

    def ranks(self, job: str, number: int) -> FakePool:
        return self

    def save(self, at_step: int, leaving: str = "") -> None:
        self.done.append(f"save {at_step}")

    async def agree_on_save(self, at_step: int, leaving: str = "") -> None:
        self.done.append(f"agree on {at_step}")

    def save_as_agreed(self, at_step: int, leaving: str = "") -> None:
        self.done.append(f"agreed {at_step}")

    def do_not_save(self, at_step: int) -> None:
        self.done.append(f"void {at_step}")

    def generations(self, job: str) -> tuple[int, ...]:
        return tuple(sorted(self.alive))

    def master_of(self, job: str, generation: int) -> str:
        return "host:5"


class FakeReplicator:
    copying = False
    endpoint, version = "host:7", ""
    inventories = ()

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.staging_s = 0.05
        self.error: Exception | None = None
        self.forgotten: list[str] = []
        self.ended: list[EndJob] = []
        self.pruned: list[PruneSteps] = []
        self.configured: list[int] = []
        self.archived: list[int] = []
        self.brought: dict[ShardKey, StagedShard] = {}
        self.source = "memory"

    async def configure(self, request: Configure) -> None:
        self.configured.append(request.generation)

    async def stage(self, request: Stage) -> tuple[StagedShard, ...]:
        assert not {g for g in self.pool.alive if g < self.configured[-1]}, "an old worker could still write"
        await anyio.sleep(self.staging_s)
        if self.error is not None:
            raise self.error
        key = request.shards[0].shard
        if key not in self.brought:
            self.brought[key] = StagedShard(0, key, f"/shm/{self.configured[-1]}", self.source)
            return (self.brought[key],)
        return (replace(self.brought[key], source="memory"),)

    async def archive(self, request: UploadNow) -> None:
        self.archived.append(request.step)

    def retain(self, saved: CommonCheckpoint) -> None:
        raise AssertionError("no order is about it")

    async def end(self, request: EndJob) -> None:
        self.ended.append(request)

    async def prune(self, request: PruneSteps) -> None:
        self.pruned.append(request)

    async def forget(self, job: str) -> None:
        self.forgotten.append(job)

    async def open_link(self, request: OpenLink) -> None:
        raise AssertionError("no order is about it")

    async def measure_link(self, request: MeasureLink) -> LinkMeasured:
        raise AssertionError("no order is about it")

    async def close_link(self) -> None:
        raise AssertionError("no order is about it")


@asynccontextmanager
async def node() -> AsyncIterator[tuple[Node, FakePool, FakeReplicator]]:
    pool = FakePool()
    replicator = FakeReplicator(pool)
    site = Site(Path("/none"), Path("/none"), Path("/none"), Path("/none"), "")
    made = Node(
        cast(WorkerPool, pool),
        replicator,
        site,
        self_test=pool.self_test,
        test_suspect=pool.test_suspect,
        reset_gpus=pool.reset_gpus,
        reboot=pool.reboot,
        restart=pool.restart,
        check_link=pool.check_link,
        inject=pool.inject,
    )
    yield made, pool, replicator


async def test_only_a_save_for_the_object_store_is_reported_to_the_replicator() -> None:
    async with node() as (subject, pool, replicator):
        pool.alive.add(2)
        await subject.carry_out(CheckpointNow("gpt", 2, 10))
        await subject.carry_out(CheckpointNow("gpt", 2, 20, to_object_store=True))
        assert (pool.done, replicator.archived) == (["save 10", "save 20"], [20])


async def test_only_a_save_that_is_agreed_is_reported_to_the_replicator() -> None:
    async with node() as (subject, pool, replicator):
        pool.alive.add(2)
        for at_step, result in ((10, SaveStage.VOID), (20, SaveStage.AGREED)):
            for stage in (SaveStage.PROPOSED, result):
                order = CheckpointNow("gpt", 2, at_step, to_object_store=True, stage=stage)
                await subject.carry_out(order)
        assert pool.done == ["agree on 10", "void 10", "agree on 20", "agreed 20"]
        assert replicator.archived == [20]


async def test_what_was_saved_goes_far_when_its_workers_have_ended() -> None:
    async with node() as (subject, pool, replicator):
        await subject.carry_out(CheckpointNow("gpt", 2, 20, to_object_store=True))
        assert (pool.done, replicator.archived) == ([], [20])


async def test_prepare_overlaps_stop_and_fork_and_stages_after_the_old_are_gone() -> None:
    async with node() as (subject, pool, _):
        pool.alive = {1}
        began = anyio.current_time()
        outcome = await subject.carry_out(ORDER)
        assert anyio.current_time() - began == pytest.approx(0.07)
        assert pool.done == ["forked 2", "gone 1"]
        assert (outcome.master, outcome.workers[0].generation) == ("host:5", 2)
        await subject.carry_out(Start("gpt", 2, "host:5"))
        assert [shard.path for shard in pool.started[2]] == ["/shm/2"]


async def test_a_suspect_is_tested_beside_its_preparation() -> None:
    async with node() as (subject, pool, _):
        pool.alive = {1}
        began = anyio.current_time()
        outcome = await subject.carry_out(replace(ORDER, suspect_test_s=2.0))
        assert anyio.current_time() - began == pytest.approx(0.07), "as without the test, which is shorter than staging"
        assert pool.done == ["forked 2", "gone 1", "suspect tested with [2]"]
        assert outcome.tested is not None
        assert outcome.tested.failures == ""
        assert [name for name, _ in outcome.phases_s] == ["stop", "fork", "stage", "self_test"]
        pool.testing_s = 60.0
        began = anyio.current_time()
        await subject.carry_out(replace(ORDER, generation=3, suspect_test_s=2.0))
        assert anyio.current_time() - began == pytest.approx(2.02), "the budget, from the end of the old workers on"


async def test_a_suspect_that_fails_has_no_workers_and_does_not_finish_staging() -> None:
    async with node() as (subject, pool, replicator):
        pool.computes_wrongly, replicator.staging_s = True, 30.0
        began = anyio.current_time()
        with pytest.raises(
            FailedTests, match="n was suspected, and has failed its tests: products: of cuda:0"
        ) as failed:
            await subject.carry_out(replace(ORDER, suspect_test_s=2.0))
        assert anyio.current_time() - began < 1.0
        assert failed.value.tested.failures == "products: of cuda:0"
        assert pool.alive == set()


async def test_who_is_not_suspected_is_not_tested() -> None:
    async with node() as (subject, pool, _):
        outcome = await subject.carry_out(ORDER)
        assert (outcome.tested, pool.done) == (None, ["forked 2"])


async def test_a_suspected_node_tests_itself_when_the_old_workers_are_gone() -> None:
    async with node() as (subject, pool, replicator):
        pool.alive = {1}
        await subject.carry_out(replace(ORDER, self_test=True))
        assert pool.done == ["forked 2", "gone 1", "tested with [2]"]
        pool.computes_wrongly = True
        with pytest.raises(Conflict, match="n computes wrongly"):
            await subject.carry_out(replace(ORDER, generation=3, self_test=True))
        assert pool.alive == set()
        assert replicator.configured == [2], "nothing is staged for a node that cannot be used"


async def test_a_newer_prepare_cuts_an_older_one_short() -> None:
    async with node() as (subject, pool, replicator):
        replicator.staging_s = 3600.0  # the peer that holds the shard does not answer
        outcomes: dict[int, Any] = {}

        async def attempt(order: Prepare) -> None:
            try:
                outcomes[order.generation] = await subject.carry_out(order)
            except Conflict as error:
                outcomes[order.generation] = str(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attempt, ORDER)
            await anyio.sleep(1.0)
            replicator.staging_s = 0.05
            tasks.start_soon(attempt, replace(ORDER, generation=3))
        assert "overtaken by 3" in outcomes[2]
        assert isinstance(outcomes[3], Outcome)
        assert pool.alive == {3}
        with pytest.raises(Conflict, match="generation 2 of gpt is over"):
            await subject.carry_out(Start("gpt", 2, "host:5"))


async def test_what_an_overtaken_generation_has_fetched_was_fetched() -> None:
    """The second of two nodes that are lost together is noticed when the shards are here already."""
    async with node() as (subject, _, replicator):
        replicator.source = "n7"
        assert (await subject.carry_out(ORDER)).restored_from == (("peer", 1),)
        assert (await subject.carry_out(replace(ORDER, generation=3))).restored_from == (("peer", 1),)
        await subject.carry_out(Start("gpt", 3, "host:5"))
        assert (await subject.carry_out(replace(ORDER, generation=4))).restored_from == (("memory", 1),)


async def test_stop_cuts_a_preparation_short() -> None:
    async with node() as (subject, pool, replicator):
        replicator.staging_s = 3600.0
        async with anyio.create_task_group() as tasks:

            async def prepare() -> None:
                with pytest.raises(Conflict):
                    await subject.carry_out(ORDER)

            tasks.start_soon(prepare)
            await anyio.sleep(1.0)
            await subject.carry_out(Stop("gpt", 2))
        assert pool.alive == set()


@pytest.mark.parametrize("part", ["fork", "stage"])
async def test_a_failed_preparation_leaves_no_worker_and_says_why(part: str) -> None:
    async with node() as (subject, pool, replicator):
        error = Unavailable("no source has the shard")
        if part == "fork":
            pool.fork_error = error
        else:
            replicator.error = error
        with pytest.raises(Unavailable, match="no source"):
            await subject.carry_out(ORDER)
        assert pool.alive == set()
        pool.fork_error = replicator.error = None
        await subject.carry_out(replace(ORDER, generation=3))
        assert pool.alive == {3}


async def test_a_preparation_that_cannot_stop_an_earlier_run_is_over() -> None:
    async with node() as (subject, pool, _):
        pool.alive = {ORDER.generation}
        pool.stop_error = Unavailable("its process cannot be signalled")
        with pytest.raises(Unavailable, match="cannot be signalled"):
            await subject.carry_out(ORDER)
        assert not subject.is_preparing


async def test_the_same_name_submitted_anew_starts_again_at_one() -> None:
    async with node() as (subject, pool, _):
        await subject.carry_out(replace(ORDER, generation=9))
        with pytest.raises(Conflict):
            await subject.carry_out(replace(ORDER, generation=1))
        await subject.carry_out(replace(ORDER, generation=1, token="another submission"))
        assert pool.alive == {1}
        await subject.carry_out(replace(ORDER, generation=1, token="a third one"))
        assert pool.done[-2:] == ["gone 1", "forked 1"]


async def test_forget_drops_the_jobs_files_and_its_past() -> None:
    async with node() as (subject, pool, replicator):
        await subject.carry_out(ORDER)
        await subject.carry_out(Stop("gpt", 2, forget=True))
        assert (pool.alive, replicator.forgotten) == (set(), ["gpt"])
        await subject.carry_out(replace(ORDER, generation=1))


async def test_a_job_that_is_over_keeps_its_files_until_somebody_deletes_them() -> None:
    async with node() as (subject, pool, replicator):
        await subject.carry_out(ORDER)
        await subject.carry_out(Stop("gpt", 2, ended=True))
        assert (pool.alive, replicator.ended, replicator.forgotten) == (set(), [EndJob("gpt", 2)], [])
        await subject.carry_out(Prune("gpt", (CheckpointId(1, 10), CheckpointId(1, 20))))
        assert replicator.pruned == [PruneSteps("gpt", (CheckpointId(1, 10), CheckpointId(1, 20)))]


async def test_start_wants_an_address() -> None:
    async with node() as (subject, _, _):
        await subject.carry_out(ORDER)
        with pytest.raises(InvalidSpec, match="host:port"):
            await subject.carry_out(Start("gpt", 2, "nowhere"))
