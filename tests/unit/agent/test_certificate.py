"""When an agent renews its certificate, and what it says while nobody does."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from holdfast.agent.connection.certificate import RETRY_S_MAX, RETRY_S_MIN, CertificateRenewal
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.enrolled import Enrolled, Joined
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.invitation import new_request, requested_key
from holdfast.runtime.trust.tls import Tls

pytestmark = pytest.mark.anyio
NODE = Identity("main", Role.AGENT, "node-7")
DAY_S = 86_400.0


class Signer:
    """The supervisors at two endpoints, of which the first has no CA."""

    def __init__(self, folder: Path, days: float = 9) -> None:
        self.authority = Authority.create(folder / "ca", "main", 1000)
        self.days, self.asked = days, list[str]()
        self.refuses = False

    def sign(self, csr: bytes) -> bytes:
        return self.authority.sign_agent(requested_key(csr, NODE), NODE, timedelta(days=self.days))[0]

    async def __call__(self, endpoint: str, tls: Tls, node: str, csr: bytes) -> tuple[bytes, bytes]:
        self.asked.append(endpoint)
        if endpoint == "a:1" or self.refuses:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, metadata, metadata, details="no CA here")
        return self.sign(csr), self.authority.certificate


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def renewal(folder: Path, signer: Signer, clock: Clock) -> CertificateRenewal:
    enrolled = Enrolled(folder / "identity")
    key, csr = new_request(NODE)
    enrolled.join(
        Joined("main", "node-7", ()),
        certificate=signer.sign(csr),
        key=key,
        ca=signer.authority.certificate,
        join_token="",
    )
    files = enrolled.files
    tls = ServiceSettings(fleet="main", tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca).tls
    assert tls is not None
    return CertificateRenewal(enrolled.path, ("a:1", "b:1"), NODE, tls, clock=clock, ask=signer)


async def test_it_is_due_when_two_thirds_of_its_life_are_over(tmp_path: Path) -> None:
    clock = Clock()
    made = renewal(tmp_path, Signer(tmp_path), clock)
    assert made._due() - clock.now == pytest.approx(6 * DAY_S, abs=5)


async def test_each_supervisor_is_asked_until_one_signs(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    made = renewal(tmp_path, signer, Clock())
    before = Enrolled(tmp_path / "identity").files.cert.read_bytes()
    assert await made.renew()
    assert signer.asked == ["a:1", "b:1"]
    assert Enrolled(tmp_path / "identity").files.cert.read_bytes() != before


async def test_an_answer_for_another_key_is_not_used(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    made = renewal(tmp_path, signer, Clock())
    before = Enrolled(tmp_path / "identity").files.cert.read_bytes()
    signer.sign = lambda csr: before  # type: ignore[method-assign]
    with capture_logs() as logs:
        assert not await made.renew()
    assert "the certificate of the key" in str(logs[-1]["reasons"])
    assert Enrolled(tmp_path / "identity").files.cert.read_bytes() == before


async def test_who_gets_none_tries_again_ever_slower_and_says_so_at_the_end(tmp_path: Path) -> None:
    signer, clock = Signer(tmp_path), Clock()
    made = renewal(tmp_path, signer, clock)
    signer.refuses = True
    waits = []
    with capture_logs() as logs:
        for _ in range(12):
            assert not await made.renew()
            waits.append(made._retry_s())
        assert waits == sorted(waits)
        assert (waits[0], waits[-1]) == (2 * RETRY_S_MIN, RETRY_S_MAX)
        assert {each["event"] for each in logs} == {"certificate not renewed yet"}
        clock.now += 10 * DAY_S
        assert not await made.renew()
        assert logs[-1]["log_level"] == "error"
        assert "holdfast nodes invite node-7" in logs[-1]["advice"]
        assert made._retry_s() == RETRY_S_MIN
    signer.refuses = False
    assert await made.renew(), "it tries on: a supervisor decides whether it is let in"


async def test_a_certificate_that_somebody_has_broken_is_replaced(tmp_path: Path) -> None:
    made = renewal(tmp_path, Signer(tmp_path), Clock())
    Enrolled(tmp_path / "identity").files.cert.write_text("nothing")
    with capture_logs() as logs:
        assert made._due() == 0.0
    assert "cannot be read" in logs[-1]["event"]
    assert await made.renew()
    with pytest.raises(InvalidSpec):
        requested_key(b"", NODE)
