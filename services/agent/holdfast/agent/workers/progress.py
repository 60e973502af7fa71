"""Progress of each rank of one generation, computed from its messages. Pure: time and process facts are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import Any

from holdfast.domain.notes import (
    GroupsNote,
    MissedNote,
    Note,
    ObservedStepsNote,
    PhaseNote,
    ReplicaCheckNote,
    SavedNote,
    StartedNote,
    StepNote,
)
from holdfast.domain.signals import ObservedSteps, Phase, RankProgress, ReplicaChecks, StepColumns

# Rows kept between two ticks: 100 steps/s of 8 ranks for five seconds. More are dropped oldest-first and counted.
ROWS_MAX = 4096

# A rank is silent if it has sent no message for this long, and for this many times the duration of its slowest recent step.
SILENT_AFTER_S = 1.0
SILENT_FACTOR = 1.5
_RECENT = 20  # steps
# Fields of a `StepNote` that are columns of the same name.
_OF_A_STEP = ("step", "started_at", "ended_at", "data_s", "stall_s", "tokens", "loss", "grad_norm", "comm_wait_s")
STEP_ENDS_MAX = 4  # number of last steps whose end times are kept; the ranks of a job are at most this many steps apart


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Values of /proc/PID/stat: the state letter ("" = the process has ended) and the used CPU seconds, user + system."""

    state: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankStart:
    """The phases of one rank up to its first step. Empty for a rank that has sent no notes."""

    rank: int
    first_step_at: float | None
    phases_s: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class _Rank:
    step: int = 0
    phase: Phase = Phase.INIT
    phase_at: float = 0.0
    first_step_at: float | None = None  # end of its first step in this generation
    second_step_at: float | None = None
    phases_s: tuple[tuple[str, float], ...] = ()
    has_sent: bool = False
    started_noted: bool = False
    sent_at: float = 0.0  # time of the last note
    groups: tuple[tuple[str, str], ...] = ()
    collectives: int = -1  # number of collectives entered, as last counted
    # Of a script that reports no steps: optimizer steps observed, seconds for one recently, and the end of the first block
    observed: int = 0
    observed_step_s: float = 0.0
    observed_since: float | None = None
    done_at: float | None = None  # when the script had ended, or has declared its last step finished
    completed: bool = False  # has ended with exit code 0
    # End times of its last steps, newest first: (Unix seconds of its clock, monotonic seconds).
    ends: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STEP_ENDS_MAX))
    # Of its last steps: (seconds, of these seconds waited for other ranks, NaN = not measured).
    durations: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Progress:
    """The state of one generation's ranks on this node."""

    def __init__(self, *, node: str, job: str, generation: int, ranks: Iterable[int], step: int, at: float) -> None:
        """`step`: the step from which the ranks start. `at`: time of the start (Unix s)."""
        self._node, self._job, self._generation = node, job, generation
        self._ranks = {rank: _Rank(step=step, phase_at=at) for rank in ranks}
        self._rows: deque[tuple[int, StepNote]] = deque()
        self._observed: deque[ObservedStepsNote] = deque(maxlen=ROWS_MAX)
        self._checks: deque[ReplicaCheckNote] = deque(maxlen=ROWS_MAX)  # a dropped check is not evaluated
        self._intervals_s: deque[float] = deque(maxlen=_RECENT)
        self._unheard_until = 0.0
        self.dropped = 0

    def fold(self, note: Note) -> None:
        """Process a note. The caller has checked that its rank runs on this node."""
        rank = self._ranks[note.sender.rank]
        if isinstance(note, ObservedStepsNote):
            self._observe(rank, note)  # not sent by the script itself, so the rank counts as silent as before
            return
        if isinstance(note, PhaseNote) and note.phase is Phase.DONE:
            rank.done_at = note.at
            if not rank.has_sent:
                return  # sent for a script that reports no steps
        rank.has_sent = True
        rank.collectives = -1  # the count of a silent rank is outdated
        match note:
            case StepNote():
                if rank.phase is Phase.STEP:
                    self._intervals_s.append(note.ended_at - rank.sent_at)
                rank.sent_at = note.ended_at
                if note.step > rank.step + 1:
                    rank.ends.clear()  # notes of some steps were dropped
                if note.step > rank.step:
                    rank.ends.appendleft((note.ended_at, note.ended_uptime_s))
                rank.durations.append((note.ended_at - note.started_at, note.comm_wait_s))
                rank.step = max(rank.step, note.step)
                rank.phase, rank.phase_at = Phase.STEP, note.ended_at
                if rank.first_step_at is None:
                    rank.first_step_at = note.ended_at
                elif rank.second_step_at is None:
                    rank.second_step_at = note.ended_at
                if len(self._rows) == ROWS_MAX:
                    self._rows.popleft()
                    self.dropped += 1
                self._rows.append((note.sender.rank, note))
            case PhaseNote():
                # A repeated INIT does not change the phase. Diagnostics evaluates only ranks that have reported more, because a
                # script that neither restores nor uses `run.step` makes no visible progress that could stop.
                if note.phase is not rank.phase or note.phase is not Phase.INIT:
                    rank.phase, rank.phase_at = note.phase, note.at
                rank.sent_at = note.at
            case StartedNote():
                rank.phases_s, rank.started_noted = note.phases_s, True
            case GroupsNote():
                rank.groups = note.members
            case ReplicaCheckNote():
                self._checks.append(note)
            case SavedNote() | MissedNote():
                pass  # about checkpoints, not about progress

    def _observe(self, rank: _Rank, note: ObservedStepsNote) -> None:
        rank.observed = max(rank.observed, note.step)
        rank.observed_step_s = (note.ended_at - note.started_at) / note.steps
        rank.durations.append((rank.observed_step_s, note.comm_wait_s / note.steps))
        if rank.observed_since is None:
            rank.observed_since = note.ended_at
        if not math.isnan(note.comm_wait_s):
            self._observed.append(note)

    def complete(self, rank: int) -> float | None:
        """Record that the rank has ended with exit code 0: no further step is expected of it. Return when it reported that
        it was done (Unix s); None if it did not."""
        ended = self._ranks[rank]
        ended.completed = True
        return ended.done_at

    @property
    def _stepping(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if not rank.completed]

    def knows(self, rank: int) -> bool:
        return rank in self._ranks

    def step_of(self, rank: int) -> int:
        """Return the last step that the rank has finished."""
        return self._ranks[rank].step

    def observed_of(self, rank: int) -> int:
        """Optimizer steps that were observed in it, of a script that reports no steps."""
        return self._ranks[rank].observed

    def step_ends_of(self, rank: int) -> tuple[float, ...]:
        """Return the end times of the rank's last steps, newest first (Unix s)."""
        return tuple(ended_at for ended_at, _ in self._ranks[rank].ends)

    def step_end_uptimes_of(self, rank: int) -> tuple[float, ...]:
        """As `step_ends_of`, in monotonic seconds; empty if the notes do not contain them."""
        known = tuple(uptime_s for _, uptime_s in self._ranks[rank].ends)
        return known if all(known) else ()

    def duration_of(self, rank: int) -> tuple[float, float]:
        """Return the median duration of the rank's last steps, and the median time for which it waited for other ranks in
        them, in seconds. NaN = not known. Medians ignore single steps with a compilation or an evaluation."""
        known = self._ranks[rank].durations
        waits = [wait_s for _, wait_s in known if not math.isnan(wait_s)]
        return median(step_s for step_s, _ in known) if known else math.nan, median(waits) if waits else math.nan

    @property
    def silent(self) -> bool:
        """Whether no rank has sent a note yet: the script is unmodified, or has not reached `hf.launch`."""
        return not any(rank.has_sent for rank in self._ranks.values())

    @property
    def has_stepped(self) -> bool:
        """Whether any rank has reported a step."""
        return any(rank.first_step_at is not None for rank in self._ranks.values())

    def unheard(self, until: float) -> None:
        """Record that the agent was frozen until then (Unix s) and received no notes."""
        self._unheard_until = until

    def silent_s(self, at: float) -> float:
        """Return for how long no rank has sent a note; 0.0 while that is within the duration of a step, and when all are
        done."""
        waiting = [rank for rank in self._ranks.values() if rank.phase is not Phase.DONE]
        if self.silent or not waiting:
            return 0.0
        silent_s = at - max(self._unheard_until, *(rank.sent_at for rank in self._ranks.values()))
        usual_s = SILENT_FACTOR * max(self._intervals_s, default=0.0)
        return silent_s if silent_s > max(SILENT_AFTER_S, usual_s) else 0.0

    def counted(self, collectives: Mapping[int, int]) -> None:
        """Record how many collectives each rank has entered, according to its flight recorder."""
        for rank, count in collectives.items():
            self._ranks[rank].collectives = count

    def groups_of(self, rank: int) -> dict[str, str]:
        """Return the members of the rank's process groups, `compact`, by name."""
        return dict(self._ranks[rank].groups)

    @property
    def stepping_since(self) -> float | None:
        """Time at which the last rank finished its first step; None while a rank has not finished it."""
        ends = [rank.first_step_at for rank in self._ranks.values() if rank.first_step_at is not None]
        return max(ends) if len(ends) == len(self._ranks) else None

    def stepping_apart_since(self, at: float, after_s: float) -> float | None:
        """Time at which the last rank of those that report steps finished its first one, if the others report none although
        they step; None if all report them, or none does, or it is not known yet.

        A second step needs the first one of every rank. `after_s`: how long ago the second step must have ended, because a
        report may be late."""
        stepping = [rank for rank in self._ranks.values() if rank.first_step_at is not None]
        if not 0 < len(stepping) < len(self._ranks):
            return None
        second = [rank.second_step_at for rank in stepping if rank.second_step_at is not None]
        if len(second) < len(stepping) or at - max(*second, self._unheard_until) < after_s:
            return None
        return max(rank.first_step_at for rank in stepping if rank.first_step_at is not None)

    @property
    def least_reported_step(self) -> int:
        """The step that every rank has finished that reports steps; as `newest_common_step` if none does."""
        steps = [rank.step for rank in self._ranks.values() if rank.first_step_at is not None]
        return min(steps, default=self.newest_common_step)

    @property
    def observed_since(self) -> float | None:
        """When an optimizer step of the last rank was first observed (Unix s); None while a rank that may step has none."""
        ends = [rank.observed_since for rank in self._stepping if rank.observed_since is not None]
        return max(ends) if ends and len(ends) == len(self._stepping) else None

    @property
    def observed(self) -> tuple[int, float]:
        """Optimizer steps that were observed in every rank that may step, and seconds for one of them recently."""
        slowest = min(self._stepping or self._ranks.values(), key=lambda rank: rank.observed)
        return slowest.observed, slowest.observed_step_s

    @property
    def newest_common_step(self) -> int:
        """The step that every rank has finished."""
        return min(rank.step for rank in self._ranks.values())

    @property
    def all_start_phases_known(self) -> bool:
        return all(rank.started_noted for rank in self._ranks.values())

    def slowest_start(self) -> tuple[tuple[str, float], ...]:
        """Return the phases of the slowest rank up to its first step."""
        return max((rank.phases_s for rank in self._ranks.values()), key=lambda phases: sum(s for _, s in phases))

    def starts(self) -> tuple[RankStart, ...]:
        """Return the start of each rank, by rank."""
        return tuple(RankStart(rank, each.first_step_at, each.phases_s) for rank, each in sorted(self._ranks.items()))

    def take_steps(self, at: float) -> StepColumns | None:
        """Return the steps finished since the last call, as columns."""
        if not self._rows:
            return None
        rows, self._rows = self._rows, deque()
        notes = [note for _, note in rows]
        return StepColumns(
            node=self._node,
            at=at,
            job=self._job,
            generation=self._generation,
            rank=tuple(rank for rank, _ in rows),
            **_columns(notes, *_OF_A_STEP),
            local_grad_norm=_reported(tuple(note.local_grad_norm for note in notes)),
            flops=tuple(note.flops for note in notes) if any(note.flops for note in notes) else (),
        )

    def take_observed(self, at: float) -> ObservedSteps | None:
        """Return the blocks of observed optimizer steps since the last call, as columns."""
        if not self._observed:
            return None
        notes, self._observed = tuple(self._observed), deque(maxlen=ROWS_MAX)
        columns = _columns(notes, "step", "steps", "started_at", "ended_at", "comm_wait_s")
        return ObservedSteps(**self._senders(at, notes), **columns)

    def take_checks(self, at: float) -> ReplicaChecks | None:
        """Return the checksums since the last call, as columns."""
        if not self._checks:
            return None
        notes, self._checks = tuple(self._checks), deque(maxlen=ROWS_MAX)
        columns = _columns(notes, "step", "digest", "duration_s", "restored")
        return ReplicaChecks(**self._senders(at, notes), **columns)

    def _senders(self, at: float, notes: Sequence[ObservedStepsNote | ReplicaCheckNote]) -> dict[str, Any]:
        """The fields that say of which ranks the rows are."""
        ranks = tuple(note.sender.rank for note in notes)
        return {"node": self._node, "at": at, "job": self._job, "generation": self._generation, "rank": ranks}

    def _observed_counts(self, ranks: Iterable[int]) -> tuple[int, ...]:
        counts = tuple(self._ranks[rank].observed for rank in ranks)
        return counts if not self.has_stepped and any(counts) else ()

    def sample(self, at: float, processes: Mapping[int, ProcessFacts]) -> RankProgress:
        """Return the present progress of every rank, by rank."""
        ranks = sorted(self._ranks)
        facts = [processes.get(rank, ProcessFacts()) for rank in ranks]
        return RankProgress(
            node=self._node,
            at=at,
            job=self._job,
            generation=self._generation,
            rank=tuple(ranks),
            step=tuple(self._ranks[rank].step for rank in ranks),
            phase=tuple(self._ranks[rank].phase for rank in ranks),
            phase_at=tuple(self._ranks[rank].phase_at for rank in ranks),
            process_state=tuple(fact.state for fact in facts),
            cpu_s=tuple(fact.cpu_s for fact in facts),
            collective_seq=tuple(self._ranks[rank].collectives for rank in ranks),
            observed=self._observed_counts(ranks),
        )


def _columns(notes: Sequence[Note], *names: str) -> dict[str, Any]:
    """Return the values of these fields, by field."""
    return {name: tuple(map(attrgetter(name), notes)) for name in names}


def _reported(column: tuple[float, ...]) -> tuple[float, ...]:
    """Return the column; empty if no rank reports the value, as in most jobs."""
    return () if all(map(math.isnan, column)) else column
