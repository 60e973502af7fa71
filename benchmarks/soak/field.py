"""What faults are injected into, what all kinds of fault need, and the table in which kinds are registered.

A kind is a function with a declaration. The function gets the field, its own random numbers and the duration of the fault; it
injects the fault at once and returns a description. The soak undoes the fault after its duration. The target is drawn at the
injection, from the running processes.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from benchmarks.soak.rig import SUPERVISORS, Rig
from benchmarks.soak.schedule import Kind
from benchmarks.soak.watch import Api, leader


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
    api: Api
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
    """An injected fault. `nodes`: the affected nodes; an action against any other node is an error. `incidents_max`: the
    incidents and the generations that may come of it; None = not judged."""

    what: str
    nodes: tuple[str, ...] = ()
    undo: Callable[[], object] = lambda: None
    incidents_max: int | None = None


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


def send(pid: int, number: signal.Signals) -> None:
    try:
        psutil.Process(pid).send_signal(number)
    except psutil.NoSuchProcess:
        return


def frozen(pid: int, what: str, nodes: tuple[str, ...] = ()) -> Struck:
    send(pid, signal.SIGSTOP)
    return Struck(what, nodes, partial(send, pid, signal.SIGCONT))


def away_for(on: Field, names: Sequence[str], what: str, nodes: tuple[str, ...] = ()) -> Struck:
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


def power_off(on: Field, nodes: Sequence[str], hold_s: float, *, disk: bool) -> Struck:
    struck = [node for node in nodes if on.rig.running(node) and node not in on.down]
    if not struck:
        raise NotNow("no node to switch off")
    on.down.update(struck)
    for node in struck:
        on.rig.power_off(node, disk=disk)
    done = "replaced" if disk else "without power"
    who = "every node" if len(struck) == on.rig.nodes else ", ".join(struck)
    return Struck(f"{who} {done}, back after {hold_s:.1f} s", tuple(struck), partial(_back, on, struck))
