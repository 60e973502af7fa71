"""Finds the errors of a soak. Pure: from steps, views and samples to verdicts.

The run is judged by the steps of its processes (`truth.Stepped`), not by the API, whose answers are compared with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.soak.schedule import Kind
from benchmarks.soak.truth import Stepped
from holdfast.domain.mesh import Mesh

ADVANCE_STEPS = 5  # whole steps in one generation, so that ranks with a fault cannot have taken part by accident
PENDING_STEPS_MAX = 1000  # steps that only some ranks have finished, and others may never finish
ENDED = ("completed", "failed", "stopped")
TAKES_NODES = ("hot_swap", "scale_down", "cordon")


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that every rank of its generation has finished."""

    generation: int
    step: int
    at: float  # end of the step on the last rank, in monotonic seconds


class Progress:
    """Folds the steps of single ranks into steps of all ranks."""

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
        """Return the time at which the run stepped again after `since`: the first of `ADVANCE_STEPS` whole steps of one
        generation, which must still be the newest one with a step. None if there is no such time yet."""
        run: list[Whole] = []
        for one in self._after(since):
            run = [*run, one] if run and run[-1].generation == one.generation else [one]
        return run[0].at if len(run) >= ADVANCE_STEPS else None

    def pause_s(self, since: float, until: float) -> float:
        """Return the longest time without a whole step between `since` and `until`."""
        before = [one.at for one in self._last_before(since)]
        times = [*(before or [since]), *(one.at for one in self._after(since) if one.at <= until), until]
        return max(later - earlier for earlier, later in pairwise(times))

    def generations(self, since: float, until: float) -> list[int]:
        """Return the generations that finished a step between `since` and `until`, and the previous one, in order."""
        steps = [*self._last_before(since), *(one for one in self._after(since) if one.at <= until)]
        return list(dict.fromkeys(one.generation for one in steps))

    def rework_steps(self, since: float, until: float) -> int:
        """Return the number of repeated steps."""
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
    """Return an error if a healthy run was restarted, that is if no fault of the trial affects the training. Otherwise ""."""
    if not leaves_alone or len(generations) < 2:
        return ""
    return f"restarted {len(generations) - 1} times (generations {', '.join(map(str, generations))}) though no rank was touched"


def repeated(
    incidents: Collection[Mapping[str, Any]], generations: Sequence[int], permitted: Sequence[int | None]
) -> str:
    """Return an error if there are more incidents or more new generations than the faults permit; otherwise ""."""
    limits = [each for each in permitted if each is not None]
    most = sum(limits)
    if len(limits) < len(permitted) or (len(incidents) <= most and len(generations) - 1 <= most):
        return ""
    changes = len(generations) - 1
    return f"{len(incidents)} incidents and {changes} new generations, where {most} are permitted"


def untrue(incident: Mapping[str, Any]) -> str:
    """Return what the record of a closed incident contradicts; "" if nothing."""
    who = f"incident {incident['id']} ({incident['kind']})"
    if incident["state"] not in ("resolved", "failed"):
        return f"{who} is {incident['state']}, though the run has recovered"
    times = [
        (name, incident[name]) for name in ("fault_at", "detected_at", "decided_at", "prepared_at", "first_step_at")
    ]
    known = [(name, at) for name, at in times if at is not None]
    for (earlier, before), (later, after) in pairwise(known):
        if after < before:
            return f"{who}: {later} is {before - after:.3f} s before {earlier}"
    return "" if incident["action"] else f"{who} is closed without a decision"


def evicted(
    before: Mapping[str, Any], after: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]], touched: Iterable[str]
) -> dict[str, str]:
    """Return node → the action that removed it from the job, for nodes without a fault.

    `before` and `after` are the API's views of the job. A node is not evicted if its replica is removed because of another node
    of the replica.
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
    """Return an error if too many steps were repeated; otherwise "". If the shards on the nodes survive, a run repeats at most
    one interval, or two while a save is being copied to a peer, which takes longer on a slow machine. There is no limit if two
    nodes are lost at once, because they may be the holder and its peer."""
    if any(not kind.keeps_near for kind in kinds) or sum(kind.unfit for kind in kinds) > 1:
        return ""
    most = round(interval_steps * (1.0 + 1.5 * slowness))
    return f"{rework_steps} steps were done again, at most {most} may be lost" if rework_steps > most else ""


def _replicas(view: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return node → the nodes of its replicas, including itself."""
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

# Permitted growth between the first and the last calm moments, by counted object: (number, plus fraction of the first count).
ALLOWED: Mapping[str, tuple[float, float]] = {
    "processes": (0, 0.0),
    "descriptors": (24, 0.25),  # connections change, but their pools are small
    "sockets": (16, 0.25),
    "rss_bytes": (96 << 20, 0.35),
    "shm_files": (24, 0.25),  # of one node: a spare that gets a rank creates its images, and keeps them
    "shm_bytes": (24 << 20, 0.25),
    "redis_keys": (8, 0.0),
    "redis_bytes": (16 << 20, 0.25),
    "sqlite_bytes": (4 << 20, 0.25),  # the history grows with the number of incidents
    "disk_files": (300, 0.5),
    "directory_sockets": (8, 0.0),
}
EDGE_SAMPLES_MAX = 5  # samples at each end that are compared


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts at a calm moment: (counted object, owner) → number."""

    at: float
    counts: Mapping[tuple[str, str], float] = field(default_factory=dict)


def leaks(samples: Sequence[Sample]) -> dict[str, str]:
    """Return `object of owner` → its growth, for counts that grew too much. Needs at least two calm moments."""
    if len(samples) < 2:
        return {}
    edge = max(1, min(EDGE_SAMPLES_MAX, len(samples) // 3))
    first, last = samples[:edge], samples[-edge:]
    found: dict[str, str] = {}
    for what, whom in sorted({key for sample in last for key in sample.counts}):
        start = [sample.counts[what, whom] for sample in first if (what, whom) in sample.counts]
        end = [sample.counts[what, whom] for sample in last if (what, whom) in sample.counts]
        # An object that is counted in all last samples and in no first sample has grown from 0.
        begun, ended = max(start, default=0.0), min(end)
        more, share = ALLOWED[what]
        if ended > begun + more + share * begun:
            found[f"{what} of {whom}"] = f"{begun:g} → {ended:g}"
    return found
