"""Injected faults of the control plane in a simulation: the leader and the server of its log are ended on request.

One seed of eleven has them; the others give the same runs as before. A request may arrive at any time. The leader's shell may
refuse it, or may not have examined it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from holdfast.domain.faults import FaultKind
from holdfast.sim.agent import JOB
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Answer, CauseFault, Command, Event, FaultRequested, JobPhase

REQUESTS_MAX = 6
REFUSALS = ("", "", "", "no standby has asked for the lead", None)  # answers of the shell


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    kind: FaultKind
    refusal: str | None
    operation: str

    def event(self, at: float) -> FaultRequested:
        return FaultRequested(at, JOB, self.kind, 0, 60.0, operation=self.operation, refusal=self.refusal)


def requests_of(seed: int, begin_s: float, end_s: float) -> tuple[Request, ...]:
    if seed % 11 != 6:
        return ()
    chance = Random(f"own faults of {seed}")
    kinds = (FaultKind.LEADER_KILL, FaultKind.REDIS_KILL)
    return tuple(
        Request(chance.uniform(begin_s, end_s), chance.choice(kinds), chance.choice(REFUSALS), f"kill {number}")
        for number in range(chance.randint(2, REQUESTS_MAX))
    )


def check(before: State, event: Event, commands: tuple[Command, ...]) -> None:
    """Check that a fault of the control plane is caused only if the job and the shell allow it, and that its request is
    answered in the same commit, because an ended process cannot answer later."""
    for cause in commands:
        if not isinstance(cause, CauseFault):
            continue
        job = before.jobs.get(cause.job)
        if not isinstance(event, FaultRequested) or event.refusal != "":
            raise Violation(f"{cause.kind} is caused by {type(event).__name__}, which nothing has allowed")
        if job is None or not job.spec.chaos or job.phase is not JobPhase.RUNNING:
            raise Violation(f"{cause.kind} is caused for {cause.job}, which does not allow it or does not run")
        if not any(isinstance(each, Answer) and each.ok and each.operation == event.operation for each in commands):
            raise Violation(f"{cause.kind} is caused, and {event.operation} is not answered in the same commit")
