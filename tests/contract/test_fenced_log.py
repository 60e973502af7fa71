"""What every fenced log promises about leadership and atomic writes: one suite, on memory and on a real Redis."""

from __future__ import annotations

import pytest
from eventlogs import GROUP, Bench, Reader, entries, entry, names, read_all
from waiting import wait_until_async

from holdfast.domain.errors import InvalidSpec, StaleEpoch
from holdfast.log.protocol import CANDIDATE_S, Backlog, Commit, FencedLog, Lease, LostData

pytestmark = pytest.mark.anyio

TTL_S = 30.0
SHORT_S = 0.05


async def lead(log: FencedLog, holder: str = "a", *, ttl_s: float = TTL_S) -> Lease:
    lease = await log.acquire("leader", holder, ttl_s)
    assert lease is not None, f"{holder} could not take the lease"
    return lease


async def successor_of(log: FencedLog, holder: str) -> Lease:
    """`holder`'s lease, once the previous one has expired."""
    return await wait_until_async(lambda: log.acquire("leader", holder, TTL_S), description="the lease to expire")


# ---------------------------------------------------------------------- leases


async def test_one_holder_at_a_time(bench: Bench) -> None:
    first, second = bench.open(), bench.open()
    lease = await lead(first, "a")
    assert (lease.name, lease.holder) == ("leader", "a")
    assert lease.epoch > 0
    assert await second.acquire("leader", "b", TTL_S) is None
    assert await second.acquire("another", "b", TTL_S) is not None


async def test_the_holder_may_take_it_again_under_the_same_epoch(log: FencedLog) -> None:
    assert await lead(log, "a") == await lead(log, "a")


async def test_an_empty_log_is_left_to_whoever_may_begin(bench: Bench) -> None:
    """A log that has lost its data is as empty as a new one."""
    first, second = bench.open(), bench.open()
    with pytest.raises(LostData):
        await first.acquire("leader", "a", TTL_S, begin=False)
    lease = await lead(second, "b")
    assert await first.acquire("leader", "a", TTL_S, begin=False) is None
    await second.release(lease)
    again = await first.acquire("leader", "a", TTL_S, begin=False)
    assert again is not None
    assert again.epoch > lease.epoch


async def test_an_expired_lease_goes_to_the_next_with_a_higher_epoch(log: FencedLog) -> None:
    first = await lead(log, "a", ttl_s=SHORT_S)
    second = await successor_of(log, "b")
    assert second.epoch > first.epoch
    assert not await log.renew(first, TTL_S)
    assert await log.renew(second, TTL_S)


async def test_no_lease_outlasts_the_time_that_others_ask_for(bench: Bench) -> None:
    """What a server with a wrong clock makes of a lease of seconds."""
    holder, other = bench.open(), bench.open()
    lease = await lead(holder, "a", ttl_s=3600.0)
    second = await wait_until_async(lambda: other.acquire("leader", "b", SHORT_S), description="the lease to expire")
    assert second.epoch > lease.epoch
    assert not await holder.renew(lease, TTL_S)


async def test_a_holder_that_renews_in_time_keeps_the_lease_whoever_asks(bench: Bench) -> None:
    holder, other = bench.open(), bench.open()
    lease = await lead(holder, "a")
    for _ in range(20):
        assert await other.acquire("leader", "b", TTL_S) is None
        assert await holder.renew(lease, TTL_S)


async def test_who_asks_in_vain_is_known_for_a_while(bench: Bench) -> None:
    holder, other = bench.open(), bench.open()
    await lead(holder, "a")
    assert await holder.candidate("leader") == ""
    assert await other.acquire("leader", "b", TTL_S) is None
    assert await holder.candidate("leader") == "b"
    assert await holder.candidate("another") == ""

    async def nobody() -> bool:
        return await holder.candidate("leader") == ""

    await wait_until_async(nobody, description="the candidate to be forgotten", timeout_s=3 * CANDIDATE_S)


async def test_a_server_has_one_name_in_its_lifetime(bench: Bench) -> None:
    first, second = bench.open(), bench.open()
    assert await first.lifetime() == await second.lifetime() != ""


async def test_the_epoch_grows_even_when_the_holder_is_the_same(log: FencedLog) -> None:
    """A leader that slept through its lease is a new leader: others may have acted in between."""
    first = await lead(log, "a")
    await log.release(first)
    assert (await lead(log, "a")).epoch > first.epoch


async def test_epochs_grow_at_any_pace_of_change(log: FencedLog) -> None:
    epochs = []
    for _ in range(20):
        lease = await lead(log)
        epochs.append(lease.epoch)
        await log.release(lease)
    assert epochs == sorted(set(epochs))


async def test_renewal_keeps_the_lease(bench: Bench) -> None:
    log, other = bench.open(), bench.open()

    async def renewed() -> Lease | None:
        """None if this machine took longer than `SHORT_S`."""
        short = await log.acquire("leader", "a", SHORT_S)
        return short if short is not None and await log.renew(short, TTL_S) else None

    lease = await wait_until_async(renewed, description="a renewal before the end of a short lease")
    assert await other.acquire("leader", "b", TTL_S) is None
    assert await log.renew(lease, SHORT_S)
    assert (await successor_of(other, "b")).epoch > lease.epoch


async def test_the_time_of_a_holder_outlives_its_lease_and_ages_by_the_clock_of_the_log(bench: Bench) -> None:
    log, other = bench.open(), bench.open()
    lease = await lead(log)
    assert await log.renew(lease, TTL_S)
    assert await other.last_renewal("leader") is None, "a renewal without the holder's time"
    assert await log.renew(lease, TTL_S, 1_700_000_000.123456)
    renewed = await other.last_renewal("leader")
    assert renewed is not None
    assert renewed.at == 1_700_000_000.123456
    assert 0.0 <= renewed.ago_s < TTL_S
    assert await other.last_renewal("another") is None
    await log.release(lease)

    async def older() -> bool:
        known = await other.last_renewal("leader")
        return known is not None and known.at == renewed.at and known.ago_s >= renewed.ago_s + SHORT_S

    await wait_until_async(older, description="the renewal to be older")
    second = await lead(other, "b")
    assert not await log.renew(lease, TTL_S, 9.0), "a lost lease"
    assert (await other.last_renewal("leader")).at == renewed.at  # type: ignore[union-attr]
    assert await other.renew(second, TTL_S, -1.5)
    newest = await log.last_renewal("leader")
    assert newest is not None
    assert newest.at == -1.5


async def test_a_released_lease_is_free_at_once(bench: Bench) -> None:
    log, other = bench.open(), bench.open()
    lease = await lead(log)
    await log.release(lease)
    assert not await log.renew(lease, TTL_S)
    assert (await lead(other, "b")).epoch > lease.epoch


async def test_releasing_a_lost_lease_leaves_its_new_holder_alone(log: FencedLog) -> None:
    old = await lead(log, "a", ttl_s=SHORT_S)
    new = await successor_of(log, "b")
    await log.release(old)
    assert await log.renew(new, TTL_S)


async def test_epochs_never_fall_even_when_the_log_loses_everything(bench: Bench) -> None:
    """Agents remember the highest epoch and refuse lower ones: a leader of an emptied log must not be refused for good."""
    log = bench.open()
    first = await lead(log)
    await bench.flush()
    assert not await log.renew(first, TTL_S)
    assert (await lead(log, "b")).epoch >= first.epoch


# ---------------------------------------------------------------------- commits


async def test_a_commit_stores_appends_and_acknowledges(log: FencedLog) -> None:
    lease = await lead(log)
    reader = Reader(log, "in")
    await log.append("in", *entries(3))
    taken = await reader.take(3)
    await log.commit(
        lease,
        Commit(
            snapshot={"": b"state \x00\xff"},
            append=[("out", entry("a")), ("more", entry("b")), ("out", entry("c"))],
            acknowledge={("in", GROUP): [delivery.position for delivery in taken[:2]]},
        ),
    )
    assert await log.snapshot("leader") == {"": b"state \x00\xff"}
    assert await read_all(log, "out") == ["a", "c"]
    assert await read_all(log, "more") == ["b"]
    assert names(await Reader(log, "in").take(1)) == ["e2"]
    assert (await log.read("out"))[0].entry == entry("a")


async def test_a_large_commit(patient_bench: Bench) -> None:
    """More positions than a Lua stack holds."""
    log = patient_bench.open()
    lease = await lead(log, ttl_s=10 * TTL_S)
    reader = Reader(log, "in", batch_max=10_000)
    await log.append("in", *entries(10_000))
    taken = await reader.take(10_000, timeout_s=100.0)
    await log.commit(
        lease,
        Commit(
            snapshot={"": b"x" * 1_000_000},
            append=[("out", each.entry) for each in taken],
            acknowledge={("in", GROUP): [delivery.position for delivery in taken]},
        ),
    )
    assert len(await log.read("out", count=20_000)) == 10_000
    assert await log.backlog("in", GROUP) == Backlog()


async def test_a_commit_without_snapshot_keeps_the_last_one(log: FencedLog) -> None:
    lease = await lead(log)
    assert await log.snapshot("leader") == {}
    await log.commit(lease, Commit(snapshot={"": b"one"}))
    await log.commit(lease, Commit(append=[("out", entry("x"))]))
    assert await log.snapshot("leader") == {"": b"one"}
    await log.commit(lease, Commit(snapshot={"": b""}))
    assert await log.snapshot("leader") == {"": b""}


async def test_snapshots_belong_to_their_lease(log: FencedLog) -> None:
    await log.commit(await lead(log), Commit(snapshot={"": b"one"}))
    assert await log.snapshot("another") == {}


async def test_the_next_leader_finds_the_snapshot(bench: Bench) -> None:
    log, other = bench.open(), bench.open()
    lease = await lead(log)
    await log.commit(lease, Commit(snapshot={"": b"state"}))
    await log.release(lease)
    await lead(other, "b")
    assert await other.snapshot("leader") == {"": b"state"}


async def test_a_paused_leader_writes_nothing(bench: Bench) -> None:
    """It wakes after its lease has gone to another, and acts on what it believed: nothing of that may be seen."""
    log, other = bench.open(), bench.open()
    paused = await lead(log, "paused", ttl_s=SHORT_S)
    reader = Reader(log, "in")
    await log.append("in", entry("x"))
    taken = await reader.take(1)
    leader = await successor_of(other, "leader")
    await other.commit(leader, Commit(snapshot={"": b"new"}))
    with pytest.raises(StaleEpoch, match=r"paused no longer holds .*'leader'.* leader\); nothing was written"):
        await log.commit(
            paused,
            Commit(
                snapshot={"": b"old"},
                append=[("out", entry("stale"))],
                acknowledge={("in", GROUP): [taken[0].position]},
            ),
        )
    assert await log.snapshot("leader") == {"": b"new"}
    assert await read_all(log, "out") == []
    assert names(await Reader(log, "in").take(1)) == ["x"]


async def test_an_expired_lease_refuses_even_when_nobody_took_it(log: FencedLog) -> None:
    lease = await lead(log, ttl_s=SHORT_S)

    async def lost() -> bool:
        return not await log.renew(lease, SHORT_S / 1000)

    await wait_until_async(lost, description="the lease to expire")
    with pytest.raises(StaleEpoch, match="now: no holder"):
        await log.commit(lease, Commit(snapshot={"": b"late"}))
    assert await log.snapshot("leader") == {}


async def test_the_same_holder_under_an_older_epoch_is_refused(log: FencedLog) -> None:
    """A process that restarted under its old name: what its former self left running must not write."""
    old = await lead(log, "a", ttl_s=SHORT_S)
    await successor_of(log, "b")
    await log.release(Lease(name="leader", holder="b", epoch=(await lead(log, "b")).epoch))
    new = await lead(log, "a")
    assert new.epoch > old.epoch
    with pytest.raises(StaleEpoch):
        await log.commit(old, Commit(snapshot={"": b"old"}))


async def test_a_malformed_commit_writes_nothing(log: FencedLog) -> None:
    lease = await lead(log)
    with pytest.raises(InvalidSpec, match="position"):
        await log.commit(
            lease,
            Commit(snapshot={"": b"half"}, append=[("out", entry("x"))], acknowledge={("in", GROUP): ["1-0", "what"]}),
        )
    assert await log.snapshot("leader") == {}
    assert await read_all(log, "out") == []


async def test_an_empty_commit_still_checks_the_lease(log: FencedLog) -> None:
    lease = await lead(log)
    await log.commit(lease, Commit())
    await log.release(lease)
    with pytest.raises(StaleEpoch):
        await log.commit(lease, Commit())
