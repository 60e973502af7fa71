"""An API without a leader: a memory log, a history in a file, and a picture that the test folds together itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from supervising import facts, job_body

from holdfast.domain.orders import Hello, Inventory
from holdfast.log.memory import MemoryLog
from holdfast.runtime.trust.api_tokens import TokensFile
from holdfast.runtime.trust.oidc import OidcTokens
from holdfast.supervisor.api.app import build
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.api.backend import Backend, Identity
from holdfast.supervisor.core import State, step
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.protocol import Event, JobSubmitted, NodeReported
from holdfast.wire.jobfile import parse_job


@dataclass(slots=True)
class Api:
    """`http` speaks to the application; `fold` puts events into the state that it shows."""

    http: httpx.AsyncClient
    log: MemoryLog
    history: SqliteHistory
    progress: Progress
    backend: Backend
    picture: Picture | None = field(default_factory=lambda: Picture(State(), leading=True))
    folded: int = 0

    def fold(self, *events: Event) -> None:
        assert self.picture is not None
        state = self.picture.state
        for event in events:
            state, _ = step(state, event)
        self.picture = Picture(state, leading=True)

    def node(self, name: str, *, at: float = 1000.0) -> None:
        self.folded += 1
        self.fold(NodeReported(at, name, "i1", 1, Hello(facts(name)), session=self.folded))

    def report(self, name: str, report: Inventory, *, at: float = 1000.0) -> None:
        """`name` reports once."""
        self.fold(NodeReported(at, name, "i1", 2, report))

    def job(self, *, at: float = 1000.0, owner: str = "", **changes: Any) -> None:
        self.fold(JobSubmitted(at, parse_job(job_body(**changes)), "secret-token", owner=owner))


MakeApi = Callable[..., Any]


@pytest.fixture(scope="module")
def applications() -> list[FastAPI]:
    """A tenth of a second each: the next test gets those of the last one, with its own backend."""
    return []


@pytest.fixture
async def make_api(tmp_path: Path, applications: list[FastAPI]) -> AsyncIterator[MakeApi]:
    opened: list[Api] = []
    free = list(applications)
    policies = PolicyRunner()

    async def make(
        token: str = "",
        cluster: Any = None,
        tokens: TokensFile | None = None,
        audit: AuditStore | None = None,
        agents: Any = None,
        oidc: OidcTokens | None = None,
    ) -> Api:
        log, progress = MemoryLog(block_s=0.02), Progress()
        history = await SqliteHistory.open(tmp_path / "history.sqlite3")

        async def look() -> Picture | None:
            return made.picture

        backend = Backend(
            identity=Identity("sup-1", "0.1.0", token, tokens, oidc),
            log=log,
            history=history,
            look=look,
            progress=progress,
            policies=policies,
            cluster=cluster,
            audit=audit,
            agents=None if agents is None else lambda: agents,
        )
        if free:
            app = free.pop()
            app.state.backend = backend
        else:
            app = build(backend)
            applications.append(app)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        made = Api(httpx.AsyncClient(transport=transport, base_url="http://test"), log, history, progress, backend)
        opened.append(made)
        return made

    yield make
    await policies.aclose()
    for each in opened:
        await each.http.aclose()
        await each.history.aclose()


@pytest.fixture
async def api(make_api: MakeApi) -> Api:
    made: Api = await make_api()
    return made
