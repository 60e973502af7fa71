"""Signs the certificates of nodes: the first one for an invitation, the next ones for the certificate before.

The CA is a directory (HOLDFAST_CA_DIR), best an enrolment CA: then whoever takes this machine over can be every node, but no
supervisor and no diagnostics. Nothing of a request gets into a certificate but its key.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import grpc
import structlog
from anyio import to_thread

from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.runtime.rpc.grpc_access import caller
from holdfast.runtime.trust.authority import CA_DIR, CRL, Authority
from holdfast.runtime.trust.fleet import Membership
from holdfast.runtime.trust.identities import Identity
from holdfast.runtime.trust.invitation import node_identity, requested_key
from holdfast.runtime.trust.tls import CA, CERT, Tls, read_pem
from holdfast.v1 import enrolment_pb2 as pb
from holdfast.v1 import enrolment_pb2_grpc as pb_grpc

log = structlog.get_logger("holdfast.supervisor.enrolment")


Context = grpc.aio.ServicerContext[pb.RenewRequest, Awaitable[pb.RenewAnswer]]


@dataclass(frozen=True, slots=True)
class Issued:
    """PEM of a certificate with its chain, and of the CAs that the fleet trusts. `expires_at`: Unix seconds."""

    certificate: bytes
    ca: bytes
    serial: str
    expires_at: float


class Issuer:
    """`life_s`: how long a certificate of a node is valid."""

    def __init__(self, directory: Path, fleet: str, trusted: Path, life_s: float) -> None:
        """Raises `NotFound` or `InvalidSpec` for a directory without a usable CA of this fleet."""
        self._authority = Authority(directory)
        if self._authority.fleet != fleet:
            expected = f"the CA of fleet {fleet}; it is of fleet {self._authority.fleet}"
            raise InvalidSpec(CA_DIR, str(directory), expected)
        self.fleet = fleet
        self._trusted = trusted
        self._life = timedelta(seconds=life_s)
        self._authority.chain_below(self.ca)
        if not self._authority.is_for_enrolment:
            log.warning(
                "this supervisor can sign certificates of services",
                directory=str(directory),
                advice="give it an enrolment CA: holdfast ca issue --intermediate --out DIR",
            )

    @property
    def ca(self) -> bytes:
        """The CAs that the fleet trusts, as they are now. Raises `InvalidSpec`."""
        return read_pem(CA, self._trusted)

    async def issue(self, node: str, csr: bytes) -> Issued:
        """Raises `InvalidSpec` for a request that asks for something else than the certificate of this node's agent."""
        identity = node_identity(self.fleet, node)
        return await to_thread.run_sync(self._issue, identity, csr)

    def check(self, node: str, csr: bytes) -> None:
        """Raises `InvalidSpec`, as `issue`."""
        requested_key(csr, node_identity(self.fleet, node))

    def _issue(self, identity: Identity, csr: bytes) -> Issued:
        key = requested_key(csr, identity)
        ca = self.ca
        chain = self._authority.chain_below(ca)
        left = self._authority.expires.timestamp() - datetime.now().timestamp()
        life = min(self._life, timedelta(seconds=max(left - 1, 0)))  # one that outlives its CA would not be valid
        certificate, record = self._authority.sign_agent(key, identity, life)
        expires_at = datetime.fromisoformat(record.expires).timestamp()
        return Issued(certificate + chain, ca, record.serial, expires_at)


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a supervisor with a CA gives to machines that join. `control_port`: for agents."""

    issuer: Issuer
    membership: Membership
    control_port: int

    @property
    def join_token(self) -> str:
        return self.membership.tokens[0] if self.membership.tokens else ""


def issuer_of(directory: Path | None, fleet: str, tls: Tls | None, life_s: float) -> Issuer | None:
    """None without a directory. Raises `InvalidSpec` if the other settings lack what an issuer needs."""
    if directory is None:
        return None
    if tls is None:
        raise InvalidSpec(CA_DIR, str(directory), f"mutual TLS with it: {CERT} and the others (docs/security.md)")
    if not tls.identities and not tls.accepts.required:
        raise InvalidSpec(
            CA_DIR,
            str(directory),
            "a certificate with an identity, because nodes are distinguished by their identities",
        )
    return Issuer(directory, fleet, tls.files[2], life_s)


def crl_of(directory: Path | None) -> Path | None:
    """The list of revoked certificates that `holdfast ca revoke` writes in the directory of a CA."""
    return directory / CRL if directory is not None else None


class EnrolmentServicer(pb_grpc.EnrolmentServicer):
    """Any supervisor with a CA answers, leader or not: who may ask is decided by the caller's certificate."""

    def __init__(self, issuer: Issuer | None) -> None:
        self._issuer = issuer

    async def Renew(  # noqa: N802
        self, request: pb.RenewRequest, context: Context
    ) -> pb.RenewAnswer:
        if self._issuer is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this supervisor has no CA ({CA_DIR})")
            raise AssertionError("abort raises")
        identities = caller().identities
        if identities is None or not any(each.name == request.node for each in identities):
            shown = ", ".join(each.uri for each in identities or ()) or "nobody known"
            reason = f"the certificate of node {request.node!r} is renewed for this node only; the caller is {shown}"
            log.warning("certificate not renewed", node=request.node, reason=reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
            raise AssertionError("abort raises")
        try:
            issued = await self._issuer.issue(request.node, request.csr)
        except HoldfastError as error:
            log.warning("certificate not renewed", node=request.node, reason=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from None
        log.info("certificate of a node renewed", node=request.node, serial=issued.serial, peer=context.peer())
        return pb.RenewAnswer(certificate=issued.certificate, ca=issued.ca)
