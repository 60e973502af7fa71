"""What every event log promises about streams and groups: one suite, on memory and on a real Redis."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from eventlogs import (
    BLOCK_S,
    DELIVERIES_MAX,
    GROUP,
    RECLAIM_AFTER_S,
    Bench,
    Reader,
    drain_until,
    entries,
    entry,
    names,
    read_all,
)

from holdfast.domain.errors import InvalidSpec
from holdfast.log.protocol import Backlog, Commit, Entry, FencedLog

pytestmark = pytest.mark.anyio

WAKE_TIMEOUT_S = 15.0  # a fraction of the patient bench's waits
PATIENCE_S = 30.0
IN_A_NODE = 2  # entries of that size that Redis keeps together, and removes together


def large_entries(count: int) -> list[Entry]:
    return [Entry(id=f"e{number}", type="test", data=bytes(4096)) for number in range(count)]


# ---------------------------------------------------------------------- reading and writing


async def test_an_entry_comes_back_as_it_was_written(log: FencedLog) -> None:
    written = entry("x")
    [position] = await log.append("s", written)
    [delivery] = await log.read("s")
    assert (delivery.stream, delivery.position, delivery.entry) == ("s", position, written)


async def test_order_is_the_order_of_appending(log: FencedLog) -> None:
    positions = await log.append("s", *entries(300))
    assert len(set(positions)) == 300
    assert await read_all(log, "s") == [f"e{number}" for number in range(300)]
    taken = await Reader(log, "s", batch_max=7).take(300)
    assert [delivery.position for delivery in taken] == positions


async def test_a_batch_is_bounded(log: FencedLog) -> None:
    await log.append("s", *entries(10))
    await log.append("t", *entries(10))
    assert len(await Reader(log, "s", "t", batch_max=6).batch()) == 6


async def test_a_backlog_is_what_is_pending_and_how_old_the_oldest_unread_entry_is(log: FencedLog) -> None:
    assert await log.backlog("s", GROUP) == Backlog(), "no stream"
    await log.append("s", *entries(3))
    assert await log.backlog("s", GROUP) == Backlog(), "no group"
    reader = Reader(log, "s", batch_max=2)
    taken = await reader.take(2)
    await anyio.sleep(0.02)
    behind = await log.backlog("s", GROUP)
    assert behind.pending == 2
    assert 0.01 < behind.lag_s < PATIENCE_S
    await reader.acknowledge(taken)
    await reader.take(1)
    assert await log.backlog("s", GROUP) == Backlog(pending=1, lag_s=0.0)


async def test_an_entry_is_handed_out_with_the_time_it_has_waited_in_the_log(log: FencedLog) -> None:
    """Measured by the log's own clock: a reader need not trust the clock of whoever wrote it."""
    await log.append("s", entry("x"))
    await anyio.sleep(0.02)
    [first] = await Reader(log, "s").take(1)
    [again] = await Reader(log, "s").take(1)
    [read] = await log.read("s")
    assert 0.01 < first.age_s <= again.age_s <= read.age_s < PATIENCE_S


async def test_appending_nothing_writes_nothing(log: FencedLog) -> None:
    assert await log.append("s") == []
    assert await log.last_position("s") == "0"


async def test_read_goes_on_after_a_position(log: FencedLog) -> None:
    positions = await log.append("s", *entries(5))
    assert names(await log.read("s", after=positions[1], count=2)) == ["e2", "e3"]
    assert await log.last_position("s") == positions[4]
    assert await log.read("s", after=positions[4]) == []
    assert await log.read("s", after="$") == []


async def test_read_after_now_waits_for_entries(log: FencedLog) -> None:
    await log.append("s", entry("old"))
    async with anyio.create_task_group() as tasks:

        async def write() -> None:
            await anyio.sleep(3 * BLOCK_S)  # longer than one blocking read: the position must stay pinned between two
            await log.append("s", entry("new"))

        tasks.start_soon(write)
        with anyio.fail_after(PATIENCE_S):
            assert names(await log.read("s", after="$", block_s=PATIENCE_S)) == ["new"]


async def test_read_gives_up_when_the_time_is_over(log: FencedLog) -> None:
    with anyio.fail_after(PATIENCE_S):
        assert await log.read("s", block_s=3 * BLOCK_S) == []


# ---------------------------------------------------------------------- groups


async def test_each_group_sees_everything(log: FencedLog) -> None:
    await log.append("s", *entries(3))
    for group in ("a", "b"):
        batch = await anext(log.subscribe("s", group=group, consumer="c"))
        assert names(batch) == ["e0", "e1", "e2"]


async def test_a_new_group_may_skip_history(log: FencedLog) -> None:
    await log.append("s", entry("old"))
    reader = Reader(log, "s", start="$")
    await reader.idle()
    await log.append("s", entry("new"))
    assert names(await reader.take(1)) == ["new"]


async def test_two_consumers_share_a_stream(bench: Bench) -> None:
    log = bench.open()
    readers = [Reader(bench.open(), "s", consumer=name, batch_max=10) for name in ("one", "two")]
    await log.append("s", *entries(200))
    shares: list[list[str]] = [[], []]
    with anyio.fail_after(PATIENCE_S):
        while sum(map(len, shares)) < 200:
            for share, reader in zip(shares, readers, strict=True):
                batch = await reader.batch()
                await reader.acknowledge(batch)
                share += names(batch)
    assert sorted(shares[0] + shares[1]) == sorted(f"e{number}" for number in range(200))
    assert min(map(len, shares)) > 0


async def test_append_wakes_blocked_consumer(patient_bench: Bench) -> None:
    log, reader = patient_bench.open(), Reader(patient_bench.open(), "s", "t")
    async with anyio.create_task_group() as tasks:

        async def write() -> None:
            await patient_bench.until_someone_waits()
            await log.append("t", entry("x"))

        tasks.start_soon(write)
        assert names(await reader.take(1, timeout_s=WAKE_TIMEOUT_S)) == ["x"]


# ---------------------------------------------------------------------- pending entries


async def test_a_restarted_consumer_first_gets_what_it_left_pending(log: FencedLog) -> None:
    await log.append("s", *entries(5))
    before = await Reader(log, "s", batch_max=2).take(2)
    again = await Reader(log, "s", batch_max=2).take(5)
    assert names(again) == ["e0", "e1", "e2", "e3", "e4"]
    assert [delivery.deliveries for delivery in again] == [2, 2, 1, 1, 1]
    assert [delivery.position for delivery in again[:2]] == [delivery.position for delivery in before]


async def test_acknowledged_entries_do_not_come_back(hasty_bench: Bench) -> None:
    log = hasty_bench.open()
    await log.append("s", *entries(3))
    await Reader(log, "s").take_and_acknowledge(3)
    reader = Reader(log, "s")
    await reader.idle(batches=round(2 * RECLAIM_AFTER_S / BLOCK_S))


async def test_a_failed_entry_comes_back_to_its_own_consumer(hasty_bench: Bench) -> None:
    log = hasty_bench.open()
    reader = Reader(log, "s")
    await log.append("s", *entries(2))
    first = await reader.take(2)
    await reader.acknowledge(first[:1])
    [again] = await reader.take(1)
    assert (again.entry.id, again.deliveries) == ("e1", 2)


async def test_a_dead_consumers_entries_are_taken_over(hasty_bench: Bench) -> None:
    await hasty_bench.open().append("s", *entries(3))
    dead = Reader(hasty_bench.open(), "s", consumer="dead")
    await dead.take(3)
    heir = Reader(hasty_bench.open(), "s", consumer="heir")
    started = anyio.current_time()
    taken = await heir.take(3)
    assert anyio.current_time() - started < PATIENCE_S  # the patient bench would take five times that
    assert names(taken) == ["e0", "e1", "e2"]
    assert {delivery.deliveries for delivery in taken} == {2}


async def test_a_taken_over_entry_belongs_to_the_heir(hasty_bench: Bench) -> None:
    """It is not handed to a third consumer until it has been idle again."""
    await hasty_bench.open().append("s", entry("x"))
    await Reader(hasty_bench.open(), "s", consumer="dead").take(1)
    await Reader(hasty_bench.open(), "s", consumer="heir").take(1)
    since = anyio.current_time()
    early = await Reader(hasty_bench.open(), "s", consumer="third").batch()
    assert early == [] or anyio.current_time() - since >= RECLAIM_AFTER_S


async def test_more_abandoned_entries_than_one_batch(hasty_bench: Bench) -> None:
    await hasty_bench.open().append("s", *entries(50))
    await Reader(hasty_bench.open(), "s", consumer="dead").take(50)
    heir = Reader(hasty_bench.open(), "s", consumer="heir", batch_max=4)
    assert sorted(names(await heir.take_and_acknowledge(50))) == sorted(f"e{number}" for number in range(50))


async def test_poison_goes_to_the_dead_stream_and_stops_nothing(hasty_bench: Bench) -> None:
    log = hasty_bench.open()
    await log.append("s", entry("poison"), entry("good"))
    reader = Reader(log, "s")
    taken = await reader.take(2)
    await reader.acknowledge(taken[1:])
    assert await drain_until(log, reader, "s.dead", 1) == ["poison"]
    [buried] = await log.read("s.dead")
    assert buried.entry == entry("poison")
    await log.append("s", entry("later"))
    assert names(await reader.take_and_acknowledge(1)) == ["later"]
    await reader.idle(batches=round(2 * RECLAIM_AFTER_S / BLOCK_S))
    assert await read_all(log, "s.dead") == ["poison"]


async def test_a_consumer_that_crashes_on_poison_is_freed_of_it(bench: Bench) -> None:
    """Each crash and restart counts as a delivery; after the last one the rest of the stream flows."""
    log = bench.open()
    await log.append("s", entry("poison"))
    seen = [(await Reader(log, "s").take(1))[0].deliveries for _ in range(DELIVERIES_MAX)]
    assert seen == [1, 2, 3]
    await log.append("s", entry("good"))
    assert names(await Reader(log, "s").take(1)) == ["good"]
    assert await read_all(log, "s.dead") == ["poison"]


async def test_trimmed_entries_are_dropped_from_the_pending_list(hasty_bench: Bench) -> None:
    log = hasty_bench.open()
    await log.append("s", *entries(4))
    await Reader(log, "s", consumer="dead").take(4)
    await hasty_bench.trim("s", 1)
    heir = Reader(log, "s", consumer="heir")
    assert names(await heir.take_and_acknowledge(1)) == ["e3"]
    await heir.idle(batches=round(2 * RECLAIM_AFTER_S / BLOCK_S))
    assert await read_all(log, "s.dead") == []


async def test_own_trimmed_entries_are_skipped_after_a_restart(bench: Bench) -> None:
    log = bench.open()
    await log.append("s", *entries(4))
    await Reader(log, "s").take(4)
    await bench.trim("s", 2)
    assert names(await Reader(log, "s", batch_max=1).take(2)) == ["e2", "e3"]


async def test_acknowledging_twice_or_what_is_unknown_is_harmless(log: FencedLog) -> None:
    [position] = await log.append("s", entry("x"))
    reader = Reader(log, "s")
    await reader.take_and_acknowledge(1)
    await log.acknowledge("s", GROUP, position, "999-0")
    await log.acknowledge("no-such-stream", GROUP, position)
    await log.acknowledge("s", "no-such-group", position)


async def test_a_malformed_position_is_named(log: FencedLog) -> None:
    with pytest.raises(InvalidSpec, match=r"position: 'yesterday' is not valid"):
        await log.acknowledge("s", GROUP, "yesterday")


# ---------------------------------------------------------------------- what is kept


async def test_what_every_group_has_acknowledged_is_removed(make_bench: Callable[..., Bench]) -> None:
    """Nothing sooner: an entry that one group still has pending, or has not read, stays, and all after it."""
    bench = make_bench(reclaim_after_s=5 * PATIENCE_S, consumed=("c",))
    log = bench.open()
    await log.append("c", *large_entries(40))
    await log.append("plain", *large_entries(40))
    slow = log.subscribe("c", group="slow", consumer="one", batch_max=10)
    pending = await anext(slow)
    for stream in ("c", "plain"):
        await Reader(log, stream).take_and_acknowledge(40)
    assert len(await log.read("c")) == 40, "the slow group has acknowledged nothing"
    await log.acknowledge("c", "slow", *(each.position for each in pending[:9]))
    left = names(await log.read("c"))
    assert left[-31:] == [f"e{number}" for number in range(9, 40)]
    assert len(left) <= 31 + IN_A_NODE
    while len(pending) < 40:
        pending += await anext(slow)
    await log.acknowledge("c", "slow", *(each.position for each in pending))
    assert len(await log.read("c")) <= IN_A_NODE
    assert len(await log.read("plain")) == 40, "others may read a stream that is not only for groups"
    await log.append("c", entry("after"))
    assert names(await Reader(log, "c").take_and_acknowledge(1)) == ["after"]
    await bench.aclose()


async def test_a_commit_removes_what_it_acknowledges(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(reclaim_after_s=5 * PATIENCE_S, consumed=("c",))
    log = bench.open()
    lease = await log.acquire("leader", "a", 30.0)
    assert lease is not None
    await log.append("c", *large_entries(40))
    taken = await Reader(log, "c").take(40)
    await log.commit(lease, Commit(acknowledge={("c", GROUP): [each.position for each in taken[:30]]}))
    assert names(await log.read("c"))[-10:] == [f"e{number}" for number in range(30, 40)]
    assert len(await log.read("c")) <= 10 + IN_A_NODE
    await bench.aclose()


@pytest.mark.parametrize("by", ["append", "commit"])
async def test_a_stream_is_bounded_by_bytes_as_well(make_bench: Callable[..., Bench], by: str) -> None:
    bench = make_bench(stream_bytes_max=2**20)
    log = bench.open()
    lease = await log.acquire("leader", "a", 30.0)
    assert lease is not None
    for _ in range(16):
        if by == "append":
            await log.append("s", *large_entries(32))
        else:
            await log.commit(lease, Commit(append=[("s", each) for each in large_entries(32)]))
    kept = await log.read("s")
    assert 50 <= len(kept) <= 300, "of 512 entries of 4 KiB, the newest MiB"
    assert kept[-1].entry.id == "e31"
    assert (await log.usage()).used_bytes > 0
    await bench.aclose()


# ---------------------------------------------------------------------- what happens to streams


async def test_a_stream_deleted_under_a_waiting_consumer(patient_bench: Bench) -> None:
    """On Redis the blocked read ends with UNBLOCKED, not NOGROUP; the next entry must arrive all the same."""
    log, reader = patient_bench.open(), Reader(patient_bench.open(), "s", "t")
    await log.append("s", entry("before"))
    await reader.take_and_acknowledge(1)
    async with anyio.create_task_group() as tasks:

        async def sabotage() -> None:
            await patient_bench.until_someone_waits()
            await patient_bench.delete_stream("s")
            await log.append("s", entry("after"))

        tasks.start_soon(sabotage)
        assert names(await reader.take(1, timeout_s=WAKE_TIMEOUT_S)) == ["after"]


async def test_a_stream_deleted_between_reads(bench: Bench) -> None:
    log, reader = bench.open(), Reader(bench.open(), "s")
    await reader.idle(1)
    await bench.delete_stream("s")
    await log.append("s", entry("after"))
    assert names(await reader.take_and_acknowledge(1)) == ["after"]


async def test_losing_everything_is_survived(bench: Bench) -> None:
    log, reader = bench.open(), Reader(bench.open(), "s", start="$")
    await reader.idle(1)
    await log.append("s", *entries(3))
    await reader.take(3)
    await bench.flush()
    await log.append("s", entry("after"))
    assert names(await reader.take_and_acknowledge(1)) == ["after"]


async def test_a_plain_reader_survives_the_deletion_of_its_stream(patient_bench: Bench) -> None:
    log = patient_bench.open()
    await log.append("s", entry("before"))
    async with anyio.create_task_group() as tasks:

        async def sabotage() -> None:
            await patient_bench.until_someone_waits()
            await patient_bench.delete_stream("s")
            await log.append("s", entry("after"))

        tasks.start_soon(sabotage)
        with anyio.fail_after(WAKE_TIMEOUT_S):
            assert names(await log.read("s", after="$", block_s=PATIENCE_S)) == ["after"]


# ---------------------------------------------------------------------- cancellation


async def test_cancelling_a_waiting_consumer_loses_nothing(make_bench: Callable[..., Bench]) -> None:
    """Cancelled at twenty different moments of a read, while entries flow: each one arrives, and each cancel is obeyed."""
    bench = make_bench(deliveries_max=100)  # each cancelled try counts
    log = bench.open()
    seen: set[str] = set()
    async with anyio.create_task_group() as writers:
        for moment in range(20):
            with anyio.move_on_after(0.001 + moment * BLOCK_S / 10) as scope:
                writers.start_soon(log.append, "s", entry(f"e{moment}"))
                reader = Reader(bench.open() if moment % 5 == 0 else log, "s")
                while True:
                    taken = await reader.batch()
                    seen |= set(names(taken))
                    await reader.acknowledge(taken)
            assert scope.cancelled_caught
    reader = Reader(log, "s")
    with anyio.fail_after(PATIENCE_S):
        while len(seen) < 20:
            seen |= set(names(await reader.batch()))
    assert seen == {f"e{number}" for number in range(20)}
    await bench.aclose()


async def test_cancelling_an_acknowledgement_is_obeyed(bench: Bench) -> None:
    """Twenty cancels amid acknowledgements: each is obeyed, and the connection serves the next command properly."""
    log = bench.open()
    positions = await log.append("s", *entries(100))
    await Reader(log, "s").take(100)
    for moment in range(20):
        with anyio.move_on_after(moment * 0.0003) as scope:
            while True:
                await log.acknowledge("s", GROUP, *positions[: 5 * moment])
        assert scope.cancelled_caught
        assert await log.last_position("s") == positions[-1]


async def test_cancelled_appends_leave_no_answers_behind(log: FencedLog) -> None:
    """A connection given back with an unread answer would serve it to the next command."""
    [first] = await log.append("other", entry("first"))
    for moment in range(20):
        with anyio.move_on_after(moment * 0.0003) as scope:
            while True:
                await log.append("s", *entries(5))
        assert scope.cancelled_caught
        assert await log.last_position("other") == first
        assert names(await log.read("other")) == ["first"]
    arrived = await read_all(log, "s")
    assert arrived == [f"e{number % 5}" for number in range(len(arrived))], "each append arrives whole or not at all"
