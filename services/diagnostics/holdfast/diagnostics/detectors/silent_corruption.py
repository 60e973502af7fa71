"""Detects silent corruption: replicas that must hold the same bits differ.

Ranks at the same position of different replicas report a checksum of their parameters. All of these checksums must be equal. If
one differs, the state has changed without an error, and every checkpoint since the last step at which all replicas agreed may
be corrupt.

* Three replicas or more: the differing ranks are named if a majority at their position agrees and all differing ranks are on
  one node. The memory or the arithmetic of this node is broken. The node is replaced, and not used again until an operator has
  checked it.
* Two replicas: it is not known which of them is wrong. No rank is named. The nodes run their pre-flight test before the job
  continues from the last step that passed.
* Directly after a restore the checkpoint is corrupt, not a node. An older checkpoint is restored.

Three rules prevent a wrong finding, which would cost a healthy node. Replicas are expected to agree only after they have agreed
once (experts distributed over dp, or local SGD, never agree). If a step differs again after the rollback, the script is
probably the cause, and only a warning is reported. A missing report leads to no finding.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Generation, Roster, RunStarted
from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Remedy, Severity
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import ReplicaChecks

_JOBS_MAX = 4096
_OPEN_MAX = 16  # steps of a generation that some rank has not reported
_VERIFIED_MAX = 256
_FAILED_MAX = 64
_NAMED_MAX = 8  # ranks in the evidence


@dataclass(slots=True)
class _Step:
    """The reports of one step so far."""

    at: float
    digests: dict[int, str] = field(default_factory=dict)
    duration_s: float = 0.0
    restored: bool = False


@dataclass(slots=True)
class _Job:
    generation: Generation
    open: Bounded[int, _Step] = field(default_factory=lambda: Bounded(_OPEN_MAX))
    agreed: bool = False  # all replicas have agreed once; from then on they are expected to agree
    verified: deque[int] = field(default_factory=lambda: deque(maxlen=_VERIFIED_MAX))  # steps that passed, ascending
    failed: deque[int] = field(default_factory=lambda: deque(maxlen=_FAILED_MAX))  # steps that did not pass
    quiet: bool = False  # this generation has a finding; no other finding about it is reported
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True)
class CorruptionState:
    jobs: Bounded[str, _Job] = field(default_factory=lambda: Bounded(_JOBS_MAX))


@dataclass(frozen=True, slots=True)
class _Difference:
    """The ranks that differ in one step."""

    odd: tuple[int, ...]  # ranks that differ from the majority of their position
    undecided: tuple[int, ...]  # ranks of positions without a majority

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted((*self.odd, *self.undecided)))


@dataclass(frozen=True, slots=True)
class SilentCorruption:
    """Reports SILENT_CORRUPTION, from checksums of replicated parameters."""

    reads: ClassVar = (ReplicaChecks, RunStarted)
    initial = CorruptionState

    def observe(
        self, state: CorruptionState, item: Observed, now: float, roster: Roster
    ) -> tuple[CorruptionState, Findings]:
        match item:
            case ReplicaChecks():
                generation = roster.current(item.job, item.generation)
                mesh = None if generation is None else generation.mesh
                if generation is not None and mesh is not None and mesh.dp > 1:
                    return state, tuple(_collect(_job(state, generation), mesh, item, now))
            case RunStarted():
                state.jobs.pop(item.job, None)
            case _:
                pass
        return state, ()


def _job(state: CorruptionState, generation: Generation) -> _Job:
    """The state of the job. A new generation keeps the list of steps that have passed."""
    job = state.jobs.get_or_add(generation.job, lambda: _Job(generation))
    if job.generation is not generation:
        job.generation, job.quiet = generation, False
        job.open.clear()
    return job


def _collect(job: _Job, mesh: Mesh, item: ReplicaChecks, now: float) -> list[Finding]:
    found = []
    for rank, number, digest, duration_s, restored in zip(
        item.rank, item.step, item.digest, item.duration_s, item.restored, strict=True
    ):
        if rank >= mesh.world_size:
            continue
        step = job.open.get(number)
        if step is None:
            step = job.open[number] = _Step(item.at)
        step.digests[rank] = digest
        step.duration_s, step.restored = max(step.duration_s, duration_s), restored
        if len(step.digests) == mesh.world_size:
            for done in [one for one in job.open if one <= number]:
                del job.open[done]  # reports of older steps were dropped: these steps are not judged
            finding = _judge(job, mesh, item, number, step, now)
            found += [finding] if finding is not None else []
    return found


def _judge(job: _Job, mesh: Mesh, item: ReplicaChecks, number: int, step: _Step, now: float) -> Finding | None:
    while job.verified and job.verified[-1] >= number:
        job.verified.pop()  # steps of a lineage that was abandoned by a rollback
    if not any(step.digests.values()):
        return _once(job, "empty", _nothing_to_compare(item, number, now))
    difference = _compare(mesh, step.digests)
    if not difference.ranks:
        job.agreed = True
        job.verified.append(number)
        return None
    if job.quiet:
        return None
    job.quiet = True
    if not job.agreed:
        return _once(job, "never agreed", _doubtful(job, mesh, item, number, step, difference, now))
    again = number in job.failed and not step.restored
    job.failed.append(number)
    if again:
        return _doubtful(job, mesh, item, number, step, difference, now)
    return _corrupt(job, mesh, item, number, step, difference, now)


def _compare(mesh: Mesh, digests: dict[int, str]) -> _Difference:
    """Compare each rank with the ranks at its position in the other replicas."""
    odd: list[int] = []
    undecided: list[int] = []
    for position in range(mesh.replica_size):
        peers = mesh.ranks_at(position)
        counted = Counter(digests[rank] for rank in peers)
        if len(counted) == 1:
            continue
        usual, count = counted.most_common(1)[0]
        if 2 * count > mesh.dp:
            odd += [rank for rank in peers if digests[rank] != usual]
        else:
            undecided += peers
    return _Difference(tuple(odd), tuple(undecided))


def _once(job: _Job, what: str, finding: Finding) -> Finding | None:
    if what in job.warned:
        return None
    job.warned.add(what)
    return finding


# ---------------------------------------------------------------- findings


def _corrupt(
    job: _Job, mesh: Mesh, item: ReplicaChecks, number: int, step: _Step, difference: _Difference, now: float
) -> Finding:
    nodes = sorted({job.generation.node_of.get(rank, "") for rank in difference.ranks})
    named = not step.restored and not difference.undecided and len(nodes) == 1 and nodes != [""]
    evidence = _evidence(job, mesh, number, step, difference)
    verified: int | None
    evidence[DATED] = f"{ESTIMATE}the check that found the difference; the state may have become corrupt earlier"
    if step.restored:
        what = f"the state restored at step {number} differs between replicas: the checkpoint is corrupt, not a node"
        verified = job.verified[-1] if job.verified else max(0, number - 1)
    else:
        verified = job.verified[-1] if job.verified else None
        who = f"rank {_listed(difference.ranks)} ({', '.join(nodes[:_NAMED_MAX])})"
        what = (
            f"parameters of {who} differ from those of {mesh.dp - 1} other replicas at step {number}"
            if named
            else f"parameters differ between replicas at step {number}, and no majority shows which are right: {who}"
        )
    if verified is not None:
        evidence["verified_step"] = str(verified)
    return Finding(
        id=f"silent_corruption:{item.job}:{item.generation}:{number}",
        kind=FindingKind.SILENT_CORRUPTION,
        severity=Severity.FATAL if named else Severity.ERROR,
        at=now,
        since=min(step.at, now),
        summary=f"{item.job}: {what}.",
        node=nodes[0] if named else "",
        job=item.job,
        generation=item.generation,
        rank=min(difference.odd) if named else None,
        confidence=0.95 if named else 0.9,
        evidence=evidence,
        verified_step=verified,
        recommended_actions=(Remedy.REPLACE_NODE,) if named else (Remedy.RESTART_PROCESS, Remedy.REPLACE_NODE),
    )


def _doubtful(
    job: _Job, mesh: Mesh, item: ReplicaChecks, number: int, step: _Step, difference: _Difference, now: float
) -> Finding:
    if job.agreed:
        why = "they also differed at the same step before the rollback: the cause is probably the script"
    else:
        why = "they have never agreed: this check does not fit the job, or the state has been corrupt for longer"
    return _warning(
        item,
        number,
        now,
        f"parameters differ between replicas at step {number} (rank {_listed(difference.ranks)}); {why}. No action is taken",
        _evidence(job, mesh, number, step, difference) | {"because": why},
    )


def _nothing_to_compare(item: ReplicaChecks, number: int, now: float) -> Finding:
    words = "checks.replica_every_steps finds nothing to compare: no parameter is held by more than one replica"
    return _warning(item, number, now, words, {"step": str(number), "rule": "replica_checksum"})


def _warning(item: ReplicaChecks, number: int, now: float, words: str, evidence: dict[str, str]) -> Finding:
    return Finding(
        id=f"silent_corruption:{item.job}:{item.generation}:{number}:warning",
        kind=FindingKind.SILENT_CORRUPTION,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"{item.job}: {words}.",
        job=item.job,
        generation=item.generation,
        confidence=0.5,
        evidence=evidence,
        recommended_actions=(Remedy.WATCH,),
    )


def _evidence(job: _Job, mesh: Mesh, number: int, step: _Step, difference: _Difference) -> dict[str, str]:
    shown, nodes = difference.ranks[:_NAMED_MAX], job.generation.node_of
    usual = next((d for rank, d in step.digests.items() if rank not in difference.ranks), "")
    return {
        "rule": "replica_checksum",
        "step": str(number),
        "replicas": str(mesh.dp),
        "differing": ", ".join(
            f"rank {rank} ({nodes.get(rank, '')}): {step.digests[rank] or 'nothing'}" for rank in shown
        ),
        "others": usual,
        "duration_s": f"{step.duration_s:.4f}",
        "restored": str(step.restored).lower(),
    }


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _NAMED_MAX} more" if len(ranks) > _NAMED_MAX else ""
    return ", ".join(map(str, ranks[:_NAMED_MAX])) + more
