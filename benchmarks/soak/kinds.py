"""The kinds of fault: how each is injected, which nodes it affects, how it is undone. A new kind is a function with a
declaration.

A function gets the field, its own random numbers and the duration of the fault; it injects the fault at once and returns a
description. The soak undoes the fault after its duration. The target is drawn at the injection, from the running processes.
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak import corrupt
from benchmarks.soak.network import HOST
from benchmarks.soak.relay import Mode
from benchmarks.soak.rig import DIAGNOSTICS, REPLICATOR, SERVICES, SUPERVISORS, TEMPLATE, Rig
from benchmarks.soak.schedule import Kind, Need
from benchmarks.soak.watch import leader

FILL_BYTES = 1 << 20
DESCRIPTORS_LEFT = 2
JUMPS_S = (-3600.0, -330.0, -5.0, 5.0, 330.0, 3600.0)


class NotNow(Exception):
    """This fault cannot be injected at this moment, because it has no target."""


@dataclass(frozen=True, slots=True)
class Worker:
    rank: int
    pid: int
    node: str


@dataclass(slots=True)
class Field:
    """The targets of faults: the processes, and the job that runs on them. `down`: processes that must not be started now."""

    rig: Rig
    job: str
    workers: Callable[[], list[Worker]]
    down: set[str] = field(default_factory=set)

    def some(self, chance: random.Random, count: int = 1) -> list[Worker]:
        workers = self.workers()
        if len(workers) < count:
            raise NotNow(f"{len(workers)} ranks run")
        return chance.sample(workers, count)

    def node(self, chance: random.Random) -> str:
        """Choose a node whose agent runs, with ranks if possible."""
        ready = [name for name in self.rig.node_names if self.rig.running(name) and name not in self.down]
        working = sorted({worker.node for worker in self.workers()} & set(ready))
        if not ready:
            raise NotNow("no node runs")
        return chance.choice(working or ready)

    def service(self, chance: random.Random, names: Sequence[str]) -> str:
        ready = [name for name in names if self.rig.running(name) and name not in self.down]
        if not ready:
            raise NotNow(f"none of {', '.join(names)} runs")
        return chance.choice(ready)

    def leader(self) -> str:
        name = leader(self.rig.redis_url) if self.rig.running("redis") else ""
        if name not in SUPERVISORS or not self.rig.running(name):
            raise NotNow("no supervisor leads")
        return name

    def child(self, node: str, module: str) -> int:
        pid = self.rig.child(node, module)
        if pid is None:
            raise NotNow(f"{node} runs no {module}")
        return pid


@dataclass(frozen=True, slots=True)
class Struck:
    """An injected fault. `nodes`: the affected nodes; an action against any other node is an error."""

    what: str
    nodes: tuple[str, ...] = ()
    undo: Callable[[], None] = lambda: None


Strike = Callable[[Field, random.Random, float], Struck]

KINDS: dict[str, Kind] = {}
STRIKES: dict[str, Strike] = {}


def kind(does: str, **declared: Any) -> Callable[[Strike], Strike]:
    def register(strike: Strike) -> Strike:
        name = getattr(strike, "__name__", "")
        KINDS[name] = Kind(name=name, does=does, **declared)
        STRIKES[name] = strike
        return strike

    return register


# ---------------------------------------------------------------- workers


@kind("SIGKILL to one rank", leaves_alone=False)
def worker_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    _send(worker.pid, signal.SIGKILL)
    return Struck(f"SIGKILL to rank {worker.rank} on {worker.node}", (worker.node,))


@kind("SIGKILL to two ranks", leaves_alone=False)
def workers_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    workers = on.some(chance, 2)
    for worker in workers:
        _send(worker.pid, signal.SIGKILL)
    return Struck(f"SIGKILL to ranks {[worker.rank for worker in workers]}", tuple(worker.node for worker in workers))


@kind("SIGKILL to the reaper of one rank, which ends with it", leaves_alone=False)
def reaper_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    try:
        reaper = psutil.Process(worker.pid).ppid()
    except psutil.NoSuchProcess as error:
        raise NotNow(f"rank {worker.rank} has ended") from error
    _send(reaper, signal.SIGKILL)
    return Struck(f"SIGKILL to the reaper of rank {worker.rank} on {worker.node}", (worker.node,))


@kind("SIGSTOP to one rank, permanently: a hang", leaves_alone=False, recover_s=30.0)
def worker_stop(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    _send(worker.pid, signal.SIGSTOP)
    return Struck(f"SIGSTOP to rank {worker.rank} on {worker.node}", (worker.node,))


@kind("SIGSTOP to one rank, which continues before the hang timeout", leaves_alone=True, hold_s=(0.2, 1.0))
def worker_pause(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    _send(worker.pid, signal.SIGSTOP)
    return Struck(
        f"rank {worker.rank} is frozen for {hold_s:.1f} s",
        (worker.node,),
        partial(_send, worker.pid, signal.SIGCONT),
    )


# ---------------------------------------------------------------- nodes


@kind("SIGKILL to an agent, whose workers end with it", leaves_alone=False, hold_s=(0.5, 8.0), unfit=True)
def agent_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _away(on, [node], f"SIGKILL to the agent of {node}, back after {hold_s:.1f} s", nodes=(node,))


@kind("SIGSTOP to an agent, whose workers continue", leaves_alone=True, hold_s=(2.0, 7.0), aftermath_s=6.0)
def agent_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _frozen(on.rig.pid(node), f"the agent of {node} is frozen for {hold_s:.1f} s", (node,))


@kind("power failure of a node: processes and memory are lost", leaves_alone=False, hold_s=(0.5, 10.0), unfit=True)
def node_power(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _power(on, [on.node(chance)], hold_s, disk=False)


@kind("a node is replaced: its disk is lost as well", leaves_alone=False, hold_s=(0.5, 10.0), unfit=True)
def node_replaced(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _power(on, [on.node(chance)], hold_s, disk=True)


@kind(
    "power failure of every node: shards remain on disks only",
    leaves_alone=False,
    hold_s=(0.5, 3.0),
    recover_s=45.0,
    alone=True,
)
def fleet_power(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _power(on, on.rig.node_names, hold_s, disk=False)


@kind(
    "every node is replaced: shards remain in the object store only",
    leaves_alone=False,
    hold_s=(0.5, 3.0),
    recover_s=45.0,
    alone=True,
    keeps_near=False,
)
def fleet_replaced(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _power(on, on.rig.node_names, hold_s, disk=True)


@kind("SIGKILL to a worker template, while running workers continue", leaves_alone=True)
def template_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    _send(on.child(node, TEMPLATE), signal.SIGKILL)
    return Struck(f"SIGKILL to the template of {node}", (node,))


@kind("SIGKILL to a replicator", leaves_alone=True)
def replicator_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    _send(on.child(node, REPLICATOR), signal.SIGKILL)
    return Struck(f"SIGKILL to the replicator of {node}", (node,))


@kind("SIGSTOP to a replicator", leaves_alone=True, hold_s=(1.0, 8.0))
def replicator_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _frozen(on.child(node, REPLICATOR), f"the replicator of {node} is frozen for {hold_s:.1f} s", (node,))


# ---------------------------------------------------------------- control plane


@kind("SIGKILL to one diagnostics", leaves_alone=True, hold_s=(0.0, 5.0), aftermath_s=4.0)
def diagnostics_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, DIAGNOSTICS)
    return _away(on, [name], f"SIGKILL to {name}, back after {hold_s:.1f} s")


@kind("SIGKILL to both diagnostics", leaves_alone=True, hold_s=(0.5, 10.0), aftermath_s=4.0)
def diagnostics_all_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _away(on, DIAGNOSTICS, f"SIGKILL to both diagnostics, back after {hold_s:.1f} s")


@kind("SIGSTOP to one diagnostics", leaves_alone=True, hold_s=(2.0, 20.0), aftermath_s=6.0)
def diagnostics_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, DIAGNOSTICS)
    return _frozen(on.rig.pid(name), f"{name} is frozen for {hold_s:.1f} s")


@kind("SIGKILL to the leader", leaves_alone=True, hold_s=(0.0, 5.0), aftermath_s=4.0)
def supervisor_leader_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.leader()
    return _away(on, [name], f"SIGKILL to {name}, the leader, back after {hold_s:.1f} s")


@kind("SIGKILL to the standby", leaves_alone=True, hold_s=(0.0, 5.0))
def supervisor_standby_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    leading = on.leader()
    name = on.service(chance, [each for each in SUPERVISORS if each != leading])
    return _away(on, [name], f"SIGKILL to {name}, the standby, back after {hold_s:.1f} s")


@kind("SIGKILL to both supervisors", leaves_alone=True, hold_s=(0.5, 10.0), aftermath_s=4.0)
def supervisor_all_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _away(on, SUPERVISORS, f"SIGKILL to both supervisors, back after {hold_s:.1f} s")


@kind("SIGSTOP to the leader: the standby takes over, and the old leader continues", leaves_alone=True, hold_s=(1.0, 15.0),
      aftermath_s=6.0)  # fmt: skip
def supervisor_leader_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.leader()
    return _frozen(on.rig.pid(name), f"{name}, the leader, is frozen for {hold_s:.1f} s")


@kind("SIGSTOP to both supervisors", leaves_alone=True, hold_s=(2.0, 15.0), aftermath_s=6.0)
def supervisor_all_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    pids = [on.rig.pid(on.service(chance, [name])) for name in SUPERVISORS]
    frozen = [_frozen(pid, "") for pid in pids]

    def undo() -> None:
        for each in frozen:
            each.undo()

    return Struck(f"both supervisors are frozen for {hold_s:.1f} s", (), undo)


@kind("SIGKILL to Redis", leaves_alone=True, hold_s=(0.0, 5.0), aftermath_s=4.0)
def redis_kill(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, ["redis"])
    return _away(on, [name], f"SIGKILL to Redis, back after {hold_s:.1f} s")


@kind("SIGSTOP to Redis", leaves_alone=True, hold_s=(0.5, 8.0), aftermath_s=4.0)
def redis_freeze(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, ["redis"])
    return _frozen(on.rig.pid(name), f"Redis is frozen for {hold_s:.1f} s")


@kind("Redis, diagnostics and supervisors are down for long", leaves_alone=True, alone=True, long=True, aftermath_s=8.0)
def control_plane_away(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _away(on, SERVICES, f"the control plane is away for {hold_s:.0f} s")


@kind("the same, and a rank is killed", leaves_alone=False, alone=True, long=True, recover_s=30.0, aftermath_s=4.0)
def crash_without_control_plane(on: Field, chance: random.Random, hold_s: float) -> Struck:
    away = _away(on, SERVICES, f"the control plane is away for {hold_s:.0f} s")
    try:
        crash = worker_kill(on, chance, 0.0)
    except NotNow:
        away.undo()
        raise
    return Struck(f"{away.what}; {crash.what}", crash.nodes, away.undo)


# ---------------------------------------------------------------- clocks


def _jump(on: Field, name: str, chance: random.Random, hold_s: float, nodes: tuple[str, ...] = ()) -> Struck:
    assert on.rig.clocks is not None, "kinds that the machine lacks the means for are not planned"
    jump_s = chance.choice(JUMPS_S)
    on.rig.clocks.set(name, jump_s)
    what = f"the clock of {name} jumps by {jump_s:+.0f} s for {hold_s:.1f} s"
    return Struck(what, nodes, partial(on.rig.clocks.set, name, 0.0))


@kind("a node's clock jumps, and jumps back", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_node(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _jump(on, node, chance, hold_s, (node,))


@kind("a supervisor's clock jumps", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_supervisor(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _jump(on, on.service(chance, SUPERVISORS), chance, hold_s)


@kind("the clock of a diagnostics jumps", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_diagnostics(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _jump(on, on.service(chance, DIAGNOSTICS), chance, hold_s)


@kind("the clock of Redis jumps", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_redis(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return _jump(on, "redis", chance, hold_s)


# ---------------------------------------------------------------- full


@kind("a node's disk is full", leaves_alone=True, hold_s=(3.0, 10.0), needs=Need.MOUNT)
def disk_full(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _full(on.rig.disk(node), f"the disk of {node} is full for {hold_s:.1f} s", node)


@kind("a node's shared memory is full", leaves_alone=True, hold_s=(3.0, 10.0), needs=Need.MOUNT)
def memory_full(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _full(on.rig.shm(node), f"the shared memory of {node} is full for {hold_s:.1f} s", node)


@kind("an agent has no descriptors left", leaves_alone=True, hold_s=(3.0, 10.0))
def descriptors_agent(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _without_descriptors(on.rig.pid(node), f"the agent of {node}", hold_s, (node,))


@kind("a replicator has no descriptors left", leaves_alone=True, hold_s=(3.0, 10.0))
def descriptors_replicator(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return _without_descriptors(on.child(node, REPLICATOR), f"the replicator of {node}", hold_s, (node,))


@kind("a supervisor has no descriptors left", leaves_alone=True, hold_s=(3.0, 10.0), aftermath_s=4.0)
def descriptors_supervisor(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, SUPERVISORS)
    return _without_descriptors(on.rig.pid(name), name, hold_s)


@kind("a diagnostics has no descriptors left", leaves_alone=True, hold_s=(3.0, 10.0), aftermath_s=4.0)
def descriptors_diagnostics(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, DIAGNOSTICS)
    return _without_descriptors(on.rig.pid(name), name, hold_s)


# ---------------------------------------------------------------- network


def _cut(on: Field, node: str, what: str, *pairs: tuple[int, int]) -> Struck:
    assert on.rig.network is not None, "kinds that the machine lacks the means for are not planned"
    for source, target in pairs:
        on.rig.network.cut(source, target)
    return Struck(what, (node,), partial(on.rig.network.heal, on.rig.node_names.index(node)))


@kind("a node is cut off from the control plane only", leaves_alone=True, hold_s=(2.0, 20.0), aftermath_s=6.0,
      needs=Need.NETWORK)  # fmt: skip
def net_control_cut(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    index = on.rig.node_names.index(node)
    what = f"{node} is cut off from the control plane for {hold_s:.1f} s"
    return _cut(on, node, what, (index, HOST), (HOST, index))


@kind("packets of a node to the control plane, or back, are lost: one way", leaves_alone=True, hold_s=(2.0, 15.0),
      aftermath_s=6.0, needs=Need.NETWORK)  # fmt: skip
def net_control_one_way(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    index = on.rig.node_names.index(node)
    pair, way = chance.choice((((index, HOST), "to the control plane"), ((HOST, index), "from the control plane")))
    return _cut(on, node, f"packets of {node} {way} are lost for {hold_s:.1f} s", pair)


@kind("a node is cut off from all others", leaves_alone=False, hold_s=(3.0, 15.0), unfit=True, aftermath_s=4.0,
      needs=Need.NETWORK)  # fmt: skip
def net_node_cut(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    index = on.rig.node_names.index(node)
    others = [HOST, *(each for each in range(on.rig.nodes) if each != index)]
    pairs = [pair for other in others for pair in ((index, other), (other, index))]
    return _cut(on, node, f"{node} is cut off from all others for {hold_s:.1f} s", *pairs)


@kind("packets of a node to the other nodes are lost: one way", leaves_alone=False, hold_s=(3.0, 15.0), unfit=True,
      recover_s=40.0, needs=Need.NETWORK)  # fmt: skip
def net_peers_one_way(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    index = on.rig.node_names.index(node)
    pairs = [(index, other) for other in range(on.rig.nodes) if other != index]
    return _cut(on, node, f"packets of {node} to the other nodes are lost for {hold_s:.1f} s", *pairs)


@kind("a node's network loses packets", leaves_alone=True, hold_s=(3.0, 12.0), needs=Need.NETWORK)
def net_loss(on: Field, chance: random.Random, hold_s: float) -> Struck:
    assert on.rig.network is not None, "kinds that the machine lacks the means for are not planned"
    node, share = on.node(chance), chance.choice((0.005, 0.02))
    index = on.rig.node_names.index(node)
    on.rig.network.lose(index, share)
    what = f"{share:.1%} of the packets of {node} are lost for {hold_s:.1f} s"
    return Struck(what, (node,), partial(on.rig.network.heal, index))


@kind("a node's packets are delayed", leaves_alone=True, hold_s=(3.0, 12.0), needs=Need.NETWORK)
def net_delay(on: Field, chance: random.Random, hold_s: float) -> Struck:
    assert on.rig.network is not None, "kinds that the machine lacks the means for are not planned"
    node, seconds = on.node(chance), chance.choice((0.005, 0.02, 0.05))
    index = on.rig.node_names.index(node)
    on.rig.network.delay(index, seconds)
    what = f"packets of {node} are delayed by {seconds * 1e3:.0f} ms for {hold_s:.1f} s"
    return Struck(what, (node,), partial(on.rig.network.heal, index))


@kind("connections of one service to Redis stall, one way or both, or are reset", leaves_alone=True, hold_s=(1.0, 12.0),
      aftermath_s=6.0)  # fmt: skip
def redis_link(on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, [*DIAGNOSTICS, *SUPERVISORS])
    relay = on.rig.relays[name]
    relay.mode = chance.choice([mode for mode in Mode if mode is not Mode.OPEN])

    def undo() -> None:
        relay.mode = Mode.OPEN

    return Struck(f"the relay from {name} to Redis {relay.mode.value} for {hold_s:.1f} s", (), undo)


# ---------------------------------------------------------------- stored copies


@kind("a bit flips in the memory image of a rank, which is then killed", leaves_alone=False)
def corrupt_memory(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    _send(worker.pid, signal.SIGSTOP)
    flipped = corrupt.image(on.rig.shm(worker.node), on.job, chance)
    _send(worker.pid, signal.SIGKILL)
    return Struck(f"SIGKILL to rank {worker.rank} on {worker.node}, {flipped or 'nothing to flip'}", (worker.node,))


@kind("a bit flips on a node's disk, then all nodes lose power", leaves_alone=False, recover_s=45.0, alone=True)
def corrupt_disk(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    flipped = corrupt.shard(on.rig.disk(worker.node), on.job, chance, rank=worker.rank)
    power = _power(on, on.rig.node_names, hold_s, disk=False)
    return Struck(f"{power.what}, {flipped or 'nothing to flip'}", power.nodes, power.undo)


@kind("a bit flips in a peer's copy, and the node that it is a copy of is replaced", leaves_alone=False, unfit=True,
      hold_s=(0.5, 5.0), recover_s=30.0)  # fmt: skip
def corrupt_peer(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    flipped = ""
    for node in on.rig.node_names:
        if node != worker.node:
            flipped = flipped or corrupt.shard(on.rig.disk(node), on.job, chance, rank=worker.rank)
    power = _power(on, [worker.node], hold_s, disk=True)
    return Struck(f"{power.what}, {flipped or 'nothing to flip'}", power.nodes, power.undo)


@kind("a bit flips in the object store, and every node is replaced", leaves_alone=False, recover_s=45.0, alone=True,
      keeps_near=False)  # fmt: skip
def corrupt_store(on: Field, chance: random.Random, hold_s: float) -> Struck:
    flipped = corrupt.stored(on.rig.store, on.job, chance)
    power = _power(on, on.rig.node_names, hold_s, disk=True)
    return Struck(f"{power.what}, {flipped or 'nothing to flip'}", power.nodes, power.undo)


@kind("the object store is unavailable", leaves_alone=True, hold_s=(2.0, 12.0))
def store_away(on: Field, chance: random.Random, hold_s: float) -> Struck:
    store = on.rig.store
    away = store.with_name("store-away")
    if not store.exists():
        raise NotNow("the object store is already unavailable")
    store.rename(away)
    store.write_text("not a directory, so that all writes fail\n")

    def undo() -> None:
        store.unlink()
        away.rename(store)

    return Struck(f"the object store is unavailable for {hold_s:.1f} s", (), undo)


# ---------------------------------------------------------------- helpers


def _send(pid: int, number: signal.Signals) -> None:
    try:
        psutil.Process(pid).send_signal(number)
    except psutil.NoSuchProcess:
        return


def _frozen(pid: int, what: str, nodes: tuple[str, ...] = ()) -> Struck:
    _send(pid, signal.SIGSTOP)
    return Struck(what, nodes, partial(_send, pid, signal.SIGCONT))


def _away(on: Field, names: Sequence[str], what: str, nodes: tuple[str, ...] = ()) -> Struck:
    killed = [name for name in names if on.rig.running(name) and name not in on.down]
    if not killed:
        raise NotNow(f"{', '.join(names)} already stopped")
    on.down.update(killed)
    for name in killed:
        on.rig.kill(name)
    return Struck(what, nodes, partial(_back, on, killed))


def _back(on: Field, names: Sequence[str]) -> None:
    on.down.difference_update(names)
    for name in names:
        on.rig.start(name)


def _power(on: Field, nodes: Sequence[str], hold_s: float, *, disk: bool) -> Struck:
    struck = [node for node in nodes if on.rig.running(node) and node not in on.down]
    if not struck:
        raise NotNow("no node to switch off")
    on.down.update(struck)
    for node in struck:
        on.rig.power_off(node, disk=disk)
    done = "replaced" if disk else "without power"
    who = "every node" if len(struck) == on.rig.nodes else ", ".join(struck)
    return Struck(f"{who} {done}, back after {hold_s:.1f} s", tuple(struck), partial(_back, on, struck))


def _full(directory: Path, what: str, node: str) -> Struck:
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * FILL_BYTES):
                pass
        except OSError:
            pass  # the file system is full, as intended
    return Struck(what, (node,), partial(filler.unlink, missing_ok=True))


def _without_descriptors(pid: int, who: str, hold_s: float, nodes: tuple[str, ...] = ()) -> Struck:
    try:
        process = psutil.Process(pid)
        soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + DESCRIPTORS_LEFT, hard))
    except psutil.Error as error:
        raise NotNow(f"{who} has ended") from error

    def undo() -> None:
        try:
            process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except psutil.NoSuchProcess:
            return

    return Struck(f"{who} has no descriptors left for {hold_s:.1f} s", nodes, undo)
