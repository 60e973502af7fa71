"""The data plane with TLS: nothing readable travels, only nodes of the fleet take part, and a certificate may be replaced."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from relays import relayed
from replicator_node import JOB, TOKEN, Node, nodes
from tls_nodes import agent, issue, pair, settings, tls
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.errors import InvalidSpec, OtherRole, Unavailable
from holdfast.domain.generations import RankRestore, ShardSource
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.secure import NotTls, Secure
from holdfast.replicator.wanted import Wanted
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.authorization import Accepts
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.tls import Tls
from holdfast.wire.links import decode_measured


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "main", 10)


NODE = (Role.AGENT, Role.REPLICATOR)  # roles of a replicator's certificate, as in `replicator.service`


def invited(authority: Authority, where: Path, name: str) -> dict[str, str]:
    """As `issue`, for a node that has joined by an invitation: an enrolment CA has signed its certificate."""
    enrolment = authority.create_enrolment_ca(where.parent / f"enrolment-{name}", 5)
    env = issue(enrolment, where, agent(name))
    shutil.copy(authority.directory / "ca.crt", where / "ca.crt")
    return env


def test_nodes_that_have_joined_by_invitation_exchange_shards(tmp_path: Path, authority: Authority) -> None:
    """Each from another supervisor, which has an enrolment CA of its own."""
    a, b = (Node(name, tmp_path / name, **invited(authority, tmp_path / f"tls-{name}", name)) for name in ("a", "b"))
    try:
        a.start()
        b.start()
        a.configure()
        b.configure(ranks=(1,))
        key = a.save(a.images(), 7)
        record = a.wait_for(key, "disk")
        (staged,) = b.stage_all(RankRestore(0, key, record.digest, (a.source,), root=record.root))
        assert staged.source == "a"
    finally:
        a.close()
        b.close()


@contextmanager
def overheard(endpoint: str) -> Iterator[tuple[str, bytearray]]:
    """The address of a wire to `endpoint`, and the bytes that are seen on it."""
    seen = bytearray()

    def passing(data: bytes) -> bytes:
        seen.extend(data)
        return data

    with relayed(endpoint, passing) as way:
        yield way, seen


def test_a_shard_is_fetched_and_nothing_of_it_can_be_read_on_the_way(tmp_path: Path, authority: Authority) -> None:
    with pair(authority, tmp_path) as (a, b):
        a.configure()
        b.configure(ranks=(1,))
        key = a.save(a.images(), 7)
        record = a.wait_for(key, "disk")
        with overheard(a.endpoint) as (way, seen):
            wanted = RankRestore(0, key, record.digest, (ShardSource("a", way),), root=record.root)
            (staged,) = b.stage_all(wanted)
        content = a.shard_file(key).read_bytes()
        assert Path(staged.path).read_bytes() == content
        assert len(seen) > len(content)
        assert bytes([7]) * 1000 not in seen
        assert b'"manifest":' not in seen


def test_copies_to_a_peer_and_tests_of_the_network_use_it_too(tmp_path: Path, authority: Authority) -> None:
    with pair(authority, tmp_path) as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        key = a.save(a.images(), 7)
        b.wait_for(key, "disk")
        b.open_link("of this test")
        measured = decode_measured(a.begin_link_test(b.endpoint, "of this test", node="b").result())
        assert measured.failure == ""
        assert min(measured.out_bytes_per_s, measured.in_bytes_per_s) > 0


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (Identity("main", Role.AGENT, "c"), "and not of node 'a'"),
        (Identity("main", Role.DIAGNOSTICS), "must be a node"),
        (Identity("other", Role.AGENT, "a"), "this is fleet 'main'"),
    ],
)
def test_a_server_that_is_not_the_node_is_not_spoken_to(
    identity: Identity, reason: str, tmp_path: Path, authority: Authority
) -> None:
    """Whatever it is that listens at the address of node a, and although it has a certificate of the CA."""
    server = tls(authority, tmp_path / "server", identity)
    secure = Secure(tls(authority, tmp_path / "client", agent("b")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*server.files[:2])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with suppress(OSError), context.wrap_socket(accepted, server_side=True) as sock:
                assert sock.recv(100) == b"", "the client says nothing"

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OtherRole, match=reason):
            secure.connect(listener.getsockname(), 10.0, "a")
        thread.join()


@pytest.mark.parametrize(
    ("identity", "refused"),
    [
        (agent("anybody"), ""),
        (Identity("main", Role.REPLICATOR, "x"), ""),
        (Identity("main", Role.OPERATOR, "ada"), ""),
        (Identity("main", Role.SUPERVISOR), "the certificate is of holdfast://main/supervisor"),
        (Identity("other", Role.AGENT, "b"), "this is fleet 'main'"),
    ],
)
def test_who_may_connect(identity: Identity, refused: str, tmp_path: Path, authority: Authority) -> None:
    """The secret of the job is demanded of who is admitted."""
    with pair(authority, tmp_path) as (a, _):
        a.configure()
        key = a.save(a.images(), 7)
        record = a.wait_for(key, "disk")
        # The client itself accepts the server of node a, whatever its own fleet is.
        client = Client(Limits(30, 30), OpenSockets(), _lenient(tls(authority, tmp_path / "client", identity)))
        wanted, inbox = Wanted(key, record.digest, record.root), FileTier("disk", tmp_path / "inbox")
        if refused:
            with pytest.raises(Unavailable):
                client.fetch(a.source, JOB, TOKEN, wanted, inbox)
            wait_until(lambda: refused in a.log, description="the reason in the log")
            assert not inbox.shards(JOB)
        else:
            with pytest.raises(Unavailable, match="unknown job or wrong token"):
                client.fetch(a.source, JOB, "guessed", wanted, inbox)
            assert client.fetch(a.source, JOB, TOKEN, wanted, inbox).read_bytes() == a.shard_file(key).read_bytes()


def _lenient(mine: Tls) -> Secure:
    return Secure(replace(mine, accepts=Accepts()))


def test_a_stranger_without_a_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    with pair(authority, tmp_path) as (a, _):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        host, _, port = a.endpoint.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 10.0) as raw,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
            context.wrap_socket(raw) as sock,
        ):
            sock.recv(1)


def test_nodes_with_and_without_tls_do_not_talk_unless_that_is_allowed(tmp_path: Path, authority: Authority) -> None:
    """While certificates are given to a running fleet, or while it is upgraded from a release without TLS here."""
    times = {"HOLDFAST_REPLICATOR_CONNECT_TIMEOUT_S": "1"}
    with nodes(tmp_path, "plain", **times) as (plain,), pair(authority, tmp_path, **times) as (strict, _):
        for node, peer in ((plain, strict), (strict, plain)):
            node.configure()
            key = node.save(node.images(), 7)
            record = node.wait_for(key, "disk")
            restore = RankRestore(0, key, record.digest, (node.source,), root=record.root)
            peer.configure(ranks=(1,))
            with pytest.raises(Exception, match=r"speak TLS|wait for TLS"):
                peer.stage_all(restore, timeout_s=20.0)
        wait_until(lambda: "set HOLDFAST_REPLICATOR_TLS=optional" in strict.log, description="the advice in the log")


def test_a_first_byte_that_comes_late_costs_another_connection_and_not_the_encryption(
    tmp_path: Path, authority: Authority
) -> None:
    """The server has greeted without TLS by then, and both ends would go on without it."""
    greeted, late, seen = threading.Event(), [True], bytearray()

    def passing(data: bytes) -> bytes:
        seen.extend(data)
        if data.startswith(b"HFD1"):
            greeted.set()
        if data.startswith(b"\x16") and late:
            late.clear()
            assert greeted.wait(TIMEOUT_S)
        return data

    with pair(authority, tmp_path, HOLDFAST_REPLICATOR_TLS="optional") as (a, b):
        a.configure()
        key = a.save(a.images(), 7)
        record = a.wait_for(key, "disk")
        b.configure(ranks=(1,))
        with relayed(a.endpoint, passing) as way:
            restore = RankRestore(0, key, record.digest, (ShardSource("a", way),), root=record.root)
            (staged,) = b.stage_all(restore, timeout_s=40.0)
        assert greeted.is_set()
        assert Path(staged.path).read_bytes() == a.shard_file(key).read_bytes()
        assert bytes([7]) * 1000 not in seen


def test_a_fleet_in_transition_talks_in_both_directions(tmp_path: Path, authority: Authority) -> None:
    optional = {"HOLDFAST_REPLICATOR_TLS": "optional"}
    with nodes(tmp_path, "plain") as (plain,), pair(authority, tmp_path, **optional) as (a, b):
        plain.configure()
        key = plain.save(plain.images(), 7)
        record = plain.wait_for(key, "disk")
        restore = RankRestore(0, key, record.digest, (plain.source,), root=record.root)
        a.configure(ranks=(1,))
        (staged,) = a.stage_all(restore)
        assert staged.source == "plain"
        with nodes(tmp_path, "late") as (late,):
            late.configure(ranks=(1,))
            (staged,) = late.stage_all(RankRestore(0, key, record.digest, (a.source,), root=record.root))
            assert staged.source == "a"
        b.configure(ranks=(1,))
        with overheard(a.endpoint) as (way, seen):
            (staged,) = b.stage_all(RankRestore(0, key, record.digest, (ShardSource("a", way),), root=record.root))
        assert bytes([7]) * 1000 not in seen, "between two that have it, TLS is used"


def test_a_renewed_certificate_is_used_and_transfers_go_on(tmp_path: Path, authority: Authority) -> None:
    with pair(authority, tmp_path) as (a, b):
        a.configure()
        b.configure(ranks=(1,))
        before = _presented(a)
        issue(authority, tmp_path / "tls-a", agent("a"))
        assert _presented(a) != before
        key = a.save(a.images(), 7)
        record = a.wait_for(key, "disk")
        (staged,) = b.stage_all(RankRestore(0, key, record.digest, (a.source,), root=record.root))
        assert staged.source == "a"


def _presented(node: Node) -> str:
    host, _, port = node.endpoint.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=10.0)


def test_a_revoked_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    crl = tmp_path / "crl.pem"
    shutil.copy(authority.directory / "crl.pem", crl)
    with pair(authority, tmp_path, HOLDFAST_TLS_CRL=str(crl)) as (a, _):
        stolen = tls(authority, tmp_path / "stolen", agent("b"))
        secure = Secure(stolen)
        host, _, port = a.endpoint.rpartition(":")
        secure.connect((host, int(port)), 10.0, "a").close()
        serial = authority.records()[-1].serial
        authority.revoke(serial)
        shutil.copy(authority.directory / "crl.pem", crl)
        with pytest.raises(Unavailable, match="its log says why"):
            secure.connect((host, int(port)), 10.0, "a")
        wait_until(lambda: "was revoked" in a.log, description="the refusal")


def test_a_certificate_of_another_node_is_refused_at_the_start(tmp_path: Path, authority: Authority) -> None:
    for count, wrong in enumerate(
        [agent("b"), Identity("main", Role.SUPERVISOR), Identity("other", Role.REPLICATOR, "a")]
    ):
        with pytest.raises(InvalidSpec, match="a certificate for holdfast://main/agent/a; this one is for"):
            settings(authority, tmp_path / f"wrong-{count}", wrong).tls_as(*NODE, name="a")
    for right in (agent("a"), Identity("main", Role.REPLICATOR, "a")):
        assert settings(authority, tmp_path / right.role, right).tls_as(*NODE, name="a")
    assert ServiceSettings().tls_as(*NODE, name="a") is None


def test_a_client_notices_at_once_that_a_server_speaks_no_tls(tmp_path: Path, authority: Authority) -> None:
    secure = Secure(tls(authority, tmp_path / "one", agent("b")))
    with nodes(tmp_path, "plain") as (plain,):
        host, _, port = plain.endpoint.rpartition(":")
        with pytest.raises(NotTls, match="it does not speak TLS"):
            secure.connect((host, int(port)), 10.0, "plain")


def test_a_client_without_a_certificate_gets_an_error_that_names_what_it_needs(
    tmp_path: Path, authority: Authority
) -> None:
    """As `holdfast checkpoints fetch` on a machine without the settings."""
    with pair(authority, tmp_path) as (a, _):
        a.configure()
        key = a.save(a.images(), 7)
        a.wait_for(key, "disk")
        client = Client(Limits(0.5, 30), OpenSockets())
        with pytest.raises(Unavailable, match=r"HOLDFAST_TLS_CERT, HOLDFAST_TLS_KEY, HOLDFAST_TLS_CA are needed"):
            client.fetch(a.source, JOB, TOKEN, Wanted(key), FileTier("disk", tmp_path / "inbox"))
