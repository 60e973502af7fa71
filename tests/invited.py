"""A fleet with a CA of `holdfast ca`, an enrolment CA, and a supervisor that invites nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import httpx
from supervising import Running, start_supervisor
from waiting import wait_until_async

from holdfast.cli.client import Client
from holdfast.log.memory import MemoryLog
from holdfast.log.protocol import FencedLog
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.api_trust import Trust
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.enrolled import DIRECTORY, Enrolled
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.invitation import Invitation, digest, fingerprint, new_request, new_token
from holdfast.runtime.trust.tls import Tls

TOKEN, JOIN_TOKEN = "a-token-of-the-api", "a-join-token-of-the-fleet"
T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(call)


@dataclass(frozen=True, slots=True)
class Pki:
    """`root`: of the fleet; `enrolment`: what the supervisor has."""

    folder: Path
    root: Authority
    enrolment: Authority

    @classmethod
    def make(cls, folder: Path, fleet: str = "main") -> Pki:
        folder.mkdir(parents=True)
        root = Authority.create(folder / "ca", fleet, 3650)
        made = cls(folder, root, root.create_enrolment_ca(folder / "enrolment", 365))
        (folder / "ca.crt").write_bytes(root.certificate)
        made.issue("supervisor", Identity(fleet, Role.SUPERVISOR))
        return made

    def issue(self, leaf: str, *identities: Identity, authority: Authority | None = None) -> dict[str, Path]:
        """The TLS settings of a service or an agent."""
        names = ["localhost", "127.0.0.1"] if identities[0].role is not Role.AGENT else []
        pair = (authority or self.root).issue(identities, names, 30)
        (self.folder / f"{leaf}.crt").write_bytes(pair.certificate)
        (self.folder / f"{leaf}.key").write_bytes(pair.key)
        return self.files(leaf)

    def files(self, leaf: str) -> dict[str, Path]:
        return {
            "tls_cert": self.folder / f"{leaf}.crt",
            "tls_key": self.folder / f"{leaf}.key",
            "tls_ca": self.folder / "ca.crt",
        }

    def tls(self, leaf: str) -> Tls:
        return loaded(**self.files(leaf))


def loaded(**files: Path) -> Tls:
    tls = ServiceSettings(fleet="main", **files).tls  # type: ignore[arg-type]
    assert tls is not None
    return tls


@dataclass(frozen=True, slots=True)
class Fleet:
    """A supervisor that invites nodes, and what they do."""

    pki: Pki
    sup: Running

    @property
    def trust(self) -> Trust:
        return Trust(only=self.pki.folder / "ca.crt")

    def http(self, token: str = TOKEN) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self.sup.client(verify=self.trust.context(), headers=headers)

    def client(self) -> Client:
        """Needs HOLDFAST_API_CA in the environment."""
        return Client(self.sup.api, token=TOKEN)

    async def invite(self, node: str = "", uses: int = 1, ttl_s: float = 3600.0) -> Invitation:
        token = new_token()
        async with self.http() as http:
            body = {"digest": digest(token), "node": node, "uses": uses, "ttl_s": ttl_s}
            answer = await http.post("/v1/invites", json=body)
            assert answer.status_code == 202, answer.text

            async def done() -> bool:
                return bool((await http.get(answer.headers["location"])).json()["state"] == "succeeded")

            await wait_until_async(done, description="the invitation")
        ca = fingerprint(self.pki.root.certificate)
        return Invitation("main", (self.sup.api,), ca, (self.sup.control,), node, token)

    async def ask(self, invitation: Invitation, node: str, csr: bytes | None = None) -> httpx.Response:
        """What `holdfast agent --invite` sends, or another request."""
        csr = csr or new_request(Identity("main", Role.AGENT, node))[1]
        body = {"token": invitation.token, "node": node, "csr": csr.decode(errors="replace")}
        async with self.http(token="") as http:
            return await http.post("/v1/enrolment", json=body)

    async def invites(self) -> list[dict[str, Any]]:
        async with self.http() as http:
            answer = await http.get("/v1/invites")
        found: list[dict[str, Any]] = answer.json()["items"]
        return found


@asynccontextmanager
async def fleet(
    directory: Path, pki: Pki, log: FencedLog | None = None, *, name: str = "sup-1", **settings: Any
) -> AsyncIterator[Fleet]:
    async with anyio.create_task_group() as tasks:
        yield Fleet(pki, await started(tasks, directory, pki, log or MemoryLog(), name=name, **settings))
        tasks.cancel_scope.cancel()


async def started(tasks: Any, directory: Path, pki: Pki, log: FencedLog, *, name: str, **settings: Any) -> Running:
    files: dict[str, Any] = {**pki.files("supervisor"), "ca_dir": pki.enrolment.directory}
    options = {"api_tls": "on", "api_token": TOKEN, "fleet": "main", "join_token": JOIN_TOKEN, **files, **settings}
    return await start_supervisor(tasks, directory, log, name=name, **options)


def tls_of(own: Path) -> Tls:
    """Of the agent with this directory, which has joined."""
    files = Enrolled(own / DIRECTORY).files
    return loaded(tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
