"""The end of a Redis server for an injected fault: for real, and refused where Redis would not survive it or allow it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from eventlogs import entry, names, redis_log
from servers import RedisServer
from waiting import wait_until

from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.log.embedded import server_binary
from holdfast.log.protocol import Commit
from holdfast.log.redis import RedisLog
from holdfast.supervisor.service import serve
from holdfast.supervisor.settings import SupervisorSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
async def log(own_server: RedisServer) -> AsyncIterator[RedisLog]:
    log = redis_log(own_server.url)
    yield log
    await log.aclose()


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


async def test_a_killed_server_comes_back_with_its_data_under_another_name(
    own_server: RedisServer, log: RedisLog
) -> None:
    lease = await log.acquire("leader", "a", 30.0)
    assert lease is not None
    await log.commit(lease, Commit({"part": b"1"}, append=[("s", entry("x"))]))
    before = await log.lifetime()
    assert await log.server.why_not_kill() == ""
    assert answers(own_server.url), "asking ends nothing"
    await log.server.kill()
    wait_until(lambda: not answers(own_server.url), description="the end of Redis")
    with pytest.raises(Unavailable):
        await log.lifetime()
    own_server.stop()
    own_server.start()
    assert await log.lifetime() not in ("", before)
    assert names(await log.read("s")) == ["x"]
    await log.commit(lease, Commit({"part": b"2"}))
    assert await log.snapshot("leader") == {"part": b"2"}


async def test_a_server_that_would_forget_is_left_alone(own_server: RedisServer, log: RedisLog) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("appendonly", "no")
    why = await log.server.why_not_kill()
    assert why.startswith("Redis would not survive it: its append-only file is off: a restart of Redis would lose jobs")
    assert why.endswith("start Redis with --appendonly yes --appendfsync everysec (a hosted one: turn AOF on)")


async def test_a_user_without_the_right_gets_an_error(own_server: RedisServer, log: RedisLog) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "holdfast", "on", ">secret", "~*", "&*", "+@all", "-shutdown")
    limited = redis_log(own_server.url.replace("redis://", "redis://holdfast:secret@"))
    try:
        why = await limited.server.why_not_kill()
        assert why.startswith("Redis does not accept SHUTDOWN from this supervisor: ")
        assert "NOPERM" in why or "no permissions" in why, why
    finally:
        await limited.aclose()
    assert answers(own_server.url)


@contextmanager
def started(directory: Path, *arguments: str) -> Iterator[str]:
    """A Redis with these arguments, on a Unix socket."""
    socket = directory / "redis.sock"
    place = ["--port", "0", "--unixsocket", str(socket), "--dir", str(directory)]
    process = subprocess.Popen([str(server_binary()), *arguments, *place], stdout=subprocess.DEVNULL)
    try:
        url = f"unix://{socket}"
        wait_until(lambda: answers(url), description="a Redis")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def renamed(tmp_path: Path) -> Iterator[str]:
    """Has no SHUTDOWN."""
    with started(tmp_path, "--save", "", "--appendonly", "yes", "--rename-command", "SHUTDOWN", "") as url:
        yield url


async def test_a_sentinel_is_no_log(tmp_path: Path) -> None:
    """It answers PING, and has no data."""
    (tmp_path / "sentinel.conf").write_text("")
    with started(tmp_path, str(tmp_path / "sentinel.conf"), "--sentinel") as url:
        settings = SupervisorSettings(redis_url=url, data_dir=tmp_path, diagnostics="127.0.0.1:1")
        with pytest.RaisesGroup(
            pytest.RaisesExc(
                HoldfastError, match="is a Redis Sentinel, which has no data; name the Redis that it watches"
            )
        ):
            await serve(settings)


async def test_a_server_without_the_command_says_so(renamed: str) -> None:
    log = RedisLog(renamed, "test")
    try:
        began = time.monotonic()
        why = await log.server.why_not_kill()
        assert "unknown command" in why
        assert time.monotonic() - began < 5
        assert answers(renamed)
    finally:
        await log.aclose()
