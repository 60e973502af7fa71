"""Causes faults in ranks of this node, for a job that allows it. The last of three checks: the command and the supervisor
refuse what is refused here, but only this one cannot be bypassed by another client.

Theory. A fault that lasts (`hang`, `slow`, `disk_full`) has a deadline here, so it ends although the supervisor, the network or
whoever asked for it is gone. If this agent ends, its workers end with it, and the file that fills a disk is deleted; if it was
killed, at the next start of an agent of this directory. A worker is signalled through its pidfd, which can never mean
another process. A lost node is this agent's own end by SIGKILL, a moment after the answer."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent.stored_faults import fill, flip_bit, remove_filler, require_fillable
from holdfast.agent.workers.pool import WorkerPool
from holdfast.agent.workers.worker import Worker
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.faults import FOR_S_MAX, XID_MAX, FaultKind, require_allowed, xid_line
from holdfast.domain.orders import Inject
from holdfast.runtime.kernel_records import kernel_record

log = structlog.get_logger("holdfast.agent.faults")

# Of a slow rank: half of it stopped. No longer than a short step, so that every step is slow and not one in three; and much
# less than what counts as stopped (2 s).
PERIOD_S: Final = 0.05
DIE_AFTER_S: Final = 0.5  # for the answer, which is on its way
TOP_UP_S: Final = 1.0  # between two looks at what became free on a disk that is to be full
LASTING_MAX: Final = 64  # faults at a time
FILL_BYTES_MAX: Final = 16 * 2**30


class Faults:
    """`die` ends this agent at once. `disk_dir` and `memory_dir` have the stored checkpoints; the file that fills the disk has
    at most `fill_bytes_max`."""

    def __init__(
        self,
        pool: WorkerPool,
        kernel_log: Path,
        *,
        disk_dir: Path,
        memory_dir: Path,
        fill_bytes_max: int = FILL_BYTES_MAX,
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._kernel_log = kernel_log
        self._die = die
        self._clock = clock
        self._disk_dir, self._memory_dir = disk_dir, memory_dir
        self._fill_bytes_max = fill_bytes_max
        self._chance = random.SystemRandom()
        self._lasting = 0
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled: the faults that last. What an agent before this one left behind is put right first."""
        if remove_filler(self._disk_dir):
            log.warning(
                "the disk was full by a fault that an earlier agent injected: made room", directory=str(self._disk_dir)
            )
        async with anyio.create_task_group() as self._tasks:
            await anyio.sleep_forever()

    def inject(self, order: Inject) -> str:
        """Cause it. Returns what was done; raises `Conflict` or `InvalidSpec` with the reason why nothing was."""
        worker = self._allowed(order)
        who = f"rank {order.rank} of {order.job} (pid {worker.pid})"
        match FaultKind(order.kind):
            case FaultKind.CRASH:
                worker.kill()
                did = f"SIGKILL to {who}"
            case FaultKind.HANG:
                self._begin(order, worker)
                did = f"SIGSTOP to {who} for {order.for_s:g} s"
            case FaultKind.SLOW:
                self._begin(order, worker)
                did = f"{who} runs half of the time for {order.for_s:g} s"
            case FaultKind.NODE_LOSS:
                self._begin(order, None)
                did = f"SIGKILL to the agent (pid {os.getpid()}) and so to all workers"
            case FaultKind.XID:
                did = self._xid(order.xid)
            case FaultKind.DISK_FULL:
                require_fillable(self._disk_dir, self._fill_bytes_max)
                self._begin(order, worker)
                did = f"{self._disk_dir} is full for {order.for_s:g} s"
            case FaultKind.BIT_FLIP:
                did = flip_bit(self._disk_dir, self._memory_dir, order.job, order.rank, self._chance)
        log.warning("fault injected", job=order.job, rank=order.rank, fault=order.kind, did=did)
        return did

    def _allowed(self, order: Inject) -> Worker:
        if order.kind not in set(FaultKind):
            raise InvalidSpec("kind", order.kind, ", ".join(FaultKind))
        if not (0 < order.for_s <= FOR_S_MAX and math.isfinite(order.not_after)):
            raise InvalidSpec("for_s", order.for_s, f"more than 0 and at most {FOR_S_MAX:g} s")
        generation = self._pool.running_generation(order.job, order.generation)
        if generation is None:
            raise Conflict(f"generation {order.generation} of {order.job} does not run here")
        require_allowed(order.job, generation.order.chaos)
        if self._clock() > order.not_after:
            raise Conflict("the order is too old")
        worker = generation.workers.get(order.rank)
        if worker is None or not worker.alive:
            raise Conflict(f"rank {order.rank} of {order.job} does not run here")
        return worker

    def _xid(self, code: int) -> str:
        if not 1 <= code <= XID_MAX:
            raise InvalidSpec("xid", code, f"1 to {XID_MAX}")
        record = kernel_record(xid_line(code), device=self._kernel_log.is_char_device())
        try:
            with self._kernel_log.open("ab", buffering=0) as file:
                file.write(record)
        except OSError as error:
            raise Conflict(f"the kernel log {self._kernel_log} cannot be written: {error.strerror}") from error
        return f"Xid {code} written to {self._kernel_log}"

    def _begin(self, order: Inject, worker: Worker | None) -> None:
        if self._tasks is None:
            raise Conflict("the agent is still starting")
        if self._lasting >= LASTING_MAX:
            raise Conflict(f"{LASTING_MAX} injected faults last already on this node")
        self._lasting += 1
        lasting = self._full_disk if order.kind == FaultKind.DISK_FULL else self._last
        self._tasks.start_soon(lasting, order, worker, name=f"injected {order.kind}")

    async def _full_disk(self, order: Inject, worker: Worker | None) -> None:
        try:
            with anyio.move_on_after(order.for_s):
                while True:  # others delete files: it stays full
                    await anyio.to_thread.run_sync(fill, self._disk_dir, self._fill_bytes_max)
                    await anyio.sleep(TOP_UP_S)
        except OSError as error:
            log.warning("the disk cannot be filled", directory=str(self._disk_dir), error=str(error))
        finally:
            remove_filler(self._disk_dir)
            self._lasting -= 1
            log.info("injected fault ended", job=order.job, fault=order.kind, directory=str(self._disk_dir))

    async def _last(self, order: Inject, worker: Worker | None) -> None:
        if worker is None:
            await anyio.sleep(DIE_AFTER_S)
            self._die()
            return
        try:
            with anyio.move_on_after(order.for_s):
                if order.kind == FaultKind.HANG:
                    worker.kill(signal.SIGSTOP)
                    await worker.gone.wait()
                while worker.alive:
                    worker.kill(signal.SIGSTOP)
                    await anyio.sleep(PERIOD_S / 2)
                    worker.kill(signal.SIGCONT)
                    await anyio.sleep(PERIOD_S / 2)
        finally:
            worker.kill(signal.SIGCONT)
            self._lasting -= 1
            log.info("injected fault ended", job=order.job, rank=order.rank, fault=order.kind)
