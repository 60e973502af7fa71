"""Faults of the control plane, which the leader causes itself: the end of the Redis server of the log, or its own.

Theory of operation. The core cannot know whether the fault is allowed, and a process that ends cannot answer afterwards. So the
request is examined before it is folded (`examined`), the answer is in the commit, and the fault follows a moment later
(`cause`). It happens at most once, because a leader that ends in between does not leave it to the next one. Nothing may break
permanently. So both faults are off unless a setting declares what brings the part back, and that is checked each time, as far
as possible:

* redis_kill: the append-only file is enabled and works, and the server would accept the command.
* leader_kill with `standby`: another supervisor has requested the lease within the last seconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.domain.evolve import evolve
from holdfast.domain.faults import CONTROL_PLANE, DIE_AFTER_S, INJECT_TIMEOUT_S, FaultKind
from holdfast.log.names import LEADER_LEASE
from holdfast.log.protocol import CANDIDATE_S, FencedLog, Lease
from holdfast.supervisor.fault_rules import OwnFaultRules
from holdfast.supervisor.leader.intake import Input
from holdfast.supervisor.protocol import CauseFault, FaultRequested
from holdfast.supervisor.requests import OperatorRequest

log = structlog.get_logger("holdfast.supervisor.leader.own_faults")


class LogServer(Protocol):
    """The server process of the event log."""

    async def why_not_kill(self) -> str:
        """The reason if it must not or cannot be ended; empty if it can. Ends nothing. Raises `HoldfastError`."""

    async def kill(self) -> None:
        """Raises `HoldfastError` if the server refuses."""


class OwnFaults:
    """`server`: of the event log; None = the log has no server. `die` ends this process immediately."""

    def __init__(
        self,
        rules: OwnFaultRules,
        event_log: FencedLog,
        server: LogServer | None = None,
        *,
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._rules = rules
        self._log = event_log
        self._server = server
        self._die = die

    async def examined(self, inputs: Sequence[Input], lease: Lease) -> list[Input]:
        """The same inputs, in which refused requests for faults of the control plane contain the reason."""
        return [await self._examine(each, lease) if _asks_for_own(each) else each for each in inputs]

    async def cause(self, command: CauseFault) -> None:
        await anyio.sleep(DIE_AFTER_S)
        log.warning("fault injected", job=command.job, fault=command.kind.value, pid=os.getpid())
        if command.kind is FaultKind.LEADER_KILL:
            self._die()
            return
        try:
            assert self._server is not None, "it has been examined"
            await self._server.kill()
        except Exception as error:  # a fault that did not happen ends no term
            log.error("the fault was not injected", job=command.job, fault=command.kind.value, reason=str(error))

    async def _examine(self, each: Input, lease: Lease) -> Input:
        assert isinstance(each.event, OperatorRequest)
        assert isinstance(each.event.event, FaultRequested)
        waited_s = each.delivery.age_s if each.delivery is not None else 0.0
        if waited_s > INJECT_TIMEOUT_S:
            refusal = f"the request is too old: it waited for {waited_s:.0f} s"
        else:
            try:
                refusal = await self._refusal(each.event.event.kind, lease)
            except HoldfastError as error:
                refusal = f"whether it may be injected cannot be found out: {error}"
        return each._replace(event=evolve(each.event, event=evolve(each.event.event, refusal=refusal)))

    async def _refusal(self, kind: FaultKind, lease: Lease) -> str:
        if kind is FaultKind.REDIS_KILL:
            return await self._why_not_redis()
        return await self._why_not_leader(lease)

    async def _why_not_redis(self) -> str:
        if self._server is None:
            return "redis_kill needs a Redis server as event log, and this supervisor has none"
        if self._rules.redis_kill == "no":
            return (
                "this supervisor does not allow redis_kill; set HOLDFAST_FAULT_REDIS_KILL=restarted if this "
                "Redis has no other users and something restarts it after it has ended with exit code 0"
            )
        return await self._server.why_not_kill()

    async def _why_not_leader(self, lease: Lease) -> str:
        match self._rules.leader_kill:
            case "no":
                return (
                    "this supervisor does not allow leader_kill; set HOLDFAST_FAULT_LEADER_KILL=standby (a standby takes "
                    "over) or =restarted (something starts this supervisor again)"
                )
            case "standby":
                if await self._log.candidate(LEADER_LEASE) in ("", lease.holder):
                    return (
                        f"no standby has asked for the lead within the last {CANDIDATE_S:g} s; start another supervisor, "
                        "or set HOLDFAST_FAULT_LEADER_KILL=restarted if something starts this one again"
                    )
                return ""
            case "restarted":
                return ""


def _asks_for_own(each: Input) -> bool:
    request = each.event
    return (
        isinstance(request, OperatorRequest)
        and isinstance(request.event, FaultRequested)
        and request.event.kind in CONTROL_PLANE
    )
