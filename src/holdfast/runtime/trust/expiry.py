"""Certificates that expire, said in the log before and when it happens: those of the other ends of a server, and one's own.

TLS refuses an expired certificate in the handshake, of which gRPC for Python tells the process nothing, least of all the name.
So a server remembers until when the certificate of each caller is valid. It warns while the caller is connected, and says who
cannot connect any more when the certificate has expired. An open connection outlives its certificate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import anyio
import structlog

from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.renewal import renewed
from holdfast.runtime.trust.tls import Tls

DAY_S = 86_400.0
SOON_SHARE, SOON_S_MAX = 0.1, 7 * DAY_S  # of a certificate's life; a node that renews its own does so at two thirds
LOOK_S = 60.0
GONE_S = DAY_S  # an expired certificate of a caller that left earlier than this is no news
KNOWN_MAX = 65_536  # callers

log = structlog.get_logger("holdfast.runtime.trust.expiry")


@dataclass(frozen=True, slots=True)
class Certificate:
    """`whose`: what a person knows it by, an identity or the common name."""

    whose: str
    common_name: str
    begins_at: float
    ends_at: float
    advice: str

    def state(self, now: float) -> str:
        """Return "expired", "expires soon", or "" while there is time. `now`: Unix seconds."""
        if now >= self.ends_at:
            return "expired"
        soon_s = min(SOON_SHARE * (self.ends_at - self.begins_at), SOON_S_MAX)
        return "expires soon" if self.ends_at - now <= soon_s else ""

    @property
    def ends(self) -> str:
        return datetime.fromtimestamp(self.ends_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def certificate_of(pem: bytes, identities: Sequence[Identity]) -> Certificate | None:
    """Read the first certificate in `pem`; None if there is none."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        found = x509.load_pem_x509_certificate(pem)
        names = [str(each.value) for each in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except ValueError:
        return None
    name = names[0] if names else ""
    whose = ", ".join(each.local for each in identities)
    return Certificate(
        whose=whose or name or f"serial number {found.serial_number:x}",
        common_name=name,
        begins_at=found.not_valid_before_utc.timestamp(),
        ends_at=found.not_valid_after_utc.timestamp(),
        advice=_advice(identities, name),
    )


def _advice(identities: Sequence[Identity], common_name: str) -> str:
    agents = [each.name for each in identities if each.role is Role.AGENT and each.name]
    if agents:
        return (
            f"run `holdfast ca issue agent/{agents[0]} --out DIR` where the CA is, and copy the files to the node; if it has "
            f"joined by an invitation, run `holdfast nodes invite {agents[0]}`, and start its agent with --invite"
        )
    if identities:
        roles = " ".join(str(each.role) for each in identities)
        return (
            f"run `holdfast ca issue {roles} --host HOST --out DIR` where the CA is, and copy the files to that machine"
        )
    return (
        f"let your CA issue another certificate for {common_name or 'it'}, and replace the files; no restart is needed"
    )


def own_problem(tls: Tls | None, now: float) -> str:
    """Say that the certificate of this side has expired, with its name, date and what to run; empty if it has not."""
    if tls is None:
        return ""
    tls = renewed(tls)
    own = certificate_of(tls.cert, tls.identities)
    if own is None or own.state(now) != "expired":
        return ""
    return f"the certificate of this side ({own.whose}, {tls.files[0]}) expired at {own.ends}: {own.advice}"


class OwnExpiry:
    """Logs when one's own certificate expires soon, and when it has expired; each once for each certificate."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._said = ("", 0.0)

    def look(self) -> None:
        self._tls = renewed(self._tls)
        own = certificate_of(self._tls.cert, self._tls.identities)
        if own is None or not (state := own.state(time.time())) or self._said == (state, own.ends_at):
            return
        self._said = (state, own.ends_at)
        say = log.error if state == "expired" else log.warning
        say(
            f"own certificate {'has expired' if state == 'expired' else state}",
            certificate=own.whose,
            common_name=own.common_name,
            file=str(self._tls.files[0]),
            expires=own.ends,
            advice=own.advice,
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await anyio.sleep(LOOK_S)


@dataclass(slots=True)
class _Caller:
    certificate: Certificate
    calls: int = 0
    left_at: float = 0.0
    said: str = ""


class CallerExpiry:
    """The newest certificate of each caller."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._callers: dict[str, _Caller] = {}
        self._read: dict[bytes, Certificate] = {}  # by PEM, because every call shows it

    @contextmanager
    def call(self, pem: bytes, identities: Sequence[Identity]) -> Iterator[None]:
        """During the block the caller is connected."""
        caller = self._known(pem, identities) if pem else None
        if caller is None:
            yield
            return
        caller.calls += 1
        try:
            yield
        finally:
            caller.calls -= 1
            caller.left_at = self._clock()

    def look(self) -> None:
        """Log what has changed. Forgets callers that left long ago."""
        now = self._clock()
        for whose, caller in list(self._callers.items()):
            is_gone = not caller.calls and now - caller.left_at > GONE_S
            state = caller.certificate.state(now)
            if is_gone and (state == "expired" or caller.said):
                del self._callers[whose]
            elif state and state != caller.said and (caller.calls or state == "expired"):
                caller.said = state
                self._say(caller, state)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await anyio.sleep(LOOK_S)
            self.look()

    def _known(self, pem: bytes, identities: Sequence[Identity]) -> _Caller | None:
        if (certificate := self._read.get(pem)) is None:
            if (certificate := certificate_of(pem, identities)) is None:
                return None
            for table in (self._read, self._callers):
                if len(table) >= KNOWN_MAX:
                    table.clear()
            self._read[pem] = certificate
        caller = self._callers.setdefault(certificate.whose, _Caller(certificate))
        if certificate.ends_at > caller.certificate.ends_at:
            caller.certificate, caller.said = certificate, ""
        return caller

    @staticmethod
    def _say(caller: _Caller, state: str) -> None:
        known = caller.certificate
        details: Mapping[str, str] = {
            "certificate": known.whose,
            "common_name": known.common_name,
            "expires": known.ends,
            "advice": known.advice,
        }
        if state == "expired":
            then = "keeps its connection, and cannot connect again" if caller.calls else "cannot connect any more"
            log.error("certificate of a caller has expired", **details, then=then)
        else:
            log.warning("certificate of a caller expires soon", **details)
