"""Connections to the data plane that show no token: they take little memory, end in time, and keep nobody away."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from replicator_node import JOB, TOKEN, nodes
from waiting import wait_until

from holdfast.domain.errors import MalformedMessage, Unavailable
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX, Limits
from holdfast.replicator.transport.strangers import Strangers
from holdfast.replicator.wanted import Wanted

STRANGER = "127.0.0.2"
MIB = 1 << 20
CHALLENGE = "of the server"


def prefix(size: int) -> bytes:
    return struct.pack("!4sI", b"HFD1", size)


def stranger(endpoint: str, size: int) -> socket.socket:
    """A connection that announces a request of `size` bytes, and sends a part of it."""
    host, _, port = endpoint.rpartition(":")
    sock = socket.create_connection((host, int(port)), 10.0, source_address=(STRANGER, 0))
    with suppress(OSError):  # refused already
        sock.sendall(prefix(size) + b"x" * min(size // 2, MIB))
    return sock


def test_a_crowd_of_strangers_takes_little_memory_and_keeps_no_peer_away(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", HOLDFAST_REPLICATOR_IO_TIMEOUT_S="60") as (a,), ExitStack() as stack:
        a.configure()
        key = a.save(a.images(), 5)
        record = a.wait_for(key, "disk")
        process = psutil.Process(a.pid)
        before = process.memory_info().rss
        for size in [MESSAGE_BYTES_MAX] * 50 + [HEADER_BYTES_MAX] * 130:  # more than it serves at a time
            stack.enter_context(stranger(a.endpoint, size))
        wait_until(lambda: f"{STRANGER} has 64 connections" in a.log, description="the first that is refused")
        assert process.memory_info().rss - before < 200 * MIB
        client = Client(Limits(30, 30), OpenSockets())  # less than strangers may stay
        path = client.fetch(
            a.source, JOB, TOKEN, Wanted(key, record.digest, record.root), FileTier("disk", tmp_path / "inbox")
        )
        assert path.read_bytes() == a.shard_file(key).read_bytes()
        assert "leave no memory for one of" in a.log


@contextmanager
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def received(sock: socket.socket, strangers: Strangers | None = None, within_s: float = 30.0) -> frames.Received:
    token_of = {JOB: TOKEN}.get
    return frames.receive_request(sock, CHALLENGE, lambda job: token_of(job, ""), strangers or Strangers(), within_s)


def test_a_large_request_is_decoded_only_when_it_is_signed() -> None:
    nested = '{"job":"' + JOB + '","manifest":' + "[" * HEADER_BYTES_MAX + "]" * HEADER_BYTES_MAX + "}"
    with line() as (near, far), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(near.sendall, prefix(64 + len(nested)) + b"0" * 64 + nested.encode())
        request = received(far)
        sent.result()
    assert (request.fields, request.body) == ({"job": JOB}, b"")
    assert not request.signed_by(TOKEN, CHALLENGE)


@pytest.mark.parametrize("manifest", ["m" * 2 * HEADER_BYTES_MAX, '"job":"other"' * HEADER_BYTES_MAX, "short"])
def test_a_signed_request_of_any_size_is_read(manifest: str) -> None:
    message = {"op": "put", "job": JOB, "lane": 0, "manifest": manifest, "nonce": "n"}
    with line() as (near, far), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(frames.send, near, message, token=TOKEN, challenge=CHALLENGE)
        request = received(far)
        sent.result()
    assert request.fields == message
    assert request.signed_by(TOKEN, CHALLENGE)


def test_a_signed_request_that_names_two_jobs_is_refused() -> None:
    body = b'{"job":"' + JOB.encode() + b'","manifest":"' + b"m" * HEADER_BYTES_MAX + b'","job":"other"}'
    signature = frames._sign(TOKEN, CHALLENGE, body).hex().encode()
    with line() as (near, far), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(near.sendall, prefix(64 + len(body)) + signature + body)
        with pytest.raises(MalformedMessage, match="two jobs"):
            received(far)
        sent.result()


@pytest.mark.parametrize("body", [b"[" * 30000, b"[]", b"{", json.dumps({"job": 1}).encode()[:-1], b"\xff" * 100])
def test_garbage_is_a_clear_error(body: bytes) -> None:
    with line() as (near, far):
        near.sendall(prefix(64 + len(body)) + b"\xff" * 64 + body)
        with pytest.raises(MalformedMessage, match="data plane message"):
            received(far)


def test_a_request_that_comes_by_drips_ends_in_time() -> None:
    """Each byte comes soon enough for any timeout of a single read."""
    over = threading.Event()

    def drip(sock: socket.socket) -> None:
        sock.sendall(prefix(1000))
        while not over.wait(0.01):
            with suppress(OSError):
                sock.sendall(b"x")

    with line() as (near, far), ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip, near)
        began = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                received(far, within_s=0.3)
        finally:
            over.set()
        assert time.monotonic() - began < 9.0, "1,000 drips take longer"
        dripping.result()


def test_what_a_stranger_held_is_free_when_it_has_gone() -> None:
    strangers = Strangers(connections_max=1, bytes_max=100)
    with strangers.connection("10.0.0.1"), strangers.memory(60):
        with pytest.raises(Unavailable, match=r"10\.0\.0\.1 has 1 connections"), strangers.connection("10.0.0.1"):
            pass
        with strangers.connection("10.0.0.2"):
            pass
        with pytest.raises(Unavailable, match="no memory for one of 41 bytes"), strangers.memory(41):
            pass
    with strangers.connection("10.0.0.1"), strangers.memory(100):
        pass
