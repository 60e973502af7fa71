"""Announced ends in a simulation: maintenance of a machine, SIGTERM to an agent, and the end of a whole allocation."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.domain.nodes import TERMINATION
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.allocations import APART_S, BACK_WITHIN_S, Allocation, AllocationPromises, Allocations
from holdfast.sim.faults import Faults
from holdfast.sim.maintenance import Maintenance
from holdfast.sim.training import Training
from holdfast.supervisor.protocol import JobPhase

ECHO = "node loss with an echo"


class Endings:
    def __init__(self, faults: Faults, training: Training) -> None:
        self.faults, self.training = faults, training
        self.world, self.supervisor = faults.world, faults.supervisor
        self._terminated: set[str] = set()  # incarnations of agents

    def plan(self, seed: int) -> None:
        """Schedule the maintenance of machines, and the ends of agents, that the seed draws."""
        for maintenance in Maintenance.of(seed):
            self.world.after(maintenance.announced_s, lambda each=maintenance: self._announce(each))  # type: ignore[misc]
        for ending in Maintenance.of_agents(seed):
            self.world.after(ending.announced_s, lambda each=ending: self._terminate(each))  # type: ignore[misc]

    def _agent(self, maintenance: Maintenance) -> Agent:
        agents = list(self.faults.agents.values())
        return agents[maintenance.node % len(agents)]

    def _announce(self, maintenance: Maintenance) -> None:
        agent = self._agent(maintenance)
        self.world.say(f"maintenance of {agent.name} is announced")
        starts_at = None if maintenance.starts_s is None else self.world.now + maintenance.starts_s
        self.faults.workers.announced(agent, "file", "reboot", starts_at)

        def take() -> None:
            if agent.alive:
                self.faults.lose(agent, ECHO)

        def over() -> None:
            self.faults.diagnostics.notice(agent, "file", "")

        maintenance.play(self.world.after, take, over)

    def _terminate(self, ending: Maintenance) -> None:
        """Send SIGTERM to an agent with workers."""
        agent = self._agent(ending)
        if agent.alive and agent.workers and ending.taken_s is not None and agent.incarnation not in self._terminated:
            self._sigterm(agent, self.world.now + ending.taken_s, lambda: self.faults.lose(agent, ECHO))

    def _sigterm(self, agent: Agent, over_at: float, ended: Callable[[], None]) -> None:
        """Let the agent report its end. It ends when it has neither workers nor copies to make, or at the end of its grace
        period."""
        if not agent.alive:
            return
        life = agent.incarnation
        self._terminated.add(life)
        if not agent.workers:
            ended()
            return
        self.world.say(f"the agent of {agent.name} is asked to end within {over_at - self.world.now:.1f} s")
        self.faults.workers.announced(agent, TERMINATION, "its agent was asked to end", over_at, life)

        def end() -> None:
            if agent.alive and agent.incarnation == life:
                if (agent.workers or agent.replicator.is_copying(JOB)) and self.world.now < over_at:
                    self.world.after(0.5, end)
                else:
                    ended()

        self.world.after(0.5, end)

    # ------------------------------------------------------------ allocations

    def plan_allocations(
        self, allocations: Allocations, promises: AllocationPromises, complete: Callable[[], bool]
    ) -> None:
        """Schedule the ends of all allocations. `complete`: whether the job is."""
        for each in allocations.all:
            self.world.after(
                each.ends_s,
                lambda allocation=each: self._end(allocation, allocations, promises, complete),  # type: ignore[misc]
            )

    def _end(
        self,
        allocation: Allocation,
        allocations: Allocations,
        promises: AllocationPromises,
        complete: Callable[[], bool],
    ) -> None:
        """End the allocation of all machines, as a scheduler does. Another allocation returns them later."""
        chance, agents = allocations.chance, self.faults.agents.values()
        self.world.say(f"FAULT the allocation ends in {allocation.grace_s:.1f} s")
        job = self.supervisor.committed.jobs.get(JOB)
        trains = job is not None and job.phase is JobPhase.RUNNING
        promises.agents_end(allocation, self.training.step, trains=trains)
        over_at = self.world.now + allocation.grace_s
        for agent in agents:
            self.world.after(
                chance.uniform(0.0, APART_S),
                lambda each=agent: self._sigterm(each, over_at, lambda: self._leave(each, boots=allocation.boots)),  # type: ignore[misc]
            )
        if allocation.supervisor_goes_s is not None:
            away_s = (1.0, allocation.grace_s + allocation.away_s)
            self.world.after(allocation.supervisor_goes_s, lambda: self._crash_supervisor(away_s))

        def back() -> None:
            led_s = self.world.now - max(self.supervisor.led_since, over_at + APART_S)
            known_s = led_s if self.supervisor.leading else 0.0
            promises.before_return(self.supervisor.committed, trained=trains and not complete(), known_s=known_s)
            for agent in agents:
                self.world.after(chance.uniform(0.0, BACK_WITHIN_S), agent.boot)

        self.world.at(over_at + allocation.away_s, back)

    def _crash_supervisor(self, away_s: tuple[float, float]) -> None:
        if self.supervisor.leading:
            self.supervisor.crash(away_s)

    def _leave(self, agent: Agent, *, boots: bool) -> None:
        self.world.say(f"the agent of {agent.name} has ended")
        self.faults.end(agent, machine=boots)
