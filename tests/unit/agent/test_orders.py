"""Orders are executed once, whoever repeats them; no report is lost or blocks the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from replicator_node import fill_up, small_tmpfs

from holdfast.agent.connection.admission import UNKNOWN_OUTCOME
from holdfast.agent.connection.executor import Executor
from holdfast.agent.connection.ledger import ANSWERS_MAX, Ledger
from holdfast.agent.connection.reports import Reports
from holdfast.agent.outcome import Outcome
from holdfast.domain.errors import Conflict, HoldfastError, Unrestorable
from holdfast.domain.nodes import NodeFacts, RunningWorker
from holdfast.domain.orders import (
    Announced,
    Hello,
    Inventory,
    Order,
    OrderDone,
    RanksFinished,
    ResetGpu,
    Start,
    Stop,
)

pytestmark = pytest.mark.anyio

ORDER = Stop("gpt", 3)
START = Start("gpt", 3, "host:1")
HELLO = Hello(NodeFacts("n", "i", "h", "a", "z", 1, "", 1, "/d", "/k"))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "agent.db") as ledger:
        yield ledger


class Hands:
    """Carries orders out by counting them; may wait or fail on request."""

    def __init__(self) -> None:
        self.done: list[Order] = []
        self.error: Exception | None = None
        self.gate = anyio.Event()
        self.gate.set()

    async def carry_out(self, order: Order) -> Outcome:
        self.done.append(order)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Outcome(master="host:5", phases_s=(("fork", 0.25),), workers=(RunningWorker("gpt", 3, 0, 99),))


async def test_a_repeat_is_answered_and_not_executed_also_after_a_restart(tmp_path: Path) -> None:
    hands, answers = Hands(), list[OrderDone]()
    for _ in range(2):  # two lives of one agent
        with Ledger(tmp_path / "agent.db") as ledger:
            async with anyio.create_task_group() as tasks:
                executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
                executor.submit(1, "c1", ORDER)
            executor.submit(1, "c1", ORDER)
    assert hands.done == [ORDER]
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert answers[0].ok
    assert answers[0].workers == (RunningWorker("gpt", 3, 0, 99),)


async def test_a_start_that_heartbeats_answer_is_answered_only_when_it_failed_or_is_repeated(ledger: Ledger) -> None:
    hands, answers = Hands(), list[OrderDone]()
    async with anyio.create_task_group() as tasks:
        executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
        executor.submit(1, "c1", START)
        executor.submit(1, "c2", ORDER)
    assert [answer.command_id for answer in answers] == ["c2"], "other orders are answered"
    executor.submit(1, "c1", START)
    assert [(answer.command_id, answer.ok) for answer in answers[1:]] == [("c1", True)]
    assert len(hands.done) == 2
    async with anyio.create_task_group() as tasks:
        executor._tasks = tasks
        hands.error = Conflict("not prepared")
        executor.submit(1, "c3", START)
    assert [(answer.command_id, answer.ok) for answer in answers[2:]] == [("c3", False)]


async def test_the_version_of_the_workers_is_said_with_the_first_answer_only(ledger: Ledger) -> None:
    """A repeated answer may be older than the set of workers."""
    hands, answers, asked = Hands(), list[OrderDone](), list[Sequence[RunningWorker]]()

    def version(workers: Sequence[RunningWorker]) -> int:
        asked.append(workers)
        return 5

    async with anyio.create_task_group() as tasks:
        executor = Executor(
            tasks=tasks,
            ledger=ledger,
            carry_out=hands.carry_out,
            report=answers.append,
            workers_version=version,
        )
        executor.submit(1, "c1", ORDER)
    executor.submit(1, "c1", ORDER)
    assert [answer.workers_version for answer in answers] == [5, 0]
    assert asked == [(RunningWorker("gpt", 3, 0, 99),)]


async def test_a_repeat_under_way_waits_for_the_one_answer(ledger: Ledger) -> None:
    hands, answers = Hands(), list[OrderDone]()
    hands.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
        executor.submit(1, "c1", ORDER)
        await anyio.wait_all_tasks_blocked()
        executor.submit(2, "c1", ORDER)  # a new leader sends what it does not know to be under way
        hands.gate.set()
    assert hands.done == [ORDER]
    assert [answer.ok for answer in answers] == [True]


async def test_a_lower_epoch_is_refused_and_the_refusal_is_not_remembered(ledger: Ledger) -> None:
    hands, answers = Hands(), list[OrderDone]()
    async with anyio.create_task_group() as tasks:
        executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
        ledger.raise_epoch(5)
        executor.submit(4, "c1", ORDER)
        assert hands.done == []
        assert not answers[0].ok
        assert "epoch 4 is over" in answers[0].reason
        executor.submit(5, "c1", ORDER)
    assert hands.done == [ORDER]
    assert answers[-1].ok


@pytest.mark.parametrize(
    "error", [Conflict("generation 2 is over"), OSError("disk full"), KeyError("a bug"), Unrestorable("step 3")]
)
async def test_a_failure_is_an_answer_with_its_reason(ledger: Ledger, error: Exception) -> None:
    hands, answers = Hands(), list[OrderDone]()
    hands.error = error
    async with anyio.create_task_group() as tasks:
        Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append).submit(1, "c1", ORDER)
    assert not answers[0].ok
    assert str(error) in answers[0].reason
    assert answers[0].unrestorable is isinstance(error, Unrestorable)
    assert ledger.answer("c1") == answers[0]


async def test_an_answer_that_cannot_be_remembered_is_no_success(tmp_path: Path) -> None:
    hands, answers = Hands(), list[OrderDone]()
    with Ledger(tmp_path / "agent.db") as ledger:
        ledger._database.execute("PRAGMA query_only = ON")  # what a file system turned read-only does
        async with anyio.create_task_group() as tasks:
            Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append).submit(
                0, "c1", ORDER
            )
    assert not answers[0].ok
    assert str(tmp_path / "agent.db") in answers[0].reason


def test_ledger_is_bounded_and_forgets_the_oldest(ledger: Ledger) -> None:
    for number in range(ANSWERS_MAX + 10):
        ledger._database.execute("PRAGMA synchronous = OFF")  # a thousand fsyncs are not what is tested
        ledger.remember(OrderDone(f"c{number}", ok=True))
    assert ledger.answer("c9") is None
    assert ledger.answer("c10") is not None


def test_ledger_in_a_bad_place_names_it(tmp_path: Path) -> None:
    (tmp_path / "agent.db").write_bytes(b"this is no database, and it is longer than a header" * 50)
    with pytest.raises(HoldfastError, match=r"agent\.db"):
        Ledger(tmp_path / "agent.db")


def test_ledger_keeps_what_was_written_when_the_process_dies(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    with Ledger(tmp_path / "live" / "agent.db") as ledger:
        ledger.remember(OrderDone("c1", ok=True))
        ledger.raise_epoch(9)
        shutil.copytree(tmp_path / "live", tmp_path / "left")  # while it is open: the files as SIGKILL leaves them
    with Ledger(tmp_path / "left" / "agent.db") as again:
        assert again.epoch == 9
        assert again.answer("c1") == OrderDone("c1", ok=True)


def test_orders_are_recorded_on_a_disk_that_has_become_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_tmpfs(disk, "8m"), Ledger(disk / "agent.db") as ledger:
        fill_up(disk)
        for number in range(3 * ANSWERS_MAX):
            ledger.remember(OrderDone(f"c{number}", ok=True, reason="a reason of some length " * 10))
            ledger.raise_epoch(number)
        assert ledger.answer(f"c{3 * ANSWERS_MAX - 1}") is not None


def test_a_ledger_without_room_to_reserve_is_used_as_it_is(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_tmpfs(disk, "128k"), Ledger(disk / "agent.db") as ledger:
        ledger.remember(OrderDone("c1", ok=True))
        assert ledger.answer("c1") == OrderDone("c1", ok=True)


def take_all(reports: Reports) -> list[tuple[int, str]]:
    taken = []
    while (numbered := reports.take()) is not None:
        taken.append((numbered.seq, type(numbered.report).__name__))
    return taken


def test_a_new_session_greets_first_and_repeats_what_was_not_acknowledged_under_higher_numbers() -> None:
    reports = Reports()
    reports.greet(HELLO)
    reports.add(OrderDone("c1", ok=True))
    reports.add(RanksFinished("gpt", 1, (0,), 5.0))
    assert take_all(reports) == [(1, "Hello"), (2, "OrderDone"), (3, "RanksFinished")]
    reports.acknowledge(2)
    reports.add(OrderDone("c2", ok=True))
    reports.greet(HELLO)
    assert take_all(reports) == [(4, "Hello"), (5, "RanksFinished"), (6, "OrderDone")]
    reports.acknowledge(6)
    reports.greet(HELLO)
    assert take_all(reports) == [(7, "Hello")]


def test_a_new_session_tells_once_what_is_held_here() -> None:
    reports = Reports()
    reports.greet(HELLO)
    reports.add(Inventory("gpt"))
    take_all(reports)
    reports.greet(HELLO, [Inventory("gpt"), Inventory("bert")])
    assert (greeting := reports.take()) is not None
    assert greeting.report == replace(HELLO, announced=Announced(("bert", "gpt")))
    assert take_all(reports) == [(4, "Inventory"), (5, "Inventory")]


def test_a_session_announces_nothing_while_the_replicator_has_not_told_all_it_holds() -> None:
    reports = Reports()
    reports.greet(HELLO)
    reports.add(Inventory("gpt"))
    assert [each.report for each in (reports.take(), reports.take()) if each] == [HELLO, Inventory("gpt")]


def test_only_the_newest_inventory_of_a_job_waits() -> None:
    reports = Reports()
    for _ in range(3):
        reports.add(Inventory("gpt"))
        reports.add(Inventory("bert"))
    assert take_all(reports) == [(1, "Inventory"), (2, "Inventory")]


async def test_a_reset_that_an_agent_did_not_survive_is_not_made_again(tmp_path: Path) -> None:
    """At most once: whoever finds the order begun answers that nobody knows how it ended."""
    hands, answers = Hands(), list[OrderDone]()
    hands.gate = anyio.Event()
    order = ResetGpu("gpt", (0,), 60.0)
    with Ledger(tmp_path / "agent.db") as ledger:
        async with anyio.create_task_group() as tasks:
            executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
            executor.submit(1, "c1", order)
            await anyio.lowlevel.checkpoint()
            executor.submit(1, "c1", order)  # repeated while it is under way: no answer yet
            assert answers == []
            tasks.cancel_scope.cancel()
    with Ledger(tmp_path / "agent.db") as ledger:
        async with anyio.create_task_group() as tasks:
            executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
            executor.submit(1, "c1", order)
    assert hands.done == [order]
    assert [(answer.ok, answer.reason) for answer in answers] == [(False, UNKNOWN_OUTCOME)]


async def test_the_answer_to_a_reset_is_kept(ledger: Ledger) -> None:
    hands, answers = Hands(), list[OrderDone]()
    async with anyio.create_task_group() as tasks:
        executor = Executor(tasks=tasks, ledger=ledger, carry_out=hands.carry_out, report=answers.append)
        executor.submit(1, "c1", ResetGpu("gpt"))
    executor.submit(1, "c1", ResetGpu("gpt"))
    assert len(hands.done) == 1
    assert [answer.ok for answer in answers] == [True, True]
