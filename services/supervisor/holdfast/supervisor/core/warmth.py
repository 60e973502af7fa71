"""Spares have the modules of running jobs imported, so that a swap does not pay for it.

Theory of operation. When a generation steps, its spares are told to warm a worker template (`warm_spares`). That is an order,
carried out once; what became of the template is a level, which agents report with their workers: for which jobs they keep one,
whether it is ready, and why not. A node has one template. One that serves some running job is left alone, whichever that is; a
spare that keeps none for any of them (its agent was restarted, or it has joined since) is told again, by `review`.

An agent makes a template that died again by itself. One that keeps dying is said, once, and so is that it is ready again.
"""

from __future__ import annotations

from holdfast.domain.nodes import TemplateState
from holdfast.domain.orders import Warm
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.spares import is_spare_for, spares_for
from holdfast.supervisor.core.turn import Turn
from holdfast.supervisor.protocol import JobPhase


def warm_spares(turn: Turn, job: Job) -> None:
    """The job steps."""
    for spare in spares_for(turn, job):
        if job.name not in turn.nodes[spare.node].warmed:
            _warm(turn, spare.node, job)


def on_template(turn: Turn, name: str, template: TemplateState | None) -> None:
    """What the node reports of its template; None = its agent does not say."""
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
    """The node's template, or what it may be used for, has changed."""
    node = turn.nodes[name]
    if node.template is None:
        return  # unknown is not cold
    wanted = [
        job for _, job in sorted(turn.jobs.items()) if job.phase is JobPhase.RUNNING and is_spare_for(turn, job, node)
    ]
    if not wanted or any(job.name in node.template.jobs for job in wanted):
        return
    if not any(isinstance(send.order, Warm) for send in turn.orders(node=name)):
        told = [job for job in wanted if job.name in node.warmed]
        _warm(turn, name, (told or wanted)[0])


def _warm(turn: Turn, name: str, job: Job) -> None:
    # A spare that waits for a year sees many jobs: those that are over are not remembered.
    others = (each for each in turn.nodes[name].warmed if each != job.name)
    going_on = (each for each in others if each in turn.jobs and not turn.jobs[each].phase.finished)
    turn.put_node(name, warmed=(*going_on, job.name))
    turn.send(name, Warm(job.name, job.spec.launch))
