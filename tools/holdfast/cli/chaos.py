"""`holdfast inject --every`: injects faults on a schedule, and records the outcome of each.

Theory. The schedule is a function of the seed: the gaps, the kinds and the targets do not depend on the run. A fault that is
due waits until the job runs and no incident is open, so that the first incident that is opened after a fault belongs to it.
The faults go through the API to the agent of the rank's node, which refuses them unless the job file has `chaos: true`.

A fault of the control plane must not affect the job. It is *found* when the API shows its effect: another leader, or another
lifetime of Redis. It is *survived* when the job continues in the same generation without an incident, and the leader has
committed a step that was finished after the fault was found. If the API does not answer again, it is *not survived*."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound, Unavailable
from holdfast.domain.faults import (
    CONTROL_PLANE,
    LASTING,
    LOSS_PERCENT_DEFAULT,
    OFFSET_S_DEFAULT,
    SILENT,
    FaultKind,
    require_allowed,
)
from holdfast.domain.incidents import PLANNED_KINDS

POLL_S: Final = 0.5
INCIDENTS_NEW_MAX: Final = 50  # read at each poll, newest first
INCIDENTS_KNOWN_MAX: Final = 500
SETTLE_S: Final = 300.0  # after the last fault, until its incident is closed
SAY_LATE_S: Final = 60.0
NOT_FOUND_S: Final = 60.0  # a fault without an incident after this time was not found
AWAY_S: Final = 180.0  # limit of the time without an answer of the API after a fault of the control plane
HAPPENED: Final = {FaultKind.LEADER_KILL: "new_leader", FaultKind.REDIS_KILL: "redis_restarted"}
ENDED: Final = ("completed", "failed", "stopped")
CLOSED: Final = ("resolved", "failed")
WEIGHT_MAX: Final = 1000

View = Mapping[str, Any]


class Api(Protocol):
    """The methods of `holdfast.cli.client.Client` that a campaign uses."""

    def job(self, name: str) -> dict[str, Any]: ...

    def incidents(self, job: str | None = None) -> Iterator[dict[str, Any]]: ...

    def findings(self, job: str | None = None, node: str | None = None) -> Iterator[dict[str, Any]]: ...

    def version(self) -> dict[str, Any]: ...

    def inject_fault(
        self,
        name: str,
        kind: str,
        rank: int,
        for_s: float,
        xid: int,
        *,
        loss_percent: float | None = None,
        offset_s: float | None = None,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Due:
    """One fault of the schedule. `after_s`: time since the previous one was due; `pick`: 0 … 1, selects one of the ranks that
    exist when it is injected."""

    after_s: float
    kind: FaultKind
    pick: float


def parse_mix(text: str) -> dict[FaultKind, int]:
    """Parse `crash=3,hang=1`: kinds and their weights. Raises `InvalidSpec`."""
    wanted = f"kinds with weights, as crash=3,hang=1; the kinds are {', '.join(FaultKind)}"
    mix: dict[FaultKind, int] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        number = int(weight) if weight.isdecimal() and len(weight) <= len(str(WEIGHT_MAX)) else WEIGHT_MAX + 1
        if name not in set(FaultKind) or FaultKind(name) in mix or number > WEIGHT_MAX:
            raise InvalidSpec("--mix", text, wanted)
        mix[FaultKind(name)] = number
    if not sum(mix.values()):
        raise InvalidSpec("--mix", text, f"{wanted}; at least one weight is not 0")
    return mix


def schedule(seed: int, every_s: float, mix: Mapping[FaultKind, int]) -> Iterator[Due]:
    """Yield faults without end, with exponential gaps of `every_s` on average (a Poisson process)."""
    source = random.Random(seed)
    kinds = sorted(mix)
    while True:
        gap_s = source.expovariate(1 / every_s)
        (kind,) = source.choices(kinds, [mix[each] for each in kinds])
        yield Due(gap_s, kind, source.random())


def steady_clock() -> Callable[[], float]:
    """Return a clock of Unix seconds that never jumps, because a fault may let this machine's clock jump."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


@dataclass(slots=True)
class Fault:
    """One injected or refused fault and its outcome: a row of the table. Times are Unix seconds of this machine."""

    at: float
    kind: str
    rank: int | None  # None: a fault of the control plane
    node: str
    step: int
    refused: str = ""  # the reason why the fault was not injected
    incident: str = ""
    finding: str = ""  # id of a finding that opened no incident
    found_as: str = ""  # kind of the incident or of the finding
    action: str = ""
    found_after_s: float | None = None
    steps_after_s: float | None = None  # until every rank has finished a step again
    outcome: str = "open"  # survived, not survived, not found, refused, open

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Fault.__slots__}


@dataclass(frozen=True, slots=True)
class Before:
    """State of the control plane and the job before a fault of the control plane was injected."""

    epoch: int
    event_log: str
    generation: int

    def happened(self, kind: str, version: View) -> bool:
        if kind == FaultKind.REDIS_KILL:
            return bool(version.get("event_log")) and version["event_log"] != self.event_log
        return int(version["epoch"]) > self.epoch


@dataclass(slots=True)
class Campaign:
    """One run of the command. `clock` gives Unix seconds, `sleep` is that of `time`."""

    api: Api
    job: str
    seed: int
    every_s: float
    mix: Mapping[FaultKind, int]
    for_s: float
    last_s: float  # length of a lasting fault
    xid: int
    say: Callable[[str], None]
    loss_percent: float = LOSS_PERCENT_DEFAULT
    offset_s: float = OFFSET_S_DEFAULT
    clock: Callable[[], float] = field(default_factory=steady_clock)
    sleep: Callable[[float], None] = time.sleep
    settle_s: float = SETTLE_S
    not_found_s: float = NOT_FOUND_S
    away_s: float = AWAY_S
    faults: list[Fault] = field(default_factory=list)
    ended_by: str = ""
    began_at: float = 0.0
    _known: set[str] = field(default_factory=set)
    _late_reported: float = 0.0
    _before: Before | None = None  # state before the newest fault of the control plane
    _step_then: int = 0  # the job's step when that fault was found

    def run(self) -> None:
        """Inject faults until the time is over, the job has ended, or KeyboardInterrupt. Raises `Conflict` if the job does not
        allow faults."""
        self.began_at = self.clock()
        try:
            view = self.api.job(self.job)
            require_allowed(self.job, bool(view["spec"].get("chaos")))
            self._inject_all()
            self._settle()
        except KeyboardInterrupt:
            self.ended_by = "interrupted"
        self._answer(final=True)

    def _inject_all(self) -> None:
        end = due_at = self.began_at
        end += self.for_s
        for due in schedule(self.seed, self.every_s, self.mix):
            due_at += due.after_s
            if due_at >= end:
                self._wait(lambda _: self.clock() >= end, end)
                self.ended_by = self.ended_by or "the time is over"
                return
            view = self._wait(partial(self._is_time, due_at), end)
            while view is not None and not self._inject(due, view):
                self.sleep(POLL_S)
                view = self._wait(partial(self._is_time, due_at), end)
            if view is None:
                self.ended_by = self.ended_by or "the time is over"
                return

    def _is_time(self, due_at: float, view: View) -> bool:
        late_s = self.clock() - due_at
        calm = self._is_calm(view)
        if late_s > SAY_LATE_S and not calm and self._late_reported != due_at:
            self._late_reported = due_at
            why = f"the job is {view['phase']}" + (", and an incident is open" if view["incident"] else "")
            self.say(f"the next fault has been due for {late_s:.0f} s and waits: {why}")
        return late_s >= 0 and calm

    def _is_calm(self, view: View) -> bool:
        return (
            view["phase"] == "running"
            and view["incident"] is None
            and all(each.outcome != "open" for each in self.faults)
        )

    def _inject(self, due: Due, view: View) -> bool:
        """Inject one fault. Returns False, without having injected it, if the API does not answer."""
        try:
            self._known = {str(each["id"]) for each in islice(self.api.incidents(self.job), INCIDENTS_KNOWN_MAX)}
            version = self.api.version() if due.kind in CONTROL_PLANE else {}
        except Unavailable:
            return False
        if due.kind in CONTROL_PLANE:
            self._before = Before(int(version["epoch"]), str(version.get("event_log", "")), int(view["generation"]))
            fault = Fault(self.clock(), due.kind.value, None, "", int(view["step"] or 0))
            where = "the control plane"
        else:
            ranks = view["ranks"]
            worker = ranks[min(int(due.pick * len(ranks)), len(ranks) - 1)]
            fault = Fault(
                self.clock(), due.kind.value, int(worker["rank"]), str(worker["node"]), int(view["step"] or 0)
            )
            where = f"rank {fault.rank} on {fault.node}"
        self.faults.append(fault)
        try:
            self.api.inject_fault(
                self.job,
                fault.kind,
                fault.rank or 0,
                self.last_s,
                self.xid if due.kind is FaultKind.XID else 0,
                loss_percent=self.loss_percent if due.kind is FaultKind.LOSSY_LINK else None,
                offset_s=self.offset_s if due.kind is FaultKind.CLOCK_JUMP else None,
            )
        except (Conflict, InvalidSpec, NotFound) as error:
            fault.refused, fault.outcome = str(error), "refused"
        except Unavailable as error:  # it may have been injected; an incident would show this
            fault.refused = str(error)
        except HoldfastError as error:  # the same if an agent did not answer; the leader's own refusal is certain
            fault.refused = str(error)
            fault.outcome = "refused" if due.kind in CONTROL_PLANE else fault.outcome
        refusal = f": {fault.refused}" if fault.refused else ""
        self.say(f"{len(self.faults)}. {fault.kind} of {where} at step {fault.step}{refusal}")
        return True

    def _wait(self, condition: Callable[[View], bool], end: float) -> View | None:
        """Poll until `condition` and return the view; None if the time is over or the job has ended first."""
        while True:
            view = self._view()
            if view is not None:
                if view["phase"] in ENDED:
                    self.ended_by = f"the job is {view['phase']}"
                    return None
                self._answer()
                if condition(view):
                    return view
            else:
                self._answer()
            if self.clock() >= end:
                return None
            self.sleep(POLL_S)

    def _view(self) -> View | None:
        try:
            return self.api.job(self.job)
        except Unavailable:  # faults of the control plane are part of the test
            return None

    def _settle(self) -> None:
        end = self.clock() + self.settle_s
        self._wait(lambda _: all(each.outcome != "open" for each in self.faults), end)

    def _answer(self, *, final: bool = False) -> None:
        """Determine the outcome of the newest fault. At most one fault is open."""
        fault = self.faults[-1] if self.faults else None
        if fault is None or fault.outcome != "open":
            return
        try:
            newest = islice(self.api.incidents(self.job), INCIDENTS_NEW_MAX)
            new = [each for each in newest if each["id"] not in self._known]
            view = self.api.job(self.job)
            version = self.api.version() if fault.kind in CONTROL_PLANE else {}
        except Unavailable:
            if fault.kind in CONTROL_PLANE and self.clock() - fault.at > self.away_s:
                fault.outcome, fault.refused = "not survived", ""
                self.say(f"the API has not answered for {self.away_s:.0f} s after {fault.kind}")
            return
        faults = [each for each in new if each["kind"] not in PLANNED_KINDS]
        first = min(faults, key=lambda each: float(each["detected_at"]), default=None)
        if first is not None:
            fault.incident, fault.found_as = str(first["id"]), str(first["kind"])
            fault.action = str((first["action"] or {}).get("kind", ""))
            fault.found_after_s = round(max(0.0, float(first["detected_at"]) - fault.at), 3)
            if first["first_step_at"] is not None:
                fault.steps_after_s = round(max(0.0, float(first["first_step_at"]) - fault.at), 3)
        if view["phase"] == "failed":
            fault.outcome = "not survived"
        elif fault.kind in CONTROL_PLANE:
            changed = len(new) == len(faults) and view["generation"] != self._generation_before
            self._judge_control_plane(fault, version, view, disturbed=first is not None or changed)
        elif first is not None and first["state"] in CLOSED:
            fault.outcome = "survived" if first["state"] == "resolved" else "not survived"
        elif first is None and self.clock() - fault.at > max(self.not_found_s, self._lasts(fault)):
            self._judge_without_incident(fault, int(view["step"] or 0))
        elif final and first is None and fault.refused:
            fault.outcome = "refused"

    def _judge_without_incident(self, fault: Fault, step: int) -> None:
        if fault.refused:
            fault.outcome = "refused"
        elif fault.kind not in SILENT:
            fault.outcome = "not found"
        elif step > fault.step or not fault.step:  # it suffices that the run continues; some scripts report no steps
            fault.outcome = "survived"
        else:
            return  # no step has been finished since the fault
        self._look_for_finding(fault)

    @property
    def _generation_before(self) -> int:
        return self._before.generation if self._before is not None else 0

    def _judge_control_plane(self, fault: Fault, version: View, view: View, *, disturbed: bool) -> None:
        assert self._before is not None, "set before a fault of the control plane is injected"
        late_s = self.clock() - fault.at
        step = int(view["step"] or 0)
        happened = fault.found_as == HAPPENED[FaultKind(fault.kind)]
        if disturbed:
            fault.outcome = "not survived"
        elif not happened and self._before.happened(fault.kind, version):
            fault.found_as, fault.found_after_s, fault.refused = HAPPENED[FaultKind(fault.kind)], round(late_s, 3), ""
            self._step_then = step
        elif not happened and late_s > self.not_found_s:
            fault.outcome = "refused" if fault.refused else "not found"
        elif happened and view["phase"] == "running" and (step > self._step_then or not fault.step):
            fault.steps_after_s, fault.outcome = round(late_s, 3), "survived"

    def _look_for_finding(self, fault: Fault) -> None:
        """Find a finding of the fault. A warning without an action opens no incident: the run continued, and users were
        notified."""
        about = islice(self.api.findings(node=fault.node), INCIDENTS_NEW_MAX)
        mine = [each for each in about if each["job"] in ("", self.job) and float(each["at"]) >= fault.at]
        if not fault.refused and mine:
            first = min(mine, key=lambda each: float(each["at"]))
            fault.finding, fault.found_as, fault.outcome = str(first["id"]), str(first["kind"]), "survived"
            fault.found_after_s = round(float(first["at"]) - fault.at, 3)

    def _lasts(self, fault: Fault) -> float:
        return self.last_s if fault.kind in LASTING else 0.0

    def report(self) -> dict[str, Any]:
        """Return the settings and all faults, for `--out`."""
        outcomes = [each.outcome for each in self.faults]
        return {
            "job": self.job,
            "seed": self.seed,
            "every_s": self.every_s,
            "for_s": self.for_s,
            "mix": {kind.value: weight for kind, weight in self.mix.items()},
            "began_at": self.began_at,
            "ended_at": self.clock(),
            "ended_by": self.ended_by,
            "faults": [each.as_json() for each in self.faults],
            "counts": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        }
