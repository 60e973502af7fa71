"""The records of the data plane: they carry what was sent, and nothing that was changed, repeated, left out or sent back."""

from __future__ import annotations

import math
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relays import relayed
from replicator_node import Node
from tls_nodes import agent, issue, pair, tls

from holdfast.domain.errors import MalformedMessage, Unavailable
from holdfast.domain.generations import RankRestore, ShardSource
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.sealed import (
    ALPN,
    KEY_BYTES,
    RECORD_BYTES_MAX,
    Altered,
    SealedSocket,
    sealed_by_client,
    sealed_by_server,
)
from holdfast.replicator.transport.secure import Secure
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.peer_certificate import with_files

OVERHEAD = 4 + 16  # length and tag
ONE, TWO = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "main", 10)


@pytest.fixture
def ends() -> Iterator[tuple[SealedSocket, SealedSocket]]:
    """Both ends of a connection."""
    near, far = socket.socketpair()
    with (
        SealedSocket(near, outgoing=ONE, incoming=TWO) as a,
        SealedSocket(far, outgoing=TWO, incoming=ONE) as b,
    ):
        for end in (a, b):
            end.settimeout(10.0)
        yield a, b


@pytest.fixture
def wire() -> Iterator[tuple[SealedSocket, socket.socket]]:
    """A receiver, and the bare socket of whoever sends to it."""
    near, far = socket.socketpair()
    with SealedSocket(near, outgoing=TWO, incoming=ONE) as receiver, far:
        receiver.settimeout(10.0)
        yield receiver, far


def records(*contents: bytes) -> list[bytes]:
    """What a sender puts on the wire for each of the contents."""
    near, far = socket.socketpair()
    with SealedSocket(near, outgoing=ONE, incoming=TWO) as sender, far:
        seen = []
        for content in contents:
            sender.sendall(content)
            seen.append(far.recv(len(content) + OVERHEAD, socket.MSG_WAITALL))
        return seen


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=6),
    reads=st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    back=st.binary(max_size=100),
)
@settings(max_examples=50)
def test_bytes_arrive_whatever_the_sizes_of_writes_and_reads(sizes: list[int], reads: list[int], back: bytes) -> None:
    near, far = socket.socketpair()
    with SealedSocket(near, outgoing=ONE, incoming=TWO) as a, SealedSocket(far, outgoing=TWO, incoming=ONE) as b:
        sent = [secrets.token_bytes(size) for size in sizes]
        for content in sent:
            a.sendall(content)
        a.shutdown(socket.SHUT_WR)
        received, turn = b"", 0
        while piece := b.recv(reads[turn % len(reads)]):
            received, turn = received + piece, turn + 1
        assert received == b"".join(sent)
        b.sendall(back)
        assert a.recv(len(back) or 1) == back if back else True


def test_large_contents_are_several_records_and_go_where_they_belong(ends: tuple[SealedSocket, SealedSocket]) -> None:
    a, b = ends
    content = secrets.token_bytes(2 * RECORD_BYTES_MAX + 17)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(frames.pour, a, content)
        target = bytearray(len(content))
        assert b.recv_into(target) == RECORD_BYTES_MAX
        frames.fill(b, memoryview(target)[RECORD_BYTES_MAX:])
        sending.result()
    assert target == content


def test_equal_contents_look_different_and_unlike_themselves() -> None:
    first, second = records(b"weights" * 10, b"weights" * 10)
    assert first[4:] != second[4:]
    assert b"weights" not in first + second


@pytest.mark.parametrize("at", range(7 + OVERHEAD))
def test_a_changed_byte_is_found_wherever_it_is(wire: tuple[SealedSocket, socket.socket], at: int) -> None:
    """Of the length, too: the record is then cut at another place, or waited for in vain."""
    receiver, far = wire
    (record,) = records(b"weights")
    far.sendall(record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :])
    far.shutdown(socket.SHUT_WR)
    if at < 4:
        try:
            assert receiver.recv(100) == b""
        except (Altered, MalformedMessage):
            pass
    else:
        with pytest.raises(Altered, match="changed on their way"):
            receiver.recv(100)


@pytest.mark.parametrize(
    "order", [(1,), (0, 0), (0, 2), (1, 0)], ids=["first missing", "repeated", "one missing", "swapped"]
)
def test_records_count_in_their_order_and_once(
    wire: tuple[SealedSocket, socket.socket], order: tuple[int, ...]
) -> None:
    receiver, far = wire
    sent = records(b"one", b"two", b"six")
    far.sendall(b"".join(sent[number] for number in order))
    for number in order[:-1]:
        if number == 0:
            assert receiver.recv(100) == b"one"
    with pytest.raises(Altered):
        receiver.recv(100)


def test_what_a_node_has_sent_cannot_be_sent_back_to_it() -> None:
    """Each direction has a key of its own."""
    (own,) = records(b"ok")  # with the key of a
    near, far = socket.socketpair()
    with SealedSocket(near, outgoing=ONE, incoming=TWO) as receiver, far:
        far.sendall(own)
        with pytest.raises(Altered):
            receiver.recv(10)


@pytest.mark.parametrize("size", [0, RECORD_BYTES_MAX + 1, 2**32 - 1])
def test_an_impossible_length_is_refused_before_memory_is_taken(
    wire: tuple[SealedSocket, socket.socket], size: int
) -> None:
    receiver, far = wire
    far.sendall(size.to_bytes(4))
    with pytest.raises(MalformedMessage, match=f"{size} bytes; 1 to {RECORD_BYTES_MAX} are possible"):
        receiver.recv(10)


@pytest.mark.parametrize("given", [0, 3, 4, 10, 4 + 7 + 15])
def test_the_end_of_the_connection_within_a_record_is_an_end(
    wire: tuple[SealedSocket, socket.socket], given: int
) -> None:
    receiver, far = wire
    (record,) = records(b"weights")
    far.sendall(record[:given])
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(Unavailable, match="closed the connection"):
        frames.fill(receiver, memoryview(bytearray(7)))


def test_a_timeout_loses_nothing(wire: tuple[SealedSocket, socket.socket]) -> None:
    receiver, far = wire
    (record,) = records(b"weights")
    receiver.settimeout(0.01)
    for cut in (2, 9, 10):
        far.sendall(record[:cut])
        record = record[cut:]
        with pytest.raises(TimeoutError):
            receiver.recv(100)
        assert receiver.gettimeout() == pytest.approx(0.01)
    receiver.setblocking(False)
    with pytest.raises(BlockingIOError):
        receiver.recv(100)
    far.sendall(record)
    assert receiver.recv(100) == b"weights"


def test_a_deadline_counts_for_a_record_that_drips(wire: tuple[SealedSocket, socket.socket]) -> None:
    """Each byte arrives well within the timeout; the record does not."""
    receiver, far = wire
    (record,) = records(bytes(5000))
    over = threading.Event()

    def drip() -> None:
        for byte in record:
            if over.wait(0.01):
                return
            far.sendall(bytes([byte]))

    with ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip)
        receiver.settimeout(0.2)
        try:
            with pytest.raises(TimeoutError):
                receiver.recv(5000)
        finally:
            over.set()
        dripping.result()


def fill_up(sender: SealedSocket, content: memoryview) -> int:
    """Send until the socket has no room; returns the number of bytes that the sender accepted."""
    sent = 0
    while sent < len(content):
        try:
            sent += sender.send(content[sent:])
        except BlockingIOError:
            return sent
    raise AssertionError("the socket has room for everything: the test shows nothing")


def test_a_sender_that_must_not_wait_goes_on_with_the_same_record(ends: tuple[SealedSocket, SealedSocket]) -> None:
    """As the test of the network sends. Nobody receives until the sender had to wait for the first time."""
    a, b = ends
    a.setblocking(False)
    content = secrets.token_bytes(3 * RECORD_BYTES_MAX + 5)
    view = memoryview(content)
    sent = fill_up(a, view)
    target = bytearray(len(content))
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(frames.fill, b, memoryview(target))
        while sent < len(content):
            try:
                sent += a.send(view[sent:])
            except BlockingIOError:
                select.select([], [a], [], 10.0)
        receiving.result()
    assert target == content


# ---------------------------------------------------------------- between replicators


def both(
    root: Path, authority: Authority, *, client_knows: bool, server_knows: bool
) -> tuple[socket.socket, socket.socket]:
    """Both ends after the handshake. Who does not know the records is of an earlier release."""
    made = []
    for name, knows in (("a", server_knows), ("b", client_knows)):
        files = tls(authority, root / name, agent(name))
        side = with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if name == "a" else ssl.PROTOCOL_TLS_CLIENT), files)
        side.verify_mode = ssl.CERT_REQUIRED
        if name == "a":
            side.num_tickets = 0
        if knows:
            side.set_alpn_protocols([ALPN])
        made.append(side)
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(10.0)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(lambda: sealed_by_server(made[0].wrap_socket(far, server_side=True)))
        client = sealed_by_client(made[1].wrap_socket(near))
        return client, serving.result()


@pytest.mark.parametrize(
    ("client_knows", "server_knows"), [(True, True), (True, False), (False, True)], ids=["both", "client", "server"]
)
def test_an_end_of_an_earlier_release_is_spoken_to_by_tls(
    tmp_path: Path, authority: Authority, client_knows: bool, server_knows: bool
) -> None:
    client, server = both(tmp_path, authority, client_knows=client_knows, server_knows=server_knows)
    with client, server:
        kind = SealedSocket if client_knows and server_knows else ssl.SSLSocket
        assert isinstance(client, kind)
        assert isinstance(server, kind)
        assert client.gettimeout() == server.gettimeout() == pytest.approx(10.0)
        for sender, receiver in ((client, server), (server, client)):
            sender.sendall(b"weights")
            content = bytearray(7)
            frames.fill(receiver, memoryview(content))
            assert content == b"weights"


def test_two_connections_have_other_keys(tmp_path: Path, authority: Authority) -> None:
    """The same request, twice, is not twice the same on the wire."""
    seen: list[bytes] = []

    def passing(data: bytes) -> bytes:
        seen.append(data)
        return data

    with pair(authority, tmp_path) as (a, _), relayed(a.endpoint, passing) as way:
        host, _, port = way.rpartition(":")
        secure = Secure(tls(authority, tmp_path / "client", agent("b")))
        for _ in range(2):
            with secure.connect((host, int(port)), 10.0, "a") as sock:
                assert isinstance(sock, SealedSocket)
                frames.receive(sock)
                sock.sendall(b"the same content")
    ends = [data[-(16 + 16) :] for data in seen if len(data) == 16 + OVERHEAD]
    assert len(ends) == 2
    assert ends[0] != ends[1]


def flipped(after: int) -> Callable[[bytes], bytes]:
    """Change one bit once, beyond so many bytes."""
    passed, done = 0, False

    def passing(data: bytes) -> bytes:
        nonlocal passed, done
        passed += len(data)
        if done or passed < after:
            return data
        done = True
        return data[:-1] + bytes([data[-1] ^ 1])

    return passing


def test_a_connection_in_which_a_bit_was_changed_is_not_used_further(tmp_path: Path, authority: Authority) -> None:
    """The transfer goes on with another connection, from what has arrived."""
    with pair(authority, tmp_path) as (a, b):
        a.configure()
        b.configure(ranks=(1,))
        key = a.save(a.images(), 7)
        record = a.wait_for(key, "disk")
        with relayed(a.endpoint, flipped(after=2 << 20)) as way:
            wanted = RankRestore(0, key, record.digest, (ShardSource("a", way),), root=record.root)
            (staged,) = b.stage_all(wanted)
        assert Path(staged.path).read_bytes() == a.shard_file(key).read_bytes()
        assert "corrupt" not in a.log, "the source's copy is not suspected for it"


def test_a_client_that_sends_no_keys_is_dropped_in_time(tmp_path: Path, authority: Authority) -> None:
    env = issue(authority, tmp_path / "tls-a", agent("a"))
    node = Node("a", tmp_path / "a", **env, HOLDFAST_REPLICATOR_CONNECT_TIMEOUT_S="1")
    client = tls(authority, tmp_path / "client", agent("b"))
    context = with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), client)
    context.set_alpn_protocols([ALPN])
    with ExitStack() as stack:
        stack.callback(node.close)
        node.start()
        host, _, port = node.endpoint.rpartition(":")
        raw = stack.enter_context(socket.create_connection((host, int(port)), 10.0))
        sock = stack.enter_context(context.wrap_socket(raw))
        assert sock.selected_alpn_protocol() == ALPN
        sock.sendall(bytes(KEY_BYTES))  # half of them
        assert sock.recv(1) == b""


def test_a_timeout_of_the_kernel_is_for_progress(wire: tuple[SealedSocket, socket.socket]) -> None:
    receiver, _ = wire
    frames.block(receiver, 0.05)
    with pytest.raises(TimeoutError):
        frames.fill(receiver, memoryview(bytearray(1)), math.inf)
