"""What would otherwise be sought among all nodes, jobs, incidents and orders, found by a key.

An index is a function of the state: `indexing.index_of` makes it anew, and a turn keeps it up with everything that it writes.
It holds nothing that the state does not say, so it is in no snapshot, and two states are equal whatever their indexes are. With
it an event costs what it concerns, and not what the fleet is large: at 12,500 nodes a storm of faults is decided in seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import IntEnum, unique
from typing import Any


@unique
class By(IntEnum):
    """What is found, by which key; "" where there is only one such group."""

    CLAIM = 0  # node → unfinished jobs whose newest generation includes it
    CONCERN = 1  # node → jobs that wait for it to stop workers; their members answer them by CLAIM
    CONNECTED = 2  # nodes with a session
    FREE = 3  # nodes with a session, in service, claimed by no job
    AVAILABLE = 4  # nodes with a session, in service
    CONDEMNED = 5  # nodes with a session, out of service
    QUARANTINED = 6  # nodes
    GONE = 7  # nodes that are lost
    SILENT = 8  # nodes with a session and a replicator that have not said what they hold
    HOLDS = 9  # job → nodes that may have workers of it
    KEEPS = 10  # job → nodes that have shards of it
    WANTS_NODES = 11  # unfinished jobs that might do better with other nodes, or cannot run now
    OPEN = 12  # job → its open incidents
    UNDECIDED = 13  # open incidents without a decision
    FINDING = 14  # finding → open incidents that have it
    STRUCK = 15  # node → open incidents that began there
    ORDER_FOR = 16  # node → its unanswered orders
    ORDER_ABOUT = 17  # job → unanswered orders about it
    FINISHED = 18  # jobs
    DEFERRED = 19  # unfinished jobs that wait for what is not known yet of saved steps
    AWAY = 20  # nodes without a session that nobody has declared lost
    ANNOUNCED = 21  # nodes whose maintenance is announced
    SUSPECTED = 22  # nodes of which one witness says that they are lost
    UNHEARD = 23  # nodes that had a session with an earlier leader, and have none with this one yet
    RESET_DUE = 24  # nodes that get no ranks before GPUs of theirs have been reset
    RETURNING = 25  # nodes with a session that a fault took out, and that may come back by themselves
    RUNG_OVER = 26  # open incidents of which a rung has failed, or took too long, and the next one was not taken yet
    REMOVED = 27  # nodes that a fault took out, with a session or without
    RESERVES = 28  # unfinished jobs for which free nodes are reserved, or kept
    RANKED = 29  # unfinished jobs with another priority than 0
    ON_PROBATION = 30  # nodes that have come back from a fault not long ago


Group = Mapping[str, None]  # a set that remembers the order of arrival; copied at the speed of a dictionary
EMPTY: Group = {}
# What was made of values, by a key: (the values, the result). Whoever reads it compares the values, so that all states that
# follow each other can share it; it is no part of what an index says.
Memo = dict[Hashable, tuple[tuple[object, ...], Any]]


class Index:
    """By kind and key the names or ids; `indexing.Draft` makes the next one."""

    __slots__ = ("groups", "memo")

    def __init__(self, groups: tuple[Mapping[str, Group], ...], memo: Memo | None = None) -> None:
        self.groups = groups
        self.memo: Memo = {} if memo is None else memo

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.groups == other.groups

    __hash__ = None  # type: ignore[assignment]
