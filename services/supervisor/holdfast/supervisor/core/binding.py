"""What binds a report to its sender: the door through which everything that agents say comes in.

Theory of operation. The shell says in whose session a report came; the report says what it is about. An agent is believed about
its own node, the orders that this node was given, and the ranks that it has in the generation that it speaks of:

    Hello           names the node and the incarnation of its session; workers as WorkersChanged
    WorkersChanged  ranks that ended: of the node's placement. Workers that live count wherever they are (they must be stopped),
                    and as ranks of a run only in the node's placement (reconcile.py)
    OrderDone       answers an order to this node
    RanksStepping   ranks of the node's placement in this generation; likewise in heartbeats
    RanksFinished   likewise: a job is completed when each of its nodes has said so of all of its own ranks
    Inventory       what the object store has: from nodes that run, or prepare, the job. Shards may lie on any node, that had
                    ranks once or fetched some to have them: of the attempt that runs, none that is newer than what the nodes
                    that run it have saved (`believed`, asked whenever it is decided what to restore)
    Tested          is about the node itself
    StepReached     (with beats) of the running generation, from one of its nodes

    Finding         (of diagnostics, from a node's signals) about ranks of a generation: of a node that has some of them

What does not belong is left out, and the rest of the report counts. It is noted as the sender's, once in `NOTED_EVERY_S`.
Late is no lie: reports of a generation that is over, and answers to orders that were withdrawn, are left out without a word,
and so is a session's report that comes after the next session's Hello (sessions.py). A new kind of report needs a line in
`_BOUND_BY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, Severity
from holdfast.domain.generations import Generation, Placement, ShardRecord
from holdfast.domain.nodes import RunningWorker, WorkerEnded
from holdfast.domain.orders import (
    Hello,
    Inventory,
    OrderDone,
    RanksFinished,
    RanksStepping,
    Report,
    StepReached,
    Tested,
    WorkersChanged,
)
from holdfast.domain.runs import Shards, Workers, shard_runs, worker_runs
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.wording import listed
from holdfast.supervisor.protocol import NodeReported

NOTED_EVERY_S = 60.0  # per node
# The next number of a generation or an attempt is above every one that a node reports, and has to fit the messages, too.
NUMBER_MAX = 1 << 53
FirstSteps = tuple[str, RanksStepping, Placement | None]  # node, report, the node's placement in its generation
GENERATIONS_AHEAD_MAX = 1_000_000  # of a job that is known: more than a log that went back has ever lost


def admit(turn: Turn, event: NodeReported) -> Report | None:
    """What of a report counts; None = nothing. Of one that is known to be no repeat."""
    report: Report | None = _BOUND_BY[type(event.report)](turn, event, event.report)
    return report


def admit_first_steps(turn: Turn, events: Iterable[NodeReported]) -> list[FirstSteps]:
    """`admit` of many reports of first steps. Nearly all of them are about one generation, and right."""
    admitted: list[FirstSteps] = []
    job, number, generation = "", 0, None
    for event in events:
        node, report = event.node, event.report
        assert isinstance(report, RanksStepping)
        if report.generation != number or report.job != job:
            job, number = report.job, report.generation
            generation = _generation(turn, job, number)
        if generation is None:
            continue  # it is over
        placement, ranks = generation.placement_of(node), report.ranks
        if (
            placement is not None
            and ranks
            and min(ranks) >= (first := placement.first_rank)
            and max(ranks) < first + placement.nproc
            and report.step <= NUMBER_MAX
        ) or _of_own_ranks(turn, event, report) is not None:
            admitted.append((node, report, placement))
    return admitted


def has_stepped_there(job: Job | None, node: str, reached: StepReached) -> bool:
    """Whether a beat of `node` counts: its ranks are part of the generation that runs."""
    if job is None or job.running is None or reached.generation != job.running.number or reached.step > NUMBER_MAX:
        return False
    return job.running.slot_of(node) is not None


def believed(job: Job, holders: Iterable[Node], nodes: Mapping[str, Node]) -> list[Sequence[ShardRecord]]:
    """What each of `holders` has of the job. Of the attempt that runs, a node that has no ranks in it has nothing that is newer
    than what all nodes that do have said to have."""
    every = [(node, node.inventory.get(job.name, ())) for node in holders]
    running = job.running
    if running is None:
        return [shards for _, shards in every]
    restored = job.generation.restore if job.generation is not None else running.restore
    newest = max(job.checkpoints.step, restored.step if restored.attempt == running.attempt else 0)
    with_ranks = set(running.nodes)
    doubtful = {
        node.name
        for node, shards in every
        if node.facts.node not in with_ranks and _newest_step(shards, running.attempt) > newest
    }
    if not doubtful:
        return [shards for _, shards in every]
    members = (nodes[name].inventory.get(job.name, ()) for name in running.nodes if name in nodes)
    newest = max(newest, *(_newest_step(shards, running.attempt) for shards in members))
    return [
        Shards(run for run in shard_runs(shards) if run.attempt != running.attempt or run.step <= newest)
        if node.name in doubtful
        else shards
        for node, shards in every
    ]


def _newest_step(shards: Iterable[ShardRecord], attempt: int) -> int:
    return max((run.step for run in shard_runs(shards) if run.attempt == attempt), default=0)


def not_of_the_job(turn: Turn, finding: Finding) -> str:
    """Why a finding about a job's ranks is not believed: it follows from signals of a node that has none of them. Empty when
    nothing speaks against it."""
    if not finding.node or finding.severity is Severity.INFO:
        return ""  # of no node, or of one that has left: its condition is over
    generation = _generation(turn, finding.job, finding.generation)
    if generation is None or generation.slot_of(finding.node) is not None:
        return ""
    return f"{finding.node} has no ranks in generation {finding.generation} of {finding.job}"


# ---------------------------------------------------------------- by kind


def _hello(turn: Turn, event: NodeReported, hello: Hello) -> Hello | None:
    facts = hello.facts
    if (facts.node, facts.incarnation) != (event.node, event.incarnation):
        _refuse(turn, event.node, f"its greeting is that of {facts.node} ({facts.incarnation})")
        return None
    workers, ended = _own_workers(turn, event.node, hello.running, hello.ended)
    if workers is hello.running and ended is hello.ended:
        return hello
    return evolve(hello, running=workers, ended=ended)


def _workers_changed(turn: Turn, event: NodeReported, report: WorkersChanged) -> WorkersChanged:
    workers, ended = _own_workers(turn, event.node, report.workers, report.ended)
    if workers is report.workers and ended is report.ended:
        return report
    return evolve(report, workers=workers, ended=ended)


def _order_done(turn: Turn, event: NodeReported, done: OrderDone) -> OrderDone | None:
    asked = turn.addressee(event.node, done.command_id)
    if asked is not None and asked != event.node:
        _refuse(turn, event.node, f"it answers an order for {asked} ({done.command_id})")
        return None
    return done


def _of_own_ranks(
    turn: Turn, event: NodeReported, report: RanksStepping | RanksFinished
) -> RanksStepping | RanksFinished | None:
    generation = _generation(turn, report.job, report.generation)
    if generation is None:
        return None  # it is over
    if foreign := _foreign(generation, event.node, report.ranks):
        _refuse(turn, event.node, _not_its_own(report.job, foreign))
        return None
    if isinstance(report, RanksStepping) and report.step > NUMBER_MAX:
        _refuse(turn, event.node, f"its ranks of {report.job} cannot have finished step {report.step}")
        return None
    return report


def _inventory(turn: Turn, event: NodeReported, inventory: Inventory) -> Inventory:
    job = turn.jobs.get(inventory.job)
    attempt_max = NUMBER_MAX if job is None else max(NUMBER_MAX, job.numbering.attempt_base + job.number)
    runs = shard_runs(inventory.shards)
    shards: Sequence[ShardRecord] = inventory.shards
    if impossible := [run for run in runs if run[0] > attempt_max or run[1] > NUMBER_MAX]:
        shards = Shards(run for run in runs if run not in impossible)
        what = f"step {impossible[0].step} of attempt {impossible[0].attempt}"
        _refuse(turn, event.node, f"nobody has saved {what} of {inventory.job}")
    # Without a word: a node that had ranks once goes on telling what it knows of the store.
    stored = inventory.stored
    if stored:
        members = _has_ranks(job, event.node)
        stored = tuple(each for each in stored if members and each.attempt <= attempt_max and each.step <= NUMBER_MAX)
    if shards is inventory.shards and len(stored) == len(inventory.stored):
        return inventory
    return evolve(inventory, shards=shards, stored=stored)


def _of_itself(turn: Turn, event: NodeReported, report: Tested) -> Tested:
    return report


_BOUND_BY: Mapping[type[Report], Callable[[Turn, NodeReported, Any], Report | None]] = {
    Hello: _hello,
    WorkersChanged: _workers_changed,
    OrderDone: _order_done,
    RanksStepping: _of_own_ranks,
    RanksFinished: _of_own_ranks,
    Inventory: _inventory,
    Tested: _of_itself,
}
if missing := {*get_args(Report)} - {*_BOUND_BY}:
    raise TypeError(f"reports that nothing binds to their senders: {missing}")

# ---------------------------------------------------------------- what is whose


def _own_workers(
    turn: Turn, node: str, workers: Sequence[RunningWorker], ended: tuple[WorkerEnded, ...]
) -> tuple[Sequence[RunningWorker], tuple[WorkerEnded, ...]]:
    """Without generations that cannot be, and without the ends of others' ranks; the same objects when all is well."""
    runs = worker_runs(workers)
    possible = [run for run in runs if run.generation <= _generation_max(turn, run.job)]
    if len(possible) < len(runs):
        run = next(run for run in runs if run.generation > _generation_max(turn, run.job))
        _refuse(turn, node, f"it cannot run generation {run.generation} of {run.job}")
        workers = Workers(possible)
    own = tuple(each for each in ended if _is_own(turn, node, each))
    if len(own) == len(ended):
        return workers, ended
    other = next(each for each in ended if not _is_own(turn, node, each))
    _refuse(turn, node, _not_its_own(other.job, [other.rank]))
    return workers, own


def _is_own(turn: Turn, node: str, ended: WorkerEnded) -> bool:
    generation = _generation(turn, ended.job, ended.generation)
    if generation is None:  # over, or not known here: nothing follows from it
        return ended.generation <= _generation_max(turn, ended.job)
    return not _foreign(generation, node, (ended.rank,))


def _generation(turn: Turn, name: str, number: int) -> Generation | None:
    """The one that runs, or the newest one, if it has this number."""
    job = turn.jobs.get(name)
    if job is None:
        return None
    if (each := job.running) is not None and each.number == number and each.placements:
        return each
    if (each := job.generation) is not None and each.number == number and each.placements:
        return each
    return None


def _generation_max(turn: Turn, name: str) -> int:
    job = turn.jobs.get(name)
    return NUMBER_MAX if job is None else job.number + GENERATIONS_AHEAD_MAX


def _has_ranks(job: Job | None, node: str) -> bool:
    """In the generation that runs, or in the newest."""
    known = (job.running, job.generation) if job is not None else ()
    return any(each is not None and each.slot_of(node) is not None for each in known)


def _foreign(generation: Generation, node: str, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that `node` does not have in this generation."""
    placement = generation.placement_of(node)
    own = range(0) if placement is None else placement.ranks
    if ranks and min(ranks) >= own.start and max(ranks) < own.stop:
        return []
    return [rank for rank in ranks if rank not in own]


def _not_its_own(job: str, ranks: Sequence[int]) -> str:
    return f"it speaks of ranks of {job} that it does not have: {listed(sorted(ranks))}"


def _refuse(turn: Turn, node: str, what: str) -> None:
    """Note it, unless the node's last lie was noted a moment ago, or it has never greeted."""
    known = turn.nodes.get(node)
    if known is not None and not (known.refused_at and 0.0 <= turn.at - known.refused_at < NOTED_EVERY_S):
        turn.put_node(node, refused_at=turn.at)
        turn.note(node, f"ignored: {what}. More of this kind is not noted for {NOTED_EVERY_S:g} s")
