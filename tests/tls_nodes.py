"""Certificates of nodes, and replicators that have them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replicator_node import Node

from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.tls import Tls


def issue(authority: Authority, where: Path, *identities: Identity) -> dict[str, str]:
    """Put a new certificate into the directory `where`. Returns the environment of who has it."""
    pair = authority.issue(list(identities), (), 1)
    where.mkdir(exist_ok=True)
    (where / "tls.key").write_bytes(pair.key)
    (where / "tls.crt").write_bytes(pair.certificate)
    shutil.copy(authority.directory / "ca.crt", where / "ca.crt")
    names = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
    return {f"HOLDFAST_TLS_{name}": str(where / file) for name, file in names.items()} | {"HOLDFAST_FLEET": "main"}


def settings(authority: Authority, where: Path, *identities: Identity) -> ServiceSettings:
    found = issue(authority, where, *identities)
    return ServiceSettings(
        fleet="main",
        tls_cert=Path(found["HOLDFAST_TLS_CERT"]),
        tls_key=Path(found["HOLDFAST_TLS_KEY"]),
        tls_ca=Path(found["HOLDFAST_TLS_CA"]),
    )


def tls(authority: Authority, where: Path, *identities: Identity) -> Tls:
    loaded = settings(authority, where, *identities).tls
    assert loaded is not None
    return loaded


def agent(name: str) -> Identity:
    return Identity("main", Role.AGENT, name)


@contextmanager
def pair(authority: Authority, root: Path, **env: str) -> Iterator[tuple[Node, Node]]:
    """Two replicators, each with the certificate of its node."""
    made = [
        Node(name, root / name, **issue(authority, root / f"tls-{name}", agent(name)), **env) for name in ("a", "b")
    ]
    try:
        for node in made:
            node.start()
        yield made[0], made[1]
    finally:
        for node in made:
            node.close()
