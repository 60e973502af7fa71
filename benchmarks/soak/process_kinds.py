"""The kinds of fault that stop processes: workers, agents and nodes, the control plane."""

from __future__ import annotations

import random
import signal
from functools import partial

import psutil

from benchmarks.soak.field import Field, NotNow, Struck, away_for, frozen, kind, power_off, send
from benchmarks.soak.rig import DIAGNOSTICS, REPLICATOR, SERVICES, SUPERVISORS, TEMPLATE

# ---------------------------------------------------------------- workers


@kind("SIGKILL to one rank", leaves_alone=False)
def worker_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    send(worker.pid, signal.SIGKILL)
    return Struck(f"SIGKILL to rank {worker.rank} on {worker.node}", (worker.node,))


@kind("SIGKILL to two ranks", leaves_alone=False)
def workers_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    workers = on.some(chance, 2)
    for worker in workers:
        send(worker.pid, signal.SIGKILL)
    return Struck(f"SIGKILL to ranks {[worker.rank for worker in workers]}", tuple(worker.node for worker in workers))


@kind("SIGKILL to the reaper of one rank, which ends with it", leaves_alone=False)
def reaper_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    try:
        reaper = psutil.Process(worker.pid).ppid()
    except psutil.NoSuchProcess as error:
        raise NotNow(f"rank {worker.rank} has ended") from error
    send(reaper, signal.SIGKILL)
    return Struck(f"SIGKILL to the reaper of rank {worker.rank} on {worker.node}", (worker.node,))


@kind("SIGSTOP to one rank, permanently: a hang", leaves_alone=False, recover_s=30.0)
def worker_stop(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    send(worker.pid, signal.SIGSTOP)
    return Struck(f"SIGSTOP to rank {worker.rank} on {worker.node}", (worker.node,))


@kind("SIGSTOP to one rank, which continues before the hang timeout", leaves_alone=True, hold_s=(0.2, 1.0))
def worker_pause(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    send(worker.pid, signal.SIGSTOP)
    return Struck(
        f"rank {worker.rank} is frozen for {hold_s:.1f} s",
        (worker.node,),
        partial(send, worker.pid, signal.SIGCONT),
    )


# ---------------------------------------------------------------- nodes


@kind("SIGKILL to an agent, whose workers end with it", leaves_alone=False, hold_s=(0.5, 8.0), unfit=True)
def agent_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return away_for(on, [node], f"SIGKILL to the agent of {node}, back after {hold_s:.1f} s", nodes=(node,))


@kind("SIGSTOP to an agent, whose workers continue", leaves_alone=True, hold_s=(2.0, 7.0), aftermath_s=6.0)
def agent_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return frozen(on.rig.pid(node), f"the agent of {node} is frozen for {hold_s:.1f} s", (node,))


@kind("power failure of a node: processes and memory are lost", leaves_alone=False, hold_s=(0.5, 10.0), unfit=True)
def node_power(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return power_off(on, [on.node(chance)], hold_s, disk=False)


@kind("a node is replaced: its disk is lost as well", leaves_alone=False, hold_s=(0.5, 10.0), unfit=True)
def node_replaced(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return power_off(on, [on.node(chance)], hold_s, disk=True)


@kind(
    "power failure of every node: shards remain on disks only",
    leaves_alone=False,
    hold_s=(0.5, 3.0),
    recover_s=45.0,
    alone=True,
)
def fleet_power(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return power_off(on, on.rig.node_names, hold_s, disk=False)


@kind(
    "every node is replaced: shards remain in the object store only",
    leaves_alone=False,
    hold_s=(0.5, 3.0),
    recover_s=45.0,
    alone=True,
    keeps_near=False,
)
def fleet_replaced(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return power_off(on, on.rig.node_names, hold_s, disk=True)


@kind("SIGKILL to a worker template, while running workers continue", leaves_alone=True)
def template_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    send(on.child(node, TEMPLATE), signal.SIGKILL)
    return Struck(f"SIGKILL to the template of {node}", (node,))


@kind("SIGKILL to a replicator", leaves_alone=True)
def replicator_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    send(on.child(node, REPLICATOR), signal.SIGKILL)
    return Struck(f"SIGKILL to the replicator of {node}", (node,))


@kind("SIGSTOP to a replicator", leaves_alone=True, hold_s=(1.0, 8.0))
def replicator_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return frozen(on.child(node, REPLICATOR), f"the replicator of {node} is frozen for {hold_s:.1f} s", (node,))


# ---------------------------------------------------------------- control plane


@kind("SIGKILL to one diagnostics", leaves_alone=True, hold_s=(0.0, 5.0), aftermath_s=4.0)
def diagnostics_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, DIAGNOSTICS)
    return away_for(on, [name], f"SIGKILL to {name}, back after {hold_s:.1f} s")


@kind("SIGKILL to both diagnostics", leaves_alone=True, hold_s=(0.5, 10.0), aftermath_s=4.0)
def diagnostics_all_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return away_for(on, DIAGNOSTICS, f"SIGKILL to both diagnostics, back after {hold_s:.1f} s")


@kind("SIGSTOP to one diagnostics", leaves_alone=True, hold_s=(2.0, 20.0), aftermath_s=6.0)
def diagnostics_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, DIAGNOSTICS)
    return frozen(on.rig.pid(name), f"{name} is frozen for {hold_s:.1f} s")


@kind("SIGKILL to the leader", leaves_alone=True, hold_s=(0.0, 5.0), aftermath_s=4.0)
def supervisor_leader_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.leader()
    return away_for(on, [name], f"SIGKILL to {name}, the leader, back after {hold_s:.1f} s")


@kind("SIGKILL to the standby", leaves_alone=True, hold_s=(0.0, 5.0))
def supervisor_standby_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    leading = on.leader()
    name = on.service(chance, [each for each in SUPERVISORS if each != leading])
    return away_for(on, [name], f"SIGKILL to {name}, the standby, back after {hold_s:.1f} s")


@kind("SIGKILL to both supervisors", leaves_alone=True, hold_s=(0.5, 10.0), aftermath_s=4.0)
def supervisor_all_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return away_for(on, SUPERVISORS, f"SIGKILL to both supervisors, back after {hold_s:.1f} s")


@kind("SIGSTOP to the leader: the standby takes over, and the old leader continues", leaves_alone=True, hold_s=(1.0, 15.0),
      aftermath_s=6.0)  # fmt: skip
def supervisor_leader_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.leader()
    return frozen(on.rig.pid(name), f"{name}, the leader, is frozen for {hold_s:.1f} s")


@kind("SIGSTOP to both supervisors", leaves_alone=True, hold_s=(2.0, 15.0), aftermath_s=6.0)
def supervisor_all_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    pids = [on.rig.pid(on.service(chance, [name])) for name in SUPERVISORS]
    frozen = [frozen(pid, "") for pid in pids]

    def undo() -> None:
        for each in frozen:
            each.undo()

    return Struck(f"both supervisors are frozen for {hold_s:.1f} s", (), undo)


@kind("SIGKILL to Redis", leaves_alone=True, hold_s=(0.0, 5.0), aftermath_s=4.0)
def redis_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, ["redis"])
    return away_for(on, [name], f"SIGKILL to Redis, back after {hold_s:.1f} s")


@kind("SIGSTOP to Redis", leaves_alone=True, hold_s=(0.5, 8.0), aftermath_s=4.0)
def redis_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, ["redis"])
    return frozen(on.rig.pid(name), f"Redis is frozen for {hold_s:.1f} s")


@kind("Redis, diagnostics and supervisors are down for long", leaves_alone=True, alone=True, long=True, aftermath_s=8.0)
def control_plane_away(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return away_for(on, SERVICES, f"the control plane is away for {hold_s:.0f} s")


@kind("the same, and a rank is killed", leaves_alone=False, alone=True, long=True, recover_s=30.0, aftermath_s=4.0)
def crash_without_control_plane(on: Field, chance: random.Random, hold_s: float) -> Struck:
    away = away_for(on, SERVICES, f"the control plane is away for {hold_s:.0f} s")
    try:
        crash = worker_kill(on, chance, 0.0)
    except NotNow:
        away.undo()
        raise
    return Struck(f"{away.what}; {crash.what}", crash.nodes, away.undo)
