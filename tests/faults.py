"""Real faults for acceptance tests, drawn by a seeded chance: one function per fault, in a table.

Each takes a `Victim` and returns what it did, in words. `DISTURBS` are those after which another generation must run: the
others hit the control plane, and training goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from training import Cluster
from waiting import wait_until

REDIS_AWAY_S = (0.0, 1.0, 3.0)
RETURN_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class Victim:
    """A running job on a local stack. `settle` waits until it is healthy again."""

    run: Cluster
    job: str
    chance: random.Random
    settle: Callable[[str], None]

    def ranks(self) -> list[dict[str, Any]]:
        """Every rank with its node and process; a new leader hears of them within a moment."""
        described = "the processes of all ranks"
        view = self.run.wait(self.job, described, lambda view: all(worker.get("pid") for worker in view["ranks"]))
        return sorted(view["ranks"], key=lambda worker: int(worker["rank"]))

    def some(self, count: int) -> list[dict[str, Any]]:
        return self.chance.sample(self.ranks(), count)

    def child(self, node: str, module: str) -> int:
        """Pid of the process of `node` that the agent itself started to run `module`."""
        agent = psutil.Process(self.run.stack.service_pids()[node])
        described = f"{module} on {node}"
        children = wait_until(
            lambda: [child.pid for child in agent.children() if module in child.cmdline()], description=described
        )
        return int(children[0])

    def node_back(self, node: str) -> None:
        wait_until(
            lambda: self.run.client.node(node)["state"] != "lost",
            description=f"{node} to be back",
            timeout_s=RETURN_TIMEOUT_S,
        )


def crash(victim: Victim) -> str:
    return victim.run.inject.crash(victim.job, victim.some(1)[0]["rank"])


def crash_of_two(victim: Victim) -> str:
    workers = victim.some(2)
    for worker in workers:
        os.kill(worker["pid"], signal.SIGKILL)
    return f"SIGKILL to ranks {[worker['rank'] for worker in workers]}"


def hang(victim: Victim) -> str:
    return victim.run.inject.hang(victim.job, victim.some(1)[0]["rank"])


def node_loss(victim: Victim) -> str:
    """The node comes back when the job has gone on without it."""
    node = str(victim.some(1)[0]["node"])
    victim.run.stack.power_off(node)
    victim.settle(f"the loss of {node}")
    victim.run.stack.power_on(node)
    victim.node_back(node)
    return f"{node} lost, and back later"


def node_reboot(victim: Victim) -> str:
    node = str(victim.some(1)[0]["node"])
    victim.run.stack.power_off(node)
    victim.run.stack.power_on(node)
    return f"{node} off and on"


def crash_while_preparing(victim: Victim) -> str:
    """The second fault hits another node as soon as the first one's recovery shows, or a moment later."""
    first, second = victim.some(2)
    template = psutil.Process(victim.child(second["node"], "holdfast.train.template"))
    os.kill(first["pid"], signal.SIGKILL)
    victim.run.wait(victim.job, "a recovery", lambda view: view["phase"] != "running" or view["incident"] is not None)
    time.sleep(victim.chance.uniform(0.0, 0.2))  # where in the recovery it strikes is what the seed varies
    for child in template.children():
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    return f"SIGKILL to rank {first['rank']}, and during the recovery to all workers of {second['node']}"


def node_loss_while_preparing(victim: Victim) -> str:
    first, second = victim.some(2)
    os.kill(first["pid"], signal.SIGKILL)
    time.sleep(victim.chance.uniform(0.0, 0.2))
    victim.run.stack.power_off(second["node"])
    victim.settle(f"a crash and the loss of {second['node']}")
    victim.run.stack.power_on(second["node"])
    victim.node_back(second["node"])
    return f"SIGKILL to rank {first['rank']}, then {second['node']} lost, and back later"


def template_dies(victim: Victim) -> str:
    node = victim.some(1)[0]["node"]
    os.kill(victim.child(node, "holdfast.train.template"), signal.SIGKILL)
    return f"SIGKILL to the worker template of {node}"


def replicator_dies(victim: Victim) -> str:
    node = victim.some(1)[0]["node"]
    os.kill(victim.child(node, "holdfast.replicator"), signal.SIGKILL)
    return f"SIGKILL to the replicator of {node}"


def diagnostics_restarts(victim: Victim) -> str:
    _restart(victim, "diagnostics")
    return "SIGKILL to diagnostics, and started again"


def supervisor_restarts(victim: Victim) -> str:
    _restart(victim, "supervisor")
    return "SIGKILL to the supervisor, and started again"


def crash_without_diagnostics(victim: Victim) -> str:
    worker = victim.some(1)[0]
    victim.run.stack.kill_service("diagnostics")
    os.kill(worker["pid"], signal.SIGKILL)
    victim.run.stack.start_service("diagnostics")
    return f"SIGKILL to rank {worker['rank']} while diagnostics was away"


def supervisor_dies_in_a_recovery(victim: Victim) -> str:
    worker = victim.some(1)[0]
    os.kill(worker["pid"], signal.SIGKILL)
    time.sleep(victim.chance.uniform(0.0, 0.3))
    _restart(victim, "supervisor")
    return f"SIGKILL to rank {worker['rank']}, then to the supervisor"


def redis_restarts(victim: Victim) -> str:
    away_s = victim.chance.choice(REDIS_AWAY_S)
    victim.run.stack.kill_service("redis")
    time.sleep(away_s)
    victim.run.stack.start_service("redis")
    return f"SIGKILL to Redis, away for {away_s:g} s"


def crash_without_redis(victim: Victim) -> str:
    worker = victim.some(1)[0]
    victim.run.stack.kill_service("redis")
    os.kill(worker["pid"], signal.SIGKILL)
    time.sleep(victim.chance.choice(REDIS_AWAY_S))
    victim.run.stack.start_service("redis")
    return f"SIGKILL to rank {worker['rank']} while Redis was away"


def _restart(victim: Victim, service: str) -> None:
    victim.run.stack.kill_service(service)
    victim.run.stack.start_service(service)


Fault = Callable[[Victim], str]

DISTURBS: tuple[Fault, ...] = (
    crash,
    crash_of_two,
    hang,
    node_loss,
    node_reboot,
    crash_while_preparing,
    node_loss_while_preparing,
    template_dies,
    crash_without_diagnostics,
    supervisor_dies_in_a_recovery,
    crash_without_redis,
)
LEAVES_ALONE: tuple[Fault, ...] = (replicator_dies, diagnostics_restarts, supervisor_restarts, redis_restarts)
FAULTS: tuple[Fault, ...] = (*DISTURBS, *LEAVES_ALONE)
