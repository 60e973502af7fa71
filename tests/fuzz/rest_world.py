"""An API to fuzz: the real application with a history, an inbox and an audit log, over a small fleet that the core has folded.

Each request begins with the same state. What it puts into the inbox is folded as a leader would, so that what is accepted and
cannot be shown, stored or sent to an agent is found as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from fleet import Fleet, job
from fuzz import scratch

from holdfast.agent.workers.logs import log_path, read_errors, read_part
from holdfast.domain.errors import NotFound, Unavailable
from holdfast.domain.findings import FindingKind
from holdfast.domain.gpus import GpuState
from holdfast.domain.rank_reads import MeasuredRanks, RaisedError
from holdfast.domain.worker_logs import LogPart, LogRequest
from holdfast.log.memory import MemoryLog
from holdfast.log.names import EVENTS, INBOX
from holdfast.log.protocol import Delivery, Entry
from holdfast.runtime.trust.api_tokens import ApiRole, ApiToken, TokensFile, added, text_of
from holdfast.supervisor.api.app import build
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.api.backend import Backend, Identity
from holdfast.supervisor.core import State, step
from holdfast.supervisor.history.protocol import EventEntry
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.inbox import InboxEvent
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.protocol import Post, Publish, Send, SendNotification
from holdfast.supervisor.published import Published
from holdfast.supervisor.requests import OperatorRequest
from holdfast.wire import control, records

T = TypeVar("T")
BEGAN_AT = 1_790_000_000.0
ROLES = ("viewer", "submitter", "other", "operator", "admin")  # and "nobody"; "other" is a second submitter
ADMINS_TOKEN = "token-of-the-admin"
ANSWER_BYTES_MAX = 4 << 20  # of this small fleet


class _EndingLog(MemoryLog):
    """Its event stream ends when everything has been read, so that a request for it has an answer."""

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        found = await super().read(stream, after=after, count=count)
        if not found and stream == EVENTS:
            raise Unavailable("all has been read")
        return found


class _Agents:
    def __init__(self, logs: Path) -> None:
        self._logs = logs

    async def read_log(self, node: str, request: LogRequest) -> LogPart:
        return read_part(self._logs, request)

    async def read_gpus(self, node: str) -> tuple[GpuState, ...]:
        if node == "n0":
            return (GpuState(0, "GPU-1", BEGAN_AT, lost=False, temperature_c=61.0, memory_used=1 << 60),)
        raise NotFound(f"the agent of {node} is not connected")

    async def read_ranks(self, node: str, job: str) -> MeasuredRanks:
        if node == "n0":
            return MeasuredRanks(1, (0,), (0.25,), (0.05,), (61.0,))
        raise NotFound(f"the agent of {node} is not connected")

    async def read_errors(self, node: str, job: str, generation: int) -> tuple[RaisedError, ...]:
        return read_errors(self._logs, job, generation)


@dataclass(slots=True)
class World:
    """`tokens`: by role. `names`: what exists, by the parameter of a path."""

    app: FastAPI
    http: httpx.AsyncClient
    log: MemoryLog
    state: State
    parts: dict[str, bytes]
    tokens: dict[str, str]
    names: dict[str, tuple[str, ...]]
    shown: State
    backend: Backend
    inbox_read: str = "0"

    def reset(self) -> None:
        self.shown = self.state
        self.backend._pending.clear()

    def owner(self, name: str) -> str | None:
        found = self.state.jobs.get(name)
        return None if found is None else found.owner

    async def requests(self) -> list[OperatorRequest]:
        """What has come into the inbox since the last call."""
        found = await self.log.read(INBOX, after=self.inbox_read)
        if found:
            self.inbox_read = found[-1].position
        events = [records.loads(delivery.entry.data, InboxEvent) for delivery in found]
        assert all(isinstance(event, OperatorRequest) for event in events)
        return events

    def fold(self, requests: Sequence[OperatorRequest]) -> None:
        """As the leader: the state can be stored and read, records can be published, orders can be sent."""
        for request in requests:
            before = self.shown
            self.shown, commands = step(before, request.event)
            changed = snapshot.changes(before, self.shown)
            parts = {name: raw for name, raw in {**self.parts, **changed}.items() if raw is not None}
            assert snapshot.load(parts) == self.shown
            for command in commands:
                match command:
                    case Publish(record=record):
                        records.loads(records.dumps(record, Published), Published)
                    case Send():
                        control.encode_order(1, command.command_id, command.order).SerializeToString()
                    case Post() | SendNotification():
                        pass
                    case _:
                        pass


@cache
def loop() -> asyncio.Runner:
    """In the main thread, where the bounds of a target hold."""
    return asyncio.Runner()


def run(call: Coroutine[Any, Any, T]) -> T:
    return loop().run(call)


@cache
def world() -> World:
    return run(_made())


def _fleet() -> Fleet:
    """A job that runs after a crash, one of somebody else that is over, and one that waits for nodes."""
    fleet = Fleet(0, snapshots=False)
    fleet.now = BEGAN_AT
    for index in range(6):
        fleet.connect(f"n{index}", zone=f"rack-{index // 2}", capacity=1)
    fleet.about = "done"
    fleet.submit(job(2, name="done"))
    fleet.run()
    fleet.about = "llm"
    fleet.submit(replace(job(3, name="llm"), chaos=True))
    fleet.run()
    fleet.all_live()
    fleet.train(20, save=True)
    fleet.find(FindingKind.WORKER_CRASH, "n2", rank=0, exit_code="1", error="RuntimeError", log="x")
    fleet.about = "waits"
    fleet.submit(job(4, name="waits", min_dp=4))
    return fleet


async def _made() -> World:
    directory = scratch.directory() / "api"
    directory.mkdir()
    fleet = _fleet()
    owners = {"llm": "submitter", "done": "other", "waits": ""}
    jobs = {name: replace(each, owner=owners[name]) for name, each in fleet.state.jobs.items()}
    state = replace(fleet.state, jobs=jobs)
    log, progress, policies = _EndingLog(), Progress(), PolicyRunner()
    entries = [
        Entry(f"e-{n}", type(record).__name__, records.dumps(record, Published))
        for n, record in enumerate(fleet.records)
    ]
    await log.append(EVENTS, *entries)
    history = await SqliteHistory.open(directory / "history.sqlite3")
    await history.add_events([EventEntry(f"{n}-0", record) for n, record in enumerate(fleet.records, 1)], "0")
    path = log_path(directory / "logs", "llm", 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes("step 1 ä\n\xff\x00\x1b[31m\n".encode(errors="surrogateescape") * 50)
    tokens, given = _people(directory / "tokens.json")

    async def look() -> Picture:
        return Picture(made.shown, leading=True, at=time.time())

    backend = Backend(
        identity=Identity("supervisor-a", "0.1.0", ADMINS_TOKEN, tokens),
        log=log,
        history=history,
        look=look,
        progress=progress,
        policies=policies,
        audit=await AuditStore.open(directory / "audit.sqlite3"),
        agents=lambda: _Agents(directory / "logs"),
    )
    app = build(backend)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://test")
    snapshot.prepare()
    parts = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    names = {
        "name": ("llm", "done", "waits"),
        "node": ("n0", "n2", "n5"),
        "source": ("operator", "gce"),
        "incident_id": tuple(state.incidents) or ("x",),
        "finding_id": ("f-1",),
        "operation": ("op-1",),
        "attempt": ("1",),
        "step": ("20", "10"),
        "rank": ("0", "2"),
        "invite": ("3f0c5e7a91d2",),
    }
    made = World(app, http, log, state, parts, given, names, state, backend)
    return made


def _people(path: Path) -> tuple[TokensFile, dict[str, str]]:
    listed: tuple[ApiToken, ...] = ()
    given: dict[str, str] = {}
    for name in ROLES:
        role = ApiRole.SUBMITTER if name == "other" else ApiRole(name)
        listed, given[name] = added(listed, name, role, BEGAN_AT)
    path.write_bytes(text_of(listed))
    return TokensFile(path), given
