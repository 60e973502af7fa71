"""What silent ranks are doing, observed from outside because a hanging process may not be able to answer.

Ranks that finish steps are not queried. When all ranks of a node have been silent for unusually long (`Progress.silent_s`),
their flight recorders are queried once a second for their counters, which show collective progress. After 2 s of this, or a
third of the job's `floor_s` if that is less, all available evidence is sent to diagnostics: the recorders' rows and, for each
process, where it waits in the kernel, whether its interpreter lock is held, and its innermost frames.

The recorder is queried through torch's worker server (`holdfast.train.observing.recorder`), whose C++ threads answer while the
interpreter lock is held. A request for the Python stack through the same server is answered only when the lock is free, which
is how a held lock is detected. The stack then requires py-spy."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import structlog

from holdfast.agent.workers.generation import LocalGeneration
from holdfast.agent.workers.procfs import kernel_wait
from holdfast.agent.workers.progress import Progress
from holdfast.agent.workers.recorders import post
from holdfast.agent.workers.stacks import of_faulthandler, of_pyspy
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.signals import NodeSignal
from holdfast.runtime import freeze
from holdfast.wire.flight_recorder import entered_total, parse_json, records_messages, rows_of

log = structlog.get_logger("holdfast.agent.standstill")

CHECK_INTERVAL_S = 0.25  # a check costs nothing while ranks send messages
POLL_INTERVAL_S = 1.0  # of one generation's recorders
REPEAT_S = 5.0  # an unchanged snapshot is sent again after this time, because diagnostics may have restarted
ANSWER_TIMEOUT_S = 0.5  # an answer takes milliseconds, unless the process is stopped
STACK_TIMEOUT_S = 1.0
EVIDENCE_SHARE = 1 / 3  # of `floor_s`; diagnostics can report a hang after `floor_s`,
EVIDENCE_S_MAX = 2.0  # and earlier if a rank is provably stuck

# (handler, query) of torch's worker server: the recorder of gloo and similar backends, and that of NCCL. Torch before 2.9 has
# only the second, a build without CUDA only the first.
_RECORDERS = (("fr_trace_json", ""), ("dump_nccl_trace_json", "onlyactive=true"))


@dataclass(slots=True)
class _Case:
    """One generation without progress. `sent`: the last snapshot that was sent."""

    polled_at: float = 0.0
    sent_at: float = 0.0
    sent: StallSnapshot | None = None
    # (interpreter, stack) by rank, taken once, because sampling interrupts the process
    stacks: dict[int, tuple[str, str]] | None = None


class StandstillWatch:
    """`generations` returns those that run on this node. `emit` receives the signal. Malformed answers are counted in
    `refused`."""

    def __init__(
        self,
        *,
        node: str,
        generations: Callable[[], Iterable[LocalGeneration]],
        emit: Callable[[NodeSignal], None],
        uid: int | None = None,
    ) -> None:
        """`uid`: the user of the workers; None = that of this process."""
        self._uid = uid
        self._node = node
        self._generations = generations
        self._emit = emit
        self._cases: dict[tuple[str, int], _Case] = {}
        self._pyspy = _find_pyspy()
        self.refused = 0

    async def run(self) -> None:
        """A loop for the agent's task group."""
        while True:
            await anyio.sleep(CHECK_INTERVAL_S)
            await self.look(time.time())

    async def look(self, at: float) -> None:
        """Check all generations of this node once, at `at` (Unix s)."""
        still = {
            (generation.order.job, generation.order.generation): generation
            for generation in self._generations()
            if generation.silent_s(at) > 0 and any(path.exists() for path in generation.recorders.values())
        }
        self._cases = {key: self._cases.get(key, _Case()) for key in still}
        for key, generation in still.items():
            case = self._cases[key]
            if at - case.polled_at >= POLL_INTERVAL_S:
                case.polled_at = at
                await self._ask(generation, case, at)

    async def _ask(self, generation: LocalGeneration, case: _Case, at: float) -> None:
        dumps = await self._dumps(generation)
        _progress(generation).counted({rank: sum(map(entered_total, of_rank)) for rank, of_rank in dumps.items()})
        if generation.silent_s(at) < min(generation.order.hang.floor_s * EVIDENCE_SHARE, EVIDENCE_S_MAX):
            return
        if case.stacks is None:
            case.stacks = await self._stacks(generation)
        snapshot = self._snapshot(generation, dumps, case.stacks, at)
        if case.sent is None or replace(snapshot, at=case.sent.at) != case.sent or at - case.sent_at >= REPEAT_S:
            case.sent, case.sent_at = snapshot, at
            self._emit(snapshot)

    def _snapshot(
        self,
        generation: LocalGeneration,
        dumps: Mapping[int, list[Any]],
        stacks: Mapping[int, tuple[str, str]],
        at: float,
    ) -> StallSnapshot:
        workers = {rank: worker for rank, worker in sorted(generation.workers.items()) if worker.alive}
        return StallSnapshot(
            node=self._node,
            at=at,
            job=generation.order.job,
            generation=generation.order.generation,
            rank=tuple(workers),
            answered=tuple(rank in dumps for rank in workers),
            interpreter=tuple(stacks.get(rank, ("", ""))[0] for rank in workers),
            messages=tuple(rank in dumps and all(map(records_messages, dumps[rank])) for rank in workers),
            kernel=tuple(kernel_wait(worker.pid) for worker in workers.values()),
            stack=tuple(stacks.get(rank, ("", ""))[1] for rank in workers),
            rows=self._rows(generation, dumps),
        )

    def _rows(self, generation: LocalGeneration, dumps: Mapping[int, list[Any]]) -> CollectiveRows:
        """Return the rows of every rank with a valid dump."""
        parts = []
        for rank, of_rank in dumps.items():
            try:
                parts.append(rows_of(((rank, dump) for dump in of_rank), _progress(generation).groups_of(rank)))
            except MalformedMessage as error:
                self._refuse(generation, rank, error)
        return CollectiveRows.of(parts)

    # ------------------------------------------------------------------ asking

    async def _dumps(self, generation: LocalGeneration) -> dict[int, list[Any]]:
        """Return the dumps of the recorders that answer, by rank. A process may have one recorder for each backend."""
        found: dict[int, list[Any]] = {}

        async def ask(rank: int, path: Path) -> None:
            for handler, query in _RECORDERS:
                raw = await post(path, handler, query, ANSWER_TIMEOUT_S, self._uid)
                if raw is None:
                    continue
                try:
                    dump = parse_json(raw)
                    entered_total(dump)
                    found.setdefault(rank, []).append(dump)
                except MalformedMessage as error:
                    self._refuse(generation, rank, error)

        async with anyio.create_task_group() as tasks:
            for worker in generation.alive:
                tasks.start_soon(ask, worker.identity.rank, generation.recorders[worker.identity.rank])
        return found

    async def _stacks(self, generation: LocalGeneration) -> dict[int, tuple[str, str]]:
        """Return the state of the interpreter lock and the innermost frames, by rank."""
        found: dict[int, tuple[str, str]] = {}

        async def sample(rank: int, pid: int, path: Path) -> None:
            found[rank] = await self._stack(pid, path)

        async with anyio.create_task_group() as tasks:
            for worker in generation.alive:
                rank = worker.identity.rank
                tasks.start_soon(sample, rank, worker.pid, generation.recorders[rank])
        return found

    async def _stack(self, pid: int, path: Path) -> tuple[str, str]:
        """Request the stack from the process. If it does not answer although its recorder's server does, its interpreter lock
        is held."""
        raw = await post(path, "dump_traceback", "", STACK_TIMEOUT_S, self._uid)
        if raw is not None:
            return "free", of_faulthandler(raw.decode(errors="replace"))
        held = await post(path, "ping", "", ANSWER_TIMEOUT_S, self._uid) is not None
        return "held" if held else "", await self._by_pyspy(pid)

    async def _by_pyspy(self, pid: int) -> str:
        """Return the stack as read by py-spy; "" if py-spy is not installed or not permitted."""
        if not self._pyspy:
            return ""
        with freeze.patience(STACK_TIMEOUT_S):
            try:
                ended = await anyio.run_process([self._pyspy, "dump", "--nonblocking", "--pid", str(pid)], check=False)
            except OSError as error:  # no process or descriptor is available
                log.warning("py-spy not started", pid=pid, reason=str(error))
                return ""
            if ended.returncode == 0:
                return of_pyspy(ended.stdout.decode(errors="replace"))
            log.debug("py-spy failed", pid=pid, reason=ended.stderr.decode(errors="replace")[-200:])
        return ""

    def _refuse(self, generation: LocalGeneration, rank: int, error: MalformedMessage) -> None:
        self.refused += 1
        log.warning("flight recorder refused", job=generation.order.job, rank=rank, reason=str(error))


def _progress(generation: LocalGeneration) -> Progress:
    assert generation.progress is not None  # a silent generation has started
    return generation.progress


def _find_pyspy() -> str:
    """Return the path of py-spy, next to this interpreter or on PATH; "" if it is not installed."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy") or ""
