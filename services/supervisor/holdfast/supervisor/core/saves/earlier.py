"""Saved steps of earlier submissions under a name, and the step that a new submission continues from.

If a name has a complete checkpoint, a new submission must state what to do with it: continue from it, or start at step 0 and
keep it. It is not deleted in either case. A submission that continues has a lineage rooted in one (attempt, step): the newest
complete one on the lineage of the last submission, or else the newest one of the submissions before it. Steps that the last
submission itself abandoned are chosen only if the step is requested by number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, InvalidSpec, NotFound
from holdfast.domain.generations import ShardRecord, StoredStep
from holdfast.domain.job import JobSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.runs import shard_runs
from holdfast.supervisor.core.binding import believed
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.rules.election import Line, Segment, replicas_differ
from holdfast.supervisor.protocol import JobSubmitted, StartFrom

NAMED_MAX = 8  # steps or nodes that an error lists


class Tables(Protocol):
    """The tables that are searched: those of a state or of a turn."""

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def jobs(self) -> Mapping[str, Job]: ...


@dataclass(slots=True)
class _Step:
    """One saved step: the holders of its shards, and whether the object store has it complete."""

    meshes: set[Mesh] = field(default_factory=set)
    nodes: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # by rank
    records: list[ShardRecord] = field(default_factory=list)
    stored: StoredStep | None = None

    def missing(self, among: Iterable[str]) -> bool:
        """Whether the shard of some rank is neither on these nodes nor in the object store."""
        if self.stored is not None:
            return False
        names = set(among)
        [*mesh] = self.meshes
        return len(mesh) != 1 or any(not self.nodes[rank] & names for rank in range(mesh[0].world_size))

    def as_stored(self, age: CheckpointId) -> StoredStep:
        if self.stored is not None:
            return self.stored
        [mesh] = self.meshes
        return StoredStep(*age, mesh, replicas_differ(shard_runs(self.records)))


def check(state: Tables, event: JobSubmitted) -> None:
    """Raises `Conflict` or `NotFound` unless the submission states what to do with saved steps and that is possible."""
    name = event.spec.name
    if event.start is StartFrom.CHECKPOINT:
        choose(state, event)
    elif event.start is StartFrom.NOTHING and event.spec.resume is None:
        found = _saved(state, event)
        whole = [age for age, step in found.items() if not step.missing(state.nodes)]
        if whole:
            newest = _preferred(whole, state.jobs.get(name), asked=True)[0]
            raise Conflict(
                f"{name} has checkpoints, the newest of step {newest[1]} ({_where(found[newest])}): submit it with --resume "
                "to continue from there, or with --fresh to start at step 0 and keep them"
            )


def choose(state: Tables, event: JobSubmitted) -> StoredStep:
    """The step that a continuing submission starts from. Raises `NotFound`, `Conflict` or `InvalidSpec`, which list the
    complete steps."""
    name, wanted = event.spec.name, event.step
    found = _saved(state, event)
    whole = [age for age, step in found.items() if not step.missing(state.nodes)]
    meant = [age for age in whole if wanted in (None, age.step)]
    preferred = _preferred(meant, state.jobs.get(name), asked=wanted is not None)
    if not preferred:
        there = ", ".join(str(step) for step in sorted({step for _, step in whole}, reverse=True)[:NAMED_MAX]) or "none"
        what = "checkpoint" if wanted is None else f"checkpoint of step {wanted}"
        but = "" if wanted is not None or not whole else ", abandoned by the last run: request one by its step"
        raise NotFound(f"there is no complete {what} of {name} to continue from; complete steps: {there}{but}")
    connected = {node.name for node in state.nodes.values() if node.connected}
    age = preferred[0]
    if found[age].missing(connected):
        away = sorted({node for nodes in found[age].nodes.values() for node in nodes} - connected)
        others = sorted(
            {step for each, step in whole if not found[CheckpointId(each, step)].missing(connected)}, reverse=True
        )
        shown = ", ".join(map(str, others[:NAMED_MAX]))
        raise Conflict(
            f"step {age.step} of {name} needs shards of {', '.join(away)}, which cannot be reached now; wait for that, or name "
            f"a step that is complete without: {shown or 'there is none'}"
        )
    chosen = found[age].as_stored(age)
    _same_shape(event.spec, chosen)
    return chosen


def lineage(old: Job | None, resumed: StoredStep) -> tuple[Segment, ...]:
    """The lineage of a submission that continues from `resumed`: that step, and the attempts that led to it."""
    root = Segment(resumed.attempt, resumed.step)
    known = old.checkpoints.lineage if old is not None else ()
    before = known if any(segment.attempt == resumed.attempt for segment in known) else ()
    return (root, *(segment for segment in before if segment.attempt < resumed.attempt))


def stored(old: Job | None, event: JobSubmitted, line: Line) -> tuple[StoredStep, ...]:
    """The steps in the object store that the new submission may restore."""
    known = {each.id: each for each in _in_store(old, event)}
    return tuple(known[age] for age in sorted(known, reverse=True) if line.holds(*age))


def newest_attempt(nodes: Iterable[Node], name: str) -> int:
    """The highest attempt of anything saved under this name; 0 = nothing is saved."""
    records = (record for node in nodes for record in node.inventory.get(name, ()))
    return max((record.key.attempt for record in records), default=0)


# ---------------------------------------------------------------- saved steps


def _saved(state: Tables, event: JobSubmitted) -> dict[CheckpointId, _Step]:
    """All known saved steps of the name, on connected and disconnected nodes and in its object store."""
    name = event.spec.name
    found: dict[CheckpointId, _Step] = defaultdict(_Step)
    nodes = [node for node in state.nodes.values() if name in node.inventory]
    job = state.jobs.get(name)
    every = [node.inventory[name] for node in nodes] if job is None else believed(job, nodes, state.nodes)
    for node, shards in zip(nodes, every, strict=True):
        for record in shards:
            step = found[record.key.checkpoint]
            step.meshes.add(record.mesh)
            step.nodes[record.key.rank].add(node.name)
            step.records.append(record)
    for each in _in_store(state.jobs.get(name), event):
        found[each.id].stored = each
    return found


def _in_store(old: Job | None, event: JobSubmitted) -> Sequence[StoredStep]:
    same = old is not None and old.spec.checkpoint.store == event.spec.checkpoint.store
    known = old.checkpoints.stored if old is not None and same else ()
    return [each for each in (*known, *([event.found] if event.found is not None else [])) if not each.damage]


def _preferred(ages: Iterable[CheckpointId], old: Job | None, *, asked: bool = False) -> list[CheckpointId]:
    """Best first: steps of the last submission's lineage, then of earlier ones, then (if `asked` by number) abandoned ones."""
    if old is None:
        return sorted(ages, reverse=True)
    line, limit = Line(old.checkpoints.lineage), old.restore_limit

    def rank(age: CheckpointId) -> int:
        if line.holds(*age) and (limit is None or age.step <= limit.step):
            return 2
        return 1 if age.attempt < old.numbering.first_attempt else 0

    ranked = sorted(ages, key=lambda age: (rank(age), age), reverse=True)
    return [age for age in ranked if asked or rank(age)]


def _where(step: _Step) -> str:
    nodes = sorted({node for names in step.nodes.values() for node in names})
    on = ", ".join(nodes[:NAMED_MAX]) + (f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else "")
    return " and ".join([*([f"on {on}"] if nodes else []), *(["in its object store"] if step.stored else [])])


def _same_shape(spec: JobSpec, chosen: StoredStep) -> None:
    if chosen.mesh.resized(1) != spec.mesh.resized(1):
        raise InvalidSpec(
            "mesh",
            str(spec.mesh),
            f"the mesh that saved step {chosen.step}, {chosen.mesh}, in any number of replicas, to continue from there",
        )
