"""Simulated diagnostics: production's engine and detectors, fed by the agents' ticks in virtual time.

In a tame world a tick arrives soon, and a finding reaches the supervisor late and possibly more than once. In a hostile world
diagnostics is a process like any other: it is down or frozen for a while, loses its state with a restart, has its own clock,
and its findings, or the exits that an agent has reported, can be lost permanently after they were acknowledged. The agents keep
the other signals until they are acknowledged, as long as they live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.detectors.liveness import Liveness
from holdfast.diagnostics.detectors.protocol import Detector
from holdfast.diagnostics.engine import Engine, Folded
from holdfast.diagnostics.ticks import NodeStream, Ticks
from holdfast.domain.findings import Finding, StepRecord
from holdfast.domain.nodes import TELEMETRY_RETRY_S_MAX
from holdfast.domain.signals import (
    RELIABLE,
    GenerationStarted,
    KernelEvent,
    KernelLine,
    MaintenanceNotice,
    NodeSignal,
    Signal,
    Tick,
    WorkerExited,
)
from holdfast.runtime.steady_clock import SteadyClock
from holdfast.sim.agent import Agent
from holdfast.sim.clocks import Clock
from holdfast.sim.telemetry import Ending, Steps, Telemetry
from holdfast.sim.truth import Truth
from holdfast.sim.world import Violation, World
from holdfast.supervisor.protocol import Event, FindingArrived

TICK_S = 1.0  # of an agent
URGENT_S = (0.001, 0.05)  # until signals that are sent at once arrive
CLOCK_S = 0.1  # between two clock ticks while diagnostics is attentive …
CALM_CLOCK_S = 0.5  # … and otherwise
BROKEN_S = (0.0, 0.2)  # until diagnostics sees the end of a stream
SILENT_SHARE = 0.25  # of the machines that are lost: their streams stay open
FAILING_SHARE = 0.05  # of the streams, when they have to transport a signal that must not be lost
STEPS_S = 0.5  # between two batches of finished steps
LOST_AFTER_S = 0.4  # findings that were made this long before a crash are in the log
CATALOGUE = xid.load()
_RELIABLE = frozenset(RELIABLE)
_RETRY = (0.1, TELEMETRY_RETRY_S_MAX)


class Stream(Protocol):
    """The event log, as diagnostics writes it."""

    def append(self, event: Event) -> None: ...
    def append_steps(self, records: Sequence[StepRecord]) -> None: ...


@dataclass(slots=True)
class _Link:
    """A node, its open stream, and when it tries to open the next."""

    telemetry: Telemetry
    stream: NodeStream | None = None
    incarnation: str = ""  # of the agent that opened the stream
    retry_at: float = 0.0
    waking: bool = False
    boots: int = 1  # of its machine


class _Once(Engine):
    """Folds each signal that an agent keeps once. `take` receives each.

    A signal is remembered until its agent keeps none any more (`settled`), so that memory does not grow with the faults."""

    def __init__(self, detectors: Sequence[Detector[Any]], take: Callable[[NodeSignal], None]) -> None:
        super().__init__(detectors)
        self._take = take
        self._folded: dict[str, dict[int, Signal]] = {}  # node → signals, by identity

    def fold(self, signal: Signal, now: float) -> Folded:
        if type(signal) in _RELIABLE and isinstance(signal, RELIABLE):  # the second takes three times as long
            if not isinstance(signal, GenerationStarted):  # a start is repeated on purpose
                folded = self._folded.setdefault(signal.node, {})
                if id(signal) in folded:
                    raise Violation(f"diagnostics folds a {type(signal).__name__} of {signal.node} twice")
                folded[id(signal)] = signal
            self._take(signal)
        return super().fold(signal, now)

    def settled(self, node: str) -> None:
        """The agent of `node` keeps none of these signals any more, so it cannot send one again."""
        self._folded.pop(node, None)


@dataclass(slots=True)
class Diagnostics:
    world: World
    agents: Mapping[str, Agent]
    log: Stream
    steps: Steps
    truth: Truth
    tick_s: float = TICK_S
    liveness: Liveness = field(default_factory=Liveness)
    down_until: float = 0.0  # not running, or frozen
    clock: Clock = field(init=False)  # of the machine, which may be set
    _now: Callable[[], float] = field(init=False)  # the process's own
    chance: Random = field(init=False)
    _engine: _Once = field(init=False)
    _ticks: Ticks = field(init=False)
    _process: int = 0  # number of restarts
    _frozen_at: float | None = None
    _links: dict[str, _Link] = field(init=False)
    _records: list[StepRecord] = field(default_factory=list)  # finished steps that are not published yet
    _xids: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock(self.world)
        self._now = self._steady()
        self.chance = Random(f"telemetry of {self.world.seed}")
        self._ticks = self._started()
        self._links = {name: _Link(Telemetry(agent, self.steps)) for name, agent in self.agents.items()}

    def telemetry_of(self, agent: Agent) -> Telemetry:
        return self._links[agent.name].telemetry

    def flush(self, agent: Agent) -> None:
        """Let the node send what it has not sent yet."""
        self._send(self._links[agent.name])

    def is_settled(self, agent: Agent) -> bool:
        """Whether the node has a stream, and nothing on it that must not be lost is on its way."""
        link = self._links[agent.name]
        is_open = link.stream is not None and link.incarnation == agent.incarnation
        return is_open and not link.waking and link.telemetry.settled

    def begin(self) -> None:
        """Schedule the ticks of the agents and of the clock."""
        for link in self._links.values():
            self.world.after(self.chance.uniform(0.0, self.tick_s), lambda each=link: self._tick(each))  # type: ignore[misc]
        self._pass()

    def _started(self) -> Ticks:
        self._engine = _Once(detectors.standard(CATALOGUE, liveness=self.liveness), self._take)
        return Ticks(self._engine, self._publish)

    def _steady(self) -> SteadyClock:
        return SteadyClock(self.clock.now, lambda: self.world.now)

    def _take(self, signal: NodeSignal) -> None:
        self._links[signal.node].telemetry.unread.pop(id(signal), None)

    # ------------------------------------------------------------ the process

    @property
    def up(self) -> bool:
        return self.world.now >= self.down_until

    def restart(self, away_s: float) -> None:
        """End the process, with all streams and everything that it knows. After `away_s` there is another."""
        self.down_until, self._frozen_at = self.world.now + away_s, None
        self._process += 1
        self._records.clear()
        self._now = self._steady()
        self._ticks = self._started()
        for link in self._links.values():
            self._forget_stream(link)
        self.truth.blind(self.down_until)

    def freeze(self, seconds: float) -> None:
        if self.up:
            self._frozen_at = self.world.now
        self.down_until = max(self.down_until, self.world.now + seconds)
        self.truth.blind(self.down_until)

    def come_up(self) -> None:
        self.down_until = min(self.down_until, self.world.now)

    def _pass(self) -> None:
        """Fold a clock tick, and notice a freeze that has ended, as production's watchdog does."""
        if self.up:
            now = self._now()
            if self._frozen_at is not None:
                frozen_s, self._frozen_at = self.world.now - self._frozen_at, None
                self._ticks.frozen(frozen_s, now)
            self._ticks.passed(now)
        attentive = self.up and self._now() < self._ticks.attentive_until
        self.world.after(CLOCK_S if attentive else CALM_CLOCK_S, self._pass)

    # ------------------------------------------------------------ events on the nodes

    def changed(self, agent: Agent) -> None:
        """Handle a change of the workers on a node, or the end of its agent."""
        link = self._links[agent.name]
        if not agent.alive and link.stream is not None:
            self._break(link)
        if link.telemetry.changed():
            self._wake(link)

    def ends(self, agent: Agent, rank: int, ending: Ending) -> None:
        """Let the next end of `rank` look like this."""
        self._links[agent.name].telemetry.endings[rank] = ending

    def freezes(self, agent: Agent, rank: int) -> None:
        """Let the process of a hung rank be stopped."""
        self._links[agent.name].telemetry.frozen.add(rank)

    def xid(self, agent: Agent, code: int, text: str) -> None:
        """Let the driver write a line about another GPU of the node than before."""
        self._xids += 1
        pci = f"0000:{self._xids:02x}:00"
        line = f"NVRM: Xid (PCI:{pci}): {code}, {text}"
        self._add(agent, KernelLine(agent.name, agent.clock.now(), line, code, pci, self._xids % 8, KernelEvent.XID))

    def notice(
        self, agent: Agent, source: str, event: str, starts_at: float | None = None, incarnation: str = ""
    ) -> None:
        """Let the owner of a machine announce that it will take the machine; without `event`, withdraw that."""
        self._add(agent, MaintenanceNotice(agent.name, agent.clock.now(), source, event, starts_at, incarnation))

    def cut(self, agent: Agent) -> None:
        """Break the node's stream, because its network has failed."""
        self.truth.out_of_contact(agent)
        if (link := self._links[agent.name]).stream is not None:
            self._break(link)

    def _add(self, agent: Agent, signal: NodeSignal) -> None:
        if agent.alive:
            link = self._links[agent.name]
            link.telemetry.add(signal)
            self._wake(link)

    # ------------------------------------------------------------ streams

    def _break(self, link: _Link) -> None:
        """End a stream. Diagnostics sees the end, or nothing any more: then a lost machine is noticed by its silence."""
        stream, agent = link.stream, link.telemetry.agent
        self._forget_stream(link)
        power_lost, link.boots = agent.boots != link.boots, agent.boots
        if stream is None or (power_lost and self.chance.random() < SILENT_SHARE):
            return
        self.world.after(self.chance.uniform(*BROKEN_S), lambda: self._ended(stream, self._process))

    def _ended(self, stream: NodeStream, process: int) -> None:
        if self._process == process and not self.up:  # frozen
            self.world.at(self.down_until, lambda: self._ended(stream, process))
        elif self._process == process:
            self._ticks.close(stream, self._now(), clean=False)

    def _forget_stream(self, link: _Link) -> None:
        link.stream = None
        link.retry_at = self.world.now + self.chance.uniform(*_RETRY)

    def _tick(self, link: _Link) -> None:
        if link.telemetry.agent.represented_by is link.telemetry.agent:
            self._send(link)
        self.world.after(self.tick_s, lambda: self._tick(link))

    def _wake(self, link: _Link) -> None:
        """Send the signals that must not wait, after the time that they take to arrive."""
        if not link.waking:
            link.waking = True
            self.world.after(self.chance.uniform(*URGENT_S), lambda: self._woken(link))

    def _woken(self, link: _Link) -> None:
        link.waking = False
        if link.telemetry.outbox.urgent:
            self._send(link)

    def _send(self, link: _Link) -> None:
        agent, telemetry = link.telemetry.agent, link.telemetry
        if not agent.alive or not self.up:
            return
        if link.stream is None or agent.telemetry_cut:
            self.truth.unheard(agent.name)
        fails = self.world.loss > 0 and telemetry.outbox.urgent and self.chance.random() < FAILING_SHARE
        if link.stream is not None and (fails or agent.telemetry_cut):
            telemetry.tick(telemetry.sample())  # was written, and does not arrive
            self.cut(agent)
        if link.stream is None and (fails or agent.telemetry_cut):
            return
        if link.stream is not None and link.incarnation != agent.incarnation:
            self._break(link)
        if link.stream is None:
            if self.world.now < link.retry_at:
                return
            telemetry.changed()
            link.stream, link.incarnation = NodeStream(), agent.incarnation
            for tick in telemetry.outbox.again():
                self._fold(link, tick)
            if standing := telemetry.standing():
                self._fold(link, telemetry.tick(standing))
        self._fold(link, telemetry.tick(telemetry.sample()))
        for signal in telemetry.unread.values():
            raise Violation(f"{agent.name} does not send a {type(signal).__name__} again, which was not read")

    def _fold(self, link: _Link, tick: Tick) -> None:
        stream, outbox = link.stream, link.telemetry.outbox
        assert stream is not None
        if self.world.loss and any(isinstance(each, WorkerExited) for each in tick.signals):
            kept = tuple(each for each in tick.signals if not isinstance(each, WorkerExited) or not self._loses(tick))
            for each in tick.signals:
                link.telemetry.unread.pop(id(each), None)
            tick = replace(tick, signals=kept)
        now, cohort = self._now(), link.telemetry.agent.cohort
        receipt = self._ticks.take(stream, tick, now)
        for of_follower in cohort.ticks(tick) if cohort is not None else ():
            other = self._links[of_follower.node].stream
            assert other is not None
            self._ticks.take(other, of_follower, now)
        if not receipt.must_hold:
            outbox.acknowledge(receipt.seq)
            return
        process = self._process

        def acknowledge() -> None:
            if self._process == process and link.stream is stream:
                outbox.acknowledge(receipt.seq)
                if link.telemetry.settled:
                    for node in link.telemetry.agent.stands_for:
                        self._engine.settled(node)

        self.world.after(receipt.settle_s + LOST_AFTER_S, acknowledge)

    def _loses(self, tick: Tick) -> bool:
        if lost := self.world.loses(lambda: f"the exit of a worker that {tick.node} reported to diagnostics"):
            self.truth.lost(tick.node)
        return lost

    # ------------------------------------------------------------ results

    def _publish(self, folded: Folded) -> None:
        for finding in folded.findings:
            self.truth.found(finding)
            self._send_finding(finding)
        if folded.steps:
            if not self._records:
                process = self._process
                self.world.after(STEPS_S, lambda: self._publish_steps(process))
            self._records += folded.steps

    def _publish_steps(self, process: int) -> None:
        if process == self._process:
            records, self._records = self._records, []
            if records and not self.world.loses(lambda: f"steps up to {records[-1].step}"):
                self.log.append_steps(records)

    def _send_finding(self, finding: Finding) -> None:
        def deliver(what: str, waits_s: float) -> None:
            published = replace(finding, waited_s=finding.waited_s + waits_s)
            if self.world.loses(lambda: what):
                self.truth.lost(finding.node)
            else:
                self.world.after(waits_s, lambda: self.log.append(FindingArrived(self.world.now, published)))

        deliver(f"finding {finding.id}", self.chance.uniform(0.0, 0.3))
        if self.chance.random() < 0.2:
            deliver(f"finding {finding.id}, repeated", self.chance.uniform(0.0, 5.0))
