"""Faults of the control plane in the leader's shell: refused unless a setting says what brings the part back."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
from waiting import VIRTUAL_TIME

from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.domain.faults import DIE_AFTER_S, INJECT_TIMEOUT_S, FaultKind
from holdfast.log.memory import MemoryLog
from holdfast.log.names import INBOX, LEADER_LEASE
from holdfast.log.protocol import CANDIDATE_S, Delivery, Lease
from holdfast.supervisor.fault_rules import OwnFaultRules
from holdfast.supervisor.inbox import request_entry
from holdfast.supervisor.leader.intake import Input
from holdfast.supervisor.leader.own_faults import OwnFaults
from holdfast.supervisor.protocol import CauseFault, FaultRequested, JobStopRequested
from holdfast.supervisor.requests import OperatorRequest

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

ALL = OwnFaultRules(redis_kill="restarted", leader_kill="restarted")


@dataclass
class Server:
    why_not: str | HoldfastError = ""
    refuses: str = ""
    killed_at: list[float] = field(default_factory=list)

    async def why_not_kill(self) -> str:
        if isinstance(self.why_not, HoldfastError):
            raise self.why_not
        return self.why_not

    async def kill(self) -> None:
        if self.refuses:
            raise HoldfastError(self.refuses)
        self.killed_at.append(anyio.current_time())


def asked(kind: FaultKind, *, age_s: float = 0.0) -> Input:
    request = OperatorRequest("op-1", FaultRequested(1000.0, "gpt", kind, 0, 60.0), "mark")
    return Input(request, Delivery(INBOX, "1-0", request_entry(request), age_s=age_s))


async def lead(log: MemoryLog, holder: str = "a") -> Lease:
    lease = await log.acquire(LEADER_LEASE, holder, 30.0)
    assert lease is not None
    return lease


async def refusal(faults: OwnFaults, lease: Lease, each: Input) -> str | None:
    (seen,) = await faults.examined([each], lease)
    assert isinstance(seen.event, OperatorRequest)
    assert isinstance(seen.event.event, FaultRequested)
    assert (seen.delivery, seen.event.operation) == (each.delivery, "op-1")
    return seen.event.event.refusal


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (FaultKind.LEADER_KILL, "does not allow leader_kill; set HOLDFAST_FAULT_LEADER_KILL=standby"),
        (FaultKind.REDIS_KILL, "does not allow redis_kill; set HOLDFAST_FAULT_REDIS_KILL=restarted"),
    ],
)
async def test_both_are_off_by_default_and_say_what_to_set(kind: FaultKind, why: str) -> None:
    log = MemoryLog()
    said = await refusal(OwnFaults(OwnFaultRules(), log, Server()), await lead(log), asked(kind))
    assert said is not None
    assert why in said


async def test_what_is_allowed_and_survivable_is_not_refused() -> None:
    log = MemoryLog()
    lease = await lead(log)
    for kind in (FaultKind.LEADER_KILL, FaultKind.REDIS_KILL):
        assert await refusal(OwnFaults(ALL, log, Server()), lease, asked(kind)) == ""


async def test_a_standby_must_have_asked_for_the_lead_lately_and_be_another() -> None:
    log = MemoryLog()
    assert await log.acquire(LEADER_LEASE, "other", 1.0) is not None
    assert await log.acquire(LEADER_LEASE, "a", 30.0) is None
    await anyio.sleep(1.1)
    lease = await lead(log)  # which is the candidate that the log knows
    faults = OwnFaults(OwnFaultRules(leader_kill="standby"), log)
    said = await refusal(faults, lease, asked(FaultKind.LEADER_KILL))
    assert said is not None
    assert "no standby has asked for the lead within the last 3 s" in said
    assert await log.acquire(LEADER_LEASE, "b", 30.0) is None
    assert await refusal(faults, lease, asked(FaultKind.LEADER_KILL)) == ""
    await anyio.sleep(CANDIDATE_S + 0.1)
    assert await refusal(faults, lease, asked(FaultKind.LEADER_KILL)) != ""


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (None, "needs a Redis server as event log"),
        (Server("its append-only file is off"), "its append-only file is off"),
        (Server(Unavailable("Redis does not answer")), "cannot be found out: Redis does not answer"),
    ],
)
async def test_a_redis_that_would_not_survive_or_cannot_be_asked_is_left_alone(server: Server | None, why: str) -> None:
    log = MemoryLog()
    said = await refusal(OwnFaults(ALL, log, server), await lead(log), asked(FaultKind.REDIS_KILL))
    assert said is not None
    assert why in said


async def test_a_request_that_waited_while_nobody_led_breaks_nothing() -> None:
    log = MemoryLog()
    late = asked(FaultKind.LEADER_KILL, age_s=INJECT_TIMEOUT_S + 1)
    assert await refusal(OwnFaults(ALL, log, Server()), await lead(log), late) == (
        "the request is too old: it waited for 16 s"
    )


async def test_other_inputs_pass_as_they_are() -> None:
    log = MemoryLog()
    crash = asked(FaultKind.CRASH)
    stop = Input(OperatorRequest("op-2", JobStopRequested(1000.0, "gpt", "why"), "mark"))
    assert await OwnFaults(ALL, log, Server()).examined([crash, stop], await lead(log)) == [crash, stop]


async def test_it_happens_a_moment_after_the_answer_and_a_refusal_ends_nothing() -> None:
    died_at: list[float] = []
    server = Server()
    faults = OwnFaults(ALL, MemoryLog(), server, die=lambda: died_at.append(anyio.current_time()))
    began = anyio.current_time()
    await faults.cause(CauseFault("gpt", FaultKind.LEADER_KILL))
    assert died_at == [pytest.approx(began + DIE_AFTER_S)]
    await faults.cause(CauseFault("gpt", FaultKind.REDIS_KILL))
    assert server.killed_at == [pytest.approx(began + 2 * DIE_AFTER_S)]
    server.refuses = "Redis refused to shut down: a fork runs"
    await faults.cause(CauseFault("gpt", FaultKind.REDIS_KILL))
    assert len(server.killed_at) == 1
