"""Names the rank that the others wait for. A pure function over each rank's data from `/proc` and from the trainer library.

In synchronous training every rank stops when one rank stops. An idle rank is therefore not evidence, but the way in which it
waits is. The rules are tried in order, those with the strongest evidence first. Rules about progress only exclude ranks; the
other rules name a rank:

1. a process that is dead or stopped (SIGSTOP, a debugger); 2. the result of the flight recorders (`waiting`): the rank that
the others wait for, or that no rank is to be named; 3. the only rank whose interpreter's lock is held by one of its threads,
or the only one that sleeps in another kernel function; 4. the only rank that is behind the others in steps; 5. the rank that
is in another phase than the others (a checkpoint, an evaluation that does not end); 6. uninterruptible sleep without CPU
time: storage, a mount or the kernel; 7. the only rank that uses CPU time while the others sleep (a loop, a held interpreter
lock), or that sleeps while the others spin.

The reason also states the activity of the named process: it holds its interpreter's lock, computes, or waits for storage.

If no rank stands out, no rank is named: the cause is the network, storage, or a deadlock in the script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.diagnostics.detectors.waiting import Standing, Waiting
from holdfast.domain.findings import STOPPED
from holdfast.domain.signals import Phase

_BUSY = 0.5  # share of one CPU over the window
IDLE = 0.1
_WINDOW_MIN_S = 0.2  # CPU accounting has a resolution of 10 ms: a shorter window is too coarse
_STOPPED = frozenset("Tt")
GONE = frozenset({"", "Z", "X"})
WAITS_FOR_A_THREAD = "futex"  # /proc/PID/wchan of a thread that waits for another thread
_CONFIDENCE = {
    Standing.MISMATCH: 0.95,
    Standing.ABSENT: 0.95,
    Standing.STALLED: 0.9,
    Standing.UNREACHABLE: 0.7,
    Standing.UNDELIVERED: 0.6,
    Standing.IN_FLIGHT: 0.6,
    Standing.CYCLE: 0.9,
}


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank during a stall. `cpu` is CPU seconds per second over `window_s`."""

    rank: int
    node: str
    step: int
    phase: Phase
    state: str  # /proc letter, "" = the process has ended
    state_before: str  # `state` at the start of the window
    cpu: float
    window_s: float
    collectives: int = -1  # number entered, in all groups; -1 = not known. Not comparable between ranks
    interpreter: str = ""  # as in `StallSnapshot`
    kernel: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`rank`: None = no rank stands out. `confidence`: 0 … 1."""

    rank: int | None
    reason: str
    confidence: float
    suspects: tuple[int, ...] = ()
    stopped: bool = False  # by SIGSTOP or a debugger: caused by a person or another program


def localise(ranks: Sequence[RankView], running: int, waiting: Waiting | None = None) -> Diagnosis:
    """Name the rank that the others wait for, with the reason in English. `ranks` must not be empty.

    `running`: number of ranks that have not ended; those that are not among `ranks` send no reports. `waiting`: the result of
    the wait-for graph; None if the collectives are not known.
    """
    diagnosis = _dead_or_stopped(ranks) or _waited_for(ranks, waiting) or _by_process(ranks, running)
    culprit = next((view for view in ranks if view.rank == diagnosis.rank), None)
    doing = "" if culprit is None else _doing(culprit)
    return replace(diagnosis, reason=f"{diagnosis.reason}; {doing}") if doing else diagnosis


def _waited_for(ranks: Sequence[RankView], waiting: Waiting | None) -> Diagnosis | None:
    if waiting is None:
        return None
    if waiting.ranks:
        named = waiting.ranks if len(waiting.ranks) > 1 else ()
        return Diagnosis(waiting.ranks[0], waiting.reason, _CONFIDENCE[waiting.standing], named)
    if waiting.standing in (Standing.IN_FLIGHT, Standing.UNDELIVERED) and (stuck := _kernel(ranks)) is not None:
        return stuck  # a thread that is blocked in the kernel may be the reason why an operation does not finish
    return Diagnosis(None, waiting.reason, _CONFIDENCE[waiting.standing], waiting.among)


def _by_process(ranks: Sequence[RankView], running: int) -> Diagnosis:
    """Rules 3 to 7, for ranks whose collectives are not known."""
    if running == 1:
        return Diagnosis(ranks[0].rank, "it is the only rank", 0.9)
    if len(ranks) == 1:
        return Diagnosis(None, f"only rank {ranks[0].rank} sends reports: it may wait for the others", 0.5)
    odd = _odd_interpreter(ranks) or _odd_sleep(ranks)
    if odd is not None:
        return odd
    suspects = _behind(ranks)
    if len(suspects) == 1:
        return Diagnosis(suspects[0].rank, "it is alone behind the others in steps finished", 0.85)
    for rule in (_other_phase, _kernel, _odd_cpu):
        diagnosis = rule(suspects)
        if diagnosis is not None:
            return diagnosis
    behind = f" (ranks {_list(suspects)} are behind the others)" if len(suspects) < len(ranks) else ""
    return Diagnosis(
        None,
        f"no rank stands out{behind}: network, storage or a deadlock in the script",
        0.5,
        tuple(view.rank for view in suspects) if behind else (),
    )


def _dead_or_stopped(ranks: Sequence[RankView]) -> Diagnosis | None:
    for letters, what in ((GONE, "its process is dead"), (_STOPPED, f"its {STOPPED}")):
        found = [view for view in ranks if view.state in letters]
        stopped = letters is _STOPPED
        if len(found) == 1:
            return Diagnosis(found[0].rank, what, 0.99, stopped=stopped)
        if found and len(found) * 2 <= len(ranks):
            others = f"; so are ranks {_list(found[1:])}"
            return Diagnosis(found[0].rank, what + others, 0.9, tuple(view.rank for view in found), stopped)
        if found:
            reason = f"{len(found)} of {len(ranks)} ranks: {what.replace('its process is', 'their processes are')}"
            return Diagnosis(None, reason, 0.9, tuple(view.rank for view in found), stopped)
    return None


def _odd_interpreter(ranks: Sequence[RankView]) -> Diagnosis | None:
    held = [view for view in ranks if view.interpreter == "held"]
    if len(held) != 1 or any(view.interpreter != "free" for view in ranks if view is not held[0]):
        return None
    return Diagnosis(held[0].rank, "it is the only rank whose interpreter does not answer", 0.9)


def _odd_sleep(ranks: Sequence[RankView]) -> Diagnosis | None:
    """The only rank that does not wait for one of its own threads, as ranks do inside a collective or a receive of gloo."""
    elsewhere = [view for view in ranks if not view.kernel.startswith(WAITS_FOR_A_THREAD)]
    if len(elsewhere) != 1 or not elsewhere[0].kernel or elsewhere[0].state != "S":
        return None
    odd = elsewhere[0]
    return Diagnosis(odd.rank, f"it alone sleeps in {odd.kernel}, the others wait for their communication", 0.8)


def _behind(ranks: Sequence[RankView]) -> Sequence[RankView]:
    """The ranks that have finished the fewest steps."""
    low = min(view.step for view in ranks)
    return [view for view in ranks if view.step == low]


def _doing(view: RankView) -> str:
    """The activity of the rank's process; empty if it only waits."""
    if view.state in _STOPPED or view.state in GONE:
        return ""
    if view.state == view.state_before == "D":
        return f"its process waits inside the kernel ({view.kernel or 'state D'}): storage, a mount or a driver"
    if view.interpreter == "held":
        return "one of its threads holds the interpreter's lock"
    if view.window_s >= _WINDOW_MIN_S and view.cpu >= _BUSY:
        return f"its process computes ({view.cpu:.0%} CPU)"
    return ""


def _other_phase(ranks: Sequence[RankView]) -> Diagnosis | None:
    phases = Counter(view.phase for view in ranks)
    common, _ = max(phases.items(), key=lambda item: (item[1], item[0]))
    odd = [view for view in ranks if view.phase is not common]
    if len(odd) != 1 or len(ranks) < 3:
        return None
    return Diagnosis(odd[0].rank, f"it is in phase {odd[0].phase.value} while the others are in {common.value}", 0.7)


def _kernel(ranks: Sequence[RankView]) -> Diagnosis | None:
    stuck = [view for view in ranks if view.state == view.state_before == "D" and view.cpu < IDLE]
    if not stuck or len(stuck) * 2 > len(ranks):
        return None
    more = f"; so are ranks {_list(stuck[1:])}" if len(stuck) > 1 else ""
    reason = f"it waits inside the kernel without CPU time (state D): storage, a mount or a driver{more}"
    return Diagnosis(stuck[0].rank, reason, 0.8 / len(stuck) ** 0.5, tuple(view.rank for view in stuck))


def _odd_cpu(ranks: Sequence[RankView]) -> Diagnosis | None:
    if len(ranks) < 3 or min(view.window_s for view in ranks) < _WINDOW_MIN_S:
        return None  # if two ranks differ, either may be the cause
    busy = [view for view in ranks if view.cpu >= _BUSY]
    idle = [view for view in ranks if view.cpu <= IDLE]
    if not busy:  # on an overloaded machine no rank gets half a CPU: count the ranks that are ready to run
        busy = [view for view in ranks if view.state == view.state_before == "R"]
        idle = [view for view in ranks if view.state == "S" and view.cpu <= IDLE and view not in busy]
    if len(busy) == 1 and len(idle) == len(ranks) - 1 and busy[0].cpu >= 2 * max(view.cpu for view in idle):
        return Diagnosis(busy[0].rank, f"it alone burns CPU ({busy[0].cpu:.0%}) while the others sleep", 0.75)
    if len(idle) == 1 and len(busy) == len(ranks) - 1:
        return Diagnosis(idle[0].rank, f"it alone is idle ({idle[0].cpu:.0%} CPU) while the others spin", 0.75)
    return None


def _list(ranks: Sequence[RankView]) -> str:
    return ", ".join(str(view.rank) for view in ranks[:8]) + (" …" if len(ranks) > 8 else "")
