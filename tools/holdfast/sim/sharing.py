"""The promises about several jobs, implemented again, independently of the core. All nodes of these worlds are alike.

* A reserved spare is never taken by a job of equal or lower priority.
* A job lends only to one of higher priority, keeps its minimum, and not more often than the rules say.
* In peace a job that could run with free nodes, or with those and what jobs of lower priority could give, runs within
  `BOUND_S`.
* In peace a job with fewer replicas than it wants grows within `BOUND_S` while there are free nodes for another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.domain.incidents import LOAN, Incident
from holdfast.domain.job import JobSpec
from holdfast.sim.world import Violation
from holdfast.supervisor.core import Config, Job, Node, State
from holdfast.supervisor.core.model.lifecycle import Pending, Running, Suspended, Waiting
from holdfast.supervisor.protocol import (
    Command,
    Event,
    GenerationChanged,
    GenerationStage,
    IncidentChanged,
    JobPhase,
    Publish,
)

FAULTS_END_S = 60.0
PEACE_S = 1000.0 + FAULTS_END_S + 40.0  # every machine has returned, and its hold-down is over
BOUND_S = 150.0  # the longest pause of the rules, plus the changes of some jobs


@dataclass(slots=True)
class SharingPromises:
    specs: dict[str, JobSpec]
    refusing: bool  # policies may refuse loans
    config: Config
    lent_at: dict[str, float] = field(default_factory=dict)  # lender → when its newest change for a loan began
    begun: set[str] = field(default_factory=set)  # incidents of kind loan whose change has begun
    could_since: dict[str, float] = field(default_factory=dict)  # "job: change" → time since which it is possible

    # ------------------------------------------------------------ decisions of the core

    def folded(self, before: State, event: Event, after: State, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case Publish(record=GenerationChanged(stage=GenerationStage.PLANNED, job=name)):
                    self._leaves_reserved_spares(before, after, name, event.at)
                case Publish(record=IncidentChanged(incident=incident)) if incident.kind == LOAN:
                    self._lends_by_the_rules(after, incident, event.at)

    def _leaves_reserved_spares(self, before: State, after: State, name: str, at: float) -> None:
        """Check the number of nodes, since all nodes are alike. Nodes that are kept for a job before and after this decision do
        not count as free."""
        job, old = after.jobs[name], before.jobs[name].generation if name in before.jobs else None
        assert job.generation is not None
        kept = _kept(before, at) & _kept(after, at)
        taken = set(job.generation.nodes) - set(old.nodes if old is not None else ()) - kept
        free = taken | (_idle(before) | _idle(after)) - kept
        left, of_others = len(free), 0
        for other in sorted(before.jobs.values(), key=lambda each: (-each.spec.priority, each.submitted_at, each.name)):
            if not self._holds(other, after.jobs[other.name], is_taker=other.name == name):
                continue
            reserved = min(left, other.spec.spares)
            left -= reserved
            if other.name != name and other.spec.priority >= job.spec.priority:
                of_others += reserved
        if len(taken) > len(free) - of_others:
            raise Violation(
                f"{name} takes {sorted(taken)} of {sorted(free)}: {of_others} of them are reserved for other jobs"
            )

    @staticmethod
    def _holds(before: Job, after: Job, *, is_taker: bool) -> bool:
        """Whether free nodes are reserved for the job. For a job that takes nodes, this includes nodes that it cannot use."""
        return not _is_idle(before) if is_taker else _reserves(before) and _reserves(after)

    def _lends_by_the_rules(self, after: State, incident: Incident, at: float) -> None:
        loan, lender = incident.loan, self.specs[incident.job]
        assert loan is not None
        if self.specs[loan.job].priority <= lender.priority:
            raise Violation(f"{lender.name} is asked for replicas for {loan.job}, which has no higher priority")
        if loan.dp < lender.min_dp:
            raise Violation(f"{lender.name} is asked to keep {loan.dp} replicas, and needs {lender.min_dp}")
        if incident.new_generation is None or incident.id in self.begun:
            return
        self.begun.add(incident.id)
        last = self.lent_at.get(lender.name)
        self.lent_at[lender.name] = at
        if last is not None and at < last + self.config.loan_gap_s:
            raise Violation(f"{lender.name} was changed for a loan {at - last:.1f} s after the last one")

    # ------------------------------------------------------------ changes that must happen

    def look(self, state: State, now: float) -> None:
        """Check the state. Called once a second in peace."""
        possible = self._possible(state) if now >= PEACE_S and state.breaker.open_until is None else {}
        self.could_since = {what: self.could_since.get(what, now) for what in possible}
        for what, since in self.could_since.items():
            if now > since + BOUND_S:
                raise Violation(f"for {now - since:.0f} s {what}, and it does not: {possible[what]}")

    def _possible(self, state: State) -> dict[str, str]:
        """Return change that must happen → state of the job."""
        found = {}
        free = len(_free(state))
        for job in state.jobs.values():
            spec, replica = job.spec, job.spec.mesh.replica_size
            mine = free - self._reserved_from(state, job)
            has = len(job.generation.nodes) if job.generation and isinstance(job.doing, Waiting | Suspended) else 0
            how = f"{job.phase}, {free} nodes are free: {job.reason}"
            match job.doing:
                case Pending() | Waiting() | Suspended():
                    if mine + has >= spec.min_dp * replica:
                        found[f"{job.name} could run on free nodes"] = how
                    elif not self.refusing and mine + has + self._lendable(state, job) >= spec.min_dp * replica:
                        found[f"{job.name} could run with what others can lend"] = how
                case Running() if job.generation is not None:
                    dp = job.generation.mesh.dp
                    if dp < job.target_dp and mine >= replica and not job.membership.finished:
                        found[f"{job.name} could run {dp + 1} of {job.target_dp} replicas"] = how
                case _:
                    pass
        return found

    def _reserved_from(self, state: State, job: Job) -> int:
        """Return the number of free nodes that other jobs may have reserved, or that are kept for them."""
        free = _free(state)
        total = 0
        for other in state.jobs.values():
            if other.name != job.name and other.spec.priority >= job.spec.priority and not other.phase.finished:
                total += (other.spec.spares if _reserves(other) else 0) + len(free & set(other.kept))
        return total

    def _lendable(self, state: State, job: Job) -> int:
        total = 0
        for other in state.jobs.values():
            if (
                other.spec.priority < job.spec.priority
                and isinstance(other.doing, Running)
                and other.generation is not None
            ):
                spare = other.generation.mesh.dp - other.spec.min_dp
                total += spare * other.spec.mesh.replica_size if not other.membership.finished else 0
        return total


def _free(state: State) -> set[str]:
    used = {
        node
        for job in state.jobs.values()
        if job.generation is not None and not job.phase.finished and job.phase is not JobPhase.PENDING
        for node in job.generation.nodes
    }
    return {name for name, node in state.nodes.items() if _is_fit(node) and name not in used}


def _kept(state: State, at: float) -> set[str]:
    """Return the nodes that are kept for some job at this time, whether or not a timer that is due has fired yet."""
    jobs = (job for job in state.jobs.values() if not job.phase.finished)
    return {node for job in jobs for node, until in job.kept.items() if at < until}


def _idle(state: State) -> set[str]:
    """Return the nodes on which no workers have to stop first."""
    return {node for node in _free(state) if not state.live_on(state.nodes[node])}


def _is_fit(node: Node) -> bool:
    return node.connected and not node.lost and not node.unschedulable_reason and node.reset_due is None


def _reserves(job: Job) -> bool:
    """Whether the job can reserve nodes: it runs or changes, no node has failed in this change, and it waits for no nodes."""
    return not _is_idle(job) and not (job.change is not None and job.change.excluded)


def _is_idle(job: Job) -> bool:
    return job.phase.finished or isinstance(job.doing, Pending | Waiting | Suspended)
