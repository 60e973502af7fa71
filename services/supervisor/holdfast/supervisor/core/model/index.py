"""The index of a state: nodes, jobs, incidents and orders grouped by keys, so that they need not be searched.

An index is a function of the state: `indexing.index_of` creates it, and a turn updates it with everything that it writes. It
has no information of its own, so it is in no snapshot, and two states are equal whatever their indexes are. With an index, the
cost of an event depends on what it concerns, not on the size of the fleet: at 12,500 nodes a burst of faults is decided in
seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import IntEnum, unique
from typing import Any


@unique
class By(IntEnum):
    """The kinds of groups, with their keys and members; the key is "" if there is only one group of the kind."""

    CLAIM = 0  # node → unfinished jobs whose newest generation includes it
    CONCERN = 1  # node → jobs that wait for its Stop answer; answers of members are found by CLAIM
    CONNECTED = 2  # nodes with a session
    FREE = 3  # nodes with a session, in service, claimed by no job
    AVAILABLE = 4  # nodes with a session, in service
    CONDEMNED = 5  # nodes with a session, out of service
    QUARANTINED = 6  # nodes
    GONE = 7  # nodes that are lost
    SILENT = 8  # nodes with a session and a replicator that have not reported an inventory
    HOLDS = 9  # job → nodes that may have workers of it (`State.live`)
    KEEPS = 10  # job → nodes that hold or held shards of it
    WANTS_NODES = 11  # unfinished jobs that could use other nodes, or cannot run now
    OPEN = 12  # job → its open incidents
    UNDECIDED = 13  # open incidents without a decision
    FINDING = 14  # finding → open incidents that contain it
    STRUCK = 15  # node → open incidents that began there
    ORDER_FOR = 16  # node → its unanswered orders
    ORDER_ABOUT = 17  # job → unanswered orders about it
    FINISHED = 18  # jobs
    DEFERRED = 19  # unfinished jobs that wait for inventories
    AWAY = 20  # nodes without a session that are not declared lost
    ANNOUNCED = 21  # nodes with a maintenance notice
    SUSPECTED = 22  # nodes that one witness reports as lost
    UNHEARD = 23  # nodes that had a session with an earlier leader and have not reconnected to this one
    RESET_DUE = 24  # nodes that get no ranks until some of their GPUs have been reset
    RETURNING = 25  # nodes with a session that a fault took out of service
    RUNG_OVER = 26  # open incidents whose rung failed or timed out, before the next rung is taken
    REMOVED = 27  # nodes that a fault took out of service, with or without a session
    RESERVES = 28  # unfinished jobs for which free nodes are reserved or kept
    RANKED = 29  # unfinished jobs with another priority than 0
    ON_PROBATION = 30  # nodes on probation
    UNFIT = 31  # nodes whose pre-flight test excludes them
    HELD = 32  # node → jobs of which it may have workers (`State.live`)


Group = Mapping[str, None]  # an insertion-ordered set; copied as fast as a dictionary
EMPTY: Group = {}
# Cached results: key → (values that the result depends on, the result). Readers compare the values, so successive states can
# share the cache; it is not part of the index's content.
Memo = dict[Hashable, tuple[tuple[object, ...], Any]]


class Index:
    """By kind and key, names or ids. `indexing.Draft` creates the next one."""

    __slots__ = ("groups", "memo")

    def __init__(self, groups: tuple[Mapping[str, Group], ...], memo: Memo | None = None) -> None:
        self.groups = groups
        self.memo: Memo = {} if memo is None else memo

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.groups == other.groups

    __hash__ = None  # type: ignore[assignment]
