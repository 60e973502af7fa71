"""Fleets for the dashboard, and the real API over them, served to a browser on a port of its own.

The states are folded by the core, or are the large job of `benchmarks.core` on which the core has lost a node; the history is
the real one, filled with what the core published and with steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from anyio import create_task_group, to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fleet import Fleet, job

from benchmarks.core import running_job
from holdfast.agent.workers.logs import log_path, read_errors, read_part
from holdfast.domain.errors import NotFound
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity, StepRecord
from holdfast.domain.gpus import GpuState
from holdfast.domain.job import JobSpec, ReportSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.orders import Tested
from holdfast.domain.rank_reads import MeasuredRanks, RaisedError
from holdfast.domain.worker_logs import LogPart, LogRequest
from holdfast.log.memory import MemoryLog
from holdfast.log.names import EVENTS, INBOX
from holdfast.log.protocol import Entry
from holdfast.runtime.trust.api_tokens import TokensFile
from holdfast.supervisor.alerts.alert import Topic
from holdfast.supervisor.alerts.sender import Alerts
from holdfast.supervisor.alerts.targets import Notifier
from holdfast.supervisor.api.app import build
from holdfast.supervisor.api.backend import Backend, Identity
from holdfast.supervisor.api.server import bind, serving, url_of
from holdfast.supervisor.core import State, step
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.inbox import InboxEvent
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.protocol import (
    FindingArrived,
    JobAccepted,
    JobStopRequested,
    NodeCordonRequested,
    NodeGone,
    Publish,
    Record,
)
from holdfast.supervisor.published import Published
from holdfast.supervisor.requests import OperatorEvent
from holdfast.wire import records

HOUR_S = 3600.0
STEP_S = 10.0
SLOW_RANK = 203
SILENT_NODE = "node-040"
# Of one node: a GPU that is well, one that needs a reset, one that the driver does not reach.
GPUS = {
    "node-021": (
        GpuState(
            0, "GPU-5d1c", 1e9, lost=False, temperature_c=61.0, margin_c=26.0, power_w=644.0, memory_used=71 << 30,
            utilization=98, ecc_corrected=3, ecc_uncorrected=0, ecc_uncorrected_ever=0, remapped_rows=0,
            remap_pending=False, remap_failed=False, nvlinks_up=18, nvlinks_down=0, nvlink_errors=0, pcie_replays=0,
            pcie_width=16, pcie_width_max=16, pcie_gen=5, pcie_gen_max=5,
        ),
        GpuState(
            1, "GPU-9a07", 1e9, lost=False, temperature_c=83.0, power_w=690.0, memory_used=70 << 30, ecc_corrected=120,
            ecc_uncorrected=2, ecc_uncorrected_ever=7, remapped_rows=2, remap_pending=True, remap_failed=False,
            nvlinks_up=17, nvlinks_down=1, pcie_width=8, pcie_width_max=16, pcie_replays=90_000,
        ),
        GpuState(2, "GPU-31ee", 1e9, lost=True),
    )
}  # fmt: skip
LOG = "step 479 loss 3.6\nRuntimeError: CUDA error: an illegal memory access\n<script>alert('markup')</script>"


@dataclass(frozen=True, slots=True)
class World:
    state: State
    records: Sequence[Record] = ()
    steps: Sequence[StepRecord] = ()


class _Now(Fleet):
    """A fleet whose time began some hours ago."""

    def __init__(self, nodes: int, hours: float, capacity: int) -> None:
        super().__init__(0, snapshots=False)
        self.now = time.time() - hours * HOUR_S
        for index in range(nodes):
            self.connect(f"node-{index:03}", zone=f"rack-{index // 16}", capacity=capacity)


def empty() -> World:
    return World(State())


def under_fire() -> World:
    """512 ranks that met three faults in six hours and a fourth a moment ago, a job that waits, and one that was stopped."""
    fleet = _Now(68, hours=6, capacity=8)
    steps: list[StepRecord] = []
    fleet.about = "old-run"
    fleet.submit(job(8, nproc=8, min_dp=8, name="old-run"))
    fleet.run()
    _train(fleet, steps, minutes=20)
    fleet.fold(JobStopRequested(fleet.now, "old-run", "the result is good", save=False))
    fleet.answer_orders()
    fleet.about = "llm-70b"
    fleet.submit(_large())
    fleet.run()
    fleet.all_live()
    _train(fleet, steps, minutes=80)
    fleet.find(FindingKind.WORKER_CRASH, "node-007", rank=59, exit_code="1", error="RuntimeError: CUDA error", log=LOG)
    _recover(fleet, steps, minutes=100)
    fleet.lose("node-020")
    _recover(fleet, steps, minutes=60)
    xid = "NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus"
    fleet.find(
        FindingKind.GPU_ERROR,
        "node-031",
        gpu=3,
        severity=Severity.FATAL,
        recommended_actions=(Remedy.REPLACE_NODE,),
        line=xid,
    )
    _recover(fleet, steps, minutes=81)
    failed = Preflight(
        fleet.now, 4.2, (Check("gpus", True, "8 of 8 answer"), Check("disk", False, "writes took 9.1 s"))
    )
    fleet.connect("node-020", zone="rack-1", capacity=8)
    fleet.report("node-020", Tested(failed))
    fleet.fold(NodeCordonRequested(fleet.now, "node-067", cordoned=True, reason="fan 2 is loud"))
    fleet.about = "waits"
    fleet.submit(job(3, nproc=1, name="waits"))
    fleet.about = "llm-70b"
    fleet.now = time.time() - 2.0
    fleet.find(FindingKind.WORKER_CRASH, "node-011", rank=90, exit_code="-9", log="killed\n")
    return World(fleet.state, fleet.records, steps)


def _large() -> JobSpec:
    mesh = Mesh.of({"dp": 16, "pp": 8, "tp": 4})
    stated = ReportSpec(2.5, "€", flops_per_token=4.2e11, peak_flops=989e12, restart_s=250.0, checkpoint_every_s=600.0)
    return replace(job(16, 32, nproc=8, min_dp=12, name="llm-70b"), mesh=mesh, report=stated)


def _recover(fleet: Fleet, steps: list[StepRecord], *, minutes: float) -> None:
    fleet.now += 1.5
    fleet.answer_orders()
    fleet.now += 6.0
    fleet.step_all(fleet.job.progress.step)
    fleet.all_live()
    _train(fleet, steps, minutes=minutes)


def _train(fleet: Fleet, steps: list[StepRecord], *, minutes: float) -> None:
    """Steps of `STEP_S`. The ranks wait a second for a save every ten minutes, of which only the last one is reported."""
    generation = fleet.job.running
    assert generation is not None
    ranks = generation.mesh.world_size
    for number in range(int(minutes * 60 / STEP_S)):
        began, done = fleet.now, fleet.job.progress.step + 1
        fleet.now += STEP_S + 0.4 * math.sin(number)
        loss = 2.0 + 8.0 / math.sqrt(1 + done / 20) + 0.05 * math.sin(done)
        saves = done % 60 == 0
        last = number + 60 >= int(minutes * 60 / STEP_S)
        record = StepRecord(
            fleet.about, generation.number, done, ranks, began, fleet.now, ranks * 4096, loss, 1.0 * saves
        )
        steps.append(record)
        fleet.train(done, save=saves and last)


def large(nodes: int = 12_500) -> World:
    """One job on that many nodes with 8 ranks each, one of which has just been lost; nothing is decided about it yet."""
    state = running_job(nodes)
    now = time.time()
    spec = state.jobs["llm"].spec
    records_: list[Record] = [JobAccepted(now - HOUR_S, "llm", spec)]
    for event in (NodeGone(now - 2, "n77", "n77-1", 1), FindingArrived(now - 1, _lost("n77", now - 1), 0.0)):
        state, commands = step(state, event)
        records_ += [command.record for command in commands if isinstance(command, Publish)]
    rate = spec.mesh.world_size * 4096
    steps = [
        StepRecord(
            "llm", 1, n, spec.mesh.world_size, now - HOUR_S + 30 * n, now - HOUR_S + 30 * (n + 1), rate, 3 - n / 60, 0
        )
        for n in range(1, 115)
    ]
    return World(state, records_, steps)


def measured(state: State, node: str, job: str) -> MeasuredRanks:
    """What the node's agent answers: rank `SLOW_RANK` computes a third longer, and the others wait for it; the last node of a
    rack of 16 is hot. Node `SILENT_NODE` does not answer."""
    generation = state.jobs[job].generation
    placement = None if generation is None else generation.placement_of(node)
    if generation is None or placement is None or node == SILENT_NODE:
        raise NotFound(f"the agent of {node} is not connected, so the measurements of its ranks are not known")
    ranks = tuple(placement.ranks)
    return MeasuredRanks(
        generation.number,
        ranks,
        tuple(10.0 + 0.002 * (rank % 7) for rank in ranks),
        tuple(0.1 if rank == SLOW_RANK else 2.6 - 0.05 * (rank % 5) for rank in ranks),
        tuple(58.0 + rank % 8 + (24.0 if placement.slot % 16 == 15 else 0.0) for rank in ranks),
    )


def _lost(node: str, at: float) -> Finding:
    return Finding(f"lost:{node}:1", FindingKind.NODE_LOST, Severity.ERROR, at, at, f"{node} is gone", node, "llm", 1)


@dataclass(frozen=True, slots=True)
class Site:
    """An API that shows a world. Commands are accepted, and stay in its inbox."""

    url: str
    world: World
    logs: Path  # of all ranks, as if one agent had them; `write_log` writes there
    _log: MemoryLog
    _portal: BlockingPortal

    def publish(self, record: Published) -> None:
        """Say on the event stream that something has changed."""
        entry = Entry("test", type(record).__name__, records.dumps(record, Published))
        self._portal.call(self._log.append, EVENTS, entry)

    def write_log(self, job: str, rank: int, text: str, generation: int | None = None) -> None:
        """The rank prints this."""
        made = self.world.state.jobs[job].generation
        assert made is not None
        path = log_path(self.logs, job, generation or made.number, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def requests(self) -> list[OperatorEvent]:
        """What pages have asked for."""
        found = self._portal.call(self._log.read, INBOX)
        return [records.loads(each.entry.data, InboxEvent).event for each in found]


@contextmanager
def served(
    world: World, directory: Path, *, token: str = "", tokens: TokensFile | None = None, alerts: Sequence[Notifier] = ()
) -> Iterator[Site]:
    """The API in a thread of its own, on a free port."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_serving(world, directory, token, tokens, alerts)) as (url, log),
    ):
        yield Site(url, world, directory / "logs", log, portal)


@asynccontextmanager
async def _serving(
    world: World, directory: Path, token: str, tokens: TokensFile | None, alerts: Sequence[Notifier]
) -> AsyncIterator[tuple[str, MemoryLog]]:
    history = await SqliteHistory.open(directory / "history.sqlite3")
    await history.add_events([EventEntry(f"{n}-0", record) for n, record in enumerate(world.records, 1)], "0")
    await history.add_steps(world.steps, "0")
    progress, policies, log = Progress(), PolicyRunner(), MemoryLog(block_s=0.05)
    progress.tell(world.steps)

    async def look() -> Picture:
        return Picture(world.state, leading=True, at=time.time())

    class Agents:
        async def read_log(self, node: str, request: LogRequest) -> LogPart:
            return await to_thread.run_sync(read_part, directory / "logs", request)

        async def read_gpus(self, node: str) -> tuple[GpuState, ...]:
            if node in GPUS:
                return GPUS[node]
            raise NotFound(f"the agent of {node} is not connected, so the values of its GPUs are not known")

        async def read_ranks(self, node: str, job: str) -> MeasuredRanks:
            return measured(world.state, node, job)

        async def read_errors(self, node: str, job: str, generation: int) -> tuple[RaisedError, ...]:
            return await to_thread.run_sync(read_errors, directory / "logs", job, generation)

    backend = Backend(
        identity=Identity("supervisor-a", "0.1.0", token, tokens),
        log=log,
        history=history,
        look=look,
        progress=progress,
        policies=policies,
        agents=Agents,
        alerts=Alerts(log, alerts, [Topic.FAILED, Topic.WAITING], consumer="supervisor-a"),
    )
    listener = bind("127.0.0.1:0")
    url = url_of(listener)
    async with serving(build(backend), listener), create_task_group() as tasks:
        tasks.start_soon(backend.events.run)
        yield url, log
        tasks.cancel_scope.cancel()
    await policies.aclose()
    await history.aclose()
