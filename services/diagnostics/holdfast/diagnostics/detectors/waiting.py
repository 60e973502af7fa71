"""Finds the rank that the others wait for, by the collectives that ranks have entered. A pure function over rows of flight
recorders.

A rank *waits* if an operation that it has entered cannot finish because another rank has not entered it. A rank that others
wait for and that does not wait itself is a *root* of the wait-for graph, and the cause of the hang. Two facts per rank are
enough (whether it waits, and whether others wait for it). The graph therefore has no edges, and the cost is linear in the rows.

    mismatch     members call different operations at the same place in a group's sequence; the minority is named
    absent       a root outside of all collectives: it computes, loops, holds its interpreter's lock, or reads its data
    stalled      it has entered an operation that the other members have finished: its device or communication thread hangs
    undelivered  more members are still inside an operation than can have finished it, or the node of a member sends no
                 telemetry: data that was sent did not arrive; no rank is named
    unreachable  a rank that the others may wait for does not answer, or has ended, and no rank is a proven root; a rank for
                 which only the dump is missing is not named: it may be late, or wait like the others
    in flight    all members are inside the same operation and none has finished it: the network; no rank is named
    cycle        A waits for B in one group, B for A in another: the script's order of collectives; no rank is named
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.domain.collectives import CollectiveRows, expand

# Every member contributes to every member's result. A member that has finished therefore proves that all have taken part. This
# does not hold for broadcast, reduce, gather and scatter: a root or a leaf may finish before the others have entered.
_SYMMETRIC = ("all_reduce", "allreduce", "all_gather", "allgather", "_all_gather", "reduce_scatter", "_reduce_scatter",
              "all_to_all", "alltoall", "barrier")  # fmt: skip
# Operations to which all members pass tensors of one size; for others (all_to_all, gather …) the sizes may differ.
EQUAL_SIZES = ("all_reduce", "allreduce", "_all_gather_base", "_reduce_scatter_base", "reduce", "broadcast")
# Another cause of a mismatch: collectives of a background save between those of training.
TWO_THREADS = "two threads of a rank use one process group (dcp.async_save needs a process_group of its own)"
_OTHER_END = {"send": "recv", "recv": "send"}
_SHOWN_MAX = 8
_MEMBERS_MAX = 8_000_000  # of all groups of a job together: a job of a million ranks has some six of each


class Standing(StrEnum):
    MISMATCH = "mismatch"
    ABSENT = "absent"
    STALLED = "stalled"
    UNREACHABLE = "unreachable"
    UNDELIVERED = "undelivered"
    IN_FLIGHT = "in_flight"
    CYCLE = "cycle"


@dataclass(frozen=True, slots=True)
class Waiting:
    """The result of the wait-for graph. If no rank is named, `ranks` is empty and `among` lists the ranks concerned."""

    standing: Standing
    ranks: tuple[int, ...]
    reason: str  # of the first rank, or of all
    among: tuple[int, ...] = ()


@dataclass(slots=True)
class _Place:
    """One rank in one group."""

    entered: int
    pending: int
    kind: str
    sizes: str

    @property
    def completed(self) -> int:
        return self.pending - 1 if self.pending >= 0 else self.entered


@dataclass(slots=True)
class _Group:
    name: str
    members: tuple[int, ...]
    places: dict[int, _Place] = field(default_factory=dict)
    _label: str = ""

    @property
    def label(self) -> str:
        """The name of the group in reasons. Computed once, when `places` is complete, because 100,000 reasons contain it."""
        if not self._label:
            self._label = f"{self.name} (ranks {_list(sorted(self.places))})"
        return self._label


@dataclass(slots=True)
class _Graph:
    """The vertices of the graph: for each rank one reason why it waits, why others wait for it, and why it is stalled."""

    inside: set[int]  # ranks with an unfinished operation
    waits: dict[int, str] = field(default_factory=dict)
    # Ranks that may wait for a rank whose state is unknown. This does not exonerate a rank that others are proven to wait for.
    may_wait: dict[int, str] = field(default_factory=dict)
    waited: dict[int, str] = field(default_factory=dict)  # ranks that others wait for
    waiters: Counter[int] = field(default_factory=Counter)
    stalled: dict[int, str] = field(default_factory=dict)
    undelivered: Waiting | None = None
    # Ranks in an unknown state, while other members of one of their groups are inside an operation.
    doubted: dict[int, str] = field(default_factory=dict)
    mismatches: list[Waiting] = field(default_factory=list)


def find_blocking_ranks(
    rows: CollectiveRows,
    unreachable: Mapping[int, str] | None = None,
    messaging: Collection[int] = (),
    missing: Collection[int] = (),
    heard: Collection[int] | None = None,
) -> Waiting | None:
    """Evaluate the wait-for graph. Returns None if no rank is inside an operation: then collectives explain nothing.

    `unreachable`: ranks whose recorders did not answer, with the known state ("it has ended"). `messaging`: ranks that may be
    waiting for a message which their recorder does not show; they are not named for being outside of collectives. `missing`:
    ranks without a dump, whose state is unknown; they are not named, even if others may wait for them. `heard`: ranks whose
    nodes send telemetry, if that is known; the nodes of all other members are without contact.
    """
    groups, pairs = _read(rows)
    graph = _Graph({rank for group in groups for rank, place in group.places.items() if place.pending >= 0})
    graph.inside.update(rank for _, _, rank in pairs)
    idle = set(rows.rank) - graph.inside - set(messaging)
    away = (
        set() if heard is None else {rank for group in groups for rank in group.members} - set(heard) - set(rows.rank)
    )
    blank = {peer for peers in pairs.values() for peer in peers} - set(rows.rank)
    unknown = {
        **dict.fromkeys(blank, "its recorder shows no operation"),
        **dict.fromkeys(sorted(away), "its node sends no telemetry"),
        **dict.fromkeys(idle, "it is inside no collective"),
        **dict.fromkeys(missing, "its dump is missing"),
        **(unreachable or {}),
    }
    graph.waits.update({rank: f"rank {rank} may wait for a message" for rank in messaging if rank not in graph.inside})
    for group in groups:
        _fold(graph, group, unknown, away)
    _fold_pairs(graph, pairs, groups, unknown)
    if not graph.inside:
        return None
    if graph.mismatches:
        return min(graph.mismatches, key=lambda found: (not found.ranks, found.ranks))
    found = _roots(graph) or graph.undelivered or _doubted(graph, unknown, missing)
    return found or (None if messaging else _nobody(graph))


def _roots(graph: _Graph) -> Waiting | None:
    absent = {rank: why for rank, why in graph.waited.items() if rank not in graph.waits and rank not in graph.inside}
    stalled = {rank: why for rank, why in graph.stalled.items() if rank not in graph.waits}
    named = {**stalled, **absent}
    if not named:
        return None
    ranks = tuple(sorted(named, key=lambda rank: (-graph.waiters[rank], rank)))
    standing = Standing.ABSENT if ranks[0] in absent else Standing.STALLED
    return Waiting(standing, ranks, named[ranks[0]] + _and_others(ranks))


def _doubted(graph: _Graph, unknown: Mapping[int, str], missing: Collection[int]) -> Waiting | None:
    """Suspect ranks that do not answer. A rank without a dump is not suspected, because the dumps of the others are the same
    whether this rank is late, or waits like them in the network or in a deadlock."""
    if not graph.doubted:
        return None
    if ranks := tuple(sorted(graph.doubted.keys() - set(missing))):
        first = ranks[0]
        reason = f"{unknown[first]}, and {graph.doubted[first]} it{_and_others(ranks)}"
        return Waiting(Standing.UNREACHABLE, ranks, reason)
    among = tuple(sorted(graph.doubted))
    if len(among) == 1:
        reason = f"the dump of rank {among[0]} is missing, and {graph.doubted[among[0]]} it: it has not come"
    else:
        inside = f"{graph.doubted[among[0]]} rank {among[0]}"
        reason = f"the dumps of ranks {_list(among)} are missing, and {inside}: one has not come"
    return Waiting(Standing.UNREACHABLE, (), f"{reason}, or it is the network or a deadlock", among)


def _nobody(graph: _Graph) -> Waiting:
    """The result if no rank is a root: the waiting ranks form a cycle, or all members are inside the same operation."""
    ends = sorted(graph.waited.keys() - graph.waits.keys())
    if graph.waited and not ends:
        among = tuple(sorted(graph.waited))
        reason = f"ranks {_list(among)} wait for each other in different groups: the script's order of collectives"
        return Waiting(Standing.CYCLE, (), f"{reason} ({graph.waits[among[0]]})", among)
    still = tuple(ends or sorted(graph.inside - graph.waits.keys()))
    reason = (
        f"ranks {_list(still)} are inside operations that every member has entered and none has finished: the network"
    )
    return Waiting(Standing.IN_FLIGHT, (), reason, still)


# ---------------------------------------------------------------- collectives


def _fold(graph: _Graph, group: _Group, unknown: Mapping[int, str], away: Collection[int]) -> None:
    """Add one group: its waiting members, those that are behind, and mismatches."""
    waiting = {rank: place for rank, place in group.places.items() if place.pending >= 0}
    if not waiting:
        return
    known = {rank: place for rank, place in group.places.items() if place.entered >= 0}
    entered = min((place.entered for place in known.values()), default=-1)
    farthest_rank, farthest = max(waiting.items(), key=lambda item: (item[1].pending, -item[0]))
    silent = [rank for rank in group.members if rank in unknown and rank not in known]
    took_part = _SilentTookPart.of(group, silent)
    doubts = silent
    for rank, place in waiting.items():
        if place.pending > entered >= 0:
            graph.waits.setdefault(rank, f"rank {rank} waits in {_what(place, group)}")
        elif silent and not took_part.in_(place, rank):
            graph.may_wait.setdefault(rank, f"rank {rank} may wait in {_what(place, group)}")
            for each in doubts:
                graph.doubted.setdefault(each, f"rank {rank} is inside {_what(place, group)} with")
            doubts = []  # all have their reason
    behind = f"it has not entered {_what(farthest, group)}, in which rank {farthest_rank} waits"
    pending = sorted(place.pending for place in waiting.values())
    for rank, place in known.items():
        if place.entered < farthest.pending:
            graph.waited.setdefault(rank, behind)
            graph.waiters[rank] += len(pending) - bisect_right(pending, place.entered)
    _fold_stalled(graph, group, waiting, silent, away)
    graph.mismatches.extend(_mismatches(group, waiting))


@dataclass(frozen=True, slots=True)
class _SilentTookPart:
    """Whether the members in an unknown state must have taken part, so that a waiting rank cannot wait for them."""

    silent: frozenset[int]
    completed: tuple[int, ...]  # of the other members, ascending

    @classmethod
    def of(cls, group: _Group, silent: Collection[int]) -> _SilentTookPart:
        left_out = frozenset(silent)
        completed = sorted(place.completed for rank, place in group.places.items() if rank not in left_out)
        return cls(left_out, tuple(completed))

    def in_(self, place: _Place, rank: int) -> bool:
        """Whether some member has finished an operation that needs all members, or all other members have finished it. `rank`
        itself has not finished: its operation is pending."""
        finished = len(self.completed) - bisect_left(self.completed, place.pending)
        if place.kind.startswith(_SYMMETRIC):
            return finished > 0
        others = len(self.completed) - (rank not in self.silent)
        return others > 0 and finished == others


def _fold_stalled(
    graph: _Graph, group: _Group, waiting: Mapping[int, _Place], silent: Collection[int], away: Collection[int]
) -> None:
    finished_by, finished = max(
        ((rank, place.completed) for rank, place in group.places.items()), key=lambda item: item[1]
    )
    inside = {
        rank: place
        for rank, place in waiting.items()
        if place.pending <= finished and place.kind.startswith(_SYMMETRIC)
    }
    if not inside:
        return
    first = min(place.pending for place in inside.values())
    no_contact = [rank for rank in silent if rank in away]
    finishers = sum(place.completed >= first for place in group.places.values()) + len(silent) - len(no_contact)
    if no_contact or len(inside) > finishers:
        # A rank that loses its connection may finish first, while the others wait for the data that it sent.
        ranks = tuple(sorted(inside))
        reason = (
            f"ranks {_list(ranks)} are still inside {_what(inside[ranks[0]], group)}, which rank {finished_by} has finished: "
            + (
                f"the node of rank {no_contact[0]} sends no telemetry"
                if no_contact
                else "data that was sent to them did not arrive"
            )
            + ": the network"
        )
        graph.undelivered = graph.undelivered or Waiting(Standing.UNDELIVERED, (), reason, ranks)
        return
    for rank, place in inside.items():
        graph.stalled.setdefault(
            rank, f"it is still inside {_what(place, group)}, which rank {finished_by} has finished: its device or its "
            "communication thread hangs",
        )  # fmt: skip


def _mismatches(group: _Group, waiting: Mapping[int, _Place]) -> Iterator[Waiting]:
    """Yield members that call different operations at the same place of the sequence."""
    by_seq: dict[int, dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, place in waiting.items():
        sizes = place.sizes if place.kind.startswith(EQUAL_SIZES) else ""
        by_seq[place.pending][(place.kind, sizes)].append(rank)
    for seq, calls in by_seq.items():
        if len(calls) < 2:
            continue
        (most, many), *others = sorted(calls.items(), key=lambda item: (-len(item[1]), item[1]))
        odd = tuple(sorted(rank for _, ranks in others for rank in ranks))
        here = f"as #{seq} of group {group.label}"
        words = f"{_call(others[0][0])} where {len(many)} of them call {_call(most)}, {here}"
        if len(many) > len(odd):
            yield Waiting(Standing.MISMATCH, odd, f"it calls {words}{_and_others(odd)}")
        else:
            among = tuple(sorted(waiting))
            sides = f"{_calls(odd)} {_call(others[0][0])} and {_calls(many)} {_call(most)}, {here}"
            yield Waiting(Standing.MISMATCH, (), f"{sides}: one side is wrong, or {TWO_THREADS}", among)


# ---------------------------------------------------------------- point to point


def _fold_pairs(
    graph: _Graph, pairs: Mapping[tuple[str, str, int], set[int]], groups: Iterable[_Group], unknown: Mapping[int, str]
) -> None:
    """A send or receive waits for the other end, unless that is in the matching operation: then the transfer is under way."""
    seen = {rank for group in groups for rank in group.places} | {rank for _, _, rank in pairs}
    for (group, direction, rank), peers in pairs.items():
        if rank in graph.stalled and rank not in graph.waits:
            continue  # its recorder does not show operations as finished: the other end may have finished
        for peer in sorted(peers):
            what = f"a {direction} of group {group}"
            if peer in unknown and peer not in seen:
                graph.may_wait.setdefault(rank, f"rank {rank} may wait for rank {peer} in {what}")
                graph.doubted.setdefault(peer, f"rank {rank} is inside {what} with")
            elif peer in seen and rank not in pairs.get((group, _OTHER_END[direction], peer), ()):
                graph.waits.setdefault(rank, f"rank {rank} waits for rank {peer} in {what}")
                graph.waited.setdefault(peer, f"it has not come to the other end of {what}, in which rank {rank} waits")
                graph.waiters[peer] += 1


# ---------------------------------------------------------------- reading rows, and texts


def _read(rows: CollectiveRows) -> tuple[list[_Group], dict[tuple[str, str, int], set[int]]]:
    """Collectives by group; peers of unfinished point-to-point operations by (group, direction, rank). Empty when there are
    too many members to follow."""
    groups: dict[tuple[str, str], _Group] = {}
    listed: dict[str, tuple[int, ...]] = {}
    left = _MEMBERS_MAX
    pairs: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    columns = (rows.rank, rows.group, rows.members, rows.kind, rows.sizes, rows.peer, rows.entered, rows.pending)
    for rank, name, members, kind, sizes, peer, entered, pending in zip(*columns, strict=True):
        if peer >= 0:
            pairs[(name, kind, rank)].add(peer)
            continue
        group = groups.get((name, members))
        if group is None:
            if members not in listed:
                listed[members] = expand(members)
            if len(listed[members]) > left:
                return [], {}  # no job has so many members; from a part of the groups a wrong rank could be concluded
            left -= len(listed[members])
            group = groups[(name, members)] = _Group(name, listed[members])
        group.places[rank] = _Place(entered, pending, kind, sizes)
    return list(groups.values()), pairs


def _what(place: _Place, group: _Group) -> str:
    return f"{place.kind} #{place.pending} of group {group.label}"


def _call(call: tuple[str, str]) -> str:
    kind, sizes = call
    return f"{kind} {sizes}".strip()


def _and_others(ranks: tuple[int, ...]) -> str:
    return f"; so are ranks {_list(ranks[1:])}" if len(ranks) > 1 else ""


def _calls(ranks: Collection[int]) -> str:
    return f"rank {_list(ranks)} calls" if len(ranks) == 1 else f"ranks {_list(ranks)} call"


def _list(ranks: Collection[int]) -> str:
    shown = list(ranks)[:_SHOWN_MAX]
    return ", ".join(map(str, shown)) + (" …" if len(ranks) > _SHOWN_MAX else "")
