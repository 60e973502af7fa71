"""Progress of each rank of one generation, computed from its messages. Pure: time and process facts are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

# A rank is silent when it has said nothing for this long, and for this much longer than its slowest recent step.
SILENT_AFTER_S = 1.0
SILENT_FACTOR = 1.5
_RECENT = 20  # steps
STEP_ENDS_MAX = 4  # of which it is remembered when they ended: ranks are no more steps apart


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What /proc/PID/stat says: the state letter ("" = gone) and user + system CPU seconds used."""

    state: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankStart:
    """How one rank came to its first step; a rank that has sent no notes has told nothing."""

    rank: int
    first_step_at: float | None
    phases_s: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class _Rank:
    step: int = 0
    phase: Phase = Phase.INIT
    phase_at: float = 0.0
    first_step_at: float | None = None  # end of its first step in this generation
    phases_s: tuple[tuple[str, float], ...] = ()
    heard: bool = False
    started_noted: bool = False
    spoke_at: float = 0.0
    groups: tuple[tuple[str, str], ...] = ()
    collectives: int = -1  # entered, as last counted
    # Of a script that reports no steps: optimizer steps observed, seconds for one recently, and the end of the first block
    observed: int = 0
    observed_step_s: float = 0.0
    observed_since: float | None = None
    # When its last steps ended, the newest first: by its own clock, and by the monotonic one.
    ends: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STEP_ENDS_MAX))


class Progress:
    """The state of one generation's ranks on this node."""

    def __init__(self, *, node: str, job: str, generation: int, ranks: Iterable[int], step: int, at: float) -> None:
        """`step` is where the ranks start from, `at` when they were started (Unix s)."""
        self._node, self._job, self._generation = node, job, generation
        self._ranks = {rank: _Rank(step=step, phase_at=at) for rank in ranks}
        self._rows: deque[tuple[int, StepNote]] = deque()
        self._observed: deque[ObservedStepsNote] = deque(maxlen=ROWS_MAX)
        self._checks: deque[ReplicaCheckNote] = deque(maxlen=ROWS_MAX)  # one that is lost is not judged
        self._intervals_s: deque[float] = deque(maxlen=_RECENT)
        self._unheard_until = 0.0
        self.dropped = 0

    def fold(self, note: Note) -> None:
        """Take in a note. The caller has checked that its rank is one of ours."""
        rank = self._ranks[note.sender.rank]
        if isinstance(note, ObservedStepsNote):
            self._observe(rank, note)  # the script itself has reported nothing
            return
        rank.heard = True
        rank.collectives = -1  # it speaks for itself again
        match note:
            case StepNote():
                if rank.phase is Phase.STEP:
                    self._intervals_s.append(note.ended_at - rank.spoke_at)
                rank.spoke_at = note.ended_at
                if note.step > rank.step + 1:
                    rank.ends.clear()  # notes of some steps were dropped
                if note.step > rank.step:
                    rank.ends.appendleft((note.ended_at, note.ended_uptime_s))
                rank.step = max(rank.step, note.step)
                rank.phase, rank.phase_at = Phase.STEP, note.ended_at
                if rank.first_step_at is None:
                    rank.first_step_at = note.ended_at
                if len(self._rows) == ROWS_MAX:
                    self._rows.popleft()
                    self.dropped += 1
                self._rows.append((note.sender.rank, note))
            case PhaseNote():
                # One that only says that it begins is where it was put at its start. Diagnostics judges who has said more:
                # a script that never restores and never uses `run.step` makes no progress that could stop.
                if note.phase is not rank.phase or note.phase is not Phase.INIT:
                    rank.phase, rank.phase_at = note.phase, note.at
                rank.spoke_at = note.at
            case StartedNote():
                rank.phases_s, rank.started_noted = note.phases_s, True
            case GroupsNote():
                rank.groups = note.members
            case ReplicaCheckNote():
                self._checks.append(note)
            case SavedNote() | MissedNote():
                pass  # it says something about checkpoints, not about progress

    def _observe(self, rank: _Rank, note: ObservedStepsNote) -> None:
        rank.observed = max(rank.observed, note.step)
        rank.observed_step_s = (note.ended_at - note.started_at) / note.steps
        if rank.observed_since is None:
            rank.observed_since = note.ended_at
        if not math.isnan(note.comm_wait_s):
            self._observed.append(note)

    def knows(self, rank: int) -> bool:
        return rank in self._ranks

    def step_of(self, rank: int) -> int:
        """Last step that it finished."""
        return self._ranks[rank].step

    def observed_of(self, rank: int) -> int:
        """Optimizer steps that were observed in it, of a script that reports no steps."""
        return self._ranks[rank].observed

    def step_ends_of(self, rank: int) -> tuple[float, ...]:
        """When its last steps ended, the newest first."""
        return tuple(ended_at for ended_at, _ in self._ranks[rank].ends)

    def step_end_uptimes_of(self, rank: int) -> tuple[float, ...]:
        """The same by the monotonic clock; none when it does not say."""
        known = tuple(uptime_s for _, uptime_s in self._ranks[rank].ends)
        return known if all(known) else ()

    @property
    def silent(self) -> bool:
        """No rank has sent a note yet: an unmodified script, or one that has not come to `hf.launch`."""
        return not any(rank.heard for rank in self._ranks.values())

    def unheard(self, until: float) -> None:
        """Nobody listened to the ranks until then (Unix s)."""
        self._unheard_until = until

    def silent_s(self, at: float) -> float:
        """How long no rank has said anything; 0.0 while that is no longer than a step may take, and when all are done."""
        waiting = [rank for rank in self._ranks.values() if rank.phase is not Phase.DONE]
        if self.silent or not waiting:
            return 0.0
        silent_s = at - max(self._unheard_until, *(rank.spoke_at for rank in self._ranks.values()))
        usual_s = SILENT_FACTOR * max(self._intervals_s, default=0.0)
        return silent_s if silent_s > max(SILENT_AFTER_S, usual_s) else 0.0

    def counted(self, collectives: Mapping[int, int]) -> None:
        """How many collectives each rank has entered, by its flight recorder."""
        for rank, count in collectives.items():
            self._ranks[rank].collectives = count

    def groups_of(self, rank: int) -> dict[str, str]:
        """Members of its process groups, `compact`, by name."""
        return dict(self._ranks[rank].groups)

    @property
    def stepping_since(self) -> float | None:
        """When the last rank finished its first step; None while one has not."""
        ends = [rank.first_step_at for rank in self._ranks.values() if rank.first_step_at is not None]
        return max(ends) if len(ends) == len(self._ranks) else None

    @property
    def observed_since(self) -> float | None:
        """When an optimizer step of the last rank was first observed (Unix s); None while one rank has none."""
        ends = [rank.observed_since for rank in self._ranks.values() if rank.observed_since is not None]
        return max(ends) if len(ends) == len(self._ranks) else None

    @property
    def observed(self) -> tuple[int, float]:
        """Optimizer steps that were observed in every rank, and seconds for one of them recently."""
        slowest = min(self._ranks.values(), key=lambda rank: rank.observed)
        return slowest.observed, slowest.observed_step_s

    @property
    def newest_common_step(self) -> int:
        """The step that every rank has finished."""
        return min(rank.step for rank in self._ranks.values())

    @property
    def all_start_phases_known(self) -> bool:
        return all(rank.started_noted for rank in self._ranks.values())

    def slowest_start(self) -> tuple[tuple[str, float], ...]:
        """How the slowest rank spent the time to its first step."""
        return max((rank.phases_s for rank in self._ranks.values()), key=lambda phases: sum(s for _, s in phases))

    def starts(self) -> tuple[RankStart, ...]:
        """How each rank came to its first step, by rank."""
        return tuple(RankStart(rank, each.first_step_at, each.phases_s) for rank, each in sorted(self._ranks.items()))

    def take_steps(self, at: float) -> StepColumns | None:
        """The steps finished since the last call, as columns."""
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
            step=tuple(note.step for note in notes),
            started_at=tuple(note.started_at for note in notes),
            ended_at=tuple(note.ended_at for note in notes),
            data_s=tuple(note.data_s for note in notes),
            stall_s=tuple(note.stall_s for note in notes),
            tokens=tuple(note.tokens for note in notes),
            loss=tuple(note.loss for note in notes),
            grad_norm=tuple(note.grad_norm for note in notes),
            comm_wait_s=tuple(note.comm_wait_s for note in notes),
            local_grad_norm=_reported(tuple(note.local_grad_norm for note in notes)),
        )

    def take_observed(self, at: float) -> ObservedSteps | None:
        """The blocks of observed optimizer steps since the last call, as columns."""
        if not self._observed:
            return None
        notes, self._observed = tuple(self._observed), deque(maxlen=ROWS_MAX)
        return ObservedSteps(
            node=self._node,
            at=at,
            job=self._job,
            generation=self._generation,
            rank=tuple(note.sender.rank for note in notes),
            step=tuple(note.step for note in notes),
            steps=tuple(note.steps for note in notes),
            started_at=tuple(note.started_at for note in notes),
            ended_at=tuple(note.ended_at for note in notes),
            comm_wait_s=tuple(note.comm_wait_s for note in notes),
        )

    def take_checks(self, at: float) -> ReplicaChecks | None:
        """The checksums since the last call, as columns."""
        if not self._checks:
            return None
        notes, self._checks = tuple(self._checks), deque(maxlen=ROWS_MAX)
        return ReplicaChecks(
            node=self._node,
            at=at,
            job=self._job,
            generation=self._generation,
            rank=tuple(note.sender.rank for note in notes),
            step=tuple(note.step for note in notes),
            digest=tuple(note.digest for note in notes),
            took_s=tuple(note.took_s for note in notes),
            restored=tuple(note.restored for note in notes),
        )

    def sample(self, at: float, processes: Mapping[int, ProcessFacts]) -> RankProgress:
        """Where every rank stands now, by rank."""
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
        )


def _reported(column: tuple[float, ...]) -> tuple[float, ...]:
    """No column at all when nobody reports it, as in most jobs."""
    return () if all(map(math.isnan, column)) else column
