"""A connection that stays open between copies admits nobody whom a new one would not admit: certificates are looked at again at
both ends before each request."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from data_plane import JOB, NO_LIMIT, TOKEN, Here, saved
from tls_nodes import agent, issue, tls

from holdfast.domain.errors import Unavailable
from holdfast.domain.generations import ShardSource
from holdfast.replicator.transport import secure as module
from holdfast.replicator.transport.sealed import encrypted
from holdfast.replicator.transport.secure import Secure
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.tls import Tls

SMALL = 1 << 16


class Fleet:
    """Two nodes with certificates and a CRL each: "a" sends copies to "b"."""

    def __init__(self, root: Path, *, optional: bool = False) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.authority = Authority.create(root / "ca", "main", 10)
        self.serials: dict[str, str] = {}
        ends = {name: self._end(name) for name in ("a", "b")}
        self.secure = {name: Secure(end, optional=optional) for name, end in ends.items()}
        self.here = Here(root / "node", secure=(self.secure["b"], self.secure["a"]))
        self._steps = iter(range(10, 1000, 10))

    def _end(self, name: str) -> Tls:
        made = tls(self.authority, self.root / name, agent(name))
        self.serials[name] = self.authority.records()[-1].serial
        crl = self.root / name / "crl.pem"
        shutil.copy(self.authority.directory / "crl.pem", crl)
        return replace(made, crl=crl)

    def push(self, peer: ShardSource) -> None:
        step = next(self._steps)
        with saved(self.root / f"saved-{step}", step, SMALL) as shard:
            self.here.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)

    def renew(self, name: str) -> None:
        issue(self.authority, self.root / name, agent(name))

    def revoke(self, name: str, *, known_to: str) -> None:
        self.authority.revoke(self.serials[name])
        shutil.copy(self.authority.directory / "crl.pem", self.root / known_to / "crl.pem")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.here.takers.shutdown()


def test_copies_over_an_encrypted_connection_need_one_handshake(fleet: Fleet) -> None:
    with fleet.here.listening() as peer:
        for _ in range(3):
            fleet.push(peer)
        assert fleet.here.connections == 1
        (line,) = fleet.here.client.kept.take(peer, 1)
        assert encrypted(line.sock)
        line.close()


@pytest.mark.parametrize("name", ["a", "b"])
def test_after_a_renewal_both_ends_show_their_certificates_again(fleet: Fleet, name: str) -> None:
    with fleet.here.listening() as peer:
        fleet.push(peer)
        fleet.renew(name)
        fleet.push(peer)
        assert fleet.here.connections == 2
        assert len(fleet.here.arrived) == 2, "and no copy has failed"


@pytest.mark.parametrize(("revoked", "by"), [("a", "b"), ("b", "a")], ids=["of the sender", "of the receiver"])
def test_a_certificate_that_was_revoked_ends_a_connection_that_is_open(fleet: Fleet, revoked: str, by: str) -> None:
    with fleet.here.listening() as peer:
        fleet.push(peer)
        fleet.revoke(revoked, known_to=by)
        with pytest.raises(Unavailable):
            fleet.push(peer)
        assert len(fleet.here.arrived) == 1


@pytest.mark.parametrize("name", ["a", "b"], ids=["seen by the sender", "seen by the receiver"])
def test_a_certificate_that_expires_ends_a_connection_that_is_open(
    fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end asks again with a new connection, in whose handshake OpenSSL compares the time."""
    with fleet.here.listening() as peer:
        fleet.push(peer)
        (line,) = fleet.here.client.kept.take(peer, 1)
        assert fleet.secure["a"].still_admits(line.sock)
        fleet.here.client.kept.put(line)
        with monkeypatch.context() as later:
            later.setattr(module, "expired", lambda admission: admission.node == ("b" if name == "a" else ""))
            fleet.push(peer)
        assert fleet.here.connections == 2
        assert len(fleet.here.arrived) == 2


def test_a_connection_without_tls_is_not_kept_by_a_node_that_has_it(tmp_path: Path) -> None:
    """It was allowed because one of the ends had no certificate; the next copy asks again."""
    node = Here(tmp_path / "node", secure=(Fleet(tmp_path / "b", optional=True).secure["b"], Secure()))
    with node.listening() as peer:
        for step in (10, 20):
            with saved(tmp_path / f"saved-{step}", step, SMALL) as shard:
                node.client.push(peer, JOB, TOKEN, shard, NO_LIMIT)
        assert node.connections == 2
        assert len(node.arrived) == 2
    node.takers.shutdown()
