"""What an agent sends on its sessions, and the promises about it, implemented again.

* Each session begins with a Hello. The numbers of an incarnation increase; the version of its set of workers never decreases.
* A report that was sent and not acknowledged is sent again on the next session, in the same order, before newer ones.
* Each heartbeat repeats the first steps that the supervisor has not recorded, also on the next session.
* An inventory, complete or as a difference, gives the supervisor exactly the shards in the node's memory and on its disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.agent.connection.reports import Numbered
from holdfast.domain import inventories
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.orders import Hello, Inventory, RanksStepping, Report, WorkersChanged
from holdfast.replicator.view import Held, Tier
from holdfast.sim.world import Violation

_TIERS = {Tier.IMAGE: "memory", Tier.STAGED: "memory", Tier.DISK: "disk"}


class Reporting:
    """Of one incarnation."""

    def __init__(self, node: str, last: int = 0, version: int = 0) -> None:
        self._node = node
        self.last = last  # number of the last report
        self._version = version
        self._greets = False  # whether the next report must be a Hello
        self._sent: dict[int, Report] = {}  # on this session, by number; not acknowledged
        self._again: deque[Report] = deque()  # of the session before, not sent again yet
        self._in_beats: dict[str, RanksStepping] = {}  # by job: in the last heartbeat, not recorded
        self._beats = True  # whether they have been in a heartbeat of this session
        self._shown: dict[str, tuple[int, Iterable[ShardRecord]]] = {}  # by job: the last inventory of this session

    def begin(self) -> None:
        self._again = deque((*self._again, *self._sent.values()))
        self._sent.clear()
        self._shown.clear()
        self._greets, self._beats = True, not self._in_beats

    def sent(self, numbered: Numbered, files: Iterable[Held]) -> None:
        """`files`: the shards of the job on this machine, if the report is an inventory."""
        seq, report = numbered.seq, numbered.report
        if seq <= self.last or isinstance(report, Hello) is not self._greets:
            raise Violation(f"{self._node} sends {type(report).__name__} as its report {seq}, after {self.last}")
        self.last, self._greets = seq, False
        match report:
            case Hello(workers_version=version) | WorkersChanged(version=version):
                if version < self._version:
                    raise Violation(f"{self._node} sends version {version} of its workers after {self._version}")
                self._version = version
            case Inventory(job=job, base=base):
                before, shown = self._shown.get(job, (0, ()))
                if base not in (0, before):
                    raise Violation(f"{self._node} sends a difference to its report {base}, the last one was {before}")
                shown = inventories.changed(shown, report).shards if base else report.shards
                if _places(shown) != {(*_numbers(held.key), _TIERS[held.tier]) for held in files}:
                    raise Violation(f"{self._node} sends an inventory that is not the contents of its memory and disk")
                self._shown[job] = seq, shown
            case _:
                if self._again and (expected := self._again.popleft()) != report:
                    raise Violation(f"{self._node} sends {report} before {expected}, which was not acknowledged")
                self._sent[seq] = report

    def begun(self) -> None:
        """Everything that waited for the session has been sent."""
        if not self._beats:
            raise Violation(f"{self._node} does not repeat its first steps, which are not recorded")
        if self._again:
            raise Violation(f"{self._node} does not send again {self._again[0]}, which was not acknowledged")

    def acknowledged(self, seq: int) -> None:
        for number in [number for number in self._sent if number <= seq]:
            del self._sent[number]

    def beat(self, first_steps: Iterable[RanksStepping]) -> None:
        said = {each.job: each for each in first_steps}
        for job, known in self._in_beats.items():
            if job not in said or said[job].generation < known.generation:
                raise Violation(f"a heartbeat of {self._node} lacks {known}, which is not recorded")
        self._in_beats, self._beats = said, True

    def recorded(self, job: str, generation: int) -> None:
        if (known := self._in_beats.get(job)) is not None and known.generation == generation:
            del self._in_beats[job]


def _places(shown: Iterable[ShardRecord]) -> set[tuple[int, int, int, str]]:
    return {(*_numbers(each.key), each.tier) for each in shown}


def _numbers(key: ShardKey) -> tuple[int, int, int]:
    return key.attempt, key.step, key.rank
