"""The kinds of fault of the environment: clocks, full memory and disks, descriptors, networks, stored copies."""

from __future__ import annotations

import random
import resource
import signal
from functools import partial
from pathlib import Path

import psutil

from benchmarks.soak import corrupt
from benchmarks.soak.field import Field, NotNow, Struck, kind, power_off, send
from benchmarks.soak.network import HOST
from benchmarks.soak.relay import Mode
from benchmarks.soak.rig import DIAGNOSTICS, REPLICATOR, SUPERVISORS
from benchmarks.soak.schedule import Need

FILL_BYTES = 1 << 20
DESCRIPTORS_LEFT = 2
JUMPS_S = (-3600.0, -330.0, -5.0, 5.0, 330.0, 3600.0)


# ---------------------------------------------------------------- clocks


def jump(on: Field, name: str, chance: random.Random, hold_s: float, nodes: tuple[str, ...] = ()) -> Struck:
    assert on.rig.clocks is not None, "kinds that the machine lacks the means for are not planned"
    jump_s = chance.choice(JUMPS_S)
    on.rig.clocks.set(name, jump_s)
    what = f"the clock of {name} jumps by {jump_s:+.0f} s for {hold_s:.1f} s"
    return Struck(what, nodes, partial(on.rig.clocks.set, name, 0.0))


@kind("a node's clock jumps, and jumps back", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_node(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return jump(on, node, chance, hold_s, (node,))


@kind("a supervisor's clock jumps", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_supervisor(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return jump(on, on.service(chance, SUPERVISORS), chance, hold_s)


@kind("the clock of a diagnostics jumps", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_diagnostics(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return jump(on, on.service(chance, DIAGNOSTICS), chance, hold_s)


@kind("the clock of Redis jumps", leaves_alone=True, hold_s=(1.0, 8.0), aftermath_s=6.0, needs=Need.CLOCK)
def clock_redis(on: Field, chance: random.Random, hold_s: float) -> Struck:
    return jump(on, "redis", chance, hold_s)


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
    send(worker.pid, signal.SIGSTOP)
    flipped = corrupt.image(on.rig.shm(worker.node), on.job, chance)
    send(worker.pid, signal.SIGKILL)
    return Struck(f"SIGKILL to rank {worker.rank} on {worker.node}, {flipped or 'nothing to flip'}", (worker.node,))


@kind("a bit flips on a node's disk, then all nodes lose power", leaves_alone=False, recover_s=45.0, alone=True)
def corrupt_disk(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    flipped = corrupt.shard(on.rig.disk(worker.node), on.job, chance, rank=worker.rank)
    power = power_off(on, on.rig.node_names, hold_s, disk=False)
    return Struck(f"{power.what}, {flipped or 'nothing to flip'}", power.nodes, power.undo)


@kind("a bit flips in a peer's copy, and the node that it is a copy of is replaced", leaves_alone=False, unfit=True,
      hold_s=(0.5, 5.0), recover_s=30.0)  # fmt: skip
def corrupt_peer(on: Field, chance: random.Random, hold_s: float) -> Struck:
    (worker,) = on.some(chance)
    flipped = ""
    for node in on.rig.node_names:
        if node != worker.node:
            flipped = flipped or corrupt.shard(on.rig.disk(node), on.job, chance, rank=worker.rank)
    power = power_off(on, [worker.node], hold_s, disk=True)
    return Struck(f"{power.what}, {flipped or 'nothing to flip'}", power.nodes, power.undo)


@kind("a bit flips in the object store, and every node is replaced", leaves_alone=False, recover_s=45.0, alone=True,
      keeps_near=False)  # fmt: skip
def corrupt_store(on: Field, chance: random.Random, hold_s: float) -> Struck:
    flipped = corrupt.stored(on.rig.store, on.job, chance)
    power = power_off(on, on.rig.node_names, hold_s, disk=True)
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
