"""The kinds of fault that strike a part of Holdfast in a phase of an incident: SIGKILL, after which the part is started
again as by a service manager, SIGSTOP for half a minute, or a clock that jumps.

The draw selects the cause of the incident (`CAUSES`) and the phase (`MOMENTS`). A kind begins the incident itself, waits for
the phase in the answers of the API, and strikes. `Struck.incidents_max` limits what may come of it: an incident that is opened
twice, or carried out twice, is an error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.soak.environment_kinds import jump
from benchmarks.soak.field import Field, NotNow, Struck, away_for, frozen, kind, power_off
from benchmarks.soak.process_kinds import replicator_kill, worker_kill
from benchmarks.soak.rig import DIAGNOSTICS, REPLICATOR, SUPERVISORS
from benchmarks.soak.schedule import Need

PHASE_TIMEOUT_S = 25.0
PHASE_POLL_S = 0.005
JITTER_S = 0.15  # the strike comes up to this time after the phase was seen
BACK_S = 1.0  # a service manager starts what has ended
FREEZE_S = 30.0
JUMP_S = 10.0
OPEN_STATES = ("open", "decided", "preparing", "starting")

# How an incident begins: returns what it affects and what ends it.
Cause = Callable[[Field, random.Random], Struck]


def _crash(on: Field, chance: random.Random) -> Struck:
    return worker_kill(on, chance, 0.0)


def _node_replaced(on: Field, chance: random.Random) -> Struck:
    """All shards of one node have to be fetched."""
    return power_off(on, [on.node(chance)], BACK_S, disk=True)


def _cordon(on: Field, chance: random.Random) -> Struck:
    node = on.node(chance)
    if not on.api.post(f"/v1/nodes/{node}/cordon", {"reason": "a planned change"}):
        raise NotNow(f"{node} cannot be cordoned")
    return Struck(f"{node} is cordoned", (node,), partial(on.api.post, f"/v1/nodes/{node}/uncordon", {}))


def _growth(on: Field, chance: random.Random) -> Struck:
    full = (on.api.job(on.job) or {}).get("mesh", {}).get("dp", 0)
    if full < 2:
        raise NotNow("the job has one replica")
    _resize(on, full - 1)
    _resize(on, full, wait=False)
    return Struck(f"growth from {full - 1} to {full} replicas", on.rig.node_names)


def _resize(on: Field, dp: int, *, wait: bool = True) -> None:
    if not on.api.post(f"/v1/jobs/{on.job}/resize", {"dp": dp}):
        raise NotNow(f"no resize to {dp} replicas")
    if wait:
        _until(on, lambda view: view["phase"] == "running" and view["mesh"]["dp"] == dp and not view["incident"])


CAUSES: Mapping[str, tuple[Cause, int]] = {  # name → (how it begins, the number of incidents that it is)
    "crash": (_crash, 1),
    "node replaced": (
        _node_replaced,
        2,
    ),  # without a spare that is ready, the run goes on with fewer replicas and grows later
    "cordon": (_cordon, 1),
    "growth": (_growth, 2),
}


def _state(*states: str) -> Callable[[Mapping[str, Any]], bool]:
    """The open incident has reached one of the states, or is over already."""

    def reached(view: Mapping[str, Any]) -> bool:
        return view["incident"] is not None and view["incident"]["state"] in states

    return reached


MOMENTS: Mapping[str, Callable[[Mapping[str, Any]], bool] | None] = {
    "at once": None,
    "incident open": _state(*OPEN_STATES),
    "decided": _state(*OPEN_STATES[1:]),
    "preparing": _state(*OPEN_STATES[2:]),
    "starting": _state("starting"),
    "resolved": lambda view: view["phase"] == "running" and view["incident"] is None,
    "saving": lambda view: view["phase"] == "running" and (view["step"] or 0) % 20 in (0, 1),
}


def _until(on: Field, reached: Callable[[Mapping[str, Any]], bool]) -> bool:
    deadline = time.monotonic() + PHASE_TIMEOUT_S
    while time.monotonic() < deadline:
        view = on.api.job(on.job)
        if view is not None and reached(view):
            return True
        time.sleep(PHASE_POLL_S)
    return False


def _amid(on: Field, chance: random.Random, strike: Callable[[], Struck], more: int = 0) -> Struck:
    """Begin an incident, and strike in one of its phases. `more`: incidents that the struck part is a cause of itself."""
    name, moment = chance.choice(list(CAUSES)), chance.choice(list(MOMENTS))
    begin, incidents = CAUSES[name]
    cause = begin(on, chance)
    try:
        if (reached := MOMENTS[moment]) is not None:
            if moment in ("resolved", "saving"):
                _until(on, _state(*OPEN_STATES))
            _until(on, reached)
        time.sleep(chance.uniform(0.0, JITTER_S))
        struck = strike()
    except NotNow:
        cause.undo()
        raise

    def undo() -> None:
        struck.undo()
        cause.undo()

    what = f"{cause.what}; {moment}: {struck.what}"
    return Struck(what, (*cause.nodes, *struck.nodes), undo, incidents_max=incidents + more)


def _declare(name: str, does: str, strike: Callable[[Field, random.Random, float], Struck], hold_s: float, *, more: int = 0,
             needs: Need | None = None) -> None:  # fmt: skip
    def amid(on: Field, chance: random.Random, hold_s: float) -> Struck:
        return _amid(on, chance, partial(strike, on, chance, hold_s), more)

    amid.__name__ = f"{name}_amid"
    kind(
        f"{does} in a phase of an incident",
        leaves_alone=False,
        unfit=True,
        hold_s=(hold_s, hold_s),
        recover_s=60.0,
        aftermath_s=6.0,
        alone=True,
        needs=needs,
    )(amid)


Names = Callable[[Field], list[str]]  # the services or nodes that are one part of Holdfast


def _away(names: Names, on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, names(on))
    return away_for(on, [name], f"SIGKILL to {name}", _as_node(on, name))


def _frozen(names: Names, on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = on.service(chance, names(on))
    return frozen(on.rig.pid(name), f"{name} is frozen for {hold_s:.0f} s", _as_node(on, name))


def _as_node(on: Field, name: str) -> tuple[str, ...]:
    return (name,) if name in on.rig.node_names else ()


def _leader(on: Field) -> list[str]:
    return [on.leader()]


def _standby(on: Field) -> list[str]:
    leading = on.leader()
    return [name for name in SUPERVISORS if name != leading]


def _diagnostics(_: Field) -> list[str]:
    return list(DIAGNOSTICS)


def _agents(on: Field) -> list[str]:
    return sorted({worker.node for worker in on.workers()}) or list(on.rig.node_names)


def _replicator_frozen(on: Field, chance: random.Random, hold_s: float) -> Struck:
    node = on.node(chance)
    return frozen(on.child(node, REPLICATOR), f"the replicator of {node} is frozen for {hold_s:.0f} s", (node,))


def _clock(names: Names, on: Field, chance: random.Random, hold_s: float) -> Struck:
    name = chance.choice(names(on))
    return jump(on, name, chance, hold_s, _as_node(on, name))


_PARTS: Mapping[str, Names] = {
    "leader": _leader,
    "standby": _standby,
    "diagnostics": _diagnostics,
    "agent": _agents,
}
for _part, _names in _PARTS.items():
    # A node whose agent is away for long is lost, and a run that went on without it grows when the agent is back.
    _more = 2 if _part == "agent" else 0
    _declare(f"{_part}_kill", f"SIGKILL to the {_part}", partial(_away, _names), BACK_S, more=_more)
    _declare(f"{_part}_freeze", f"SIGSTOP to the {_part}", partial(_frozen, _names), FREEZE_S, more=_more)
    _declare(f"{_part}_clock", f"a jump of the clock of the {_part}", partial(_clock, _names), JUMP_S, needs=Need.CLOCK)
_declare("redis_clock", "a jump of the clock of Redis", partial(_clock, lambda _: ["redis"]), JUMP_S, needs=Need.CLOCK)
_declare("replicator_kill", "SIGKILL to the replicator", replicator_kill, 0.0)
_declare("replicator_freeze", "SIGSTOP to the replicator", _replicator_frozen, FREEZE_S)
