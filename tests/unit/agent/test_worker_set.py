"""What a node reports of its workers: the whole set when it has changed, once, and never an old one after a newer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from waiting import wait_until_async

from holdfast.agent.connection.reports import Reports
from holdfast.agent.workers.worker import Exit
from holdfast.agent.workers.worker_set import ENDED_MAX, GATHER_S, WorkerSet
from holdfast.domain.nodes import NodeFacts, RunningWorker, TemplateState, WorkerEnded
from holdfast.domain.orders import Announced, Hello, Inventory, OrderDone, WorkersChanged

FACTS = NodeFacts("n", "i", "n", "n", "", 8, "", 1, "/", "/kmsg")
ONE = RunningWorker("gpt", 3, 0, 100)


@dataclass(slots=True)
class Node:
    running: tuple[RunningWorker, ...] = ()
    reported: list[WorkersChanged] = field(default_factory=list)
    now: float = 50.0

    def workers(self) -> WorkerSet:
        return WorkerSet(lambda: self.running, self.reported.append, lambda: self.now)


def worker(rank: int, generation: int = 3, job: str = "gpt") -> Any:
    return SimpleNamespace(identity=SimpleNamespace(job=job, generation=generation, rank=rank))


@pytest.mark.anyio
async def test_changes_at_once_are_one_report_of_the_whole_set() -> None:
    node = Node()
    workers = node.workers()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run)
        await anyio.wait_all_tasks_blocked()
        for rank in range(8):
            node.running = (*node.running, RunningWorker("gpt", 3, rank, 100 + rank))
            workers.changed()
        await wait_until_async(lambda: bool(node.reported), description="a report")
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert [(report.version, len(report.workers)) for report in node.reported] == [(9, 8)]


def test_an_end_is_reported_with_its_age_until_a_newer_generation_begins() -> None:
    node = Node()
    workers = node.workers()
    workers.add_ended(cast(Any, worker(1)), Exit(0.0, None, 9))
    workers.add_ended(cast(Any, worker(0, 7, "other")), Exit(0.0, 1, None))
    node.now += 2.5
    assert workers.ended == (
        WorkerEnded("gpt", 3, 1, signal=9, ago_s=2.5),
        WorkerEnded("other", 7, 0, exit_code=1, ago_s=2.5),
    )
    workers.begin("gpt", 4)
    assert [ended.job for ended in workers.ended] == ["other"]


def test_ends_are_bounded() -> None:
    workers = Node().workers()
    for rank in range(ENDED_MAX + 10):
        workers.add_ended(cast(Any, worker(rank)), Exit(0.0, 1, None))
    assert len(workers.ended) == ENDED_MAX
    assert workers.ended[-1].rank == ENDED_MAX + 9


def test_an_answer_that_says_all_of_the_set_is_its_report() -> None:
    node = Node()
    workers = node.workers()
    assert workers.version_for_answer((ONE,)) == 0, "it does not run"
    node.running = (ONE,)
    workers.changed()
    assert workers.version_for_answer((ONE,)) == workers.version == 2
    node.running = (ONE, RunningWorker("other", 7, 0, 101))
    workers.changed()
    assert workers.version_for_answer((ONE,)) == 0, "another worker runs, too"
    node.running = (ONE,)
    workers.add_ended(cast(Any, worker(0, 7, "other")), Exit(0.0, 1, None))
    assert workers.version_for_answer((ONE,)) == 0, "how a worker ended is still to be reported"


@pytest.mark.anyio
async def test_what_an_answer_has_said_is_not_reported_again_and_a_new_template_is() -> None:
    node, state = Node(), TemplateState(("gpt",), False)
    workers = WorkerSet(lambda: node.running, node.reported.append, lambda: node.now, lambda: state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run)
        workers.template_changed()
        node.running = (ONE,)
        assert workers.version_for_answer((ONE,)) == 0, "the template is still to be reported"
        await wait_until_async(lambda: bool(node.reported), description="the template")
        workers.changed()
        assert workers.version_for_answer((ONE,)) == workers.version
        await anyio.sleep(2 * GATHER_S)
        assert [each.template for each in node.reported] == [state]
        state = TemplateState(("gpt",), True)
        workers.template_changed()
        assert workers.version_for_answer((ONE,)) == 0
        await wait_until_async(lambda: len(node.reported) > 1, description="the other template")
        tasks.cancel_scope.cancel()
    assert [(each.version, each.template) for each in node.reported[1:]] == [(workers.version, state)]


def test_only_the_newest_set_waits_to_be_sent() -> None:
    reports = Reports()
    reports.add(WorkersChanged(2, (ONE,)))
    reports.add(OrderDone("c", ok=True))
    reports.add(WorkersChanged(3))
    sent = [reports.take(), reports.take(), reports.take()]
    assert [each.report for each in sent if each] == [OrderDone("c", ok=True), WorkersChanged(3)]


def test_a_new_session_begins_with_the_set_of_hello_and_no_older_one_follows() -> None:
    """The supervisor would take an older set that comes after Hello for a newer one."""
    reports = Reports()
    reports.add(WorkersChanged(2, (ONE,)))
    reports.take()
    reports.add(WorkersChanged(3))
    reports.add(OrderDone("c", ok=True))
    hello = Hello(FACTS, (ONE,), workers_version=4)
    reports.greet(hello, [Inventory("gpt")])
    sent = []
    while (numbered := reports.take()) is not None:
        sent.append(numbered.report)
    greeting = replace(hello, announced=Announced(("gpt",)))
    assert sent == [greeting, OrderDone("c", ok=True), Inventory("gpt")]


def test_a_template_is_part_of_the_set_and_costs_nothing_while_it_stays_the_same() -> None:
    state = TemplateState(("gpt",), True)
    workers = WorkerSet(lambda: (), lambda _: None, template=lambda: state)
    before = workers.version
    workers.template_changed()
    workers.template_changed()
    assert workers.version == before + 1
    assert workers.template == state
    state = TemplateState(("gpt",), False)
    workers.template_changed()
    assert workers.version == before + 2
