"""Injects faults into ranks of this node, for a job that allows it. The command and the supervisor make the same checks, but
only the checks of this module cannot be bypassed by another client.

Theory. A lasting fault has a deadline in this agent, so it also ends if the supervisor, the network or the requester is lost.
If this agent ends, its workers end with it, and the file that fills a disk is deleted; if the agent was killed, the next agent
of this directory deletes the file at its start. Faults of the whole machine (lost packets, a clock that jumps) are off unless a
setting of this agent allows them. A separate process causes and ends them (`machine_faults`). A worker is signalled through its
pidfd, which never refers to another process. For a lost node, this agent kills itself by SIGKILL shortly after its answer."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from holdfast.agent.injection import machine_faults
from holdfast.agent.injection.machine_faults import MachineFault
from holdfast.agent.injection.stored_faults import fill, flip_bit, remove_filler, require_fillable
from holdfast.agent.workers.pool import WorkerPool
from holdfast.agent.workers.worker import Worker
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec
from holdfast.domain.faults import CONTROL_PLANE, DIE_AFTER_S, FaultKind, require_allowed, require_valid, xid_line
from holdfast.domain.orders import Inject
from holdfast.runtime.kernel_records import kernel_record

log = structlog.get_logger("holdfast.agent.injection.faults")

# A slow rank is stopped for half of each period. A period is not longer than a short step, so that every step is slow and not
# one in three. It is much shorter than the time after which a process counts as stopped (2 s).
PERIOD_S: Final = 0.05
TOP_UP_S: Final = 1.0  # interval at which space that became free on a disk is filled again
LASTING_MAX: Final = 64  # faults at a time
FILL_BYTES_MAX: Final = 16 * 2**30
UNDO_AGAIN_S: Final = 5.0
MACHINE: Final = (FaultKind.LOSSY_LINK, FaultKind.CLOCK_JUMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFaultRules:
    """The operator's limits for this node. `link`: the interface that may lose packets; empty = none."""

    link: str = ""
    loss_percent_max: float = 0.0
    clock_s_max: float = 0.0


class Faults:
    """`die` ends this agent at once. `disk_dir` and `memory_dir` contain the stored checkpoints. The file that fills the disk
    has at most `fill_bytes_max` bytes. `agent_dir` contains the records of faults of the machine."""

    def __init__(
        self,
        pool: WorkerPool,
        kernel_log: Path,
        *,
        disk_dir: Path,
        memory_dir: Path,
        agent_dir: Path,
        fill_bytes_max: int = FILL_BYTES_MAX,
        rules: MachineFaultRules = MachineFaultRules(),
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._kernel_log = kernel_log
        self._die = die
        self._clock = clock
        self._disk_dir, self._memory_dir = disk_dir, memory_dir
        self._fill_bytes_max = fill_bytes_max
        self._agent_dir, self._rules = agent_dir, rules
        self._of_machine: set[FaultKind] = set()  # in progress
        self._chance = random.SystemRandom()
        self._lasting = 0
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Run the lasting faults until cancelled. Faults that an earlier agent has left are undone first."""
        if remove_filler(self._disk_dir):
            log.warning(
                "file of an earlier agent's injected fault deleted from the disk", directory=str(self._disk_dir)
            )
        async with anyio.create_task_group() as self._tasks:
            for kind in MACHINE:
                if machine_faults.record_of(kind, self._agent_dir).exists():
                    self._tasks.start_soon(self._undo_left, kind, name=f"undo {kind}")
            await anyio.sleep_forever()

    async def _undo_left(self, kind: FaultKind) -> None:
        """Undo a fault of an earlier agent, repeatedly until it succeeds. While its record exists, no other fault of this kind
        is injected."""
        while True:
            try:
                await to_thread.run_sync(machine_faults.undo, kind, self._agent_dir)
            except HoldfastError as error:
                log.error("a fault that an earlier agent injected is not undone", fault=kind.value, reason=str(error))
                await anyio.sleep(UNDO_AGAIN_S)
            else:
                log.warning("a fault that an earlier agent injected is undone", fault=kind.value)
                return

    async def inject(self, order: Inject) -> str:
        """Cause a fault. Returns a description of it. Raises `Conflict` or `InvalidSpec` with the reason if it is refused."""
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
            case FaultKind.LOSSY_LINK | FaultKind.CLOCK_JUMP as kind:
                did = await self._disturb_machine(kind, order)
            case FaultKind.REDIS_KILL | FaultKind.LEADER_KILL:
                raise Conflict(f"{order.kind} is a fault of the control plane, which an agent cannot cause")
        log.warning("fault injected", job=order.job, rank=order.rank, fault=order.kind, did=did)
        return did

    def _allowed(self, order: Inject) -> Worker:
        if order.kind not in set(FaultKind):
            raise InvalidSpec("kind", order.kind, ", ".join(kind for kind in FaultKind if kind not in CONTROL_PLANE))
        if not math.isfinite(order.not_after):
            raise InvalidSpec("not_after", order.not_after, "Unix seconds")
        require_valid(
            FaultKind(order.kind),
            for_s=order.for_s,
            xid=order.xid,
            loss_percent=order.loss_percent,
            offset_s=order.offset_s,
        )
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
        record = kernel_record(xid_line(code), device=self._kernel_log.is_char_device())
        try:
            with self._kernel_log.open("ab", buffering=0) as file:
                file.write(record)
        except OSError as error:
            raise Conflict(f"the kernel log {self._kernel_log} cannot be written: {error.strerror}") from error
        return f"Xid {code} written to {self._kernel_log}"

    async def _disturb_machine(self, kind: FaultKind, order: Inject) -> str:
        tasks = self._require_room()
        rules = self._rules
        if kind is FaultKind.LOSSY_LINK:
            if not rules.link:
                raise Conflict(
                    "this agent does not allow lossy_link; set HOLDFAST_FAULT_LINK to the interface that may lose packets"
                )
            if order.loss_percent > rules.loss_percent_max:
                raise Conflict(
                    f"{order.loss_percent:g} % of the packets are more than the {rules.loss_percent_max:g} % that may be lost "
                    "on this node (HOLDFAST_FAULT_LOSS_PERCENT_MAX of the agent)"
                )
            values: dict[str, object] = {"interface": rules.link, "percent": order.loss_percent}
            did = f"{order.loss_percent:g} % of the packets of {rules.link} are lost for {order.for_s:g} s"
        else:
            if abs(order.offset_s) > rules.clock_s_max:
                raise Conflict(
                    f"this agent allows the clock of its machine to jump by at most {rules.clock_s_max:g} s, and "
                    f"{order.offset_s:g} s are requested (HOLDFAST_FAULT_CLOCK_S_MAX; all processes here share the clock)"
                )
            values = {"offset_s": order.offset_s}
            did = f"the clock of this machine jumps by {order.offset_s:+g} s for {order.for_s:g} s"
        if kind in self._of_machine or machine_faults.record_of(kind, self._agent_dir).exists():
            raise Conflict(f"an injected {kind} lasts already on this node")
        self._of_machine.add(kind)
        try:
            # Not in a separate task: if the agent ends now, the process notices it and ends the fault.
            begin = partial(MachineFault, kind, self._agent_dir, order.for_s, **values)
            fault = await to_thread.run_sync(begin)
        except BaseException:
            self._of_machine.discard(kind)
            raise
        self._lasting += 1
        tasks.start_soon(self._last_on_machine, kind, order, fault, name=f"injected {kind}")
        return did

    async def _last_on_machine(self, kind: FaultKind, order: Inject, fault: MachineFault) -> None:
        try:
            await to_thread.run_sync(fault.wait, abandon_on_cancel=True)
            while (reason := await self._undone(kind, fault)) is not None:  # the process was killed, or has failed
                log.error("an injected fault cannot be undone; trying again", fault=kind.value, reason=reason)
                await anyio.sleep(UNDO_AGAIN_S)
        finally:
            with anyio.CancelScope(shield=True):
                reason = await self._undone(kind, fault)
            self._of_machine.discard(kind)
            self._lasting -= 1
            log.info("injected fault ended", job=order.job, fault=kind.value, reason=reason)

    async def _undone(self, kind: FaultKind, fault: MachineFault) -> str | None:
        """End the process and undo the fault. Returns the reason if that fails; None = undone."""
        await to_thread.run_sync(fault.end)
        try:
            await to_thread.run_sync(machine_faults.undo, kind, self._agent_dir)
        except HoldfastError as error:
            return str(error)
        return None

    def _require_room(self) -> TaskGroup:
        if self._tasks is None:
            raise Conflict("the agent is still starting")
        if self._lasting >= LASTING_MAX:
            raise Conflict(f"{LASTING_MAX} injected faults last already on this node")
        return self._tasks

    def _begin(self, order: Inject, worker: Worker | None) -> None:
        tasks = self._require_room()
        self._lasting += 1
        lasting = self._full_disk if order.kind == FaultKind.DISK_FULL else self._last
        tasks.start_soon(lasting, order, worker, name=f"injected {order.kind}")

    async def _full_disk(self, order: Inject, worker: Worker | None) -> None:
        try:
            with anyio.move_on_after(order.for_s):
                while True:  # fill space again that becomes free when files are deleted
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
