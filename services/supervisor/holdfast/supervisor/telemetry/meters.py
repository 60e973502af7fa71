"""The leader's metrics: states every few seconds, latencies of orders when they are answered.

Nothing runs unless telemetry is on. Standbys send no metrics: the fleet must not be counted twice.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.domain.nodes import NodeState
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Order, OrderDone, Start
from holdfast.domain.tiers import STORE
from holdfast.log.names import SUPERVISOR_GROUP, SUPERVISOR_STREAMS
from holdfast.log.protocol import EventLog
from holdfast.runtime.telling import metrics, telemetry
from holdfast.runtime.telling.telemetry import Point
from holdfast.supervisor.core import LINK_STANDINGS, link_standing, saved_steps
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.live import nodes_of
from holdfast.supervisor.core.model.state import State
from holdfast.supervisor.history.goodput import account
from holdfast.supervisor.history.ledger import to_history
from holdfast.supervisor.history.protocol import History, Run
from holdfast.supervisor.history.time_classes import Ledger
from holdfast.supervisor.picture import Live, Picture, Progress
from holdfast.supervisor.protocol import JobPhase

EVERY_S = 5.0
SHARE_MAX = 0.05  # of one core: accounting for a job of a million steps takes seconds, and is then done less often
ORDERS_MAX = 50_000  # whose latency is being measured

log = structlog.get_logger("holdfast.supervisor.telemetry.meters")


class Latencies:
    """Measures how long agents take to answer orders. Answers to orders of an earlier term are not measured, and neither is
    `Start`, which takes no time and is answered by heartbeats."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def sent(self, command_id: str, order: Order) -> None:
        if telemetry.on() and not isinstance(order, Start):
            self._sent[command_id] = (time.monotonic(), type(order).__name__)
            if len(self._sent) > ORDERS_MAX:
                self._sent.popitem(last=False)

    def heard(self, report: object) -> None:
        if isinstance(report, OrderDone) and (known := self._sent.pop(report.command_id, None)) is not None:
            telemetry.record(metrics.COMMAND_LATENCY, time.monotonic() - known[0], order=known[1])


class Meters:
    def __init__(self, live: Live, event_log: EventLog, history: History, progress: Progress) -> None:
        self._live = live
        self._log = event_log
        self._history = history
        self._progress = progress

    async def run(self) -> None:
        """Runs until cancelled. Data that cannot be read now is read again in the next round."""
        while True:
            began = time.monotonic()
            picture = self._live()
            try:
                await self._measure(picture or Picture(State()))
            except HoldfastError as error:
                log.warning("not measured", reason=str(error))
            await anyio.sleep(max(EVERY_S, (time.monotonic() - began) / SHARE_MAX))

    async def _measure(self, picture: Picture) -> None:
        """Show all gauges. Without a state they have no series: a supervisor that leads no longer leaves them to the leader."""
        state = picture.state
        jobs = [job for _, job in sorted(state.jobs.items()) if not job.phase.finished]
        telemetry.show(metrics.NODES, _nodes(state))
        telemetry.show(metrics.NODE_LINKS, _links(state))
        telemetry.show(metrics.WORLD_SIZE, [(_world_size(job), {"job": job.name}) for job in jobs])
        telemetry.show(metrics.STEP_RATE, _rates(jobs, self._progress.steps_per_s))
        telemetry.show(metrics.TOKEN_RATE, _rates(jobs, self._progress.tokens_per_s))
        streams = SUPERVISOR_STREAMS if state.epoch else ()
        behind = [(stream, await self._log.backlog(stream, SUPERVISOR_GROUP)) for stream in streams]
        telemetry.show(metrics.LOG_PENDING, [(each.pending, {"stream": stream}) for stream, each in behind])
        telemetry.show(metrics.LOG_LAG, [(each.lag_s, {"stream": stream}) for stream, each in behind])
        usage = await self._log.usage() if state.epoch else None
        telemetry.show(metrics.LOG_MEMORY, [(usage.used_bytes, {})] if usage else [])
        telemetry.show(metrics.LOG_MEMORY_LIMIT, [(usage.limit_bytes, {})] if usage and usage.limit_bytes else [])
        ages: list[Point] = []
        seconds: list[Point] = []
        for job in jobs:
            if (run := await self._history.run(job.name)) is not None:
                ledger, aged = await anyio.to_thread.run_sync(_account, state, job.name, run, picture.at)
                ages += aged
                seconds += [(each, {"job": job.name, "class": name.value}) for name, each in ledger.seconds.items()]
        telemetry.show(metrics.CHECKPOINT_AGE, ages)
        lags = await anyio.to_thread.run_sync(lambda: [point for job in jobs for point in _lags(state, job)])
        telemetry.show(metrics.CHECKPOINT_LAG, lags)
        telemetry.show(metrics.JOB_TIME, seconds)


def _account(state: State, name: str, run: Run, now: float) -> tuple[Ledger, list[Point]]:
    """Call in a thread: both functions iterate over all data of the run."""
    return account(to_history(run, now)), list(_ages(state, name, run, now))


def _ages(state: State, name: str, run: Run, now: float) -> Iterator[Point]:
    """For each tier, the age of the newest step that is complete there, since that step was finished."""
    finished = {record.step: record.ended_at for record in run.steps}  # of a repeated step, the later time
    known = max(finished, default=0)
    newest: dict[str, int] = {}
    for saved in saved_steps(state, name):
        full = saved.mesh.world_size
        for tier in (
            *(tier for tier, ranks in saved.ranks.items() if ranks == full),
            *([STORE] if saved.stored else ()),
        ):
            newest.setdefault(tier, saved.step)
    for tier, step in newest.items():
        if step in finished or step > known:  # steps are reported a moment after they are finished, saves at once
            yield max(0.0, now - finished.get(step, now)), {"job": name, "tier": tier}


def _lags(state: State, job: Job) -> Iterator[Point]:
    """The distance from the newest step to the newest restorable one, in checkpoint intervals. Empty while the job does not run
    or reports no steps."""
    running = job.running
    if running is None or job.phase is not JobPhase.RUNNING or job.progress.reports_no_steps:
        return
    newest = next((saved.step for saved in saved_steps(state, job.name) if saved.newest), running.restore.step)
    yield max(0, job.progress.step - newest) / max(1, job.interval_steps), {"job": job.name}


def _nodes(state: State) -> list[Point]:
    """The count of every state, including 0; empty if this supervisor has no state."""
    counted = Counter(node.state for node in state.nodes.values())
    return [(counted[each], {"state": each.value}) for each in NodeState] if state.epoch else []


def _links(state: State) -> list[Point]:
    """Nodes that take part in network tests, by verdict; empty without a state or if there are no tests."""
    if not state.epoch or not state.config.links.every_s:
        return []
    busy = Numbers.union(map(nodes_of, state.live.values()))
    counted = Counter(
        link_standing(node)
        for node in state.nodes.values()
        if node.connected and node.facts.tests_links and node.number not in busy
    )
    return [(counted[each], {"verdict": each}) for each in LINK_STANDINGS]


def _world_size(job: Job) -> int:
    return job.running.mesh.world_size if job.running is not None and job.phase is JobPhase.RUNNING else 0


def _rates(jobs: list[Job], rate: Callable[[str], float | None]) -> list[Point]:
    """The rate of each job, 0 while it does not run."""
    return [((rate(job.name) or 0.0) if job.phase is JobPhase.RUNNING else 0.0, {"job": job.name}) for job in jobs]
