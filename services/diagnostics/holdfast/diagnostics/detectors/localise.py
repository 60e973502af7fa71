"""Who do the others wait for? A pure function over what `/proc` and the trainer say of each rank.

In synchronous training every rank stops when one does, so being still is no evidence. What differs is *how* they are still.
The rules are tried from the hardest evidence to the softest; rules about progress narrow the suspects, the others name one:

1. a process that is gone or stopped (SIGSTOP, a debugger),
2. the rank that is alone behind the others: in steps, then in collectives entered,
3. the rank that sits in another phase than the others (a checkpoint, an evaluation that does not end),
4. uninterruptible sleep without CPU time: storage, a mount or the kernel,
5. the only one that burns CPU while the others sleep (a loop, a held GIL), or sleeps while the others spin.

When nobody stands out the answer is nobody: then it is the network, storage, or a deadlock in the script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.domain.signals import Phase

_BUSY = 0.5  # share of one CPU over the window
_IDLE = 0.1
_WINDOW_MIN_S = 0.2  # CPU accounting counts in ticks of 10 ms: a shorter window says nothing
_STOPPED = frozenset("Tt")
_GONE = frozenset({"", "Z", "X"})


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank during a stall. `cpu` is CPU seconds per second over `window_s`."""

    rank: int
    node: str
    step: int
    phase: Phase
    state: str  # /proc letter, "" = gone
    state_before: str  # the same at the start of the window
    cpu: float
    window_s: float
    collective_seq: int  # -1 = not known


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rank` None = nobody stands out. `confidence` is 0 … 1."""

    rank: int | None
    reason: str
    confidence: float
    suspects: tuple[int, ...] = ()


def localise(ranks: Sequence[RankView]) -> Verdict:
    """Name the rank that the others wait for, with the reason in English. `ranks` must not be empty."""
    hard = _dead_or_stopped(ranks)
    if hard is not None:
        return hard
    if len(ranks) == 1:
        return Verdict(ranks[0].rank, "it is the only rank", 0.9)
    suspects: Sequence[RankView] = ranks
    for value, words in _PROGRESS:
        suspects = _behind(suspects, value)
        if len(suspects) == 1:
            return Verdict(suspects[0].rank, f"it is alone behind the others in {words}", 0.85)
    for rule in (_other_phase, _kernel, _odd_cpu):
        verdict = rule(suspects)
        if verdict is not None:
            return verdict
    behind = f" (ranks {_list(suspects)} are behind the others)" if len(suspects) < len(ranks) else ""
    return Verdict(
        None,
        f"no rank stands out{behind}: network, storage or a deadlock in the script",
        0.5,
        tuple(view.rank for view in suspects) if behind else (),
    )


def _dead_or_stopped(ranks: Sequence[RankView]) -> Verdict | None:
    for letters, what in ((_GONE, "its process is gone"), (_STOPPED, "its process is stopped")):
        found = [view for view in ranks if view.state in letters]
        if len(found) == 1:
            return Verdict(found[0].rank, what, 0.99)
        if found and len(found) * 2 <= len(ranks):
            others = f"; so are ranks {_list(found[1:])}"
            return Verdict(found[0].rank, what + others, 0.9, tuple(view.rank for view in found))
        if found:
            reason = f"{len(found)} of {len(ranks)} ranks: {what.replace('its process is', 'their processes are')}"
            return Verdict(None, reason, 0.9, tuple(view.rank for view in found))
    return None


_PROGRESS: tuple[tuple[Callable[[RankView], int], str], ...] = (
    (lambda view: view.step, "steps finished"),
    (lambda view: view.collective_seq, "collectives entered"),
)


def _behind(ranks: Sequence[RankView], value: Callable[[RankView], int]) -> Sequence[RankView]:
    """Those with the lowest value; all of them when it is not known of each."""
    values = [value(view) for view in ranks]
    low = min(values)
    if low < 0:
        return ranks
    return [view for view, its in zip(ranks, values, strict=True) if its == low]


def _other_phase(ranks: Sequence[RankView]) -> Verdict | None:
    phases = Counter(view.phase for view in ranks)
    common, _ = max(phases.items(), key=lambda item: (item[1], item[0]))
    odd = [view for view in ranks if view.phase is not common]
    if len(odd) != 1 or len(ranks) < 3:
        return None
    return Verdict(odd[0].rank, f"it is in phase {odd[0].phase.value} while the others are in {common.value}", 0.7)


def _kernel(ranks: Sequence[RankView]) -> Verdict | None:
    stuck = [view for view in ranks if view.state == view.state_before == "D" and view.cpu < _IDLE]
    if not stuck or len(stuck) * 2 > len(ranks):
        return None
    more = f"; so are ranks {_list(stuck[1:])}" if len(stuck) > 1 else ""
    reason = f"it waits inside the kernel without CPU time (state D): storage, a mount or a driver{more}"
    return Verdict(stuck[0].rank, reason, 0.8 / len(stuck) ** 0.5, tuple(view.rank for view in stuck))


def _odd_cpu(ranks: Sequence[RankView]) -> Verdict | None:
    if len(ranks) < 3 or min(view.window_s for view in ranks) < _WINDOW_MIN_S:
        return None  # of two, neither is the odd one
    busy = [view for view in ranks if view.cpu >= _BUSY]
    idle = [view for view in ranks if view.cpu <= _IDLE]
    if len(busy) == 1 and len(idle) == len(ranks) - 1:
        return Verdict(busy[0].rank, f"it alone burns CPU ({busy[0].cpu:.0%}) while the others sleep", 0.75)
    if len(idle) == 1 and len(busy) == len(ranks) - 1:
        return Verdict(idle[0].rank, f"it alone is idle ({idle[0].cpu:.0%} CPU) while the others spin", 0.75)
    return None


def _list(ranks: Sequence[RankView]) -> str:
    return ", ".join(str(view.rank) for view in ranks[:8]) + (" …" if len(ranks) > 8 else "")
