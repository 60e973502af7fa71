"""Hostile worlds: every message may be lost permanently, clocks differ and jump, links fail for a long time, the log loses its
last second or everything, diagnostics loses its state. Then there is peace: all messages arrive, and clocks stay as they are.
Half of the seeds are hostile; the other half gives the same runs as before hostility was added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from holdfast.domain.nodes import WorkerEnded
from holdfast.domain.orders import OrderDone, RanksFinished, RanksStepping, WorkersChanged
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.clocks import Clock
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.faults import Faults
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.world import World

HOUR_S = 3600.0
PEACE_S = (72.0, 100.0)  # after the last recovery from a fault of a tame world
LONG_S = (30.0, 120.0)  # duration of a failed link, which ends at the peace at the latest
ABSENCE_S = (305.0, 330.0)  # time without a supervisor; longer than the former lifetime of a finding
FAULTS_MAX = 4
BABBLE_TRIES_MAX = 100


@dataclass(frozen=True, slots=True)
class Hostility:
    """The hostile events of one seed. None by default."""

    loss: float = 0.0  # fraction of messages that are lost
    clocks: bool = False
    links: bool = False
    log_tail: bool = False
    log_all: bool = False
    diagnostics: bool = False
    absence: bool = False
    babble: bool = False  # agents send reports about ranks and orders of other nodes
    peace_s: float = 0.0  # after the start; 0 = this world is not hostile

    @classmethod
    def of(cls, seed: int) -> Hostility:
        if seed % 10 not in (0, 1, 2, 5, 8):
            return cls()
        chance = Random(f"hostility of {seed}")
        absence = chance.random() < 0.1
        return cls(
            loss=chance.choice((0.0, 0.01, 0.05, 0.2)),
            clocks=chance.random() < 0.6,
            links=chance.random() < 0.5,
            log_tail=chance.random() < 0.5,
            log_all=chance.random() < 0.1,
            diagnostics=chance.random() < 0.6,
            absence=absence,
            babble=chance.random() < 0.3,
            peace_s=chance.uniform(*PEACE_S) + (ABSENCE_S[1] if absence else 0.0),
        )

    def __bool__(self) -> bool:
        return self.peace_s > 0


class Surroundings(Protocol):
    """The parts of a scenario that hostile events change."""

    world: World
    agents: dict[str, Agent]
    supervisor: Supervisor
    diagnostics: Diagnostics
    faults: Faults

    def lose_log(self, everything: bool) -> None: ...


class Hostilities:
    """Carries out the hostile events of a seed."""

    def __init__(self, hostility: Hostility, around: Surroundings, *, control_plane_only: bool) -> None:
        self.hostility, self.around, self.world = hostility, around, around.world
        self.control_plane_only = control_plane_only

    def plan(self, begin_s: float, end_s: float) -> None:
        """Begin to lose messages, and schedule faults between `begin_s` and `end_s`."""
        hostility, spite = self.hostility, self.world.spite
        self.world.loss = hostility.loss
        kinds: list[Callable[[], None]] = []
        if hostility.clocks:
            kinds += [self._jump, self._jump]
            for clock in self._clocks():
                clock.set(spite.choice((0.0, spite.uniform(-HOUR_S, HOUR_S))))
        if hostility.links:
            kinds += [self._cut_control, self._cut_telemetry]
        if hostility.log_tail:
            kinds += [lambda: self._lose_log(everything=False)]
        if hostility.log_all:
            kinds += [lambda: self._lose_log(everything=True)]
        if hostility.diagnostics:
            kinds += [self._restart_diagnostics, self._freeze_diagnostics]
        for _ in range(spite.randint(1, FAULTS_MAX) if kinds else 0):
            self.world.after(spite.uniform(begin_s, end_s), spite.choice(kinds))
        if hostility.babble:
            for _ in range(spite.randint(1, FAULTS_MAX)):
                self.world.after(spite.uniform(begin_s, end_s), self._babble)
        if hostility.absence:
            self.world.after(spite.uniform(begin_s, end_s), self._absence)

    def peace(self) -> None:
        """From now on all messages arrive, and no clock is changed."""
        self.world.say("PEACE")
        self.world.loss = 0.0
        self.around.diagnostics.come_up()
        for agent in self.around.agents.values():
            agent.control_cut = agent.telemetry_cut = False

    # ------------------------------------------------------------ events

    def _clocks(self) -> list[Clock]:
        around = self.around
        clocks = [*around.supervisor.machines, around.diagnostics.clock, *(a.clock for a in around.agents.values())]
        if not self.hostility.log_all:  # a log that loses everything must not have its clock set back as well
            clocks.append(around.supervisor.log_clock)
        return clocks

    def _jump(self) -> None:
        clock = self.world.spite.choice(self._clocks())
        clock.set(self.world.spite.choice((0.0, clock.ahead_s - HOUR_S, clock.ahead_s + HOUR_S)))
        self.world.say(f"FAULT a clock is set to {clock.ahead_s:+.0f} s")

    def _some_agent(self) -> Agent:
        return self.world.spite.choice(list(self.around.agents.values()))

    def _cut_control(self) -> None:
        agent = self._some_agent()
        if self.control_plane_only and agent.name in self.around.faults.doubted:
            return  # a node without both links counts as lost, even if it runs
        self.world.say(f"FAULT control link of {agent.name} is dead")
        agent.control_cut = True
        self.around.supervisor.hang_up(agent)
        self.world.after(self.world.spite.uniform(*LONG_S), lambda: setattr(agent, "control_cut", False))

    def _cut_telemetry(self) -> None:
        agent = self._some_agent()
        if self.control_plane_only and not self.around.supervisor.sees(agent):
            return  # a node without both links counts as lost, even if it runs
        self.world.say(f"FAULT telemetry link of {agent.name} is dead")
        agent.telemetry_cut = True
        self.around.faults.doubted.add(agent.name)
        self.around.diagnostics.cut(agent)
        self.world.after(self.world.spite.uniform(*LONG_S), lambda: setattr(agent, "telemetry_cut", False))

    def _restart_diagnostics(self) -> None:
        self.world.say("FAULT diagnostics restarts")
        self.around.diagnostics.restart(self.world.spite.uniform(0.5, 20.0))

    def _freeze_diagnostics(self) -> None:
        self.world.say("FAULT diagnostics freezes")
        self.around.diagnostics.freeze(self.world.spite.uniform(1.0, 30.0))

    def _lose_log(self, *, everything: bool) -> None:
        """Let the log lose data, in half of the cases with the events that follow a worker crash."""
        if self.world.spite.random() < 0.5 and not self.control_plane_only:
            self.around.faults.crash_worker()
            self.world.after(self.world.spite.uniform(0.1, 0.9), lambda: self.around.lose_log(everything=everything))
        else:
            self.around.lose_log(everything=everything)

    def _babble(self, tries: int = BABBLE_TRIES_MAX) -> None:
        """Let a faulty agent report all ranks as stepping or finished, and orders of other nodes as done."""
        agent, state = self._some_agent(), self.around.supervisor.committed
        job = state.jobs.get(JOB)
        if not agent.alive or job is None or job.running is None:
            return
        if not (state.outbox or state.unanswered) and tries:  # wait for unanswered orders, which the reports can affect
            self.world.after(0.1, lambda: self._babble(tries - 1))
            return
        self.world.say(f"FAULT {agent.name} reports what it knows nothing of")
        number, others = job.running.number, [send for send in state.sends() if send.node != agent.name]
        ranks = tuple(rank for p in job.running.placements if p.node != agent.name for rank in p.ranks)
        agent.report(RanksStepping(JOB, number, ranks, 1, agent.clock.now()))
        agent.report(RanksFinished(JOB, number, ranks, agent.clock.now()))
        theirs = (WorkerEnded(JOB, number, rank, exit_code=0) for rank in ranks)
        agent.report(WorkersChanged(agent.version, agent.running, (*agent.ended, *theirs)))
        for send in others:
            agent.report(OrderDone(send.command_id, True, master=f"{agent.name}:1"))

    def _absence(self) -> None:
        """Have no supervisor for minutes. The findings of faults in this time are old when the supervisor receives them."""
        if self.around.supervisor.leading:
            self.world.say("FAULT there is no supervisor for minutes")
            self.around.supervisor.crash(ABSENCE_S)
            if not self.control_plane_only:
                self.world.after(self.world.spite.uniform(0.5, 5.0), self.around.faults.crash_worker)
