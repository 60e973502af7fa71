"""Silent corruption: replicas that must hold the same bits do not.

Ranks at the same position of different replicas report a checksum of their parameters; all of them must be equal. When one is
not, the state has gone wrong without an error, and everything saved since the last step at which all agreed is doubtful.

* Three replicas or more: the odd one out is named, when a majority of its peers agrees and all odd ranks are on one node.
  Memory or arithmetic of that node is broken: it is replaced, and not used again before somebody has looked.
* Two replicas: one of two differs, and nobody can tell which. Nobody is named; the nodes are asked to test themselves
  before they go on from the last step that passed.
* Right after a restore it is the checkpoint that differs, and no node: an older one is gone back to.

Three guards, because a wrong verdict costs a healthy node: replicas are believed to have to agree only after they once did
(experts spread over dp, or local SGD, never do); a step that differs again after the run went back is the script's doing as
far as anybody can tell, and only said; a report that is missing is no verdict.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Observed
from holdfast.diagnostics.roster import Generation, Roster, RunStarted
from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Remedy, Severity
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import ReplicaChecks

_JOBS_MAX = 4096
_OPEN_MAX = 16  # steps of a generation that not every rank has reported
_VERIFIED_MAX = 256
_STRUCK_MAX = 64
_NAMED_MAX = 8  # ranks in the evidence


@dataclass(slots=True)
class _Step:
    """What the ranks have said of one step so far."""

    at: float
    digests: dict[int, str] = field(default_factory=dict)
    took_s: float = 0.0
    restored: bool = False


@dataclass(slots=True)
class _Job:
    generation: Generation
    open: Bounded[int, _Step] = field(default_factory=lambda: Bounded(_OPEN_MAX))
    agreed: bool = False  # all replicas agreed once: since then they are expected to
    verified: deque[int] = field(default_factory=lambda: deque(maxlen=_VERIFIED_MAX))  # steps that passed, ascending
    struck: deque[int] = field(default_factory=lambda: deque(maxlen=_STRUCK_MAX))  # steps that did not
    quiet: bool = False  # this generation has been judged: the rest of it says nothing new
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True)
class CorruptionState:
    jobs: Bounded[str, _Job] = field(default_factory=lambda: Bounded(_JOBS_MAX))


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Who differs from whom in one step."""

    odd: tuple[int, ...]  # ranks that a majority of their peers contradicts
    undecided: tuple[int, ...]  # ranks of positions without a majority

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted((*self.odd, *self.undecided)))


@dataclass(frozen=True, slots=True)
class SilentCorruption:
    """SILENT_CORRUPTION, from checksums of replicated parameters."""

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (ReplicaChecks, RunStarted)

    def initial(self) -> CorruptionState:
        return CorruptionState()

    def observe(
        self, state: CorruptionState, item: Observed, now: float, roster: Roster
    ) -> tuple[CorruptionState, tuple[Finding, ...]]:
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
    """The job's memory. A new generation keeps which steps have passed."""
    job = state.jobs.get_or_add(generation.job, lambda: _Job(generation))
    if job.generation is not generation:
        job.generation, job.quiet = generation, False
        job.open.clear()
    return job


def _collect(job: _Job, mesh: Mesh, item: ReplicaChecks, now: float) -> list[Finding]:
    found = []
    for rank, number, digest, took_s, restored in zip(
        item.rank, item.step, item.digest, item.took_s, item.restored, strict=True
    ):
        if rank >= mesh.world_size:
            continue
        step = job.open.get(number)
        if step is None:
            step = job.open[number] = _Step(item.at)
        step.digests[rank] = digest
        step.took_s, step.restored = max(step.took_s, took_s), restored
        if len(step.digests) == mesh.world_size:
            for done in [one for one in job.open if one <= number]:
                del job.open[done]  # an older one lacks reports that were dropped: no verdict
            finding = _judge(job, mesh, item, number, step, now)
            found += [finding] if finding is not None else []
    return found


def _judge(job: _Job, mesh: Mesh, item: ReplicaChecks, number: int, step: _Step, now: float) -> Finding | None:
    while job.verified and job.verified[-1] >= number:
        job.verified.pop()  # of a branch that was given up when the run went back
    if not any(step.digests.values()):
        return _said_once(job, "empty", _nothing_to_compare(item, number, now))
    verdict = _compare(mesh, step.digests)
    if not verdict.ranks:
        job.agreed = True
        job.verified.append(number)
        return None
    if job.quiet:
        return None
    job.quiet = True
    if not job.agreed:
        return _said_once(job, "never agreed", _doubtful(job, mesh, item, number, step, verdict, now))
    again = number in job.struck and not step.restored
    job.struck.append(number)
    if again:
        return _doubtful(job, mesh, item, number, step, verdict, now)
    return _corrupt(job, mesh, item, number, step, verdict, now)


def _compare(mesh: Mesh, digests: dict[int, str]) -> _Verdict:
    """Position by position, each rank against its peers in the other replicas."""
    odd: list[int] = []
    undecided: list[int] = []
    for position in range(mesh.replica_size):
        peers = range(position, mesh.world_size, mesh.replica_size)
        counted = Counter(digests[rank] for rank in peers)
        if len(counted) == 1:
            continue
        usual, count = counted.most_common(1)[0]
        if 2 * count > mesh.dp:
            odd += [rank for rank in peers if digests[rank] != usual]
        else:
            undecided += peers
    return _Verdict(tuple(odd), tuple(undecided))


def _said_once(job: _Job, what: str, finding: Finding) -> Finding | None:
    if what in job.warned:
        return None
    job.warned.add(what)
    return finding


# ---------------------------------------------------------------- findings


def _corrupt(
    job: _Job, mesh: Mesh, item: ReplicaChecks, number: int, step: _Step, verdict: _Verdict, now: float
) -> Finding:
    nodes = sorted({job.generation.node_of.get(rank, "") for rank in verdict.ranks})
    named = not step.restored and not verdict.undecided and len(nodes) == 1 and nodes != [""]
    evidence = _evidence(job, mesh, number, step, verdict)
    evidence[DATED] = f"{ESTIMATE}the check that showed it, which says nothing of when the state went wrong"
    if step.restored:
        what = f"what was restored at step {number} differs between replicas: the checkpoint is corrupt, not a node"
        evidence["verified_step"] = str(job.verified[-1] if job.verified else max(0, number - 1))
    else:
        if job.verified:
            evidence["verified_step"] = str(job.verified[-1])
        who = f"rank {_listed(verdict.ranks)} ({', '.join(nodes[:_NAMED_MAX])})"
        what = (
            f"parameters of {who} differ from those of {mesh.dp - 1} other replicas at step {number}"
            if named
            else f"parameters differ between replicas at step {number}, and no majority says whose are right: {who}"
        )
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
        rank=min(verdict.odd) if named else None,
        confidence=0.95 if named else 0.9,
        evidence=evidence,
        ladder=(Remedy.REPLACE_NODE,) if named else (Remedy.RESTART_PROCESS, Remedy.REPLACE_NODE),
    )


def _doubtful(
    job: _Job, mesh: Mesh, item: ReplicaChecks, number: int, step: _Step, verdict: _Verdict, now: float
) -> Finding:
    if job.agreed:
        why = "they did so at this very step before, and the run went back for it: as far as can be told the script does it"
    else:
        why = "they were never seen to agree: this check does not fit the job, or it has been corrupt for longer"
    return _warning(
        item,
        number,
        now,
        f"parameters differ between replicas at step {number} (rank {_listed(verdict.ranks)}); {why}. Nothing is done",
        _evidence(job, mesh, number, step, verdict) | {"because": why},
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
        ladder=(Remedy.WATCH,),
    )


def _evidence(job: _Job, mesh: Mesh, number: int, step: _Step, verdict: _Verdict) -> dict[str, str]:
    shown, nodes = verdict.ranks[:_NAMED_MAX], job.generation.node_of
    usual = next((d for rank, d in step.digests.items() if rank not in verdict.ranks), "")
    return {
        "rule": "replica_checksum",
        "step": str(number),
        "replicas": str(mesh.dp),
        "differing": ", ".join(
            f"rank {rank} ({nodes.get(rank, '')}): {step.digests[rank] or 'nothing'}" for rank in shown
        ),
        "others": usual,
        "took_s": f"{step.took_s:.4f}",
        "restored": str(step.restored).lower(),
    }


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _NAMED_MAX} more" if len(ranks) > _NAMED_MAX else ""
    return ", ".join(map(str, ranks[:_NAMED_MAX])) + more
