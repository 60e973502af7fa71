"""Redis refuses, a password or a certificate is replaced: services wait, say why, and go on by themselves."""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import anyio
import certificates
import pytest
import redis
from anyio.abc import ByteStream
from anyio.streams.tls import TLSListener
from eventlogs import redis_log
from servers import RedisServer
from waiting import wait_until, wait_until_async

from holdfast.domain.errors import InvalidSpec, RedisAway, Unavailable
from holdfast.log.protocol import Commit, LostData
from holdfast.log.redis import RedisLog

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisLog]:
    log = redis_log(url)
    try:
        yield log
    finally:
        await log.aclose()


def says_busy(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            client.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)
    return False


async def test_a_script_that_runs_for_long_is_waited_for(own_server: RedisServer) -> None:
    """Redis answers nothing else until it ends: another program's, or any on a machine that stands still."""

    def run() -> None:
        with redis.Redis.from_url(own_server.url) as client, pytest.raises(redis.ResponseError):
            client.eval("while true do end", 0)

    with redis.Redis.from_url(own_server.url) as operator:
        operator.config_set("lua-time-limit", 1)
        endless = threading.Thread(target=run)
        async with opened(own_server.url) as log:
            lease = await log.acquire("leader", "a", 30.0)
            assert lease is not None
            endless.start()
            try:
                wait_until(lambda: says_busy(own_server.url), description="a busy Redis")
                with pytest.raises(
                    Unavailable, match=r"does not serve now: BUSY .*; a script has run for seconds: wait"
                ):
                    await log.renew(lease, 30.0)
            finally:
                operator.script_kill()
                endless.join()
            assert await log.renew(lease, 30.0)


async def test_a_password_that_is_demanded_from_now_on_is_a_refusal_of_every_command(own_server: RedisServer) -> None:
    """Of a command with more than ten arguments Redis says that it violates the protocol."""
    async with opened(own_server.url) as log:
        lease = await log.acquire("leader", "a", 30.0)
        assert lease is not None
        with redis.Redis.from_url(own_server.url) as operator:
            operator.config_set("requirepass", "new")
        with redis.Redis.from_url(own_server.url, password="new") as operator:
            operator.client_kill_filter(_type="normal")
            for attempt in (
                lambda: log.renew(lease, 30.0),
                lambda: log.commit(lease, Commit({f"p{n}": b"1" for n in range(9)})),
            ):
                with pytest.raises(Unavailable, match=r"refuses the credentials \(.*\); correct its user and password"):
                    await attempt()
            operator.config_set("requirepass", "")
        await log.commit(lease, Commit({"part": b"1"}))


async def test_a_new_password_in_its_file_needs_no_restart(own_server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "password with space"
    file.write_text("old\n")
    with redis.Redis.from_url(own_server.url) as operator:
        operator.execute_command("ACL", "SETUSER", "holdfast", "on", ">old", "~*", "&*", "+@all")
        url = own_server.url.replace("redis://", "redis://holdfast@")
        async with opened(f"{url}?password_file={quote(str(file))}") as log:
            lease = await log.acquire("leader", "a", 30.0)
            assert lease is not None
            operator.execute_command("ACL", "SETUSER", "holdfast", ">new", "<old")
            assert await log.renew(lease, 30.0), "a connection lives on with the password it was made with"
            operator.client_kill_filter(_type="normal")
            with pytest.raises(Unavailable, match=rf"refuses the credentials .*; write the valid password to {file}$"):
                await log.renew(lease, 30.0)
            file.unlink()
            with pytest.raises(
                Unavailable, match=rf"cannot be asked: its password cannot be read \(.*{file}.*\); correct"
            ):
                await log.renew(lease, 30.0)
            file.write_text("new")
            assert await log.renew(lease, 30.0)


async def test_a_password_in_the_url_and_in_a_file_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidSpec, match=r"HOLDFAST_REDIS_URL: .*password_file=PATH") as raised:
        RedisLog("redis://me:s3cret@127.0.0.1/0?password_file=/x", "test")
    assert "s3cret" not in str(raised.value)


async def test_a_redis_without_a_free_connection_says_so(own_server: RedisServer) -> None:
    with redis.Redis.from_url(own_server.url) as operator:
        operator.config_set("maxclients", 1)
        async with opened(own_server.url) as log:

            async def refusal() -> str:
                with pytest.raises(RedisAway) as raised:
                    await log.ping()
                return str(raised.value)

            async def is_clear() -> bool:  # the server may close the connection before its answer is read
                return (
                    "max number of clients reached); close connections of other programs, or raise" in await refusal()
                )

            await wait_until_async(is_clear, description="a clear refusal")
            operator.config_set("maxclients", 100)
            await log.ping()


async def test_who_may_begin_anew_does_not_wait_while_nobody_could(own_server: RedisServer) -> None:
    """A failover to an empty replica: as long as it refuses writes, the last leader cannot put its state back."""
    with redis.Redis.from_url(own_server.url) as operator:
        async with opened(own_server.url) as leader, opened(own_server.url) as standby:
            assert await leader.acquire("leader", "a", 30.0)
            assert await standby.acquire("leader", "b", 30.0) is None
            operator.flushall()
            operator.config_set("min-replicas-to-write", 1)
            for log, holder in ((leader, "a"), (standby, "b")):
                with pytest.raises(Unavailable, match="NOREPLICAS") as raised:
                    await log.acquire("leader", holder, 30.0, begin=False)
                assert not isinstance(raised.value, LostData)
            operator.config_set("min-replicas-to-write", 0)
            with pytest.raises(LostData):
                await standby.acquire("leader", "b", 30.0, begin=False)
            assert await leader.acquire("leader", "a", 30.0)


# ---------------------------------------------------------------- TLS


@asynccontextmanager
async def in_tls(url: str, chain: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a server that speaks TLS in front of the Redis at `url`. `chain` may be given another certificate."""
    place = urlsplit(url)

    async def pump(source: ByteStream, sink: ByteStream) -> None:
        async for data in source:
            await sink.send(data)
        await sink.aclose()

    async def serve(outer: ByteStream) -> None:
        try:
            async with (
                outer,
                await anyio.connect_tcp(str(place.hostname), place.port or 0) as inner,
                anyio.create_task_group() as pumps,
            ):
                pumps.start_soon(pump, outer, inner)
                await pump(inner, outer)
                pumps.cancel_scope.cancel()
        except* (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with TLSListener(listener, chain, standard_compatible=False) as served, anyio.create_task_group() as tasks:
        tasks.start_soon(served.serve, serve)
        yield int(listener.extra(anyio.abc.SocketAttribute.local_port))
        tasks.cancel_scope.cancel()


async def test_a_new_ca_of_redis_is_read_without_a_restart(own_server: RedisServer, tmp_path: Path) -> None:
    certificates.make(tmp_path)
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes((tmp_path / "ours-ca.pem").read_bytes())
    chain = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    chain.load_cert_chain(tmp_path / "ours.pem", tmp_path / "ours.key")
    async with (
        in_tls(own_server.url, chain) as port,
        opened(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={trusted}") as log,
    ):
        await log.last_position("s")
        chain.load_cert_chain(tmp_path / "foreign.pem", tmp_path / "foreign.key")
        with redis.Redis.from_url(own_server.url) as operator:
            operator.client_kill_filter(_type="normal")
        with pytest.raises(RedisAway, match=r"CERTIFICATE_VERIFY_FAILED.*; renew its certificate, or correct the ssl_"):
            await log.last_position("s")
        trusted.unlink()
        with pytest.raises(RedisAway, match=rf"cannot use {trusted}: .*No such file"):
            await log.last_position("s")
        trusted.write_bytes((tmp_path / "foreign-ca.pem").read_bytes())
        await log.last_position("s")


async def test_the_wrong_one_of_the_two_schemes_is_named(own_server: RedisServer, tmp_path: Path) -> None:
    """Neither server says so: one closes the connection at the first command, the other waits for more of the handshake."""
    certificates.make(tmp_path)
    chain = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    chain.load_cert_chain(tmp_path / "ours.pem", tmp_path / "ours.key")
    async with in_tls(own_server.url, chain) as port, opened(f"redis://127.0.0.1:{port}/0") as plain:
        with pytest.raises(RedisAway, match=r"HOLDFAST_REDIS_URL, which is rediss://… where its port expects TLS$"):
            await plain.ping()
    async with opened(own_server.url.replace("redis://", "rediss://")) as encrypted:
        with pytest.raises(RedisAway, match=r"HOLDFAST_REDIS_URL, which is redis://… where its port expects no TLS$"):
            await encrypted.ping()
    own_server.stop()
    async with opened(own_server.url) as away:
        with pytest.raises(RedisAway, match=r"check that it is running, and HOLDFAST_REDIS_URL$"):
            await away.ping()
