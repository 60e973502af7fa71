"""Renews the certificate of a node that has joined by an invitation, while it is still valid.

    two thirds of its validity are over ──► a new key, a request (CSR) for it ──► Renew, over the mutual TLS of the present one
                                        ──► files replaced as a whole ──► the next connection uses them (`runtime.renewal`)

The open session keeps its connection, so workers are not affected. If no supervisor answers, or none has a CA, all of them are
tried again until the certificate has expired; then the node needs another invitation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import grpc
import structlog

from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.runtime.rpc.grpc_channel import cancellable, connected
from holdfast.runtime.trust.enrolled import Enrolled
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.invitation import new_request
from holdfast.runtime.trust.renewal import renewed, report_expiry
from holdfast.runtime.trust.tls import CERT, Tls, lifetime_of, read_pem
from holdfast.v1 import enrolment_pb2 as pb
from holdfast.v1.enrolment_pb2_grpc import EnrolmentStub

RENEWED_AT = 2 / 3  # share of its validity
LOOK_S = 60.0  # between two checks, because the clock may jump and the files may be replaced
RETRY_S_MIN, RETRY_S_MAX = 5.0, 600.0
ANSWER_TIMEOUT_S = 15.0
BACKDATED_S = 300.0  # a certificate begins that long before it was signed

log = structlog.get_logger("holdfast.agent.connection.certificate")


class Ask(Protocol):
    """Asks the supervisor at an endpoint. Returns PEM of certificate and CAs. Raises `AioRpcError` or `HoldfastError`."""

    async def __call__(self, endpoint: str, tls: Tls, node: str, csr: bytes) -> tuple[bytes, bytes]: ...


async def ask(endpoint: str, tls: Tls, node: str, csr: bytes) -> tuple[bytes, bytes]:
    with anyio.fail_after(ANSWER_TIMEOUT_S):
        async with connected(endpoint, tls, Role.SUPERVISOR) as channel:
            request = pb.RenewRequest(node=node, csr=csr)
            answer = await cancellable(EnrolmentStub(channel).Renew(request, timeout=ANSWER_TIMEOUT_S))
            return answer.certificate, answer.ca


class CertificateRenewal:
    def __init__(
        self,
        enrolled: Path,
        endpoints: Sequence[str],
        identity: Identity,
        tls: Tls,
        *,
        clock: Callable[[], float] = time.time,
        ask: Ask = ask,
    ) -> None:
        """`enrolled`: the directory of `runtime.enrolled`."""
        self._enrolled, self._endpoints, self._identity = Enrolled(enrolled), tuple(endpoints), identity
        self._tls, self._clock, self._ask = tls, clock, ask
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            wait_s = self._due() - self._clock()
            if wait_s <= 0:
                wait_s = RETRY_S_MIN if await self.renew() else self._retry_s()
            await anyio.sleep(min(wait_s, LOOK_S))

    async def renew(self) -> bool:
        """Request a certificate from each supervisor until one issues it. Returns whether there is a new certificate."""
        key, csr = new_request(self._identity)
        reasons: list[str] = []
        for endpoint in self._endpoints:
            try:
                self._tls = renewed(self._tls)
                certificate, ca = await self._ask(endpoint, self._tls, self._identity.name, csr)
                replace = partial(self._enrolled.replace, certificate=certificate, key=key, ca=ca)
                await anyio.to_thread.run_sync(replace)
            except (HoldfastError, OSError, TimeoutError, grpc.aio.AioRpcError) as error:
                reasons.append(f"{endpoint}: {_words(error)}")
                continue
            self._tls = renewed(self._tls)
            self._failures = 0
            report_expiry(self._tls)
            log.info("certificate renewed", endpoint=endpoint, file=str(self._enrolled.files.cert))
            return True
        self._failures += 1
        self._say(reasons)
        return False

    def _due(self) -> float:
        """Return the time at which the present certificate is due for renewal, Unix seconds."""
        path = self._enrolled.files.cert
        try:
            lifetime = lifetime_of(read_pem(CERT, path), CERT, path)
        except InvalidSpec as error:
            log.warning("the certificate of this node cannot be read", reason=str(error))
            return 0.0  # unreadable files are due for renewal now, with the certificate in use
        begins_at = min(lifetime.begins_at + BACKDATED_S, lifetime.ends_at)
        return begins_at + RENEWED_AT * (lifetime.ends_at - begins_at)

    def _retry_s(self) -> float:
        left_s = max(lifetime_of(self._tls.cert, CERT, self._tls.files[0]).ends_at - self._clock(), 0.0)
        doubled_s: float = RETRY_S_MIN * 2 ** min(self._failures, 10)
        return max(min(doubled_s, RETRY_S_MAX, left_s / 4), RETRY_S_MIN)

    def _say(self, reasons: Sequence[str]) -> None:
        left_s = lifetime_of(self._tls.cert, CERT, self._tls.files[0]).ends_at - self._clock()
        if left_s > 0:
            log.warning("certificate not renewed yet", valid_for_s=round(left_s), reasons=reasons)
        else:
            advice = f"invite it by name (holdfast nodes invite {self._identity.name}), and start it with --invite"
            log.error("the certificate of this node has expired", reasons=reasons, advice=advice)


def _words(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
