"""The history: kept once, found again, bounded, built anew when its file is of no use."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog.testing
from supervising import job_body
from waiting import wait_until_async

from holdfast.domain.errors import Unavailable
from holdfast.domain.findings import StepRecord
from holdfast.domain.generations import Generation, Placement
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState
from holdfast.domain.job import PolicySpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeState
from holdfast.log.memory import MemoryLog
from holdfast.log.names import EVENTS, LEADER_LEASE, STEPS
from holdfast.log.protocol import Entry
from holdfast.policy import restart
from holdfast.supervisor.history import sqlite_file
from holdfast.supervisor.history.follower import Follower
from holdfast.supervisor.history.ledger import account_in_thread
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.history.time_classes import Class
from holdfast.supervisor.picture import Progress
from holdfast.supervisor.policies.script import sample_incidents, sample_job
from holdfast.supervisor.protocol import (
    GenerationChanged,
    GenerationStage,
    IncidentChanged,
    JobAccepted,
    JobChanged,
    JobPhase,
    NodeChanged,
    PolicyChanged,
)
from holdfast.supervisor.published import LeaderChanged, OperationDone, PolicyAsked, Published
from holdfast.wire import records
from holdfast.wire.events import step_entries
from holdfast.wire.jobfile import parse_job

pytestmark = pytest.mark.anyio

INCIDENT = Incident("i-1", "gpt", "hang", "rank 2 hangs", IncidentState.OPEN, 1, fault_at=10.0, detected_at=11.0)
DECIDED = replace(
    INCIDENT,
    state=IncidentState.DECIDED,
    action=Action(ActionKind.RESTART, "healthy nodes"),
    decided_by="default policy",
    decided_at=11.5,
)


@pytest.fixture
async def history(tmp_path: Path) -> AsyncIterator[SqliteHistory]:
    history = await SqliteHistory.open(tmp_path / "h.sqlite3", steps_max=50, events_max=40)
    yield history
    await history.aclose()


def entries(*found: Published, first: int = 1) -> list[EventEntry]:
    return [EventEntry(f"{number}-0", record) for number, record in enumerate(found, start=first)]


def steps(count: int, *, first: int = 1, generation: int = 1, begin: float = 101.0) -> list[StepRecord]:
    return [
        StepRecord("gpt", generation, first + i, 2, begin + i, begin + i + 1, 100, 3.5 - i, 0.0) for i in range(count)
    ]


async def test_an_entry_is_kept_once(history: SqliteHistory) -> None:
    events = entries(IncidentChanged(11.0, INCIDENT), IncidentChanged(11.5, DECIDED))
    await history.add_events(events, "2-0")
    await history.add_events(events, "2-0")
    assert await history.incidents(job="gpt", before=None, limit=9) == [(1, DECIDED)]
    [done] = await history.actions(job=None, before=None, limit=9)
    assert (done.action, done.at) == (DECIDED.action, 11.5)
    assert await history.cursors() == ("2-0", "0")
    assert await history.incident("i-1") == DECIDED
    assert await history.incident("i-2") is None


async def test_an_old_record_delivered_again_does_not_undo_a_newer_one(history: SqliteHistory) -> None:
    await history.add_events(entries(IncidentChanged(11.0, INCIDENT), IncidentChanged(11.5, DECIDED)), "2-0")
    await history.add_events(entries(IncidentChanged(11.0, INCIDENT)), "2-0")
    assert await history.incident("i-1") == DECIDED


async def test_pages_are_newest_first(history: SqliteHistory) -> None:
    found = [replace(DECIDED, id=f"i-{n}", job="a" if n % 2 else "b") for n in range(6)]
    await history.add_events(entries(*(IncidentChanged(11.5, each) for each in found)), "6-0")
    first = await history.incidents(job="a", before=None, limit=2)
    rest = await history.incidents(job="a", before=first[-1][0], limit=2)
    assert [incident.id for _, incident in first + rest] == ["i-5", "i-3", "i-1"]
    assert [done.incident.id for done in await history.actions(job="b", before=None, limit=9)] == ["i-4", "i-2", "i-0"]


async def test_operations_and_leaders(history: SqliteHistory) -> None:
    done = OperationDone(5.0, "op-1", False, "a job named gpt is running", "f")
    await history.add_events(
        entries(LeaderChanged(1.0, 1, "a", "http://a"), LeaderChanged(2.0, 2, "b", "http://b"), done), "3-0"
    )
    assert await history.operation("op-1") == done
    assert await history.operation("op-2") is None
    leader = await history.leader()
    assert leader is not None
    assert leader.api == "http://b"


async def test_it_stays_bounded(history: SqliteHistory) -> None:
    for n in range(4):
        await history.add_steps(steps(40, first=1 + 40 * n, begin=101.0 + 40 * n), "1-0")
    for n in range(8):
        many = [NodeChanged(1.0, "n", NodeState.SPARE, "", "") for _ in range(20)]
        await history.add_events(entries(*many, first=1 + 20 * n), "1-0")
    await history.add_events(entries(JobAccepted(100.0, "gpt", parse_job(job_body())), first=1000), "1-0")
    run = await history.run("gpt")
    assert run is not None
    assert 50 <= len(run.steps) <= 90
    assert max(record.step for record in run.steps) == 160
    assert 39 <= len(run.nodes) <= 60


async def test_steps_that_are_kept_no_more_stay_in_the_goodput_over_a_restart_too(tmp_path: Path) -> None:
    history = await SqliteHistory.open(tmp_path / "h.sqlite3", steps_max=50)
    await history.add_events(entries(JobAccepted(100.0, "gpt", parse_job(job_body(nodes=2)))), "1-0")
    for n in range(4):
        await history.add_steps(steps(100, first=1 + 100 * n, begin=101.0 + 100 * n), "1-0")
    await history.aclose()
    history = await SqliteHistory.open(tmp_path / "h.sqlite3", steps_max=50)
    run = await history.run("gpt")
    await history.aclose()
    assert run is not None
    assert len(run.steps) < 200
    ledger = await account_in_thread(run, now=501.0)
    assert ledger.seconds[Class.USEFUL] == pytest.approx(400.0)
    assert ledger.seconds[Class.STARTUP] == pytest.approx(1.0), "and not the steps that went"
    assert ledger.tokens == 400 * 100


async def test_a_file_from_before_steps_were_booked_is_brought_up_to_date(tmp_path: Path) -> None:
    history = await SqliteHistory.open(tmp_path / "h.sqlite3")
    await history.add_events(entries(JobAccepted(100.0, "gpt", parse_job(job_body()))), "1-0")
    await history.add_steps(steps(10), "1-0")
    await history.aclose()
    database = sqlite3.connect(tmp_path / "h.sqlite3")
    database.executescript(
        "DROP TABLE booked; DROP TABLE asked; ALTER TABLE steps DROP COLUMN flops; PRAGMA user_version = 2;"
    )
    database.close()
    history = await SqliteHistory.open(tmp_path / "h.sqlite3", steps_max=5)
    await history.add_steps(steps(10, first=11, begin=111.0), "2-0")
    run = await history.run("gpt")
    await history.aclose()
    assert run is not None
    assert (await account_in_thread(run, now=121.0)).tokens == 20 * 100


async def test_a_run_becomes_a_ledger_whose_seconds_add_up(history: SqliteHistory) -> None:
    spec = parse_job(job_body())
    generation = Generation(1, 1, Mesh.of({"dp": 2}), (Placement(0, "n1", 0, 1), Placement(1, "n2", 1, 1)))
    await history.add_events(
        entries(
            NodeChanged(90.0, "n1", NodeState.SPARE, "", ""),
            NodeChanged(90.0, "n2", NodeState.SPARE, "", ""),
            NodeChanged(90.0, "n3", NodeState.SPARE, "", ""),
            JobAccepted(100.0, "gpt", spec),
            JobChanged(100.0, "gpt", JobPhase.PENDING, "submitted"),
            JobChanged(100.0, "gpt", JobPhase.PREPARING, ""),
            NodeChanged(100.0, "n1", NodeState.ACTIVE, "gpt", ""),
            GenerationChanged(100.5, "gpt", GenerationStage.STARTED, generation, ""),
            NodeChanged(105.0, "n3", NodeState.LOST, "", ""),
            GenerationChanged(111.0, "gpt", GenerationStage.ENDED, generation, ""),
            JobChanged(111.0, "gpt", JobPhase.COMPLETED, ""),
        ),
        "11-0",
    )
    await history.add_steps(steps(10), "1-0")
    run = await history.run("gpt")
    assert run is not None
    ledger = await account_in_thread(run, now=500.0)
    assert ledger.wall_s == pytest.approx(11.0)
    assert sum(ledger.seconds.values()) == pytest.approx(11.0)
    assert ledger.seconds[Class.USEFUL] == pytest.approx(10.0)
    assert ledger.seconds[Class.STARTUP] == pytest.approx(1.0)
    assert ledger.world_sizes == ((0.0, 0), (0.5, 2), (11.0, 0))
    assert ledger.goodput_paid == pytest.approx(10.0 * 2 / (3 * 5 + 2 * 6))


@pytest.mark.parametrize("late", [False, True], ids=["no steps", "a late first step"])
async def test_the_time_of_a_run_without_steps_is_known_as_such(history: SqliteHistory, *, late: bool) -> None:
    """A script that was silent for long before its first step only seemed to report none."""
    generation = Generation(1, 1, Mesh.of({"dp": 2}), (Placement(0, "n1", 0, 1), Placement(1, "n2", 1, 1)))
    after = replace(generation, number=2)
    stepping = GenerationStage.STEPPING
    await history.add_events(
        entries(
            JobAccepted(100.0, "gpt", parse_job(job_body())),
            JobChanged(100.0, "gpt", JobPhase.PREPARING, ""),
            GenerationChanged(101.0, "gpt", GenerationStage.STARTED, generation, ""),
            GenerationChanged(106.0, "gpt", stepping, generation, "", reports_steps=False),
            GenerationChanged(120.0, "gpt", GenerationStage.PLANNED, after, ""),
            GenerationChanged(121.0, "gpt", GenerationStage.STARTED, after, ""),
            GenerationChanged(124.0, "gpt", stepping, after, "", reports_steps=False),
            JobChanged(130.0, "gpt", JobPhase.STOPPED, ""),
        ),
        "8-0",
    )
    if late:
        await history.add_steps([replace(each, generation=2) for each in steps(4, begin=126.0)], "1-0")
    run = await history.run("gpt")
    assert run is not None
    ledger = await account_in_thread(run, now=500.0)
    assert ledger.wall_s == pytest.approx(30.0) == sum(ledger.seconds.values())
    assert ledger.seconds[Class.RUNNING] == pytest.approx(14.0 if late else 20.0)
    assert (ledger.goodput_job is None) == (not late)


async def test_a_second_run_of_a_name_is_another_run(history: SqliteHistory) -> None:
    spec = parse_job(job_body())
    await history.add_events(entries(JobAccepted(100.0, "gpt", spec), JobAccepted(200.0, "gpt", spec)), "2-0")
    await history.add_steps(steps(3) + steps(2, begin=201.0), "1-0")
    run = await history.run("gpt")
    assert run is not None
    assert run.accepted.at == 200.0
    assert len(run.steps) == 2


# ---------------------------------------------------------------- its file


async def test_a_damaged_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite3"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    history = await SqliteHistory.open(path)
    assert await history.cursors() == ("0", "0")
    await history.aclose()
    assert (tmp_path / "h.sqlite3.old").exists()


async def test_a_file_of_another_layout_is_put_aside(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "h.sqlite3")
    database.execute("PRAGMA user_version = 99")
    database.close()
    history = await SqliteHistory.open(tmp_path / "h.sqlite3")
    assert await history.cursors() == ("0", "0")
    await history.aclose()


async def test_the_history_is_used_again_after_a_return_to_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.sqlite3"
    accepted = entries(JobAccepted(100.0, "gpt", parse_job(job_body())))

    async def opened(position: str = "") -> tuple[str, str]:
        """Its cursors, then a job is accepted at `position`."""
        history = await SqliteHistory.open(path)
        found = await history.cursors()
        if position:
            await history.add_events(accepted, position)
        await history.aclose()
        return found

    await opened("2-0")
    with monkeypatch.context() as earlier:
        earlier.setattr(sqlite_file, "LAYOUT", sqlite_file.LAYOUT - 1)
        earlier.setattr(sqlite_file, "_UPGRADES", sqlite_file._UPGRADES[:-1])
        assert await opened("3-0") == ("0", "0"), "it has built a new file"
        assert await opened() == ("3-0", "0"), "which stays in use"
    assert await opened() == ("2-0", "0"), "the entries after it are read again"
    assert await opened() == ("2-0", "0")
    (tmp_path / "h.sqlite3.old").write_bytes(b"this is no database, whatever its name says" * 100)
    assert await opened() == ("2-0", "0")


async def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="HOLDFAST_DATA_DIR"):
        await SqliteHistory.open(tmp_path / "file" / "h.sqlite3")


# ---------------------------------------------------------------- the follower


async def follow(log: MemoryLog, history: SqliteHistory, progress: Progress, until: Any) -> None:
    follower = Follower(log, history, progress)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follower.follow_events)
        tasks.start_soon(follower.follow_steps)
        await wait_until_async(until, description="the history to catch up")
        tasks.cancel_scope.cancel()


async def test_a_lost_history_is_rebuilt_from_the_streams(history: SqliteHistory) -> None:
    log, progress = MemoryLog(), Progress()
    await log.append(
        EVENTS,
        records.entry("1", IncidentChanged(11.5, DECIDED), Published),
        Entry("2", "Nonsense", b"\xff"),
        records.entry("3", LeaderChanged(2.0, 2, "b", "http://b"), Published),
    )
    await log.append(STEPS, *step_entries(steps(5)), Entry("4", "StepRecords", b"\xff\xff"))

    async def caught_up() -> bool:
        return await history.cursors() == ("3-0", "5-0")

    await follow(log, history, progress, caught_up)
    assert await history.incident("i-1") == DECIDED
    assert progress.tokens_per_s("gpt") == pytest.approx(100.0)
    await follow(log, history, Progress(), caught_up)  # from where it ended
    assert len(await history.incidents(job=None, before=None, limit=9)) == 1


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
async def test_steps_are_kept_in_the_time_of_the_leaders_whatever_clock_diagnostics_has(
    history: SqliteHistory, ahead_s: float
) -> None:
    """Goodput compares them with events. They are read late, as after an outage of this supervisor."""
    log, leads_at = MemoryLog(), 100.0
    await history.add_events(entries(JobAccepted(90.0, "gpt", parse_job(job_body()))), "1-0")
    lease = await log.acquire(LEADER_LEASE, "a", 60.0)
    assert lease is not None
    assert await log.renew(lease, 60.0, leads_at)
    records = [
        replace(each, started_at=each.started_at + ahead_s, ended_at=each.ended_at + ahead_s)
        for each in steps(5, begin=leads_at - 5)
    ]
    await log.append(
        STEPS, *step_entries(records[:3], leads_at + ahead_s), *step_entries(records[3:], leads_at + ahead_s)
    )

    async def caught_up() -> bool:
        return (await history.cursors())[1] == "2-0"

    await follow(log, history, Progress(), caught_up)
    run = await history.run("gpt")
    assert run is not None
    booked = run.steps
    assert [each.step for each in booked] == [1, 2, 3, 4, 5]
    assert [each.ended_at for each in booked] == pytest.approx([leads_at - 4 + i for i in range(5)], abs=2.0)
    assert [each.ended_at - each.started_at for each in booked] == pytest.approx([1.0] * 5)


async def test_a_history_that_cannot_be_written_catches_up_later(
    history: SqliteHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, failures = MemoryLog(), [3]
    write = history._add_events

    def flaky(events: Any, cursor: str) -> None:
        if failures[0]:
            failures[0] -= 1
            raise sqlite3.OperationalError("database or disk is full")
        write(events, cursor)

    monkeypatch.setattr(history, "_add_events", flaky)
    await log.append(EVENTS, records.entry("1", IncidentChanged(11.5, DECIDED), Published))

    async def there() -> bool:
        return await history.incident("i-1") is not None

    await follow(log, history, Progress(), there)
    assert failures == [0]


def asked(at: float, job: str = "gpt", action: Action | None = None) -> PolicyAsked:
    incident = replace(sample_incidents()[0], job=job)
    return PolicyAsked(at, incident, sample_job(incident), action or restart("why not"), "p.py")


async def test_questions_to_policies_are_kept_and_found_by_job_and_time(history: SqliteHistory) -> None:
    added_twice = entries(*(asked(100.0 + n) for n in range(6)), asked(200.0, "other"))
    await history.add_events(added_twice, "7-0")
    await history.add_events(added_twice, "7-0")
    newest = await history.asked("gpt", since=102.0, before=None, limit=3)
    assert [each.at for _, each in newest] == [105.0, 104.0, 103.0]
    rest = await history.asked("gpt", since=102.0, before=newest[-1][0], limit=3)
    assert [each for _, each in rest] == [asked(102.0)]
    assert await history.run("gpt") is None, "a question is no event of a run"


async def test_old_questions_go_when_there_are_too_many(history: SqliteHistory) -> None:
    for n in range(5):
        many = entries(*(asked(100.0 + 20 * n + k) for k in range(20)), first=1 + 20 * n)
        await history.add_events(many, f"{n}-0")
    kept = await history.asked("gpt", since=0.0, before=None, limit=100)
    assert kept[0][1].at == 199.0
    assert len(kept) < 100


async def test_the_policies_of_a_run_are_listed_from_its_submission_on(history: SqliteHistory) -> None:
    spec = parse_job(job_body()).with_policy(PolicySpec("a.py", "x = 1\n"))
    other = PolicySpec("b.py", "x = 2\n", {"swaps": 3})
    await history.add_events(
        entries(
            JobAccepted(50.0, "gpt", spec),
            PolicyChanged(60.0, "gpt", PolicySpec("of the run before")),
            JobAccepted(100.0, "gpt", spec),
            PolicyChanged(120.0, "gpt", other),
        ),
        "4-0",
    )
    assert await history.policies("gpt") == [
        PolicyChanged(100.0, "gpt", spec.policy_spec),
        PolicyChanged(120.0, "gpt", other),
    ]
    assert await history.policies("nope") == []


async def test_a_file_from_before_questions_were_kept_is_brought_up_to_date(tmp_path: Path) -> None:
    history = await SqliteHistory.open(tmp_path / "h.sqlite3")
    await history.add_events(entries(JobAccepted(100.0, "gpt", parse_job(job_body()))), "1-0")
    await history.aclose()
    database = sqlite3.connect(tmp_path / "h.sqlite3")
    database.executescript("DROP TABLE asked; ALTER TABLE steps DROP COLUMN flops; PRAGMA user_version = 3;")
    database.close()
    history = await SqliteHistory.open(tmp_path / "h.sqlite3")
    await history.add_events(entries(asked(101.0), first=2), "2-0")
    assert len(await history.asked("gpt", since=0.0, before=None, limit=5)) == 1
    assert await history.run("gpt") is not None
    await history.aclose()


async def test_an_outage_of_the_event_log_is_a_few_lines_and_not_one_for_each_try(
    history: SqliteHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, failures = MemoryLog(), [4]
    read = log.read

    async def away(stream: str, **options: Any) -> Any:
        if stream == EVENTS and failures[0]:
            failures[0] -= 1
            raise Unavailable("Redis does not answer")
        return await read(stream, **options)

    monkeypatch.setattr(log, "read", away)
    await log.append(EVENTS, records.entry("1", IncidentChanged(11.5, DECIDED), Published))

    async def there() -> bool:
        return await history.incident("i-1") is not None

    with structlog.testing.capture_logs() as lines:
        await follow(log, history, Progress(), there)
    assert failures == [0]
    assert [(each["event"], each["times"]) for each in lines if each.get("stream") == EVENTS] == [
        ("the history is falling behind", 1),
        ("the history is followed again", 4),
    ]
