"""What the leader tells a collector: numbers that follow from its state, its history and its log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from fleet import JOB, job, running
from sinks import Kept, keep
from waiting import wait_until_async

from holdfast.domain.findings import FindingKind, StepRecord
from holdfast.domain.generations import StoredStep
from holdfast.domain.orders import Inventory, OrderDone, Stop
from holdfast.log.memory import MemoryLog
from holdfast.log.names import INBOX, SUPERVISOR_GROUP
from holdfast.log.protocol import Entry
from holdfast.runtime.telling import metrics
from holdfast.supervisor.core.model.lifecycle import AwaitedNodes, Waiting
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.protocol import JobAccepted
from holdfast.supervisor.telemetry import tracing
from holdfast.supervisor.telemetry.meters import Latencies, Meters, _lags

pytestmark = pytest.mark.anyio


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return keep(monkeypatch)


async def test_a_closed_incident_is_counted_with_its_phases(kept: Kept) -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    tracing.closed(fleet.incident)
    assert [span.name for span in kept.spans] == ["incident", "decision", "generation change"]
    assert (metrics.INCIDENTS.name, 1, {"job": JOB, "kind": "worker_crash", "action": "restart"}) in kept.recorded
    phases = {str(about["phase"]): value for name, value, about in kept.recorded if name == metrics.RECOVERY.name}
    assert {"detect", "decide", "prepare", "start", "total"} <= phases.keys()
    assert phases["total"] == pytest.approx(sum(phases[name] for name in ("detect", "decide", "prepare", "start")))


async def test_nothing_is_computed_while_off() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    tracing.closed(fleet.incident)  # no sink: nothing to see, and nothing raised
    latencies = Latencies()
    latencies.sent("c-1", Stop(JOB, 1))
    assert latencies._sent == {}


async def test_an_answer_is_timed_once(kept: Kept) -> None:
    latencies = Latencies()
    latencies.sent("c-1", Stop(JOB, 1))
    for _ in range(2):
        latencies.heard(OrderDone("c-1", ok=True))
    latencies.heard(OrderDone("of an earlier term", ok=True))
    [(name, seconds, about)] = kept.recorded
    assert (name, about) == (metrics.COMMAND_LATENCY.name, {"order": "Stop"})
    assert 0 <= seconds < 60


async def test_the_leader_shows_the_fleet(kept: Kept, tmp_path: Path) -> None:
    fleet = running(job(dp=2), spares=1)
    now = fleet.now
    state = fleet.state
    stored = StoredStep(fleet.job.generation.attempt if fleet.job.generation else 0, 3, fleet.job.spec.mesh, False)
    state = replace(
        state,
        epoch=1,
        jobs={**state.jobs, JOB: replace(fleet.job, checkpoints=replace(fleet.job.checkpoints, stored=(stored,)))},
    )
    steps = [StepRecord(JOB, 1, n, 2, now + n, now + n + 1, 100, None, 0.0) for n in range(1, 6)]
    history = await SqliteHistory.open(tmp_path / "history.sqlite3")
    await history.add_events([EventEntry("1-0", JobAccepted(now, JOB, fleet.job.spec))], "1-0")
    await history.add_steps(steps, "1-0")
    progress = Progress()
    progress.tell(steps)
    log = MemoryLog()
    await log.append(INBOX, Entry("a", "x", b""), Entry("b", "x", b""))
    async for batch in log.subscribe(INBOX, group=SUPERVISOR_GROUP, consumer="leader"):
        assert len(batch) == 2
        break
    meters = Meters(lambda: Picture(state, leading=True, at=now + 60.0), log, history, progress)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(meters.run)
        await wait_until_async(lambda: metrics.JOB_TIME.name in kept.shown, description="the ledger")
        tasks.cancel_scope.cancel()
    shown = dict(kept.shown)
    assert shown[metrics.NODES.name] == {"active": 2, "spare": 1, "cordoned": 0, "left": 0, "lost": 0}
    assert shown[metrics.WORLD_SIZE.name] == {JOB: 2}
    assert shown[metrics.STEP_RATE.name][JOB] == pytest.approx(1.0)
    assert shown[metrics.TOKEN_RATE.name][JOB] == pytest.approx(100.0)
    assert shown[metrics.LOG_PENDING.name] == {"findings": 0, "steps": 0, "inbox": 2}
    assert shown[metrics.LOG_LAG.name]["inbox"] == 0
    assert shown[metrics.LOG_MEMORY.name][""] > 0
    assert shown[metrics.LOG_MEMORY_LIMIT.name] == {}, "this log has none"
    assert shown[metrics.CHECKPOINT_AGE.name].keys() == {"store"}
    assert shown[metrics.CHECKPOINT_LAG.name] == {JOB: 0.0}
    assert shown[metrics.JOB_TIME.name]["useful"] == pytest.approx(5.0)
    await until_shown_nothing(kept, Meters(lambda: None, log, history, progress))
    await history.aclose()


async def until_shown_nothing(kept: Kept, of_no_leader: Meters) -> None:
    """Who leads no longer ends its series: the new leader has them, and sums would count twice."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of_no_leader.run)
        await wait_until_async(lambda: not any(kept.shown.values()), description="the end of every series")
        tasks.cancel_scope.cancel()


async def test_the_lag_counts_intervals_since_the_step_that_a_restart_would_take() -> None:
    """One rank that does not save any more is enough: what the others have is no checkpoint."""
    fleet = running(job(dp=2))
    every = fleet.job.interval_steps
    fleet.train(every, save=True)
    fleet.train(every + every // 2)
    assert list(_lags(fleet.state, fleet.job)) == [(0.5, {"job": JOB})]
    held = fleet.state.nodes["n1"].inventory[JOB]
    fleet.train(8 * every, save=True)
    fleet.report("n1", Inventory(JOB, held))
    of_peers = [record for record in fleet.state.nodes["n0"].inventory[JOB] if record.key.rank != 1]
    fleet.report("n0", Inventory(JOB, (*of_peers, *held)))
    assert list(_lags(fleet.state, fleet.job)) == [(7.0, {"job": JOB})]
    assert list(_lags(fleet.state, replace(fleet.job, doing=Waiting(AwaitedNodes(0.0, ()))))) == []


async def test_a_standby_shows_nothing(kept: Kept, tmp_path: Path) -> None:
    history = await SqliteHistory.open(tmp_path / "history.sqlite3")
    meters = Meters(lambda: None, MemoryLog(), history, Progress())
    with anyio.move_on_after(0.1):
        await meters.run()
    await history.aclose()
    assert not any(kept.shown.values())
