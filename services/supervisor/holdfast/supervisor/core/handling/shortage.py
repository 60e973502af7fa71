"""Describes what a job waits for. It depends on all other jobs, so it is computed on request and not recorded."""

from __future__ import annotations

from holdfast.domain.words import plural
from holdfast.supervisor.core.fleet.spares import withheld
from holdfast.supervisor.core.model.indexing import nodes_in_use
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.lifecycle import Pending, Suspended, Waiting
from holdfast.supervisor.core.model.state import State
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.wording import listed

HOLDERS_MAX = 3


def waits_for(state: State, job: Job) -> str:
    """The jobs that have the nodes that a job lacks, and those that were asked for some; empty if it lacks none."""
    lacking = isinstance(job.doing, Pending | Waiting | Suspended)
    asked = sorted(each.job for each in state.incidents.values() if each.loan is not None and each.loan.job == job.name)
    texts = [holders(Turn(state, state.folded_at), job)] if lacking else []
    if asked:
        texts.append(f"{listed(asked)} {'is' if len(asked) == 1 else 'are'} asked for replicas")
    return "; ".join(filter(None, texts))


def holders(turn: Turn, job: Job) -> str:
    """The jobs with the most nodes, and free nodes that are reserved for others; empty if this job is the only one."""
    having = turn.pooled("holders", lambda: _holders(turn))
    others = [(name, count) for name, count in having if name != job.name]
    texts = [f"{_called(turn, name)} has {plural(count, 'node')}" for name, count in others[:HOLDERS_MAX]]
    if len(others) > HOLDERS_MAX:
        count = len(others) - HOLDERS_MAX
        texts.append(
            f"{count} more {'job has' if count == 1 else 'jobs have'} {plural(sum(n for _, n in others[HOLDERS_MAX:]), 'node')}"
        )
    kept: dict[str, list[str]] = {}
    for node, owner in sorted(withheld(turn, job).items()):
        kept.setdefault(owner, []).append(node)
    for owner, nodes in sorted(kept.items())[:HOLDERS_MAX]:
        texts.append(f"{listed(nodes)} {'is' if len(nodes) == 1 else 'are'} reserved for {_called(turn, owner)}")
    return "; ".join(texts)


def _holders(turn: Turn) -> list[tuple[str, int]]:
    """(job, nodes), most first."""
    counts = ((name, len(nodes_in_use(job))) for name, job in turn.jobs.items())
    return sorted(((name, count) for name, count in counts if count), key=lambda item: (-item[1], item[0]))


def _called(turn: Turn, name: str) -> str:
    priority = turn.jobs[name].spec.priority
    return f"{name} (priority {priority})" if priority else name
