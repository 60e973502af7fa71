"""Which of the steps that agents' beats report the core is told. Pure.

Every agent says twice a second how far its ranks have come. Finished steps reach the core by diagnostics; beats are the second
witness, wanted when diagnostics is silent, or when it is in doubt whether a generation is alive. A start whose first step
only beats have reported is over with its second step, and may have less time left than diagnostics is given.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.orders import StepReached
from holdfast.supervisor.core import State
from holdfast.supervisor.core.lifecycle import Starting

SECOND_WITNESS_S = 5.0  # no step has been seen for this long by anybody


def steps_to_fold(reported: Iterable[StepReached], state: State, at: float) -> list[StepReached]:
    """The newest step of each running generation, where it is newer than what the core knows and the core needs it."""
    newest: dict[str, StepReached] = {}
    for each in reported:
        job = state.jobs.get(each.job)
        if (
            job is None
            or job.running is None
            or job.running.number != each.generation
            or each.step <= job.progress.seen_step
        ):
            continue
        begun = isinstance(job.doing, Starting) and job.progress.seen_step > job.running.restore.step
        if begun or job.membership.absent or at - job.progress.seen_at >= SECOND_WITNESS_S:
            known = newest.get(each.job)
            newest[each.job] = each if known is None or each.step > known.step else known
    return [newest[name] for name in sorted(newest)]
