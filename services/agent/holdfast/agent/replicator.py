"""The agent's side of the checkpoint-replicator: runs the process, sends it requests, receives its inventory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import grpc
import structlog
from anyio.abc import TaskStatus

from holdfast.agent.troubles import TroubleReports
from holdfast.agent.workers.logs import open_log, tail
from holdfast.domain.errors import HoldfastError, NotFound, Unavailable, Unrestorable
from holdfast.domain.links import LinkMeasured, MeasureLink, OpenLink
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import (
    CommonCheckpoint,
    Configure,
    EndJob,
    PruneSteps,
    Stage,
    StagedShard,
    Trouble,
    UploadNow,
)
from holdfast.domain.tiers import DURABLE
from holdfast.runtime import freeze
from holdfast.runtime.processes.children import Child, running, spawn
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.runtime.rpc.grpc_channel import cancellable, open_channel
from holdfast.v1 import replicator_pb2 as pb
from holdfast.v1.replicator_pb2_grpc import ReplicatorStub
from holdfast.wire import links as wire_links
from holdfast.wire import shards as wire
from holdfast.wire.retention import encode_end, encode_prune, encode_retain

log = structlog.get_logger("holdfast.agent.replicator")

CALL_TIMEOUT_S = 5.0
PRUNE_TIMEOUT_S = 60.0  # includes the wait for copies of the job in progress
START_TIMEOUT_S = 120.0  # the start takes seconds; a busy machine must not fail the node
READY_POLL_S = 0.01
# A restart of the replicator takes a second or two. After this time the shards of the node are reported as unavailable.
# Shorter than the wait of other nodes (AWAY_S of the replicator).
AWAY_S = 8.0
AGAIN_S = 0.05
LINK_TIMEOUT_S = 25.0  # a test of the network has limits of its own, which are shorter


class Replicator(Protocol):
    """The agent's interface to a replicator. Every call raises `HoldfastError` with the reason if it fails."""

    @property
    def endpoint(self) -> str:
        """`host:port` of the replicator's data plane; empty if this node has no replicator."""

    @property
    def version(self) -> str:
        """Of its package; empty if this node has no replicator, or it has not answered yet."""

    @property
    def inventories(self) -> tuple[Inventory, ...] | None:
        """Its last inventories, one per job; None while it has not told those of all jobs."""

    @property
    def copying(self) -> bool:
        """Whether the newest save of this node's ranks is not on disk yet, or not in the object store of its job."""

    async def configure(self, request: Configure) -> None: ...

    async def stage(self, request: Stage) -> tuple[StagedShard, ...]: ...

    async def archive(self, request: UploadNow) -> None: ...

    def retain(self, saved: CommonCheckpoint) -> None:
        """Forward a retention update. The newest counts, and a restarted replicator receives it again."""

    async def end(self, request: EndJob) -> None: ...

    async def prune(self, request: PruneSteps) -> None: ...

    async def forget(self, job: str) -> None: ...

    async def open_link(self, request: OpenLink) -> None: ...

    async def measure_link(self, request: MeasureLink) -> LinkMeasured:
        """Ends the test if it is cancelled."""

    async def close_link(self) -> None: ...


class NoReplicator:
    """A node without checkpoints: jobs start from scratch, and an order to restore is refused."""

    endpoint = version = ""
    inventories: tuple[Inventory, ...] | None = ()
    copying = False

    async def configure(self, request: Configure) -> None:
        pass  # there are no copies; the node reports this with its empty endpoint

    async def stage(self, request: Stage) -> tuple[StagedShard, ...]:
        raise NotFound(f"this node runs without a replicator and cannot restore {request.job}")

    async def archive(self, request: UploadNow) -> None:
        raise NotFound(f"this node runs without a replicator and cannot upload step {request.step} of {request.job}")

    def retain(self, saved: CommonCheckpoint) -> None:
        pass  # this node has no checkpoints

    async def end(self, request: EndJob) -> None:
        pass

    async def prune(self, request: PruneSteps) -> None:
        pass

    async def forget(self, job: str) -> None:
        pass

    async def open_link(self, request: OpenLink) -> None:
        raise NotFound("this node runs without a replicator and takes no part in tests of the network")

    async def measure_link(self, request: MeasureLink) -> LinkMeasured:
        raise NotFound(f"this node runs without a replicator and cannot test the network with {request.node}")

    async def close_link(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatorPlaces:
    """Paths and addresses of one replicator. `listen` is its data plane's `host:port`."""

    node: str
    agent_dir: Path
    memory_dir: Path
    disk_dir: Path
    listen: str

    @property
    def socket(self) -> Path:
        return self.agent_dir / "replicator.sock"

    @property
    def notes(self) -> Path:
        return self.agent_dir / "replicator.notes"


class _Died(Unavailable):
    """The connection failed."""


class _Late(Unavailable):
    """No answer within the timeout."""


_KINDS: Mapping[grpc.StatusCode, type[Unavailable]] = {
    grpc.StatusCode.ABORTED: Unrestorable,
    grpc.StatusCode.UNAVAILABLE: _Died,
    grpc.StatusCode.DEADLINE_EXCEEDED: _Late,
}


def is_copying(served: Configure, held: Inventory | None) -> bool:
    """Whether the newest step that the ranks of this node have saved is not on disk yet, or not in the job's object store."""
    own = [each for each in (held.shards if held else ()) if each.key.rank in served.ranks]
    own = [each for each in own if each.key.attempt == served.attempt]
    newest = max((each.key.step for each in own), default=0)
    if held is None or not newest:
        return False
    on_disk = {each.key.rank for each in own if each.key.step == newest and each.tier in DURABLE}
    stored = (served.attempt, newest) in {(each.attempt, each.step) for each in held.stored}
    return len(on_disk) < len(served.ranks) or (bool(served.store) and not stored)


class LocalReplicator:
    """The replicator process of this node; if it exits, it is restarted on the same port while training continues."""

    def __init__(
        self,
        places: ReplicatorPlaces,
        environment: Mapping[str, str],
        on_inventory: Callable[[Inventory], None],
        on_trouble: Callable[[str, Trouble], None],
    ) -> None:
        """`on_trouble` is called with the job when a problem is new, and repeatedly while it lasts."""
        self._places = places
        self._environment = environment
        self._on_inventory = on_inventory
        self._on_trouble = on_trouble
        self._channel = open_channel(f"unix:{places.socket}")
        self._stub = ReplicatorStub(self._channel)
        self._log_path = places.agent_dir / "replicator.log"
        self._ready_path = places.agent_dir / "replicator.ready"
        self._listen = places.listen
        self._endpoint = ""
        self._version = ""
        self._held: dict[str, Inventory] = {}  # by job
        self._started = False  # whether the agent was told that the replicator has started
        self._listed = anyio.Event()  # set when `_held` has every job, until its inventories are withdrawn
        self._troubles = TroubleReports()
        self._retained: dict[str, CommonCheckpoint] = {}  # by job, the newest; dropped with the job
        self._served: dict[str, Configure] = {}  # by job, as last configured
        self._retain_changed = anyio.Event()
        self._died, self._serves = anyio.Event(), anyio.Event()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def version(self) -> str:
        return self._version

    @property
    def inventories(self) -> tuple[Inventory, ...] | None:
        return tuple(self._held.values()) if self._listed.is_set() else None

    @property
    def copying(self) -> bool:
        return any(is_copying(served, self._held.get(job)) for job, served in self._served.items())

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Reports `started` when the first process serves and has told its inventories: the agent's first
        session announces them. Raises `Unavailable` if it does not serve."""
        backoff = Backoff(first_s=0.1, max_s=5.0)
        first = True
        async with self._channel:
            while True:
                try:
                    spawned = self._spawn()
                except (HoldfastError, OSError) as error:  # no process or descriptor available now
                    if first:
                        raise
                    log.error("replicator restart failed", reason=str(error))
                    await backoff.sleep()
                    continue
                async with running(spawned) as child:
                    served = await self._serve(child)
                    if served and first:
                        first = False
                        backoff.reset()
                    if served:
                        self._serves.set()
                        await self._follow(child, task_status)
                    code = await child.wait()
                if self._serves.is_set():
                    self._serves = anyio.Event()
                    self._died.set()
                if first:
                    output = "; ".join(tail(self._log_path, lines_max=3))
                    raise Unavailable(
                        f"the checkpoint-replicator exited with code {code} before it was serving: {output}"
                    )
                log.error("replicator exited", code=code, log=str(self._log_path))
                await backoff.sleep()

    async def configure(self, request: Configure) -> None:
        await self._call_again(self._stub.Configure, wire.encode_configure(request), AWAY_S)
        self._served[request.job] = request

    async def stage(self, request: Stage) -> tuple[StagedShard, ...]:
        timeout_s = request.timeout_s + CALL_TIMEOUT_S
        answer = await self._call_again(self._stub.Stage, wire.encode_stage(request), timeout_s)
        return wire.decode_staged(answer)

    async def archive(self, request: UploadNow) -> None:
        await self._call(self._stub.Archive, wire.encode_archive(request), CALL_TIMEOUT_S)

    def retain(self, saved: CommonCheckpoint) -> None:
        known = self._retained.get(saved.job)
        if known is None or known.checkpoint_id < saved.checkpoint_id:
            self._retained[saved.job] = saved
            self._retain_changed.set()

    async def end(self, request: EndJob) -> None:
        self._retained.pop(request.job, None)
        self._served.pop(request.job, None)
        await self._call(self._stub.End, encode_end(request), CALL_TIMEOUT_S)

    async def prune(self, request: PruneSteps) -> None:
        await self._call(self._stub.Prune, encode_prune(request), PRUNE_TIMEOUT_S)

    async def forget(self, job: str) -> None:
        self._retained.pop(job, None)
        self._served.pop(job, None)
        await self._call(self._stub.Forget, pb.ForgetRequest(job=job), PRUNE_TIMEOUT_S)

    async def open_link(self, request: OpenLink) -> None:
        await self._call(self._stub.OpenLink, wire_links.encode_open(request), CALL_TIMEOUT_S)

    async def measure_link(self, request: MeasureLink) -> LinkMeasured:
        return wire_links.decode_measured(
            await self._call(self._stub.MeasureLink, wire_links.encode_measure(request), LINK_TIMEOUT_S)
        )

    async def close_link(self) -> None:
        await self._call(self._stub.CloseLink, pb.CloseLinkRequest(), CALL_TIMEOUT_S)

    def _spawn(self) -> Child:
        self._ready_path.unlink(missing_ok=True)
        output = open_log(self._log_path)
        try:
            return spawn(
                "checkpoint-replicator",
                [sys.executable, "-m", "holdfast.replicator"],
                env={
                    **self._environment,
                    "HOLDFAST_NODE": self._places.node,
                    "HOLDFAST_MEMORY_DIR": str(self._places.memory_dir),
                    "HOLDFAST_DISK_DIR": str(self._places.disk_dir),
                    "HOLDFAST_REPLICATOR_SOCKET": str(self._places.socket),
                    "HOLDFAST_REPLICATOR_NOTES": str(self._places.notes),
                    "HOLDFAST_REPLICATOR_LISTEN": self._listen,
                    "HOLDFAST_READY_FILE": str(self._ready_path),
                },
                output=output,
            )
        finally:
            os.close(output)

    async def _serve(self, child: Child) -> bool:
        """Wait until the process serves. Returns False if it exited, or if it was killed after the timeout."""
        served = False

        async def until_exited() -> None:
            await child.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_exited)
            with freeze.patience(START_TIMEOUT_S):
                served = await self._wait_ready()
            tasks.cancel_scope.cancel()
        if not served:
            child.kill()
        return served

    async def _wait_ready(self) -> bool:
        while not self._ready_path.exists():  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(READY_POLL_S)
        try:
            described: pb.DescribeResponse = await self._call(
                self._stub.Describe, pb.DescribeRequest(), START_TIMEOUT_S
            )
        except Unavailable as error:
            log.error("replicator not reachable", reason=str(error))
            return False
        self._version = described.version
        self._endpoint = self._listen = described.endpoint  # a restarted process uses the same port, which peers know
        return True

    async def _follow(self, child: Child, task_status: TaskStatus[None]) -> None:
        """Receive the process's inventory and send it retention updates, until it exits."""

        async def start_when_listed() -> None:
            await self._listed.wait()
            if not self._started:
                self._started = True
                task_status.started()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_inventory)
            tasks.start_soon(self._pass_on_retained)
            tasks.start_soon(start_when_listed)
            await child.wait()
            tasks.cancel_scope.cancel()

    async def _watch_inventory(self) -> None:
        backoff = Backoff(first_s=0.02, max_s=1.0)
        while True:
            try:
                async for message in self._stub.WatchInventory(pb.WatchInventoryRequest(), wait_for_ready=True):
                    backoff.reset()
                    if not message.job:
                        self._listed.set()  # those of all jobs have been sent
                        continue
                    self._take(wire.decode_inventory(message))
                    self._pass_on_troubles(message.job, wire.decode_troubles(message))
            except grpc.aio.AioRpcError as error:
                log.warning("inventory stream failed", reason=error.details())
            await backoff.sleep()

    async def _pass_on_retained(self) -> None:
        """Send all retention updates to a new process, then changes."""
        sent: dict[str, CommonCheckpoint] = {}
        while True:
            changed = self._retain_changed
            for job, saved in list(self._retained.items()):
                if sent.get(job) == saved:
                    continue
                try:
                    await self._call(self._stub.Retain, encode_retain(saved), CALL_TIMEOUT_S)
                except Unavailable as error:  # the replicator retains more checkpoints until the next update
                    log.warning("retention update not delivered", job=job, reason=str(error))
                sent[job] = saved
            sent = {job: saved for job, saved in sent.items() if job in self._retained}
            await changed.wait()
            self._retain_changed = anyio.Event()

    def _pass_on_troubles(self, job: str, troubles: tuple[Trouble, ...]) -> None:
        for trouble in self._troubles.due(job, troubles, time.monotonic()):
            self._on_trouble(job, trouble)

    def _take(self, inventory: Inventory) -> None:
        if inventory.shards or inventory.stored:
            self._held[inventory.job] = inventory
        else:
            self._held.pop(inventory.job, None)
        self._on_inventory(inventory)

    async def _call_again(self, method: Any, request: Any, timeout_s: float) -> Any:
        """As `_call`, but repeated for up to `AWAY_S` if the replicator exited or this process was frozen during the call."""
        deadline = freeze.awake() + AWAY_S
        while True:
            frozen_s = freeze.frozen_s()
            try:
                return await self._call(method, request, timeout_s)
            except _Died:
                if freeze.awake() >= deadline:
                    raise
            except _Late:
                if freeze.frozen_s() == frozen_s:
                    raise
            await anyio.sleep(AGAIN_S)

    async def withdraw_when_away(self) -> None:
        """Withdraw the inventory of a replicator that does not restart within `AWAY_S`. Never returns."""
        while True:
            await self._died.wait()
            self._died = anyio.Event()
            with freeze.patience(AWAY_S) as waited:
                await self._serves.wait()
            if waited.cancelled_caught:
                held, self._held, self._listed = self._held, {}, anyio.Event()
                log.error("replicator unavailable: its shards withdrawn", jobs=sorted(held))
                for job in held:
                    self._on_inventory(Inventory(job, ()))

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Call the replicator, waiting if it is restarting. Raises `Unavailable` with its message, or `Unrestorable` if
        it has tried every source of a shard."""
        try:
            return await cancellable(method(request, timeout=timeout_s, wait_for_ready=True))
        except grpc.aio.AioRpcError as error:
            kind = _KINDS.get(error.code(), Unavailable)
            raise kind(f"checkpoint-replicator: {error.details() or error.code().name}") from error
