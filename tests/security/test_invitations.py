"""Invitations: one machine becomes a node by each, and everything else that somebody tries with one is refused by name."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, cast

import anyio
import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from invited import JOIN_TOKEN, TOKEN, Fleet, Pki, fleet, in_thread, loaded, started, tls_of
from lone_sessions import lone_session
from structlog.testing import capture_logs
from waiting import wait_until_async

from holdfast.agent.connection.certificate import CertificateRenewal
from holdfast.agent.connection.session import Session
from holdfast.cli import invites, joining
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, OtherRole
from holdfast.log.memory import MemoryLog
from holdfast.log.names import INBOX
from holdfast.log.redis import RedisLog
from holdfast.runtime.rpc.grpc_channel import connected
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.trust.enrolled import DIRECTORY, Enrolled, Joined
from holdfast.runtime.trust.fleet import Membership
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.invitation import Invitation, digest, new_request, new_token
from holdfast.runtime.trust.revocation import serial_of
from holdfast.runtime.trust.tls import Tls
from holdfast.v1 import enrolment_pb2 as pb
from holdfast.v1.enrolment_pb2_grpc import EnrolmentStub

pytestmark = pytest.mark.anyio
NODE_1 = Identity("main", Role.AGENT, "node-1")


@pytest.fixture
def own_pki(tmp_path: Path) -> Pki:
    return Pki.make(tmp_path / "pki")


def quiet(_: str) -> None:
    pass


async def join(invitation: Invitation, node: str, own: Path) -> Joined:
    return await in_thread(lambda: joining.join(invitation, node, own, quiet))


async def refused(one: Fleet, invitation: Invitation, node: str, *, status: int = 409) -> str:
    answer = await one.ask(invitation, node)
    assert answer.status_code == status, answer.text
    return str(answer.json()["detail"])


async def test_an_invitation_names_the_standby_too(
    own_pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its machine keeps the endpoints: with the leader's alone, the node would be without a supervisor after a takeover."""
    log = MemoryLog()
    async with fleet(tmp_path / "1", own_pki, log) as one, anyio.create_task_group() as tasks:
        two = await started(tasks, tmp_path / "2", own_pki, log, name="sup-2")
        monkeypatch.setenv("HOLDFAST_API_CA", str(own_pki.folder / "ca.crt"))
        monkeypatch.setenv("HOLDFAST_API_TOKEN", TOKEN)

        def asked() -> str:
            with one.client() as client:
                return str(client.version()["standby_api"])

        async def known() -> bool:
            return await in_thread(asked) == two.api

        await wait_until_async(known, description="the leader to know the standby")
        await in_thread(lambda: invites.invite("node-1", api=one.sup.api))
        invited = Invitation.read(capsys.readouterr().out.split()[-1])
        assert set(invited.apis) == {one.sup.api, two.api}
        assert len(invited.control) == 2
        tasks.cancel_scope.cancel()


def an_agent(endpoint: str, tls: Tls, node: str = "node-1") -> Session:
    return lone_session([endpoint], node, membership=Membership("main", (JOIN_TOKEN,)), tls=tls)


async def states(one: Fleet) -> dict[str, bool]:
    async with one.http() as http:
        return {node["node"]: node["connected"] for node in (await http.get("/v1/nodes")).json()["items"]}


# ---------------------------------------------------------------- what it is for


async def test_a_machine_joins_and_its_agent_has_a_session(own_pki: Pki, tmp_path: Path) -> None:
    own = tmp_path / "agent"
    async with fleet(tmp_path / "sup", own_pki) as one, anyio.create_task_group() as tasks:
        invitation = await one.invite("node-1")
        found = await join(invitation, "node-1", own)
        assert found.control == (one.sup.control,)
        files = Enrolled(own / DIRECTORY).files
        assert files.join_token is not None
        assert files.join_token.read_text().strip() == JOIN_TOKEN
        for path in (files.key, files.join_token):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((own / DIRECTORY).stat().st_mode) == 0o700
        tls = tls_of(own)
        assert tls.identities == (NODE_1,)
        tls.require_pair()
        tasks.start_soon(an_agent(one.sup.control, tls).run)

        async def connected_now() -> bool:
            return (await states(one)).get("node-1", False)

        await wait_until_async(connected_now, description="a session of the node that has joined")
        # the same command again, after a boot: the invitation is used, and not needed
        assert await join(invitation, "node-1", own) == found
        [row] = await one.invites()
        assert (row["state"], [each["node"] for each in row["used"]]) == ("was used already, by node-1", ["node-1"])
        tasks.cancel_scope.cancel()


async def test_one_invitation_for_several_nodes_is_for_as_many(own_pki: Pki, tmp_path: Path) -> None:
    async with fleet(tmp_path, own_pki) as one:
        invitation = await one.invite(uses=2)
        assert (await one.ask(invitation, "a")).status_code == 200
        assert "a has joined by invitation" in await refused(one, invitation, "a")
        assert (await one.ask(invitation, "b")).status_code == 200
        assert "was used already, by a, b" in await refused(one, invitation, "c")


# ---------------------------------------------------------------- what is refused


async def test_a_second_use_and_a_replayed_request_are_refused(own_pki: Pki, tmp_path: Path) -> None:
    async with fleet(tmp_path / "sup", own_pki) as one:
        invitation = await one.invite("node-1")
        _, csr = new_request(NODE_1)
        assert (await one.ask(invitation, "node-1", csr)).status_code == 200
        replayed = await one.ask(invitation, "node-1", csr)
        assert replayed.status_code == 409
        assert "was used already, by node-1; ask for another one" in replayed.json()["detail"]
        with pytest.raises(HoldfastError, match="was used already"):
            await join(invitation, "node-1", tmp_path / "another machine")
        assert not (tmp_path / "another machine" / DIRECTORY / "current").exists()


async def test_of_two_machines_at_once_one_joins(own_pki: Pki, tmp_path: Path) -> None:
    async with fleet(tmp_path, own_pki) as one:
        invitation = await one.invite("node-1")
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await one.ask(invitation, "node-1"))

        async with anyio.create_task_group() as both:
            for _ in range(5):
                both.start_soon(ask)
        assert sorted(each.status_code for each in answers) == [200, 409, 409, 409, 409]


async def test_expired_revoked_and_unknown_ones_are_refused(own_pki: Pki, tmp_path: Path) -> None:
    log = MemoryLog()
    async with fleet(tmp_path, own_pki, log) as one:
        expired, revoked = await one.invite("node-1", ttl_s=0.05), await one.invite("node-1")

        async def over() -> bool:
            return any(each["state"] == "has expired" for each in await one.invites())

        await wait_until_async(over, description="the first to expire")
        assert "has expired; ask for another one" in await refused(one, expired, "node-1")
        async with one.http() as http:
            assert (await http.delete(f"/v1/invites/{id_of(revoked)}")).status_code == 202

            async def gone() -> bool:
                return any(each["state"] == "was revoked" for each in await one.invites())

            await wait_until_async(gone, description="the second to be revoked")
            again = await http.delete(f"/v1/invites/{id_of(revoked)}")
            assert (again.status_code, "was revoked" in again.text) == (409, True)
            assert (await http.delete("/v1/invites/none")).status_code == 404
        assert "was revoked" in await refused(one, revoked, "node-1")
        before = await log.last_position(INBOX)
        unknown = Invitation("main", revoked.apis, revoked.ca, revoked.control, "node-1", new_token())
        assert "no invitation has this token" in await refused(one, unknown, "node-1", status=403)
        assert await log.last_position(INBOX) == before, "nothing that nobody has invited gets so far"


def id_of(invitation: Invitation) -> str:
    return digest(invitation.token)[:12]


async def test_an_invitation_for_one_node_is_not_for_another_and_one_for_any_takes_no_name(
    own_pki: Pki, tmp_path: Path
) -> None:
    async with fleet(tmp_path, own_pki) as one, anyio.create_task_group() as tasks:
        named, free = await one.invite("node-1"), await one.invite()
        assert "is for node node-1, not for node-2" in await refused(one, named, "node-2")
        with pytest.raises(InvalidSpec, match="node-1, for whom the invitation is"):
            await join(named, "node-2", tmp_path / "own")
        own_pki.issue("known", Identity("main", Role.AGENT, "known"))
        tasks.start_soon(an_agent(one.sup.control, own_pki.tls("known"), "known").run)

        async def there() -> bool:
            return "known" in await states(one)

        await wait_until_async(there, description="a node that the fleet has")
        assert "whose name an invitation for any node cannot take" in await refused(one, free, "known")
        assert (await one.ask(named, "node-1")).status_code == 200, "the refusals have not used it"
        tasks.cancel_scope.cancel()


def request(*names: x509.GeneralName, extension: x509.ExtensionType | None = None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if extension is not None:
        builder = builder.add_extension(extension, critical=True)
    signed = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


URI = x509.UniformResourceIdentifier
OWN = URI("holdfast://main/agent/node-1")


def forged() -> bytes:
    """A request for somebody else's key: the signature is not of this key."""
    good = x509.load_pem_x509_csr(new_request(NODE_1)[1])
    der = bytearray(good.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    return x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(("csr", "said"), [
    (new_request(Identity("main", Role.SUPERVISOR))[1], "holdfast://main/supervisor"),
    (new_request(Identity("main", Role.AGENT, "node-9"))[1], "holdfast://main/agent/node-9"),
    (new_request(Identity("main", Role.AGENT, "*"))[1], "holdfast://main/agent/*"),
    (new_request(Identity("other", Role.AGENT, "node-1"))[1], "holdfast://other/agent/node-1"),
    (request(OWN, URI("holdfast://main/diagnostics")), "holdfast://main/diagnostics"),
    (request(OWN, x509.DNSName("head-1")), "head-1"),
    (request(OWN, extension=x509.BasicConstraints(ca=True, path_length=None)), "extension 2.5.29.19"),
    (request(), "no identity"),
    (b"-----BEGIN CERTIFICATE REQUEST-----\n", "PKCS #10"),
    (forged(), "not signed by its key"),
], ids=["supervisor", "node-9", "any node", "fleet", "two", "host", "ca", "none", "broken", "forged"])  # fmt: skip
async def test_a_request_for_another_identity_is_refused_and_uses_nothing(
    own_pki: Pki, tmp_path: Path, csr: bytes, said: str
) -> None:
    async with fleet(tmp_path, own_pki) as one:
        invitation = await one.invite("node-1")
        answer = await one.ask(invitation, "node-1", csr)
        assert answer.status_code == 422, answer.text
        assert said in answer.json()["detail"]
        assert [each["state"] for each in await one.invites()] == ["open"]
        for node in ("*", "a/b", "\x1b[2J"):
            assert (await one.ask(invitation, node)).status_code == 422


async def test_only_administrators_invite_and_no_token_is_kept(own_pki: Pki, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with fleet(tmp_path, own_pki) as one:
            invitation = await one.invite("node-1")
            assert (await one.ask(invitation, "node-1")).status_code == 200
            async with one.http(token="wrong") as http:
                assert (await http.get("/v1/invites")).status_code == 401
                assert (await http.get("/v1/enrolment")).status_code == 200, "no secret is in it"
            async with one.http() as http:
                audit = (await http.get("/v1/audit")).json()["items"]
    lines = [(each["what"], each["subject"], each["who"]) for each in audit]
    identifier = id_of(invitation)
    assert ("invite", f"invitation {identifier}", "admin") in lines
    assert ("join", "node node-1", f"invitation {identifier}") in lines
    assert invitation.token not in str(logs) + str(audit)
    assert invitation.token.encode() not in written_below(tmp_path)
    assert invitation.token not in repr(invitation)


def written_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


async def test_nobody_joins_without_tls_or_without_a_ca(own_pki: Pki, tmp_path: Path) -> None:
    async with fleet(tmp_path / "a", own_pki, api_tls="off") as one:
        invitation = await one.invite("node-1")
        assert "over TLS only" in await refused(one, invitation, "node-1", status=403)
        assert [each["state"] for each in await one.invites()] == ["open"]
    async with fleet(tmp_path / "b", own_pki, ca_dir=None) as one, one.http() as http:
        answer = await http.post("/v1/invites", json={"digest": "0" * 64})
        assert (answer.status_code, "HOLDFAST_CA_DIR" in answer.text) == (409, True)
        assert not (await http.get("/v1/enrolment")).json()["possible"]


async def test_a_server_with_another_ca_gets_nothing(own_pki: Pki, tmp_path: Path) -> None:
    """Somebody between the machine and the supervisor, with a fleet of his own."""
    theirs = Pki.make(tmp_path / "theirs")
    async with fleet(tmp_path / "ours", own_pki) as one:
        invitation = await one.invite("node-1")
    with capture_logs() as logs:
        async with fleet(tmp_path / "between", theirs) as between:
            led = Invitation("main", (between.sup.api,), invitation.ca, invitation.control, "node-1", invitation.token)
            with pytest.raises(Conflict, match="another CA than that of the invitation"):
                await join(led, "node-1", tmp_path / "own")
    assert not [each for each in logs if each["event"] == "join refused"], "the token was not sent"
    assert not (tmp_path / "own" / DIRECTORY / "current").exists()


async def test_a_leader_change_between_invitation_and_use_loses_nothing(
    own_pki: Pki, tmp_path: Path, redis_url: str
) -> None:
    async with anyio.create_task_group() as tasks:
        first = await started(tasks, tmp_path / "a", own_pki, RedisLog(redis_url, "main"), name="a")
        one = Fleet(own_pki, first)
        kept, used = await one.invite("node-1"), await one.invite("node-2")
        assert (await one.ask(used, "node-2")).status_code == 200
        first.scope.cancel()
        second = await started(tasks, tmp_path / "b", own_pki, RedisLog(redis_url, "main"), name="b")
        after = Fleet(own_pki, second)

        async def leads() -> bool:
            async with after.http() as http:
                return bool((await http.get("/healthz")).json().get("leader"))

        await wait_until_async(leads, description="the second to lead")
        assert "was used already" in await refused(after, used, "node-2")
        assert (await after.ask(kept, "node-1")).status_code == 200
        assert "was used already" in await refused(after, kept, "node-1")
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------- renewal


async def renew(endpoint: str, tls: Tls, node: str, csr: bytes) -> pb.RenewAnswer:
    async with connected(endpoint, tls, Role.SUPERVISOR) as channel:
        return await EnrolmentStub(channel).Renew(pb.RenewRequest(node=node, csr=csr), timeout=30)


async def test_an_agent_renews_its_certificate_until_it_is_revoked(own_pki: Pki, tmp_path: Path) -> None:
    own = tmp_path / "agent"
    async with fleet(tmp_path / "sup", own_pki) as one, anyio.create_task_group() as tasks:
        await join(await one.invite("node-1"), "node-1", own)
        tls = tls_of(own)
        session = an_agent(one.sup.control, tls)
        with capture_logs() as logs:
            tasks.start_soon(session.run)

            async def there() -> bool:
                return (await states(one)).get("node-1", False)

            await wait_until_async(there, description="the session")
            renewal = CertificateRenewal(own / DIRECTORY, (one.sup.control,), NODE_1, tls)
            before = serial_of(tls.cert)
            assert await renewal.renew()
            after = tls_of(own)
            after.require_pair()
            assert serial_of(after.cert) != before
            assert after.identities == (NODE_1,)
            assert await renewal.renew(), "with the one that it has got"
            assert await there()
            assert [each["event"] for each in logs].count("control session opened") == 1
            revoked = own_pki.enrolment.revoke_identity("agent/node-1")
            assert len(revoked) == 3
            assert not await renewal.renew()
            said = [each for each in logs if each["event"] == "certificate not renewed yet"]
            assert "was revoked" in str(said[-1]["reasons"])

            async def ended() -> bool:
                return not await there()

            await wait_until_async(ended, description="the session of the revoked node to end")
        tasks.cancel_scope.cancel()


async def test_nobody_renews_the_certificate_of_another_node(own_pki: Pki, tmp_path: Path) -> None:
    own_pki.issue("node-9", Identity("main", Role.AGENT, "node-9"))
    own_pki.issue("any", Identity("main", Role.AGENT, "*"))
    async with fleet(tmp_path, own_pki) as one:
        for leaf in ("node-9", "any", "supervisor"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await renew(one.sup.control, own_pki.tls(leaf), "node-1", new_request(NODE_1)[1])
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED, leaf
        wanted = Identity("main", Role.SUPERVISOR)
        with pytest.raises(grpc.aio.AioRpcError, match="holdfast://main/supervisor"):
            await renew(one.sup.control, own_pki.tls("node-9"), "node-9", new_request(wanted)[1])
    async with fleet(tmp_path / "without", own_pki, ca_dir=None) as one:
        csr = new_request(Identity("main", Role.AGENT, "node-9"))[1]
        with pytest.raises(grpc.aio.AioRpcError, match="HOLDFAST_CA_DIR"):
            await renew(one.sup.control, own_pki.tls("node-9"), "node-9", csr)


# ---------------------------------------------------------------- a stolen supervisor


def stolen(pki: Pki, leaf: str, identity: Identity, *, dns: str = "localhost", common_name: str = "") -> Tls:
    """A certificate that a thief of the enrolment CA's key makes, with whatever he likes in it."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = cast(Any, serialization.load_pem_private_key((pki.enrolment.directory / "ca.key").read_bytes(), None))
    issuer = x509.load_pem_x509_certificate(pki.enrolment.certificate)
    names = [*([x509.DNSName(dns)] if dns else []), URI(identity.uri)]
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    (pki.folder / f"{leaf}.crt").write_bytes(pem + pki.enrolment.certificate)
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (pki.folder / f"{leaf}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    return loaded(**pki.files(leaf))


@pytest.mark.parametrize(
    "names", [{"dns": "localhost"}, {"dns": "", "common_name": "localhost"}], ids=["as host", "as common name"]
)
async def test_who_has_the_enrolment_ca_can_be_a_node_and_no_supervisor(
    own_pki: Pki, tmp_path: Path, names: dict[str, str]
) -> None:
    false_supervisor = stolen(own_pki, "false", Identity("main", Role.SUPERVISOR), **names)
    own_pki.issue("node-9", Identity("main", Role.AGENT, "node-9"))
    victim = own_pki.tls("node-9")
    async with listen("localhost:0", lambda _: None, services=[], tls=false_supervisor) as server:
        with pytest.raises((grpc.aio.AioRpcError, OtherRole), match=r"CERTIFICATE_VERIFY_FAILED|no DNS name"):
            async with connected(server.endpoint, victim, Role.SUPERVISOR):
                pass
    async with fleet(tmp_path / "a", own_pki) as one:
        files = own_pki.files("false")
        options: dict[str, Any] = {"api_tls_cert": files["tls_cert"], "api_tls_key": files["tls_key"], "name": "false"}
        async with fleet(tmp_path / "b", own_pki, **options) as false:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                async with false.http() as http:
                    await http.get("/v1/version")
        # what remains: he is any node
        tls = stolen(own_pki, "any", Identity("main", Role.AGENT, "node-7"), dns="")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(an_agent(one.sup.control, tls, "node-7").run)

            async def there() -> bool:
                return (await states(one)).get("node-7", False)

            await wait_until_async(there, description="the false node")
            tasks.cancel_scope.cancel()


async def test_a_revoked_enrolment_ca_ends_all_that_it_has_signed(own_pki: Pki, tmp_path: Path) -> None:
    """By the list of the fleet's CA, joined with that of the enrolment CA as docs/security.md says."""
    lists = tmp_path / "crl.pem"

    def publish() -> None:
        lists.write_bytes(
            b"".join((each.directory / "crl.pem").read_bytes() for each in (own_pki.root, own_pki.enrolment))
        )

    publish()
    own_pki.issue("node-1", NODE_1, authority=own_pki.enrolment)
    own_pki.issue("node-2", Identity("main", Role.AGENT, "node-2"))
    async with fleet(tmp_path / "sup", own_pki, tls_crl=lists) as one, anyio.create_task_group() as tasks:
        for leaf in ("node-1", "node-2"):
            tasks.start_soon(an_agent(one.sup.control, own_pki.tls(leaf), leaf).run)

        async def both() -> bool:
            return await states(one) == {"node-1": True, "node-2": True}

        await wait_until_async(both, description="both nodes")
        (record,) = own_pki.root.revoke_identity("enrolment")
        publish()

        async def one_is_left() -> bool:
            return await states(one) == {"node-1": False, "node-2": True}

        await wait_until_async(one_is_left, description="the node of the revoked CA to be gone")
        with pytest.raises(grpc.aio.AioRpcError, match=f"the CA of the certificate .serial number {record.serial}"):
            await renew(one.sup.control, own_pki.tls("node-1"), "node-1", new_request(NODE_1)[1])
        tasks.cancel_scope.cancel()


async def test_a_ca_that_cannot_be_used_is_refused_at_the_start(own_pki: Pki, tmp_path: Path) -> None:
    other = Pki.make(tmp_path / "other")
    for directory, said in (
        (other.enrolment.directory, "a CA that the CA of HOLDFAST_TLS_CA is, or has signed"),
        (tmp_path / "nothing", "has no CA"),
    ):
        with pytest.raises(ExceptionGroup) as failed:
            async with fleet(tmp_path / "sup", own_pki, ca_dir=directory):
                pass
        assert failed.group_contains(HoldfastError, match=said), failed.value
    with pytest.raises(ExceptionGroup) as failed:
        async with fleet(tmp_path / "sup", own_pki, tls_cert=None, tls_key=None, tls_ca=None, api_tls="off"):
            pass
    assert failed.group_contains(InvalidSpec, match="HOLDFAST_CA_DIR")
