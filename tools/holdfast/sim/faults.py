"""Faults of a simulated fleet. Each method causes one: of the leader, of a link, of a node, of a worker, or of saved copies."""

from __future__ import annotations

from holdfast.domain.findings import FindingKind
from holdfast.sim.agent import JOB, Agent
from holdfast.sim.diagnostics import Diagnostics
from holdfast.sim.store import Store
from holdfast.sim.supervisor import Supervisor
from holdfast.sim.training import Training
from holdfast.sim.truth import Truth
from holdfast.sim.worker_faults import WorkerFaults
from holdfast.sim.world import World
from holdfast.supervisor.protocol import NodeCordonRequested, NodeRepaired

Range = tuple[float, float]  # of seconds

CUT_S = (0.1, 10.0)
BACK_S = (5.0, 30.0)  # until a lost machine has booted
AGENT_BACK_S = (0.2, 3.0)
REPORTED_LATE_S = 200.0  # a fault is reported at the latest so long after the repair
REPAIR_LOOK_S = 20.0


class Faults:
    def __init__(
        self, world: World, agents: dict[str, Agent], supervisor: Supervisor, diagnostics: Diagnostics, truth: Truth
    ) -> None:
        self.world, self.agents, self.supervisor = world, agents, supervisor
        self.diagnostics, self.truth = diagnostics, truth
        self.workers = WorkerFaults(world, diagnostics, truth)
        self.running_share = 1.0  # fraction of the faults that are faults of nodes with ranks, if there are any
        self.times: list[float] = []  # of the faults that interrupt the training
        self.doubted: set[str] = set()  # nodes that may count as lost, because their telemetry was interrupted

    def interrupts(self, what: str) -> None:
        """Record a fault that interrupts the training."""
        self.world.say(f"FAULT {what}")
        self.times.append(self.world.now)

    def _victim(self) -> Agent | None:
        """Choose the node of a fault, in most cases one that runs ranks."""
        alive = [agent for agent in self.agents.values() if agent.alive]
        running = [agent for agent in alive if agent.workers is not None]
        if running and (self.running_share == 1.0 or self.world.chance.random() < self.running_share):
            alive = running
        return self.world.chance.choice(alive) if alive else None

    # ------------------------------------------------------------ the leader and the links

    def crash_supervisor(self) -> None:
        if self.supervisor.leading:
            self.supervisor.crash_in = self.world.chance.randint(1, 8)

    def cut_control(self, seconds: Range = CUT_S, *, spare_doubted: bool = False) -> None:
        """`spare_doubted`: not for a node whose telemetry was interrupted, which without both links would count as lost."""
        if (agent := self._victim()) is not None and not (spare_doubted and agent.name in self.doubted):
            self.world.say(f"FAULT control partition of {agent.name}")
            agent.control_cut = True
            self.supervisor.hang_up(agent)
            self.world.soon(*seconds, lambda: setattr(agent, "control_cut", False))

    def cut_telemetry(self, *, spare_unseen: bool = False) -> None:
        """`spare_unseen`: not for a node that has no session with the supervisor, which would then count as lost."""
        agent = self._victim()
        if agent is None or (spare_unseen and not self.supervisor.sees(agent)):
            return
        self.world.say(f"FAULT telemetry partition of {agent.name}")
        self.doubted.add(agent.name)
        agent.telemetry_cut = True
        self.diagnostics.cut(agent)
        self.world.soon(0.5, 10.0, lambda: setattr(agent, "telemetry_cut", False))

    def cut_all(self) -> None:
        """Cut both links of a node whose workers continue to run."""
        if (agent := self._victim()) is not None:
            self.interrupts(f"full partition of {agent.name}")
            agent.control_cut = agent.telemetry_cut = True
            self.supervisor.hang_up(agent)
            self.diagnostics.cut(agent)

            def heal() -> None:
                agent.control_cut = agent.telemetry_cut = False

            self.world.soon(1.0, 20.0, heal)

    # ------------------------------------------------------------ nodes

    def end(self, agent: Agent, *, machine: bool, disk: bool = False) -> None:
        """End the agent, with its workers. `machine`: with its memory. `disk`: with its disk."""
        self.supervisor.hang_up(agent)
        self.truth.out_of_contact(agent)
        self.truth.begins(FindingKind.NODE_LOST, agent)
        agent.die(machine=machine, disk=disk)

    def lose(self, agent: Agent, what: str = "node loss", back_s: Range = BACK_S, *, disk: bool = False) -> None:
        """Lose the machine, which boots later."""
        self.interrupts(f"{what}: {agent.name}")
        self.end(agent, machine=True, disk=disk)
        self.world.soon(*back_s, agent.boot)

    def lose_node(self, back_s: Range = BACK_S) -> None:
        if (agent := self._victim()) is not None:
            self.lose(agent, back_s=back_s)

    def lose_node_and_disk(self) -> None:
        """Lose one or two nodes with their disks. Two can hold both copies of a shard, which then is only in the object
        store."""
        for _ in range(self.world.chance.randint(1, 2)):
            if (agent := self._victim()) is not None:
                self.lose(agent, "node loss with its disk", disk=True)

    def restart_agent(self) -> None:
        if (agent := self._victim()) is not None:
            self.interrupts(f"agent restart: {agent.name}")
            self.end(agent, machine=False)
            self.world.soon(*AGENT_BACK_S, agent.boot)

    def lose_finding_race(self, training: Training) -> None:
        """Lose a node, and let the peers' collective errors be reported before the loss."""
        if (agent := self._victim()) is not None and agent.workers is not None:
            generation = agent.workers.order.generation
            peer = next((a for a in training.members(generation) if a is not agent), None)
            if peer is not None and peer.workers is not None:
                self.interrupts(f"worker crash: rank {peer.ranks[0]} on {peer.name}")
                self.workers.fails_with_another(peer, peer.ranks[0])
            self.lose(agent, "node loss with an echo")

    def cordon(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT an operator cordons {agent.name}")

            def request(cordoned: bool) -> None:
                self.supervisor.append(NodeCordonRequested(self.world.now, agent.name, cordoned, "maintenance"))

            request(True)
            self.world.soon(*BACK_S, lambda: request(False))

    # ------------------------------------------------------------ workers and GPUs

    def crash_worker(self) -> None:
        agent = self._victim()
        if agent is not None and agent.workers is not None:
            rank = self.world.chance.choice(agent.ranks)
            self.interrupts(f"worker crash: rank {rank} on {agent.name}")
            self.workers.crash(agent, rank)

    def hang(self) -> None:
        agent = self._victim()
        if agent is not None and agent.workers is not None and agent.workers.started:
            rank = self.world.chance.choice(agent.ranks)
            self.interrupts(f"hang: rank {rank} on {agent.name}")
            self.workers.hang(agent, rank)

    def xid(self) -> None:
        if (agent := self._victim()) is not None:
            self.world.say(f"FAULT Xid 79 on {agent.name}")
            self.workers.off_the_bus(agent)
            self.world.soon(5.0, 40.0, lambda: self._repaired(agent))

    def _repaired(self, agent: Agent, patience_s: float = REPORTED_LATE_S) -> None:
        """An operator marks the node as repaired, and does so again if its fault is reported after that."""
        self.supervisor.append(NodeRepaired(self.world.now, agent.name))
        if patience_s > 0:
            self.world.after(REPAIR_LOOK_S, lambda: self._look_at(agent, patience_s - REPAIR_LOOK_S))

    def _look_at(self, agent: Agent, patience_s: float) -> None:
        node = self.supervisor.committed.nodes.get(agent.name)
        if node is not None and node.unschedulable_reason and not node.quarantined:
            self._repaired(agent, patience_s)
        elif patience_s > 0:
            self.world.after(REPAIR_LOOK_S, lambda: self._look_at(agent, patience_s - REPAIR_LOOK_S))

    # ------------------------------------------------------------ copies

    def rot(self) -> None:
        """Corrupt some copies on one node. This is detected only when a copy is read."""
        if (agent := self._victim()) is not None and (keys := agent.replicator.keys(JOB)):
            spoilt = self.world.chance.sample(keys, k=self.world.chance.randint(1, len(keys)))
            self.world.say(f"FAULT {len(spoilt)} copies rot on {agent.name}")
            for key in spoilt:
                agent.replicator.rot(JOB, key)

    def lose_store(self, store: Store) -> None:
        self.world.say("FAULT the object store is away")
        store.away = True
        self.world.soon(1.0, 40.0, lambda: setattr(store, "away", False))
