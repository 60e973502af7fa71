"""What the routers stand on: the picture for reads, the history for the past, the inbox for requests."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from anyio import Lock, to_thread
from fastapi import Depends, Header, Query, Request, Response

from holdfast.domain.errors import HoldfastError, InvalidSpec, NotFound, Unavailable
from holdfast.domain.gpus import GpuState
from holdfast.domain.job import PolicySpec
from holdfast.domain.rank_reads import MeasuredRanks, RaisedError
from holdfast.domain.worker_logs import LogPart, LogRequest
from holdfast.kubernetes.bridge import Sight
from holdfast.log.names import INBOX
from holdfast.log.protocol import EventLog
from holdfast.plugins import POLICY_PREFIX
from holdfast.runtime.trust.api_tokens import ApiRole, TokensFile
from holdfast.runtime.trust.oidc import OidcTokens
from holdfast.supervisor.agents.rank_measuring import RankMeasuring
from holdfast.supervisor.alerts.sender import Alerts
from holdfast.supervisor.api import audit
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.api.event_tail import EventTail
from holdfast.supervisor.api.models import Operation
from holdfast.supervisor.api.problems import NotLeading
from holdfast.supervisor.enrolment import Enrolment
from holdfast.supervisor.history.accounts import Accounts
from holdfast.supervisor.history.protocol import History
from holdfast.supervisor.inbox import request_entry
from holdfast.supervisor.picture import Look, Picture, Progress, Standby
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.requests import OperatorEvent, OperatorRequest, check, fingerprint
from holdfast.wire.jobfile import read_policy

PENDING_MAX = 10_000


class Agents(Protocol):
    """What agents are asked, each in its session."""

    async def read_log(self, node: str, request: LogRequest) -> LogPart: ...
    async def read_gpus(self, node: str) -> tuple[GpuState, ...]: ...
    async def read_ranks(self, node: str, job: str) -> MeasuredRanks: ...
    async def read_errors(self, node: str, job: str, generation: int) -> tuple[RaisedError, ...]: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers here."""

    supervisor: str
    version: str
    token: str = ""  # bearer token of the admin; empty = none
    tokens: TokensFile | None = None  # those of others
    oidc: OidcTokens | None = None  # those of an OpenID Connect issuer; without any of the three, nobody needs a token

    @property
    def is_open(self) -> bool:
        """Whether everybody who reaches the API is an admin."""
        return not self.token and self.tokens is None and self.oidc is None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `name`: of the token; empty = nobody had to say. `expires_at`: of the token, Unix seconds; 0 = never."""

    name: str
    role: ApiRole
    expires_at: float = 0.0


class Backend:
    def __init__(
        self,
        *,
        identity: Identity,
        log: EventLog,
        history: History,
        look: Look,
        progress: Progress,
        policies: PolicyRunner,
        cluster: Callable[[], Sequence[Sight]] | None = None,
        alerts: Alerts | None = None,
        audit: AuditStore | None = None,
        agents: Callable[[], Agents] | None = None,
        standby: Callable[[], Awaitable[Standby]] | None = None,
        trouble: Callable[[], str] = lambda: "",
        behind: Callable[[], str] = lambda: "",
        now: Callable[[], float] = time.time,
    ) -> None:
        """`standby`: who would take over; None = there is never one. `trouble`: why this supervisor can
        neither lead nor stand by. `behind`: why the history lacks the newest incidents. `now`: the time of the state, Unix
        seconds. `agents`: whom agents are asked through; raises `Unavailable` without sessions, which only a leader has.

        `cluster`: how well the bridge to Kubernetes sees the cluster; None = there is no bridge. `alerts`: what sends
        alerts; None = nobody is notified. `audit`: where lines of the audit log are kept; None = they are in the log only."""
        self.audit = audit
        self.identity = identity
        self.log = log
        self.events = EventTail(log)
        self.history = history
        self.progress = progress
        self.accounts = Accounts(history, now)
        self.cluster = cluster
        self.alerts = alerts
        self.measuring = RankMeasuring()
        self.reporting = Lock()
        self.enrolment: Enrolment | None = None  # set when the port for agents is known; None = nobody is invited
        self._agents = agents
        self._standby = standby
        self.trouble = trouble
        self.behind = behind
        self.now = now
        self._look = look
        self._policies = policies
        self._pending: OrderedDict[str, str] = OrderedDict()  # operation → fingerprint: appended here, not folded yet

    async def standby(self) -> Standby:
        """Who would take over now. Raises `Unavailable`."""
        return await self._standby() if self._standby is not None else Standby()

    async def picture(self) -> Picture:
        """Raises `NotLeading` when there is none to show."""
        picture = await self._look()
        if picture is None:
            leader = await self.history.leader()
            waiting = "no supervisor has become the leader yet; ask again in a second"
            raise NotLeading(self.trouble() or waiting, leader.api if leader else "")
        return picture

    @property
    def agents(self) -> Agents:
        """Raises `Unavailable` if no agent is connected to this supervisor."""
        if self._agents is None:
            raise Unavailable("no agent is connected to this supervisor")
        return self._agents()

    async def usable(self, policy: PolicySpec) -> PolicySpec:
        """`policy` with its text: a script that came without one is read here, once. Raises `InvalidSpec` naming what is wrong
        with it."""
        if policy.name and not policy.source and not policy.name.startswith(POLICY_PREFIX):
            policy = replace(policy, source=await to_thread.run_sync(read_policy, Path(policy.name)))
        await self._policies.check(policy)
        return policy

    async def command(self, event: OperatorEvent, key: str | None) -> Operation:
        """Put a request into the inbox. The same key is the same operation, however often it is asked for."""
        mark = fingerprint(event)
        operation = f"op-{uuid.uuid4().hex}" if key is None else f"op-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        if key is not None and (known := await self._known(operation)) is not None:
            answer, known_mark = known
            if known_mark != mark:
                raise InvalidSpec("Idempotency-Key", key, "a key that has not been used for a different request")
            return answer
        check((await self.picture()).state, event)
        request = OperatorRequest(operation, event, mark)
        await self.log.append(INBOX, request_entry(request))
        self._pending[operation] = mark
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)
        return _operation(operation, "pending")

    async def operation(self, operation: str) -> Operation:
        """Raises `NotFound`."""
        known = await self._known(operation)
        if known is None:
            raise NotFound(f"there is no operation {operation}, or it is too long ago")
        return known[0]

    async def _known(self, operation: str) -> tuple[Operation, str] | None:
        """The operation and its request's fingerprint."""
        if (done := await self.history.operation(operation)) is not None:
            self._pending.pop(operation, None)
            return _operation(operation, "succeeded" if done.ok else "failed", done.reason), done.fingerprint
        if operation in self._pending:
            return _operation(operation, "pending"), self._pending[operation]
        return None


def _operation(operation: str, state: Any, reason: str = "") -> Operation:
    return Operation(id=operation, url=f"/v1/operations/{operation}", state=state, reason=reason)


# ---------------------------------------------------------------- what routers ask for


def _backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


Serving = Annotated[Backend, Depends(_backend)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="Sent again with the same key, a request is not carried out twice.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=500, description="Items per page.")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before.")]


class Located:
    """Sets `Location` to the operation that a command started, and has the command in the audit log."""

    def __init__(self, request: Request, backend: Serving, response: Response, key: IdempotencyKey = None) -> None:
        self._principal: Principal = request.state.principal  # set by who authorized the request
        self._backend = backend
        self._response = response
        self._key = key

    async def command(self, event: OperatorEvent) -> Operation:
        who, role = self._principal.name, str(self._principal.role)
        before = await self._before(event)
        try:
            operation = await self._backend.command(event, self._key)
        except HoldfastError as error:
            await self._keep(audit.refused(who, role, event, before, error))
            raise
        await self._keep(audit.accepted(who, role, event, before, operation.id))
        self._response.headers["Location"] = operation.url
        return operation

    async def _keep(self, line: audit.Fields) -> None:
        if self._backend.audit is not None:
            await self._backend.audit.add(time.time(), line)

    async def _before(self, event: OperatorEvent) -> audit.Fields:
        try:
            return audit.before_of((await self._backend.picture()).state, event)
        except Unavailable:
            return {}  # a request that is repeated with its key is answered without a picture


Commands = Annotated[Located, Depends()]


def number_of(cursor: str | None) -> int | None:
    """A cursor that is a number. Raises `InvalidSpec` for one that this API has not given out."""
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise InvalidSpec("cursor", cursor, "the next_cursor of an earlier page")
    return int(cursor)
