"""Simulated diagnostics: receives signals, reports findings, and delivers them to the supervisor.

In a tame world a finding arrives late, and possibly more than once. In a hostile world diagnostics is a process like any other:
it is down or frozen for a while, loses its state with a restart, has its own clock, and its findings can be lost permanently
after they were acknowledged. The signals of an agent wait for it in the agent's `Outbox`, as long as the agent lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from holdfast.domain import old_evidence
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.clocks import Clock
from holdfast.sim.telemetry import RECONNECT_S, Telemetry
from holdfast.sim.world import World
from holdfast.supervisor.protocol import Event, FindingArrived, StepsCompleted

SEEN_S = 5.0  # time after a restart by which every living agent has connected
OF_WORKERS = frozenset({FindingKind.WORKER_CRASH, FindingKind.HANG})


@dataclass(frozen=True, slots=True)
class _Observed:
    """A fault as diagnostics observes it."""

    kind: FindingKind
    agent: Agent
    life: int
    generation: int
    began: float  # the world's time
    rank: int | None
    severity: Severity
    identifier: str
    evidence: dict[str, str]
    recommended_actions: tuple[Remedy, ...] = ()
    job: str = JOB


@dataclass(slots=True)
class Diagnostics:
    world: World
    publish: Callable[[Event], None]
    init_s: float  # hang timeout while the duration of steps is unknown
    hostile: bool = False
    forgetful_of_comebacks: bool = False  # later exits of a lost node's generation always count as consequences
    down_until: float = 0.0
    restarted_at: float = 0.0
    clock: Clock = field(init=False)
    telemetry: Telemetry = field(init=False)
    _observed: dict[str, _Observed] = field(default_factory=dict)  # by the text of the signal
    _count: int = 0
    _explained: set[int] = field(default_factory=set)  # generations

    def __post_init__(self) -> None:
        self.clock = Clock(self.world)
        self.telemetry = Telemetry(self.world, lambda: self.up, lambda text: self._conclude(self._observed[text]))

    # ------------------------------------------------------------ the process

    @property
    def up(self) -> bool:
        return self.world.now >= self.down_until

    def restart(self, away_s: float) -> None:
        self.down_until = self.restarted_at = self.world.now + away_s
        self._explained.clear()
        self.telemetry.restarted()

    def freeze(self, seconds: float) -> None:
        self.down_until = max(self.down_until, self.world.now + seconds)

    def come_up(self) -> None:
        self.down_until = min(self.down_until, self.world.now)
        self.restarted_at = min(self.restarted_at, self.world.now)

    # ------------------------------------------------------------ findings

    def find(
        self,
        kind: FindingKind,
        agent: Agent,
        generation: int,
        delay_s: float,
        rank: int | None = None,
        severity: Severity = Severity.ERROR,
        key: str = "",
        **evidence: str,
    ) -> None:
        """Let a fault begin now. It is reported `delay_s` later, if diagnostics runs and receives it."""
        self._begin(kind, agent, generation, delay_s, rank, severity, key, evidence, ())

    def find_reset_due(
        self, agent: Agent, delay_s: float, recommended_actions: tuple[Remedy, ...], *, later: bool = False
    ) -> None:
        """From now on a GPU of the node must be reset, which is reported as in `find`. `later`: at the job's next boundary."""
        severity = Severity.WARNING if later else Severity.ERROR
        self._begin(FindingKind.GPU_ERROR, agent, 0, delay_s, None, severity, "", {}, recommended_actions)

    def _begin(
        self,
        kind: FindingKind,
        agent: Agent,
        generation: int,
        delay_s: float,
        rank: int | None,
        severity: Severity,
        key: str,
        evidence: dict[str, str],
        recommended_actions: tuple[Remedy, ...],
    ) -> None:
        self._count += 1
        identifier = f"{kind}{key}:{agent.name}:{self._count}"
        job = agent.workers.order.job if agent.workers is not None else JOB
        observed = _Observed(
            kind,
            agent,
            agent.life,
            generation,
            self.world.now,
            rank,
            severity,
            identifier,
            evidence,
            recommended_actions,
            job,
        )
        if not self.hostile:
            self._send(self._finding(observed, self.world.now + delay_s), delay_s)
        elif kind is FindingKind.NODE_LOST:
            self.world.after(delay_s, lambda: self._lost(observed))
        elif kind is FindingKind.HANG:  # concluded from progress that stops
            self.world.after(delay_s, lambda: self._find_hang(observed))
        elif not self.world.loses(f"the report of {agent.name} to diagnostics about its {kind}"):
            self.world.after(delay_s, lambda: self._emit(observed))

    def _lost(self, observed: _Observed) -> None:
        """Report a lost node. This needs no signal, but only a node that this process has seen can be reported."""
        if self.world.now < self.restarted_at:
            return
        if not self.up:  # frozen
            self.world.at(self.down_until + 0.1, lambda: self._lost(observed))
        elif not self.restarted_at or observed.began >= self.restarted_at + SEEN_S:
            if self.forgetful_of_comebacks:
                self._explained.add(observed.generation)
            self._send(self._finding(observed), 0.0)

    def _emit(self, observed: _Observed) -> None:
        if observed.agent.alive and observed.agent.life == observed.life:
            self._observed[observed.identifier] = observed
            self.telemetry.emit(observed.agent, observed.identifier)

    def _find_hang(self, observed: _Observed) -> None:
        agent = observed.agent
        if not agent.alive or agent.life != observed.life:
            return
        if agent.telemetry_cut or not self.up:
            self.world.after(self.world.spite.uniform(*RECONNECT_S), lambda: self._find_hang(observed))
        elif self.world.now < self._rhythm_known_at(observed):
            self.world.at(self._rhythm_known_at(observed), lambda: self._find_hang(observed))
        else:
            self._conclude(observed)

    def _conclude(self, observed: _Observed) -> None:
        if observed.generation in self._explained and observed.kind in OF_WORKERS:
            self.world.say(f"diagnostics takes {observed.identifier} for a consequence of a lost node")
        else:
            self._send(self._finding(observed), 0.0)

    def _rhythm_known_at(self, observed: _Observed) -> float:
        return self.restarted_at + self.init_s if self.restarted_at > observed.began else 0.0

    def _finding(self, observed: _Observed, at: float | None = None) -> Finding:
        at = self.world.now if at is None else at
        found = Finding(
            observed.identifier,
            observed.kind,
            observed.severity,
            at + self.clock.ahead_s,
            observed.began + self.clock.ahead_s,
            f"{observed.kind} on {observed.agent.name}",
            observed.agent.name,
            observed.job if observed.generation else "",
            observed.generation,
            observed.rank,
            evidence=observed.evidence,
            recommended_actions=observed.recommended_actions,
        )
        return old_evidence.with_fields(found)

    def _send(self, finding: Finding, delay_s: float) -> None:
        def deliver(what: str, waits_s: float) -> None:
            published = replace(finding, waited_s=waits_s)
            if not self.world.loses(what):
                self.world.after(delay_s + waits_s, lambda: self.publish(FindingArrived(self.world.now, published)))

        deliver(f"finding {finding.id}", self.world.chance.uniform(0.0, 0.3))
        if self.world.chance.random() < 0.2:
            deliver(f"finding {finding.id}, repeated", self.world.chance.uniform(0.0, 5.0))

    # ------------------------------------------------------------ steps

    def stepped(self, steps: StepsCompleted, members: list[Agent]) -> None:
        """Publish a step that every rank has finished, if the telemetry of all its nodes arrives."""
        if any(agent.telemetry_cut for agent in members) or not self.up:
            return
        self.world.soon(0.1, 0.4, lambda: None if self.world.loses(f"step {steps.step}") else self.publish(steps))
