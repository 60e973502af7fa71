"""The state as the API shows it: with the newest finished steps, and whether agents have confirmed it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from holdfast.domain.findings import StepRecord
from holdfast.domain.nodes import ServiceVersions
from holdfast.domain.orders import StepReached
from holdfast.supervisor.core import Job, State

RECENT_STEPS_MAX = 32  # per job: a rate is computed over these
JOBS_MAX = 1000
CONFIRMED_S = 5.0  # agents send a message twice a second


class Progress:
    """The newest finished steps of each job."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[StepRecord]] = {}

    def tell(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            recent = self._recent.setdefault(step.job, deque(maxlen=RECENT_STEPS_MAX))
            if recent and recent[-1].generation != step.generation:
                recent.clear()  # a rate over a restart would apply to neither generation
            recent.append(step)
        while len(self._recent) > JOBS_MAX:
            del self._recent[next(iter(self._recent))]

    def tokens_per_s(self, job: str) -> float | None:
        return self._rate(job, lambda step: step.tokens)

    def steps_per_s(self, job: str) -> float | None:
        return self._rate(job, lambda _: 1)

    def _rate(self, job: str, worth: Callable[[StepRecord], int]) -> float | None:
        recent = self._recent.get(job)
        if not recent:
            return None
        seconds = recent[-1].ended_at - recent[0].started_at
        return sum(worth(step) for step in recent) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Standby:
    """A supervisor that would take over; its API's address is empty if there is none."""

    api: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """The state, and what only the leader knows, which has the sessions: what the newest messages of the nodes say."""

    state: State
    leading: bool = False
    at: float = 0.0  # Unix seconds, when it was taken
    heard_s_ago: Callable[[str], float | None] | None = None
    steps_of: Callable[[str], tuple[StepReached, ...]] | None = None  # node → the steps in its newest heartbeat
    telemetry_cut_s: Callable[[str], float | None] | None = None  # node → how long diagnostics acknowledges none of it
    # of the services that a node's agent talks to
    versions_of: Callable[[str], ServiceVersions] = lambda _: ServiceVersions()
    clock_ahead_s: Callable[[str], float | None] = lambda _: (
        None
    )  # node → its clock against that of the leader's machine
    trouble: str = ""  # why no decisions are made, if that is known

    def observed(self, job: Job) -> tuple[int, float] | None:
        """(steps, recent seconds per step): optimizer steps observed in every rank of the running generation, for a script
        that reports no steps. None if unknown here."""
        if job.running is None or self.steps_of is None:
            return None
        least: tuple[int, float] | None = None
        for node in job.running.nodes:
            of_job = (
                each for each in self.steps_of(node) if (each.job, each.generation) == (job.name, job.running.number)
            )
            reached = next(of_job, None)
            if reached is None or not reached.observed or not math.isfinite(reached.observed_step_s):
                return None
            if least is None or reached.observed < least[0]:
                least = (reached.observed, reached.observed_step_s)
        return least

    def telemetry_cut_since(self, node: str) -> float | None:
        """Since when (Unix seconds) diagnostics has acknowledged no telemetry of the node; None if it does, or if unknown."""
        cut_s = self.telemetry_cut_s(node) if self.telemetry_cut_s is not None else None
        return None if cut_s is None else self.at - cut_s

    def unconfirmed_since(self, job: Job) -> dict[str, float]:
        """Nodes of a running generation whose agents have not confirmed within `CONFIRMED_S` that all of its ranks live → since
        when (Unix seconds); empty if the run is confirmed. All of them if this is the snapshot of a standby: no agent has a
        session with it, and it shows the snapshot only while no leader answers."""
        if job.running is None:
            return {}
        if not self.leading:
            return dict.fromkeys(job.running.nodes, self.state.folded_at)
        silent = {}
        for name in job.running.nodes:
            since = self._unconfirmed(name)
            if since is None:
                since = job.membership.absent.get(name)
            if since is not None:
                silent[name] = since
        return silent

    def _unconfirmed(self, name: str) -> float | None:
        node = self.state.nodes.get(name)
        if node is None or not node.connected:
            return node.gone_at if node is not None else 0.0
        if self.heard_s_ago is None:
            return None
        ago_s = self.heard_s_ago(name)
        if ago_s is None:  # connected to the last leader, not yet to this one
            return node.connected_at
        return self.at - ago_s if ago_s > CONFIRMED_S else None


Live = Callable[[], Picture | None]
Look = Callable[[], Awaitable[Picture | None]]
