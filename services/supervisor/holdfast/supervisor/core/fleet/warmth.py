"""Prepares worker templates on spares: the modules of running jobs are imported before a swap needs them.

Theory of operation. When a generation steps, its spares are ordered to prepare a worker template (`warm_spares`). The order is
executed once. The resulting template is a level, which agents report with their workers: the jobs that it serves, whether it
is ready, and why not. A node has one template. If it serves any running job, it is kept. A spare whose template serves none of
them (its agent has restarted, or it has joined since) gets the order again, by `review`.

An agent replaces a template that ended. If templates end repeatedly, that is noted once, and so is the next ready one.
"""

from __future__ import annotations

from holdfast.domain.nodes import TemplateState
from holdfast.domain.orders import PrepareTemplate
from holdfast.supervisor.core.fleet.spares import is_spare_for, spares_for
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.protocol import JobPhase


def warm_spares(turn: Turn, job: Job) -> None:
    """The job steps: order templates on its spares."""
    for spare in spares_for(turn, job):
        if job.name not in turn.nodes[spare.node].warmed:
            _warm(turn, spare.node, job)


def on_template(turn: Turn, name: str, template: TemplateState | None) -> None:
    """Fold the reported state of the node's template; None = its agent does not report it."""
    before = turn.nodes[name].template
    if template is not before:
        turn.put_node(name, template=template)
    if template is None:
        return
    if template.failure and not (before is not None and before.failure):
        turn.note(
            name, f"has no worker template: a restart or swap there pays for imports, or fails. {template.failure}"
        )
    elif before is not None and before.failure and not template.failure and template.ready:
        turn.note(name, "has a worker template again")


def review(turn: Turn, name: str) -> None:
    """The node's template, or the jobs that may use the node, have changed: order a template if it is needed."""
    node = turn.nodes[name]
    if node.template is None:
        return  # unknown does not mean that there is none
    wanted = [
        job for _, job in sorted(turn.jobs.items()) if job.phase is JobPhase.RUNNING and is_spare_for(turn, job, node)
    ]
    if not wanted or any(job.name in node.template.jobs for job in wanted):
        return
    if not any(isinstance(send.order, PrepareTemplate) for send in turn.orders(node=name)):
        ordered = [job for job in wanted if job.name in node.warmed]
        _warm(turn, name, (ordered or wanted)[0])


def _warm(turn: Turn, name: str, job: Job) -> None:
    # A spare that waits for a year sees many jobs: finished jobs are dropped.
    others = (each for each in turn.nodes[name].warmed if each != job.name)
    unfinished = (each for each in others if each in turn.jobs and not turn.jobs[each].phase.finished)
    turn.put_node(name, warmed=(*unfinished, job.name))
    turn.send(name, PrepareTemplate(job.name, job.spec.launch))
