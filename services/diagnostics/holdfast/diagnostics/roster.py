"""Roster: the generations of each job and the ranks of each node, folded once for all detectors. Pure.

A node reports the start of its ranks, their progress once a second, each exit, and that it has stopped its ranks. The roster
derives from these signals

* the *newest* generation of a job, by starts and progress; reports of older generations are ignored;
* the *placement* of a generation's ranks on nodes, also if diagnostics started after the generation did;
* the nodes that have *left* a generation, and whether the generation is *over*: one node that stops it on purpose is enough,
  because the supervisor then stops all nodes;
* a new *run*: the same job name, submitted again. All earlier data of the job is dropped, except what identifies late signals
  of earlier runs. Such signals are ignored: a node that was cut off reports its old generation when it returns, and the number
  of that generation may be higher than all of the new run, for example after the event log has lost the job.

The engine folds each signal here before it passes the signal to the detectors. Detectors read the roster and never change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.diagnostics.bounded import Bounded
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, GenerationStopped, RankProgress, StepColumns, WorkerExited

_JOBS_MAX = 16_384  # the jobs that have made no progress for the longest time are dropped first
_GENERATIONS_MAX = 4  # of a job, at least 2; signals about older generations are not kept
_NODES_MAX = 50_000
_JOBS_PER_NODE_MAX = 64
_EARLIER_MAX = 4  # runs of a job whose late signals are recognized
_NONE: Mapping[str, Placement] = {}


OfRun = GenerationStarted | GenerationStopped | RankProgress | StepColumns | WorkerExited


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A known job name was submitted again. The state that detectors keep about the job belongs to an earlier run. `node`: that
    reported it; "" = not known."""

    job: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of one job on one node, as first reported in this generation."""

    generation: int
    ranks: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Generation:
    """One generation of a job, as far as nodes have reported it to this process."""

    job: str
    number: int
    over: bool = False  # some node has stopped the generation on purpose
    mesh: Mesh | None = None  # None: no node has reported its start
    hang: HangSpec = field(default_factory=HangSpec)
    started_at: float | None = None  # the earliest start, agents' clocks
    starts: dict[str, float] = field(default_factory=dict)  # node → its newest start, agent's clock
    spread: bool = False  # the ranks are on more than one node
    learned_start: bool = False  # ranks of some node have modules that earlier ones have imported
    nodes: set[str] = field(default_factory=set)
    node_of: dict[int, str] = field(default_factory=dict)  # rank → node, for ranks whose start or exit was reported
    left: set[str] = field(default_factory=set)  # nodes that stopped their ranks, or whose ranks have all finished

    @property
    def world_size(self) -> int:
        """Number of ranks; 0 = not known."""
        return 0 if self.mesh is None else self.mesh.world_size

    def place(self, node: str, ranks: Iterable[int]) -> None:
        self.nodes.add(node)
        self.node_of.update(dict.fromkeys(ranks, node))


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A run that another one has replaced."""

    generation: int  # its newest generation that was started
    nodes: frozenset[str]  # that have reported about it
    over: bool  # a node has left it on purpose, or has begun the next run


@dataclass(slots=True)
class _Job:
    generations: dict[int, Generation] = field(default_factory=dict)  # by number
    newest: int = -1
    started: int = -1  # the newest generation whose start was reported
    submission: str = ""  # of the run; "" = its agents do not report the submission
    earlier: dict[str, _Earlier] = field(default_factory=dict)  # by submission, the last ones
    strangers: set[str] = field(default_factory=set)  # nodes of earlier runs that are over, and not of this one
    ended: bool = False  # some node has left the generation `started`
    stopped: int = -1  # the newest generation that some node stopped on purpose
    began_at: float | None = None  # the earliest start of the run, agents' clocks
    left: Bounded[str, int] = field(default_factory=lambda: Bounded(_NODES_MAX))  # node → newest generation it has left

    def generation(self, job: str, number: int) -> Generation | None:
        """Return the generation `number`, which is created if it is new; None if it is older than all generations kept."""
        known = self.generations.get(number)
        if known is not None:
            return known
        if len(self.generations) >= _GENERATIONS_MAX:
            # The running generation is kept, whatever exits and stops of other generations are reported.
            oldest = min(kept for kept in self.generations if kept != self.newest)
            if number < oldest and number != self.newest:
                return None
            del self.generations[oldest]
        known = self.generations[number] = Generation(job, number, over=number <= self.stopped)
        return known


@dataclass(slots=True)
class _Node:
    jobs: Bounded[str, Placement] = field(default_factory=lambda: Bounded(_JOBS_PER_NODE_MAX))
    last_job: str = ""


class Roster:
    """`observe` folds one item; all other methods are queries. Tables are updated in place."""

    def __init__(self) -> None:
        self._jobs: Bounded[str, _Job] = Bounded(_JOBS_MAX)
        self._nodes: Bounded[str, _Node] = Bounded(_NODES_MAX)

    # ---------------------------------------------------------------- queries

    def generation(self, job: str, number: int) -> Generation | None:
        """The generation `number` of `job`; None if it is not kept."""
        known = self._jobs.get(job)
        return None if known is None else known.generations.get(number)

    def current(self, job: str, number: int) -> Generation | None:
        """The generation `number` if it is the newest of `job`; None if it is older or the job is not known."""
        known = self._jobs.get(job)
        return known.generations.get(number) if known is not None and number == known.newest else None

    def newest_started(self, job: str) -> int:
        """The highest generation number whose start was reported; -1 = none."""
        known = self._jobs.get(job)
        return -1 if known is None else known.started

    def began_at(self, job: str) -> float | None:
        """The earliest reported start of the job's run, agents' clocks."""
        known = self._jobs.get(job)
        return None if known is None else known.began_at

    def on(self, node: str) -> Mapping[str, Placement]:
        """Job → its ranks on `node`, without the ranks that the node has stopped."""
        known = self._nodes.get(node)
        return _NONE if known is None else known.jobs

    def last_job(self, node: str) -> str:
        """The last job that started ranks on `node`; "" = none."""
        known = self._nodes.get(node)
        return "" if known is None else known.last_job

    def is_new_run(self, item: GenerationStarted | WorkerExited) -> bool:
        """Whether `item`, which is not folded yet, belongs to another run of a known job. Clocks are never compared.

        The submission decides if agents report it. Otherwise a run is new if some node has left the newest generation and a
        generation with the same or a lower number starts. A worker may exit before any node has started its generation: this
        begins a run if the run before it has not started either, or has ended.
        """
        job = self._jobs.get(item.job)
        if job is None:
            return False
        if item.submission and job.submission:
            begins = isinstance(item, GenerationStarted) or job.ended or job.started < 0
            return begins and item.submission != job.submission
        return isinstance(item, GenerationStarted) and job.ended and item.generation <= job.started

    def is_of_earlier_run(self, item: OfRun) -> bool:
        """Whether `item` is a late signal of a run that another one has replaced. A start that its node has reported before is
        late; any other start of a run that is not over, or of a newer generation, says that the run goes on."""
        job = self._jobs.get(item.job)
        if job is None or not job.earlier:
            return False
        if isinstance(item, RankProgress | StepColumns):
            return item.node in job.strangers
        earlier = job.earlier.get(item.submission)
        if earlier is None or not isinstance(item, GenerationStarted):
            return earlier is not None
        return item.generation <= earlier.generation and (earlier.over or item.node in earlier.nodes)

    # ---------------------------------------------------------------- fold

    def observe(self, item: object) -> None:
        """Fold one item. Items without information about placements are ignored."""
        match item:
            case RankProgress():
                self._progress(item)
            case GenerationStarted():
                self._started(item)
            case GenerationStopped():
                self._stopped(item)
            case WorkerExited():
                generation = self._job(item.job).generation(item.job, item.generation)
                if generation is not None:
                    generation.place(item.node, (item.rank,))
                job = self._job(item.job)
                job.submission = job.submission or item.submission
                job.strangers.discard(item.node)
            case RunStarted():
                self._forget(item.job, item.node)
            case _:
                pass

    def _progress(self, item: RankProgress) -> None:
        """Fold progress. Hot path: called for every node every second, and nearly always without a change."""
        node = self._nodes.get(item.node)
        if node is not None and item.job in self._jobs:
            self._jobs.move_to_end(item.job)
            placement = node.jobs.get(item.job)
            if placement is not None and placement.generation == item.generation:
                return
        self._place(item.node, item.job, item.generation, item.rank)

    def _started(self, item: GenerationStarted) -> None:
        job = self._job(item.job)
        job.earlier.pop(item.submission, None)
        job.strangers.discard(item.node)
        self._place(item.node, item.job, item.generation, item.ranks)
        generation = job.generation(item.job, item.generation)
        if generation is None:
            return
        generation.mesh, generation.hang = item.mesh, item.hang
        generation.place(item.node, item.ranks)
        generation.starts[item.node] = item.at
        generation.started_at = min(item.at, generation.started_at or item.at)
        generation.learned_start = generation.learned_start or item.learned_start
        generation.spread = len(item.ranks) < item.mesh.world_size
        job.began_at = min(item.at, job.began_at or item.at)
        self._nodes.get_or_add(item.node, _Node).last_job = item.job
        if item.generation > job.started:
            job.started, job.submission, job.ended = item.generation, item.submission, False

    def _stopped(self, item: GenerationStopped) -> None:
        job = self._job(item.job)
        job.ended = job.ended or item.generation == job.started
        if not item.finished and item.generation > job.stopped:
            job.stopped = item.generation
            for number, each in job.generations.items():
                each.over = each.over or number <= item.generation
        generation = job.generation(item.job, item.generation)
        if generation is not None:
            generation.left.add(item.node)
        job.left[item.node] = max(item.generation, job.left.get(item.node, -1))
        node = self._nodes.get(item.node)
        if node is not None and item.job in node.jobs and node.jobs[item.job].generation <= item.generation:
            del node.jobs[item.job]

    def _place(self, name: str, job_name: str, number: int, ranks: tuple[int, ...]) -> None:
        """Record a placement, unless the signal is late: the node has left this generation or runs a newer one."""
        job, node = self._job(job_name), self._nodes.get_or_add(name, _Node)
        job.newest = max(number, job.newest)
        generation = job.generation(job_name, number)
        if generation is None:
            return
        if job.left.get(name, -1) >= number:
            return
        generation.nodes.add(name)
        placement = node.jobs.get(job_name)
        if placement is None or placement.generation < number:
            node.jobs[job_name] = Placement(number, ranks)

    def _forget(self, name: str, begun_on: str) -> None:
        """Drop the run of the job, except what identifies its late signals. Work depends on the job's own nodes only."""
        job = self._jobs.pop(name, None)
        if job is None:
            return
        nodes = frozenset(node for each in job.generations.values() for node in each.nodes)
        for node in nodes:
            known = self._nodes.get(node)
            if known is not None:
                known.jobs.pop(name, None)
        if not job.submission:
            return
        over = job.ended or begun_on in nodes
        earlier = {**job.earlier, job.submission: _Earlier(job.started, nodes, over)}
        kept = dict(list(earlier.items())[-_EARLIER_MAX:])
        self._jobs[name] = _Job(earlier=kept, strangers=job.strangers | nodes if over else job.strangers)

    def _job(self, name: str) -> _Job:
        return self._jobs.get_or_add(name, _Job)
