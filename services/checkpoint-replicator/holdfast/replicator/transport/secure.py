"""TLS of the data plane: shards travel encrypted, and between nodes of the fleet only.

Both ends present the certificate of their node, and look at what the other one says of itself (docs/security.md, Identities).
The secret of the job stays what admits to its shards.

After the handshake, bytes travel in larger records than those of TLS, if both sides know them (`sealed`).

In TLS the client speaks first; without TLS the server does. So a client notices at once that a server does not speak TLS, and a
server that also accepts connections without TLS waits a moment for the client's first byte. If this byte takes longer (a lost
packet, a busy machine), the server greets without TLS. Its greeting says that it speaks TLS, and a client that does tries again
(`late`)."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.domain.errors import InvalidSpec, OtherRole, Unavailable
from holdfast.replicator.transport.sealed import ALPN, encrypted, sealed_by_client, sealed_by_server
from holdfast.runtime.processes.readable import readable
from holdfast.runtime.trust.identities import ANY_NAME, Role
from holdfast.runtime.trust.peer_certificate import examined, with_files
from holdfast.runtime.trust.renewal import renewed
from holdfast.runtime.trust.tls import Tls

MODE = "HOLDFAST_REPLICATOR_TLS"
PLAIN_WAIT_S = 0.25  # for the first byte of a client that may not speak TLS
_NODES = frozenset({Role.AGENT, Role.REPLICATOR})
_CLIENTS = _NODES | {Role.OPERATOR}  # people download checkpoints
_HANDSHAKE = b"\x16"  # first byte of a TLS connection


class NotTls(Unavailable):
    """The other end does not speak TLS."""


@dataclass(frozen=True, slots=True)
class _Contexts:
    tls: Tls
    client: ssl.SSLContext
    server: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class _Admission:
    """What the other end of a connection has shown, and for what it was admitted."""

    context: ssl.SSLContext
    fields: Mapping[str, Any]  # of its certificate, as `ssl` shows them
    pem: bytes
    roles: frozenset[Role]
    node: str
    for_whom: str


def expired(admission: _Admission) -> bool:
    """Whether the certificate has expired since the handshake."""
    return ssl.cert_time_to_seconds(str(admission.fields["notAfter"])) <= time.time()


class Secure:
    """`tls` None: no TLS. `optional`: also talk to replicators that do not speak TLS. Thread-safe."""

    def __init__(self, tls: Tls | None = None, *, optional: bool = False) -> None:
        self.optional = optional or tls is None
        self._lock = threading.Lock()
        self._contexts = _Contexts(tls, *_contexts_of(tls)) if tls is not None else None
        self._admissions: WeakKeyDictionary[socket.socket, _Admission] = WeakKeyDictionary()  # of open connections

    @property
    def speaks_tls(self) -> bool:
        return self._contexts is not None

    # ------------------------------------------------------------ as a server

    def begun(self, sock: socket.socket) -> socket.socket:
        """Return the connection of a client, which `admit` completes. Raises OSError."""
        contexts = self._current()
        if contexts is None or (self.optional and not _begins_tls(sock)):
            return sock
        return contexts.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def admit(self, sock: socket.socket) -> socket.socket:
        """Complete the handshake, and look at the client's certificate. Returns the connection that takes the place of `sock`.
        Raises NotTls, OtherRole, Unavailable, and OSError."""
        if not isinstance(sock, ssl.SSLSocket):
            return sock
        try:
            sock.do_handshake()
        except (TimeoutError, ssl.SSLEOFError, ConnectionError) as error:  # it has waited for a greeting, or given up
            raise NotTls(f"the peer has not begun TLS; {_advice()}") from error
        admission = self._look(sock, _CLIENTS, "", "connections of the data plane are for")
        return self._admitted(sealed_by_server(sock), admission)

    # ------------------------------------------------------------ as a client

    def connect(self, address: tuple[str, int], timeout_s: float, node: str) -> socket.socket:
        """Connect to the replicator of `node`. Raises NotTls, OtherRole, Unavailable, and OSError."""
        contexts = self._current()
        with ExitStack() as unless_admitted:
            sock = unless_admitted.enter_context(_connected(address, timeout_s))
            if contexts is not None:
                try:
                    sock = unless_admitted.enter_context(contexts.client.wrap_socket(sock))
                except ssl.SSLError as error:
                    if error.reason != "WRONG_VERSION_NUMBER":
                        raise
                    if not self.optional:
                        raise NotTls(f"it does not speak TLS; {_advice()}") from error
                    sock = unless_admitted.enter_context(_connected(address, timeout_s))
                else:
                    admission = self._look(sock, _NODES, node, f"{node} must be a node:")
                    sock = unless_admitted.enter_context(sealed_by_client(sock))
                    self._admitted(sock, admission)
            unless_admitted.pop_all()
            return sock

    def late(self, sock: socket.socket, greeting: Mapping[str, Any]) -> bool:
        """Whether this connection has no TLS although both ends speak it."""
        return self.speaks_tls and greeting.get("tls") is True and not encrypted(sock)

    # ------------------------------------------------------------ both

    def still_admits(self, sock: socket.socket) -> bool:
        """Whether a connection that has been open for some time would be admitted now: the files of this end are those with
        which it began, and the certificate of the other end has neither expired nor been revoked. A connection without TLS,
        which `optional` allows, is not admitted again."""
        current = self._current()
        if current is None:
            return True
        with self._lock:
            admission = self._admissions.get(sock)
        if admission is None or admission.context not in (current.client, current.server):
            return False
        try:
            self._examine(admission)
        except (OtherRole, InvalidSpec):
            return False
        return not expired(admission)

    def _admitted(self, sock: socket.socket, admission: _Admission) -> socket.socket:
        with self._lock:
            self._admissions[sock] = admission
        return sock

    def _look(self, sock: ssl.SSLSocket, roles: frozenset[Role], node: str, for_whom: str) -> _Admission:
        """Raises OtherRole unless the peer's certificate has one of the roles (or need not have any), for this node if one is
        given, and was not revoked."""
        pem = ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"").encode()
        admission = _Admission(sock.context, sock.getpeercert() or {}, pem, roles, node, for_whom)
        self._examine(admission)
        return admission

    def _examine(self, admission: _Admission) -> None:
        """Raises OtherRole."""
        assert self._contexts is not None
        tls, roles, node = self._contexts.tls, admission.roles, admission.node
        whose = "the certificate of the other end"
        identities = examined(tls, admission.fields, admission.pem, roles, for_whom=admission.for_whom, whose=whose)
        mine = [each for each in tls.accepts.of_this_fleet(identities) if each.role in roles]
        if node and mine and not any(each.name in (node, ANY_NAME) for each in mine):
            listed = ", ".join(each.uri for each in mine)
            raise OtherRole(f"the certificate is of {listed}, and not of node {node!r}")

    def _current(self) -> _Contexts | None:
        """Of the present files. Files that cannot be used leave what was read before."""
        with self._lock:
            if self._contexts is not None and (now := renewed(self._contexts.tls)) is not self._contexts.tls:
                try:
                    self._contexts = _Contexts(now, *_contexts_of(now))
                except (OSError, InvalidSpec):  # replaced again meanwhile: the next connection reads them
                    pass
            return self._contexts


def _connected(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect, and let each message leave at once. The handshake ends with several small messages of the client, of which TCP
    would keep the second back for 40 ms, until the first one is acknowledged."""
    sock = socket.create_connection(address, timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _contexts_of(tls: Tls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Raises OSError for files that cannot be used."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (client, server):
        with_files(context, tls).verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols([ALPN])
    server.num_tickets = 0  # nothing is resumed, and a client that waits for an answer must not be woken by a ticket
    return client, server


def _begins_tls(sock: socket.socket) -> bool:
    """Wait for the client's first byte. A client without TLS sends none before the server's greeting."""
    return readable(sock, PLAIN_WAIT_S) and sock.recv(1, socket.MSG_PEEK) == _HANDSHAKE


def _advice() -> str:
    return f"give all nodes certificates and this release, or set {MODE}=optional while that is done (docs/security.md)"
