"""The Redis log when Redis itself has a bad day: restarts, freezes, full memory and disk, lost answers, foreign data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from cutting_proxy import cutting_proxy
from eventlogs import FLEET, GROUP, Reader, entries, entry, names, read_all, redis_log
from servers import RedisServer
from waiting import TIMEOUT_S, wait_until_async

from holdfast.domain.errors import HoldfastError, InvalidSpec, RedisAway, StaleEpoch, Unavailable
from holdfast.log import subscription
from holdfast.log.connection import Connection
from holdfast.log.embedded import MEMORY_MAX, EmbeddedRedis
from holdfast.log.keys import Keys
from holdfast.log.protocol import Commit, Entry, Lease, LostData
from holdfast.log.redis import RedisLog

pytestmark = pytest.mark.anyio

KEYS = Keys(FLEET)


@pytest.fixture
async def log(redis_url: str) -> AsyncIterator[RedisLog]:
    log = redis_log(redis_url, reclaim_after_s=60.0)
    yield log
    await log.aclose()


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def binary(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def lead(log: RedisLog, holder: str = "a") -> Lease:
    lease = await log.acquire("leader", holder, 30.0)
    assert lease is not None
    return lease


# ---------------------------------------------------------------------- a lost second


async def test_a_commit_on_top_of_one_that_redis_has_lost_writes_nothing(log: RedisLog, binary: redis.Redis) -> None:
    """The server came back without its last second and the lease is still held: the leader's differences have no base."""
    lease = await lead(log)
    await log.commit(lease, Commit({"a": b"1", "b": b"1"}))
    kept: dict[str, Any] = {key: binary.dump(key) for key in (KEYS.parts("leader"), KEYS.commit("leader"))}
    await log.commit(lease, Commit({"a": b"2"}))
    for key, dumped in kept.items():
        binary.restore(key, 0, dumped, replace=True)
    with pytest.raises(StaleEpoch, match="has lost the previous commit"):
        await log.commit(lease, Commit({"b": b"3"}, append=[("s", entry("x"))]))
    assert await log.snapshot("leader") == {"a": b"1", "b": b"1"}
    assert await log.read("s") == []


# ---------------------------------------------------------------------- restarts


def restart(server: RedisServer) -> None:
    server.stop()
    server.start()


def crash(server: RedisServer) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("calamity", [restart, crash])
async def test_a_restart_mid_stream_loses_nothing(
    own_server: RedisServer, calamity: Callable[[RedisServer], None]
) -> None:
    log = redis_log(own_server.url, reclaim_after_s=60.0)
    lease = await lead(log)
    reader = Reader(log, "s")
    await log.append("s", *entries(4))
    taken = await reader.take(4)
    await log.commit(lease, Commit(snapshot={"": b"state"}, acknowledge={("s", GROUP): [taken[0].position]}))

    async with anyio.create_task_group() as tasks:
        seen: list[str] = []

        async def go_on_reading() -> None:
            while len(seen) < 4:
                seen.extend(names(await reader.take(1)))

        tasks.start_soon(go_on_reading)
        await anyio.to_thread.run_sync(calamity, own_server)
        await log.append("s", entry("after"))

    assert seen == ["e1", "e2", "e3", "after"], "what was pending comes first and at once, and then what is new"
    assert await log.snapshot("leader") == {"": b"state"}
    assert await log.renew(lease, 30.0), "a lease outlives a short restart"
    await log.commit(lease, Commit(snapshot={"": b"more"}))
    await log.aclose()


async def test_readers_wait_out_a_long_absence(own_server: RedisServer) -> None:
    """Empty batches go on meanwhile, so that a service can do its chores."""
    log = redis_log(own_server.url)
    reader = Reader(log, "s")
    await reader.idle(1)
    own_server.stop()
    await reader.idle(batches=5)
    own_server.start()
    await log.append("s", entry("x"))
    assert names(await reader.take(1)) == ["x"]
    await log.aclose()


async def test_a_frozen_server_is_unavailable_and_recovers(own_server: RedisServer) -> None:
    log = redis_log(own_server.url)
    await log.append("s", entry("before"))
    own_server.freeze()
    try:
        with anyio.fail_after(TIMEOUT_S), pytest.raises(RedisAway, match="does not answer"):
            await log.append("s", entry("during"))
    finally:
        own_server.thaw()
    await log.append("s", entry("after"))
    assert {"before", "after"} <= set(await read_all(log, "s")), "'during' may or may not be there: its outcome is open"
    await log.aclose()


async def test_a_frozen_server_is_asked_once_also_over_a_new_connection(own_server: RedisServer) -> None:
    connection, asked = Connection(own_server.url, block_s=0.1), 0

    async def ask() -> bool:
        nonlocal asked
        asked += 1
        return bool(await connection.redis.ping())

    await connection.call(ask)
    own_server.freeze()
    try:
        for _ in range(2):  # the second time the handshake is not answered
            with pytest.raises(RedisAway, match="does not answer"):
                await connection.call(ask)
    finally:
        own_server.thaw()
    assert asked == 3
    await connection.aclose()


# ---------------------------------------------------------------------- not there at all


async def test_a_refused_connection_names_the_address(own_server: RedisServer) -> None:
    url = own_server.url.replace("redis://", "redis://:secret@")
    address = own_server.url.removeprefix("redis://").removesuffix("/0")
    own_server.stop()
    log = redis_log(url)
    for command in (log.ping, lambda: log.append("s", entry("x")), lambda: log.acquire("leader", "a", 1.0)):
        with pytest.raises(RedisAway, match=f"Redis at {address} does not answer.*HOLDFAST_REDIS_URL") as caught:
            await command()
        assert "secret" not in str(caught.value)
    await log.aclose()


async def test_a_wrong_password_says_so(redis_url: str) -> None:
    log = redis_log(redis_url.replace("redis://", "redis://somebody:wrong@"))
    with pytest.raises(Unavailable, match="refuses the credentials"):
        await log.ping()
    await log.aclose()


@pytest.mark.parametrize(
    "url", ["http://somewhere", "me:secret@nowhere", "redis://host:notaport/0", "redis://:secret@h/0?foo=1"]
)
def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSpec, match=r"HOLDFAST_REDIS_URL: .* expected redis://host:port/db") as caught:
        RedisLog(url, FLEET)
    assert "secret" not in str(caught.value)


def test_a_fleet_that_would_break_the_hash_tag_is_refused(redis_url: str) -> None:
    with pytest.raises(InvalidSpec, match="fleet: 'a}b' is not valid"):
        RedisLog(redis_url, "a}b")


async def test_a_unix_socket_url(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path):  # a container's socket is not ours to open
        log = redis_log(f"unix://{tmp_path}/redis.sock")
        await log.append("s", entry("x"))
        assert await read_all(log, "s") == ["x"]
        await log.aclose()


# ---------------------------------------------------------------------- older data


async def test_older_data_than_the_last_leader_is_noticed_by_who_saw_it(redis_url: str, raw: redis.Redis) -> None:
    """A failover to a replica that lacks the last election: its lease, if there is one, is that of an earlier leader."""
    log, other, keys = redis_log(redis_url), redis_log(redis_url), Keys(FLEET)
    lease = await lead(log)
    assert await other.acquire("leader", "b", 30.0) is None
    raw.set(keys.epoch("leader"), lease.epoch - 5)
    raw.set(keys.lease("leader"), f"{lease.epoch - 5} a", px=60_000)
    with pytest.raises(LostData):
        await other.acquire("leader", "b", 30.0)
    raw.delete(keys.lease("leader"))
    with pytest.raises(LostData):
        await other.acquire("leader", "b", 30.0, begin=False)
    again = await other.acquire("leader", "b", 30.0)
    assert again is not None
    assert again.epoch > lease.epoch
    await log.aclose()
    await other.aclose()


async def test_an_emptied_redis_hands_out_no_epoch_twice(log: RedisLog, raw: redis.Redis) -> None:
    """Not even within the second of the last election, which the server's clock alone does not tell apart."""
    epochs = []
    for holder in "abcdefgh":
        epochs.append((await lead(log, holder)).epoch)
        raw.flushall()
    assert epochs == sorted(set(epochs))


# ---------------------------------------------------------------------- full


async def test_full_memory_refuses_and_writes_nothing(log: RedisLog, raw: redis.Redis) -> None:
    lease = await lead(log)
    reader = Reader(log, "s")
    [position] = await log.append("s", entry("x"))
    await reader.take(1)
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(
            Unavailable, match=r"the memory of Redis at .* is full, so it rejects writes; raise its maxmemory"
        ):
            await log.append("s", entry("y"))
        with pytest.raises(Unavailable, match="is full, so it rejects writes"):
            await log.commit(
                lease,
                Commit(snapshot={"": b"half"}, append=[("out", entry("z"))], acknowledge={("s", GROUP): [position]}),
            )
    finally:
        raw.config_set("maxmemory", MEMORY_MAX)
    assert await log.snapshot("leader") == {}
    assert await read_all(log, "out") == []
    assert names(await Reader(log, "s").take(1)) == ["x"]
    await log.append("s", entry("y"))


async def test_what_is_acknowledged_makes_room_in_a_full_memory(own_server: RedisServer) -> None:
    """As when an earlier version had kept it, or the leader was away: nobody has to clear up by hand."""
    log = redis_log(own_server.url, consumed=("c",))
    keeps_all = redis_log(own_server.url, consumed=())
    await log.append("c", *(Entry(f"e{number}", "test", bytes(4096)) for number in range(500)))
    await Reader(keeps_all, "c").take_and_acknowledge(500)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 2**20)
        with pytest.raises(Unavailable, match=r"the memory of Redis at .* is full"):
            await keeps_all.append("c", entry("refused"))
        assert await lead(log), "a leader can be found although there is no room for a lease at first"
        await log.append("c", entry("after"))
    assert names(await Reader(log, "c").take(1)) == ["after"]
    for each in (log, keeps_all):
        await each.aclose()


async def test_usage_is_that_of_the_whole_server(own_server: RedisServer) -> None:
    log = redis_log(own_server.url)
    await log.append("s", Entry("large", "test", bytes(2**20)))
    usage = await log.usage()
    assert 2**20 < usage.used_bytes < usage.limit_bytes
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 0)
    assert (await log.usage()).limit_bytes == 0, "no limit"
    await log.aclose()


async def test_a_disk_that_cannot_be_written_refuses(own_server: RedisServer) -> None:
    log = redis_log(own_server.url)
    lease = await lead(log)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("dbfilename", ".")  # a dump cannot replace a directory
        client.config_set("save", "3600 1")
        client.bgsave()
        await wait_until_async(
            lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", description="the failed dump"
        )
        with pytest.raises(Unavailable, match=r"does not serve now: .*MISCONF"):
            await log.commit(lease, Commit(snapshot={"": b"half"}))
        client.config_set("save", "")
        client.config_set("stop-writes-on-bgsave-error", "no")
    assert await log.snapshot("leader") == {}
    await log.commit(lease, Commit(snapshot={"": b"whole"}))
    await log.aclose()


async def test_streams_stay_bounded(redis_url: str, raw: redis.Redis) -> None:
    log = RedisLog(redis_url, FLEET, stream_length_max=100)
    lease = await lead(log)
    await log.append("s", *entries(1000))
    await log.commit(lease, Commit(append=[("t", each) for each in entries(1000)]))
    for stream in ("s", "t"):
        assert 100 <= raw.xlen(KEYS.stream(stream)) <= 200  # Redis trims whole nodes of a hundred
    await log.aclose()


# ---------------------------------------------------------------------- lost answers


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1].split("/")[0])


async def test_an_append_whose_answer_got_lost_may_be_doubled_but_not_lost(redis_url: str) -> None:
    async with cutting_proxy(port_of(redis_url)) as proxy:
        log = redis_log(f"redis://127.0.0.1:{proxy.port}/0")
        proxy.cut_after(b"XADD")
        await log.append("s", entry("x"))
        assert proxy.cuts == 1
        assert await read_all(log, "s") == ["x", "x"], "the same id twice: consumers are idempotent on it"
        await log.aclose()


async def test_a_commit_whose_answer_got_lost_is_done_once(redis_url: str) -> None:
    async with cutting_proxy(port_of(redis_url)) as proxy:
        log = redis_log(f"redis://127.0.0.1:{proxy.port}/0")
        lease = await lead(log)
        reader = Reader(log, "s")
        await log.append("s", *entries(2))
        taken = await reader.take(2)
        await log.commit(lease, Commit(snapshot={"": b"one"}))  # the script is loaded now
        proxy.cut_after(b"precious")
        await log.commit(
            lease,
            Commit(
                snapshot={"": b"precious"},
                append=[("out", entry("x"))],
                acknowledge={("s", GROUP): [taken[0].position]},
            ),
        )
        assert proxy.cuts == 1
        assert await log.snapshot("leader") == {"": b"precious"}
        assert await read_all(log, "out") == ["x"]
        assert names(await Reader(log, "s").take(1)) == ["e1"]
        await log.commit(lease, Commit(append=[("out", entry("x"))]))  # the same again, on purpose, is another commit
        assert await read_all(log, "out") == ["x", "x"]
        await log.aclose()


async def test_a_batch_whose_delivery_got_lost_comes_at_once(redis_url: str) -> None:
    """It is pending here already: without a look at that, it would wait for `reclaim_after_s`."""
    async with cutting_proxy(port_of(redis_url)) as proxy:
        log = redis_log(f"redis://127.0.0.1:{proxy.port}/0", reclaim_after_s=60.0)
        reader = Reader(log, "s")
        await reader.idle(1)
        await log.append("s", entry("x"))
        proxy.cut_after(b"XREADGROUP")
        [delivery] = await reader.take(1, timeout_s=30.0)
        assert (proxy.cuts, delivery.entry.id, delivery.deliveries) == (1, "x", 2)
        await log.aclose()


# ---------------------------------------------------------------------- foreign data


async def test_garbage_in_a_stream_is_buried_and_stops_nobody(log: RedisLog, raw: redis.Redis) -> None:
    key = KEYS.stream("s")
    raw.xadd(key, {"hello": "world"})
    raw.xadd(key, {"id": b"\xff\xfe", "type": "t", "data": ""})
    await log.append("s", entry("good"))
    raw.xadd(key, {"id": "no-data", "type": "t"})
    reader = Reader(log, "s")
    assert names(await reader.take_and_acknowledge(1)) == ["good"]
    await reader.idle()
    assert raw.xpending(key, GROUP)["pending"] == 0
    assert raw.xlen(KEYS.dead("s")) == 3
    assert await read_all(log, "s") == ["good"], "a plain reader passes over it"
    assert names(await log.read("s", count=1)) == ["good"], "even when a whole page is garbage"


async def test_a_dead_letter_tells_where_it_comes_from(redis_url: str, raw: redis.Redis) -> None:
    log = redis_log(redis_url)
    [position] = await log.append("s", entry("poison"))
    reader = Reader(log, "s")
    await wait_until_async(lambda: drained(reader, raw), description="the dead letter")
    dead: Any = raw.xrange(KEYS.dead("s"))
    [(_, fields)] = dead
    assert fields == {
        "position": position,
        "group": GROUP,
        "deliveries": "3",
        "id": "poison",
        "type": "test",
        "traceparent": "00-1-2-01",
        "data": "poison",
    }
    await log.aclose()


async def drained(reader: Reader, raw: redis.Redis) -> bool:
    await reader.batch()
    return bool(raw.exists(KEYS.dead("s")))


async def test_a_key_of_another_kind_is_reported_and_nothing_is_written(log: RedisLog, raw: redis.Redis) -> None:
    lease = await lead(log)
    raw.set(KEYS.stream("out"), "not a stream")
    with pytest.raises(HoldfastError, match=r"rejected a command: .*WRONGTYPE .*stream:out is a string"):
        await log.commit(lease, Commit(snapshot={"": b"half"}, append=[("in", entry("x")), ("out", entry("y"))]))
    assert await log.snapshot("leader") == {}
    assert await read_all(log, "in") == []


async def test_consumers_of_former_lives_are_forgotten(
    log: RedisLog, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.append("s", *entries(2))
    await Reader(log, "s", consumer="done").take_and_acknowledge(2)
    await log.append("s", entry("x"))
    await Reader(log, "s", consumer="owing").take(1)
    monkeypatch.setattr(subscription, "CONSUMER_SILENCE_MAX_S", -1.0)
    await Reader(log, "s", consumer="fresh").batch()
    left = {each["name"] for each in raw.xinfo_consumers(KEYS.stream("s"), GROUP)}
    assert "done" not in left
    assert "owing" in left, "what it owes would be lost with it"


async def test_keys_are_bounded_by_time_or_declared(log: RedisLog, raw: redis.Redis) -> None:
    lease = await lead(log)
    await log.commit(lease, Commit(snapshot={"": b"x"}, append=[("s", entry("x"))]))
    present = set(raw.scan_iter())
    with_ttl = {key for key in present if raw.ttl(key) > 0}
    assert with_ttl == {KEYS.lease("leader")}
    assert present - with_ttl == {KEYS.commit("leader"), KEYS.epoch("leader"), KEYS.parts("leader"), KEYS.stream("s")}


async def test_the_lease_of_a_leader_that_died_while_the_clock_of_redis_was_ahead_is_free_in_time(
    log: RedisLog, raw: redis.Redis
) -> None:
    """The soak's case: the clock jumped an hour ahead, Redis was killed and came back with the right time. The lease, whose end
    is in the file as a time of day, would have kept every supervisor a standby for an hour."""
    lease = await lead(log)
    key = KEYS.lease("leader")
    for left_ms in (3_600_000, None):
        if left_ms is None:
            raw.persist(key)
        else:
            raw.pexpire(key, left_ms)
        assert await log.acquire("leader", "b", 3.0) is None
        assert 0 < raw.pttl(key) <= 3000
    assert await log.renew(lease, 30.0), "who lives keeps it"
