"""The time of the state at a takeover: a leader continues the time of its predecessor, whatever its own machine shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs
from supervising import facts
from waiting import wait_until_async

from holdfast.domain.orders import Hello
from holdfast.log.memory import MemoryLog
from holdfast.log.names import LEADER_LEASE
from holdfast.log.protocol import Commit, Lease
from holdfast.supervisor.core import Batch, State
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.campaign import Leader
from holdfast.supervisor.leader.term import LeaseTimes, Parts
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.protocol import NodeCordonRequested, NodeReported, NoticeRequested

pytestmark = pytest.mark.anyio

AT = 1_700_000_000.0
HOUR_S = 3600.0
TIMES = LeaseTimes(ttl_s=600.0, renew_s=0.05)


def announced() -> State:
    """A node whose maintenance is announced, and whose notice expires an hour after it was made."""
    batch = Batch(State())
    batch.step(NodeReported(AT, "n1", "i1", 1, Hello(facts("n1")), session=1))
    batch.step(NoticeRequested(AT, "n1", "owner", "the machine is moved"))
    return batch.state


class Recording(MemoryLog):
    """Keeps the holders' times of all renewals. `opened`: no snapshot is read before."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[float | None] = []
        self.opened = anyio.Event()
        self.opened.set()

    async def renew(self, lease: Lease, ttl_s: float, at: float | None = None) -> bool:
        self.recorded.append(at)
        return await super().renew(lease, ttl_s, at)

    async def snapshot(self, name: str) -> dict[str, bytes]:
        await self.opened.wait()
        return dict(await super().snapshot(name))


async def left_by(log: MemoryLog, state: State, *, renewed_at: float | None) -> None:
    """A leader has committed `state`, and has ended."""
    lease = await log.acquire(LEADER_LEASE, "first", TIMES.ttl_s)
    assert lease is not None
    await log.commit(lease, Commit(snapshot=snapshot.changes(None, state)))
    if renewed_at is not None:
        await log.renew(lease, TIMES.ttl_s, renewed_at)
    await log.release(lease)


@asynccontextmanager
async def successor(log: MemoryLog, directory: Path, wall_s: float) -> AsyncIterator[Leader]:
    """Its machine's clock stands at `wall_s`."""
    history, policies = await SqliteHistory.open(directory / "history.sqlite"), PolicyRunner()
    parts = Parts(
        event_log=log,
        history=history,
        policies=policies,
        clock=lambda: wall_s,
        supervisor="second",
        api="",
        times=TIMES,
    )
    leader = Leader(parts)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leader.run)
        yield leader
        tasks.cancel_scope.cancel()
    await policies.aclose()
    await history.aclose()


async def leads(leader: Leader) -> State:
    """Its state, once it has recorded its time: by then it has taken all timers that were due at first."""
    await wait_until_async(lambda: leader.picture() is not None, description="the second leader")
    picture = leader.picture()
    assert picture is not None
    return picture.state


@pytest.mark.parametrize("ahead_s", [0.0, 2 * HOUR_S, -2 * HOUR_S])
async def test_a_notice_does_not_expire_by_a_takeover(tmp_path: Path, ahead_s: float) -> None:
    log = Recording()
    await left_by(log, announced(), renewed_at=AT + 5.0)
    log.recorded.clear()
    async with successor(log, tmp_path, AT + 5.0 + ahead_s) as leader:
        await leads(leader)
        await wait_until_async(lambda: len(log.recorded) >= 3, description="renewals")  # timers run meanwhile
        picture = leader.picture()
        assert picture is not None
        assert picture.state.nodes["n1"].notice is not None
        passed_s = leader.now() - (AT + 5.0)
        assert 0.0 <= passed_s < 60.0
        assert all(at is not None and 0.0 <= at - (AT + 5.0) < 60.0 for at in log.recorded)


async def test_a_notice_expires_when_its_time_has_passed_without_a_leader(tmp_path: Path) -> None:
    """Both measures agree: nobody led for two hours."""
    log = Recording()
    await left_by(log, announced(), renewed_at=AT + 5.0)
    log._streams._renewals[LEADER_LEASE] = (AT + 5.0, anyio.current_time() - 2 * HOUR_S)
    async with successor(log, tmp_path, AT + 5.0 + 2 * HOUR_S) as leader:
        await leads(leader)

        def expired() -> bool:
            picture = leader.picture()
            return picture is not None and picture.state.nodes["n1"].notice is None

        await wait_until_async(expired, description="the notice to expire")


async def test_after_a_leader_of_an_earlier_version_the_wall_clock_decides(tmp_path: Path) -> None:
    log = Recording()
    await left_by(log, announced(), renewed_at=None)
    async with successor(log, tmp_path, AT + 100.0) as leader:
        await leads(leader)
        assert leader.now() == pytest.approx(AT + 100.0, abs=60.0)


async def test_what_its_predecessors_wrote_is_never_in_the_future(tmp_path: Path) -> None:
    batch = Batch(announced())
    batch.step(NodeCordonRequested(AT + 50.0, "n1", cordoned=True, reason="repair"))
    log = Recording()
    await left_by(log, batch.state, renewed_at=AT + 5.0)
    async with successor(log, tmp_path, AT - HOUR_S) as leader:
        assert (await leads(leader)).epoch > 0
        assert leader.now() >= AT + 50.0


async def test_a_leader_that_still_loads_the_state_records_no_time(tmp_path: Path) -> None:
    """It does not know the time of its predecessor yet, and its own clock would replace that time."""
    log = Recording()
    await left_by(log, announced(), renewed_at=AT + 5.0)
    log.recorded.clear()
    log.opened = anyio.Event()
    async with successor(log, tmp_path, AT + 2 * HOUR_S) as leader:
        await wait_until_async(lambda: len(log.recorded) >= 2, description="renewals")
        assert set(log.recorded) == {None}
        log.opened.set()
        await leads(leader)
        assert 0.0 <= leader.now() - (AT + 5.0) < 60.0


async def test_a_clock_that_differs_is_logged_with_its_difference(tmp_path: Path) -> None:
    log = Recording()
    await left_by(log, announced(), renewed_at=AT)
    with capture_logs() as logs:
        async with successor(log, tmp_path, AT + HOUR_S) as leader:
            await leads(leader)
    (line,) = (each for each in logs if "clock differs" in each["event"])
    assert line["ahead_s"] == pytest.approx(HOUR_S, abs=60.0)
