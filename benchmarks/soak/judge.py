"""What is wrong. Pure: steps, views and samples in, verdicts out.

The run is judged by what its processes did (`truth.Stepped`), never by what the API says; that is compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.soak.schedule import Kind
from benchmarks.soak.truth import Stepped
from holdfast.domain.mesh import Mesh

ADVANCE_STEPS = 5  # whole steps in one generation: the ranks that were struck cannot have taken part by accident
PENDING_STEPS_MAX = 1000  # steps that some ranks have finished and others never will
ENDED = ("completed", "failed", "stopped")
TAKES_NODES = ("hot_swap", "scale_down", "cordon")


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that every rank of its generation has finished."""

    generation: int
    step: int
    at: float  # when the last did, monotonic s


class Progress:
    """Folds what single ranks did into whole steps."""

    def __init__(self) -> None:
        self.whole: list[Whole] = []
        self._pending: dict[tuple[int, int], set[int]] = defaultdict(set)

    def add(self, stepped: Iterable[Stepped]) -> None:
        for one in stepped:
            ranks = self._pending[one.generation, one.step]
            ranks.add(one.rank)
            if len(ranks) == one.world_size:
                del self._pending[one.generation, one.step]
                self.whole.append(Whole(one.generation, one.step, one.at))
        for key in sorted(self._pending)[: max(0, len(self._pending) - PENDING_STEPS_MAX)]:
            del self._pending[key]

    @property
    def last(self) -> Whole | None:
        return self.whole[-1] if self.whole else None

    def recovered_at(self, since: float) -> float | None:
        """When the run was seen to step again after `since`: the first of `ADVANCE_STEPS` whole steps of one generation, which
        is still the newest that has stepped. None while it does not."""
        run: list[Whole] = []
        for one in self._after(since):
            run = [*run, one] if run and run[-1].generation == one.generation else [one]
        return run[0].at if len(run) >= ADVANCE_STEPS else None

    def pause_s(self, since: float, until: float) -> float:
        """The longest time without a whole step between `since` and `until`."""
        before = [one.at for one in self._last_before(since)]
        times = [*(before or [since]), *(one.at for one in self._after(since) if one.at <= until), until]
        return max(later - earlier for earlier, later in pairwise(times))

    def generations(self, since: float, until: float) -> list[int]:
        """That stepped in the meantime, and the one before, in order."""
        steps = [*self._last_before(since), *(one for one in self._after(since) if one.at <= until)]
        return list(dict.fromkeys(one.generation for one in steps))

    def rework_steps(self, since: float, until: float) -> int:
        """Steps that were done again: how far the run fell back."""
        steps = [*self._last_before(since), *(one for one in self._after(since) if one.at <= until)]
        lost, reached = 0, 0
        for one in steps:
            lost = max(lost, reached - one.step + 1 if one.step <= reached else 0)
            reached = max(reached, one.step)
        return lost

    def _after(self, since: float) -> list[Whole]:
        found: list[Whole] = []
        for one in reversed(self.whole):
            if one.at <= since:
                break
            found.append(one)
        return found[::-1]

    def _last_before(self, since: float) -> list[Whole]:
        return next(([one] for one in reversed(self.whole) if one.at <= since), [])


# ---------------------------------------------------------------- stopped, evicted


def restarted(generations: Sequence[int], *, leaves_alone: bool) -> str:
    """Why a healthy run was stopped: the faults of a trial touch no training, and yet another generation runs. Else empty."""
    if not leaves_alone or len(generations) < 2:
        return ""
    return f"restarted {len(generations) - 1} times (generations {', '.join(map(str, generations))}) though no rank was touched"


def evicted(
    before: Mapping[str, Any], after: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]], touched: Iterable[str]
) -> dict[str, str]:
    """node → how it was taken away from the job, for nodes that nothing has touched.

    `before` and `after` are the API's views of the job. A node whose replica leaves because of another of its nodes is
    not evicted.
    """
    hurt = set(touched)
    found: dict[str, str] = {}
    for incident in incidents:
        action = incident.get("action")
        if action is None or action["kind"] not in TAKES_NODES:
            continue
        for node in action["nodes"] or [incident["node"]]:
            if node and node not in hurt:
                found[node] = f"{action['kind']} of incident {incident['id']}: {action['reason']}"
    ended = after.get("phase") in ENDED
    staying = {rank["node"] for rank in after.get("ranks", ())}
    for node, mates in _replicas(before).items():
        if staying and not ended and node not in staying and not hurt & {node, *mates}:
            found.setdefault(node, "has no rank any more, and no action names it")
    return found


def lost_work(rework_steps: int, interval_steps: int, slowness: float, kinds: Sequence[Kind]) -> str:
    """Why too much was done again; empty when it was not. Where what the nodes hold survived, a run falls back by one interval,
    or two while a save is on its way to a peer; a slow machine is longer about that. Two nodes that are gone at once may have
    been the holder and its peer: nothing is promised then."""
    if any(not kind.keeps_near for kind in kinds) or sum(kind.unfit for kind in kinds) > 1:
        return ""
    most = round(interval_steps * (1.0 + 1.5 * slowness))
    return f"{rework_steps} steps were done again, at most {most} may be lost" if rework_steps > most else ""


def _replicas(view: Mapping[str, Any]) -> dict[str, set[str]]:
    """node → the nodes of its replicas, itself among them."""
    mesh = Mesh.of(view.get("mesh") or {"dp": 1})
    of_replica: dict[int, set[str]] = defaultdict(set)
    for rank in view.get("ranks", ()):
        of_replica[mesh.replica_of(int(rank["rank"]))].add(str(rank["node"]))
    mates: dict[str, set[str]] = defaultdict(set)
    for nodes in of_replica.values():
        for node in nodes:
            mates[node] |= nodes
    return mates


# ---------------------------------------------------------------- leaks

# What may grow between the first calm moments and the last, by what is counted: (this much, plus this share of what it was).
ALLOWED: Mapping[str, tuple[float, float]] = {
    "processes": (0, 0.0),
    "descriptors": (24, 0.25),  # connections come and go; pools of them are small
    "sockets": (16, 0.25),
    "rss_bytes": (96 << 20, 0.35),
    "shm_files": (24, 0.25),  # of one node: a spare that gets a rank gets its images, and keeps them
    "shm_bytes": (24 << 20, 0.25),
    "redis_keys": (8, 0.0),
    "redis_bytes": (16 << 20, 0.25),
    "sqlite_bytes": (4 << 20, 0.25),  # a history of incidents: it grows with them
    "disk_files": (300, 0.5),
    "directory_sockets": (8, 0.0),
}
EDGE_SAMPLES_MAX = 5  # that the two ends are made of


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts at a calm moment: (what, of whom) → number."""

    at: float
    counts: Mapping[tuple[str, str], float] = field(default_factory=dict)


def leaks(samples: Sequence[Sample]) -> dict[str, str]:
    """`what of whom` → from where to where it grew, for what grew more than it may. Two calm moments at least."""
    if len(samples) < 2:
        return {}
    edge = max(1, min(EDGE_SAMPLES_MAX, len(samples) // 3))
    first, last = samples[:edge], samples[-edge:]
    found: dict[str, str] = {}
    for what, whom in sorted({key for sample in last for key in sample.counts}):
        start = [sample.counts[what, whom] for sample in first if (what, whom) in sample.counts]
        end = [sample.counts[what, whom] for sample in last if (what, whom) in sample.counts]
        # What is there at the end of every calm moment and was there at none before is growth from nothing.
        begun, ended = max(start, default=0.0), min(end)
        more, share = ALLOWED[what]
        if ended > begun + more + share * begun:
            found[f"{what} of {whom}"] = f"{begun:g} → {ended:g}"
    return found
