"""Machines of a simulated fleet whose hardware fails: GPUs are reset, machines are tested, booted, replaced and repaired."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from holdfast.sim.agent import Agent
from holdfast.sim.faults import Faults
from holdfast.sim.replacements import ReplacementPromises, Replacing
from holdfast.sim.resets import Resets
from holdfast.sim.returns import REPAIRED_S as LOOKED_AT_S
from holdfast.sim.returns import Returns
from holdfast.sim.suspects import SelfTests
from holdfast.supervisor.protocol import NodeRepaired, ProviderAnswered, RequestReplacement

REPAIRED_S = (60.0, 400.0)  # from the fault of a GPU until an operator marks the node as repaired


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one seed draws: which hardware fails, and how resets, tests, boots and replacements end."""

    resets: Resets
    returns: Returns
    replacing: Replacing
    suspicions: SelfTests

    @classmethod
    def of(cls, seed: int) -> Hardware:
        return cls(Resets.of(seed), Returns.of(seed), Replacing.of(seed), SelfTests.of(seed))

    def furnish(self, agent: Agent) -> None:
        """Let the agent's commands end as they were drawn."""
        agent.resets = self.resets
        agent.resets_gpus = self.resets.faults > 0 and self.resets.chance.random() >= self.resets.unable
        agent.suspicions = self.suspicions
        agent.returns = self.returns if self.returns.faults else None

    def calm(self) -> None:
        """Let nothing fail from now on."""
        self.resets.calm()
        self.returns.calm()
        self.replacing.calm()
        self.suspicions.calm()


class Machines:
    """Causes the faults of `Hardware`, and does what owners and operators of the machines do about them."""

    def __init__(self, hardware: Hardware, faults: Faults, promises: ReplacementPromises | None) -> None:
        self.faults, self.promises = faults, promises
        self.world, self.supervisor = faults.world, faults.supervisor
        self.resets, self.returns = hardware.resets, hardware.returns
        self.replacing, self.suspicions = hardware.replacing, hardware.suspicions

    def plan(self, begin_s: float, end_s: float) -> None:
        for _ in range(self.resets.faults):
            self.world.after(self.resets.chance.uniform(begin_s, end_s), self._gpu_needs_reset)
        for _ in range(self.returns.faults):
            self.world.after(self.returns.chance.uniform(begin_s, end_s), self._hardware_fails)
        for _ in range(self.suspicions.faults):
            self.world.after(self.suspicions.chance.uniform(begin_s, end_s), self._segfault)

    # ------------------------------------------------------------ faults

    def _some_agent(self, chance: Random, running_share: float) -> Agent | None:
        alive = [agent for agent in self.faults.agents.values() if agent.alive]
        running = [agent for agent in alive if agent.workers is not None]
        able = running if running and chance.random() < running_share else alive
        return chance.choice(able) if able else None

    def _gpu_needs_reset(self) -> None:
        """Let a GPU need a reset. In most cases its rank ends as well, which is reported before or after the driver's
        message."""
        chance = self.resets.chance
        if (agent := self._some_agent(chance, 0.9)) is None:
            return
        later = self.resets.can_wait()
        self.faults.interrupts(f"a GPU of {agent.name} needs a reset{', which can wait' if later else ''}")
        delay_s = chance.uniform(0.0, 1.5)
        self.world.after(delay_s, lambda: self.faults.workers.needs_reset(agent, later=later))
        if agent.workers is not None and not later and chance.random() < 0.7:
            self.faults.workers.crash(agent, chance.choice(agent.ranks))
        self._repair(agent, chance.uniform(*REPAIRED_S))

    def _hardware_fails(self) -> None:
        """Let the hardware of a node fail. The machine is booted, and often fails again: in its hold-down, on probation, or
        later."""
        if (agent := self._some_agent(self.returns.chance, 0.7)) is not None:
            self._fail(agent)

    def _fail(self, agent: Agent) -> None:
        chance = self.returns.chance
        if not agent.alive or self.returns.at_peace:
            return
        self.faults.interrupts(f"Xid 79 on {agent.name}, which will be booted")
        self.faults.workers.off_the_bus(agent)
        if chance.random() < 0.3:  # an operator first restarts the agent, which is not sufficient
            self.world.after(chance.uniform(0.5, 5.0), lambda: self._boot(agent, machine=False))
        if not self.returns.ordered:
            self.world.after(chance.uniform(5.0, 10.0), lambda: self._boot(agent, machine=True))
        if chance.random() < 0.5:
            self.world.after(chance.uniform(10.0, 60.0), lambda: self._fail(agent))
        self._repair(agent, chance.uniform(*LOOKED_AT_S))

    def _segfault(self) -> None:
        """End a worker by a signal that makes its node a suspect."""
        chance = self.suspicions.chance
        agents = self.faults.agents.values()
        running = [agent for agent in agents if agent.alive and agent.workers is not None and agent.ranks]
        if running:
            agent = chance.choice(running)
            rank = chance.choice(agent.ranks)
            self.faults.interrupts(f"worker crash by a POSIX signal of its own: rank {rank} on {agent.name}")
            self.faults.workers.crash_by_signal(agent, rank)

    # ------------------------------------------------------------ answers to a fault

    def _repair(self, agent: Agent, after_s: float) -> None:
        """Let an operator mark the node as repaired."""
        self.world.after(after_s, lambda: self.supervisor.append(NodeRepaired(self.world.now, agent.name)))

    def reset_failed(self, agent: Agent) -> None:
        self._repair(agent, self.resets.chance.uniform(*REPAIRED_S))

    def tests_failed(self, agent: Agent) -> None:
        self._repair(agent, self.suspicions.chance.uniform(*REPAIRED_S))

    def boot_soon(self, agent: Agent) -> None:
        """Boot the machine after a short delay, because the agent's command was accepted."""
        self.world.after(self.returns.chance.uniform(0.1, 3.0), lambda: self._boot(agent, machine=True))

    def _boot(self, agent: Agent, *, machine: bool) -> None:
        if agent.alive:
            self.faults.interrupts(f"{agent.name} is booted" if machine else f"agent restart: {agent.name}")
            self.faults.end(agent, machine=machine)
            self.world.after(self.returns.chance.uniform(0.2, 8.0), agent.boot)

    def request_replacement(self, epoch: int, wanted: RequestReplacement) -> None:
        """Ask the provider of machines. It carries out its answer even if the leader that asked has ended."""
        agent, does = self.faults.agents[wanted.node], self.replacing.answer()
        self.world.say(f"the provider is asked to replace {wanted.node} ({wanted.request}): {does}")
        if does != "answers nothing" and self.supervisor.leading and self.supervisor.epoch == epoch:
            ok = does != "refuses"
            self.supervisor.tell(ProviderAnswered(self.world.now, wanted.node, wanted.request, ok, does))
        if does == "agrees":
            self.world.after(self.replacing.chance.uniform(1.0, 10.0), lambda: self._replace(agent))

    def _replace(self, agent: Agent) -> None:
        """Replace a machine by another one with the same name and empty disks."""
        self.faults.interrupts(f"{agent.name} is replaced")
        if agent.alive:
            self.faults.end(agent, machine=True, disk=True)
        else:
            agent.die(machine=True, disk=True)
        agent.machine += 1
        if self.promises is not None:
            self.promises.came(agent.name)
        self.world.after(self.replacing.chance.uniform(0.5, 8.0), agent.boot)
