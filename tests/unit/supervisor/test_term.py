"""A term's turns: what is folded before what, and how much of it at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from fleet import job
from supervising import facts
from waiting import wait_until_async

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import PolicySpec
from holdfast.domain.orders import Hello
from holdfast.log.memory import MemoryLog
from holdfast.log.names import LEADER_LEASE
from holdfast.log.protocol import Commit, Lease
from holdfast.policy import JobView
from holdfast.supervisor.core import Batch, State
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.term import LeaseTimes, Parts, Term
from holdfast.supervisor.policies.questions import PER_TURN_MAX
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.protocol import FindingArrived, JobSubmitted, NodeReported

pytestmark = pytest.mark.anyio

AT = 1000.0
MANY = 2 * PER_TURN_MAX + 1


class CountingLog(MemoryLog):
    """Remembers how many incidents were decided by each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.decided: list[int] = []

    async def commit(self, lease: Lease, commit: Commit) -> None:
        await super().commit(lease, commit)
        self.decided.append(sum(b'"state":"decided"' in entry.data for _, entry in commit.append))


class Silent(PolicyRunner):
    """Is asked, and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def decide(self, policy: PolicySpec, incident: Incident, job: JobView) -> tuple[Action, str]:
        self.asked.append(incident.id)
        await anyio.sleep_forever()
        raise AssertionError("for ever is over")


def storm(jobs: int) -> State:
    """So many jobs of one node, each with a crash that its policy is still to be asked about."""
    batch = Batch(State())
    for index in range(jobs):
        node, name = f"n{index}", f"job{index}"
        batch.step(NodeReported(AT, node, "i1", 1, Hello(facts(node)), session=1))
        batch.step(JobSubmitted(AT, job(dp=1, name=name), "token"))
    for index in range(jobs):
        crash = Finding(
            f"f{index}",
            FindingKind.WORKER_CRASH,
            Severity.ERROR,
            AT,
            AT,
            "a rank ended by signal 11",
            node=f"n{index}",
            job=f"job{index}",
            generation=1,
            rank=0,
        )
        batch.step(FindingArrived(AT, crash))
    return batch.state


@asynccontextmanager
async def leading(
    state: State, log: MemoryLog, policies: PolicyRunner, directory: Path, clock: Callable[[], float] = lambda: AT
) -> AsyncIterator[Term]:
    """A leader that takes over from one which left `state`. No timer is due: nobody decides but the policies."""
    history, times = await SqliteHistory.open(directory / "history.sqlite"), LeaseTimes(ttl_s=600.0)
    leased_at_s = anyio.current_time()
    lease = await log.acquire(LEADER_LEASE, "sup", times.ttl_s)
    assert lease is not None
    await log.commit(lease, Commit(snapshot=snapshot.changes(None, state)))
    parts = Parts(
        event_log=log,
        times=times,
        history=history,
        policies=policies,
        clock=clock,
        supervisor="sup",
        api="",
    )
    term = Term(parts, lease=lease, leased_at_s=leased_at_s)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(term.run)
        yield term
        tasks.cancel_scope.cancel()
    await policies.aclose()
    await history.aclose()
    await log.aclose()


async def test_a_storm_is_decided_one_portion_after_the_other_though_nothing_else_arrives(tmp_path: Path) -> None:
    log = CountingLog()
    async with leading(storm(MANY), log, PolicyRunner(), tmp_path):
        await wait_until_async(lambda: sum(log.decided) >= MANY, description="every incident to be decided")
    assert sum(log.decided) == MANY
    assert max(log.decided) == PER_TURN_MAX


async def test_policies_that_do_not_answer_keep_no_question_waiting(tmp_path: Path) -> None:
    policies = Silent()
    async with leading(storm(MANY), MemoryLog(), policies, tmp_path):
        await wait_until_async(lambda: len(policies.asked) >= MANY, description="every question to be asked")
    assert len(set(policies.asked)) == len(policies.asked) == MANY


async def test_a_leaders_time_does_not_jump_with_its_machines_clock(tmp_path: Path) -> None:
    set_by_s = [0.0]
    clock = lambda: AT + set_by_s[0]  # noqa: E731
    async with leading(State(), MemoryLog(), PolicyRunner(), tmp_path, clock) as term:
        await wait_until_async(lambda: term.picture, description="the first picture")
        for jump_s in (3600.0, -3600.0):
            before = term.picture
            set_by_s[0] += jump_s
            after = term.picture
            assert before is not None
            assert after is not None
            assert abs(after.at - before.at) < 60.0
