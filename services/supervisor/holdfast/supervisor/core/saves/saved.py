"""The known saved steps of a job: which nodes hold them, which the object store has, and which must not be restored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2s

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.generations import OBJECT_STORE, Generation, Placement, RestorePoint, ShardRecord
from holdfast.domain.incidents import Incident
from holdfast.domain.mesh import Mesh
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Inventory, Prepare
from holdfast.domain.runs import ShardRun, shard_runs
from holdfast.domain.tiers import DURABLE
from holdfast.supervisor.core import binding
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.job import DOUBT_STEPS_MAX, Job, SkippedCheckpoint
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules.election import (
    Election,
    Holder,
    Knowledge,
    Line,
    ObjectStore,
    Trusted,
    elect,
    replicas_differ,
)

_NONE = Numbers()

# ---------------------------------------------------------------- election


def elect_for(turn: Turn, job: Job, mesh: Mesh, placements: Sequence[Placement]) -> Election:
    """The step that `job` would restore on these nodes now, with its sources."""
    members = [placement.node for placement in placements]
    lineage, held = job.checkpoints.lineage, holders(turn, job, members)
    elected = elect(lineage, held, mesh, placements, _knowledge(turn, job))
    in_doubt = job.restore_limit != job.checkpoints.trusted
    if elected.restore.step == 0 and in_doubt and not _verified_step_may_return(turn, job, elected):
        # No verified step is left. The state is only in doubt, and the run has nothing else to continue from.
        known = replace(_knowledge(turn, job), trusted=job.checkpoints.trusted)
        return elect(lineage, held, mesh, placements, known)
    return elected


def _verified_step_may_return(turn: Turn, job: Job, election: Election) -> bool:
    """Whether nodes that are away, or have just connected and not reported their shards yet, may have a step that is not in
    doubt."""
    since = turn.at if job.held_since is None else job.held_since
    if turn.at >= since + turn.config.scratch_s:
        return False
    return bool(inventories_due(turn, job, election)) or newest_anywhere(turn, job).step > 0


def holders(turn: Turn, job: Job, members: Sequence[str] = ()) -> list[Holder]:
    """Connected nodes that hold shards of `job`, and `members`, whatever they hold."""
    nodes = (turn.nodes[name] for name in sorted({*turn.group(By.KEEPS, job.name), *members}) if name in turn.nodes)
    return _as_holders(turn, job, [node for node in nodes if node.connected and node.facts.replicator_endpoint])


def newest_anywhere(turn: Turn, job: Job) -> RestorePoint:
    """The newest complete step, including shards that disconnected nodes held when they left."""
    generation = job.generation
    if generation is None:
        return RestorePoint()
    keepers = _as_holders(turn, job, _keepers(turn, job.name))
    known, lineage = _knowledge(turn, job), job.checkpoints.lineage
    return elect(lineage, keepers, generation.mesh, generation.placements, known).restore


def _keepers(turn: Turn, name: str) -> list[Node]:
    """Nodes that hold or held shards of the job, connected or not, except those whose machines are being replaced."""
    keepers = (turn.nodes[each] for each in turn.found(By.KEEPS, name))
    return [node for node in keepers if not _being_replaced(node)]


def only_in_memory_of(turn: Turn, name: str, node: Node) -> bool:
    """Whether a checkpoint of this job would be lost with the memory of `node`. Of a known job, the newest complete one counts;
    of an unknown job, any shard that no other node and no disk has."""
    keepers = [turn.nodes[each] for each in turn.found(By.KEEPS, name)]
    keepers = [each for each in keepers if each is node or (each.connected and each.facts.replicator_endpoint)]
    return _is_lost(turn, name, node, keepers, [each for each in node.inventory.get(name, ()) if each.tier in DURABLE])


def only_on(turn: Turn, name: str, node: Node) -> bool:
    """Whether a checkpoint of this job would be lost with `node` and its disks. Disconnected nodes count with the shards that
    they held when they left, unless their machines are being replaced."""
    keepers = [turn.nodes[each] for each in turn.found(By.KEEPS, name)]
    return _is_lost(turn, name, node, [each for each in keepers if each is node or not _being_replaced(each)], [])


def _being_replaced(node: Node) -> bool:
    request = node.removal.replacement if node.removal is not None else None
    return request is not None and request.under_way


def _is_lost(turn: Turn, name: str, node: Node, keepers: Sequence[Node], rest: Sequence[ShardRecord]) -> bool:
    """Whether a checkpoint that `keepers` hold together would be incomplete if `node` had only `rest`."""
    had = node.inventory.get(name, ())
    if len(rest) == len(had):
        return False
    job = turn.jobs.get(name)
    if job is None or job.generation is None:
        kept = {record.key for each in keepers if each is not node for record in each.inventory.get(name, ())}
        kept.update(record.key for record in rest)
        return any(record.key not in kept for record in had)
    generation = job.generation
    known, lineage = _knowledge(turn, job), job.checkpoints.lineage
    every = _as_holders(turn, job, keepers)
    without = [each._replace(shards=rest) if each.node == node.name else each for each in every]
    newest, left = (elect(lineage, each, generation.mesh, generation.placements, known) for each in (every, without))
    return left.restore.step < newest.restore.step


def _as_holders(turn: Turn, job: Job, nodes: Sequence[Node]) -> list[Holder]:
    return [_holder(node, shards) for node, shards in zip(nodes, binding.believed(job, nodes, turn.nodes), strict=True)]


def _holder(node: Node, shards: Sequence[ShardRecord]) -> Holder:
    facts = node.facts
    return Holder(facts.node, facts.replicator_endpoint, node.zone, shards)


def _knowledge(turn: Turn, job: Job) -> Knowledge:
    return Knowledge(
        store=ObjectStore(job.spec.checkpoint.store, job.checkpoints.stored),
        origin=ObjectStore(job.spec.resume.store, (job.checkpoints.resumed,), job.spec.resume.job)
        if job.spec.resume and job.checkpoints.resumed
        else ObjectStore(),
        sharded=job.checkpoints.sharded,
        doubts={
            CheckpointId(each.attempt, each.step): each.reason
            for each in job.checkpoints.skipped
            if turn.at < each.until
        },
        trusted=job.restore_limit,
    )


def inventories_complete(turn: Turn, job: Job, stale: Sequence[str]) -> bool:
    """Whether everything is known of saved shards that a deferred job waits to know. `stale`: its stale nodes."""
    running = job.running
    if running is None:
        return job.checkpoints.resumed is None
    if stale:
        return False
    election = elect_for(turn, job, running.mesh, running.placements)
    found = election.restore.step > 0 or not job.checkpoints.ever_saved
    return found and not inventories_due(turn, job, election)


def known_now(turn: Turn, job: Job) -> str:
    """A digest of the inputs of an election for `job`: inventories of connected nodes, object store, skipped steps."""
    nodes = (turn.nodes[name] for name in turn.found(By.KEEPS, job.name))
    reported = [(node.name, node.inventory_from.get(job.name)) for node in nodes if node.connected]
    stored = [(each.attempt, each.step, each.damage) for each in job.checkpoints.stored]
    doubted = [(each.attempt, each.step) for each in job.checkpoints.skipped if turn.at < each.until]
    return blake2s(repr((reported, stored, doubted)).encode(), digest_size=8).hexdigest()


def start_missing(turn: Turn, job: Job, election: Election) -> str:
    """Why a job that must continue from a saved step cannot do so now; empty if it can, or has no such step.

    It never starts from step 0 instead. Before its first start, it does not restore an older step either, unless the step was
    tried and cannot be restored.
    """
    wanted, restore = job.checkpoints.resumed, election.restore
    if wanted is None:
        return ""
    older = (restore.attempt, restore.step) < (wanted.attempt, wanted.step)
    tried = any((each.attempt, each.step) == (wanted.attempt, wanted.step) for each in job.checkpoints.skipped)
    if restore.step > 0 and not (job.running is None and older and not tried):
        return ""
    why = "no connected node holds any of it" if restore == RestorePoint() else restore.reason
    return f"step {wanted.step}, from which the job must continue, cannot be restored now: {why}"


def stale(turn: Turn, job: Job) -> list[str]:
    """Nodes whose shards may have changed since their last report, while it is worth waiting for a newer inventory.

    Includes nodes whose session ended while a new leader waits for it: agents reconnect to it one after the other.
    """
    if not (job.checkpoints.ever_saved or _may_have_saved(job)):
        return []
    at, known = turn.at, turn.nodes
    nodes = [known[name] for name in turn.group(By.HOLDS, job.name).keys() | turn.group(By.KEEPS, job.name)]
    return sorted([node.name for node in nodes if at < node.stale_until and not node.lost and _is_due(node, job)])


def _may_have_saved(job: Job) -> bool:
    """Whether a job of which no save is known may have made its first one while nobody led. A script without the library saves
    nothing."""
    return job.running is not None and not job.progress.reports_no_steps


def inventories_due(turn: Turn, job: Job, election: Election) -> dict[str, float]:
    """Nodes that may hold newer shards and have not reported them → until when it is worth waiting for them.

    If the elected step is older than one that all nodes had, that is as long as an inventory may take. Otherwise a newer step
    may have become complete without a report, by copies on peers. Then only announced inventories are waited for, and no longer
    than the steps up to the newest save would take again.
    """
    step, known = election.restore.step, job.checkpoints
    is_older = known.ever_saved and step < known.step
    wait_s = turn.config.inventory_s
    if not is_older:
        wait_s = min(wait_s, max(0, _newest_save(job) - step) * job.progress.seconds_per_step)
    if wait_s <= 0:
        return {}
    nodes = (turn.nodes[name] for name in turn.found(By.SILENT))
    return {
        node.name: node.connected_at + wait_s
        for node in nodes
        if node.facts.replicator_endpoint
        and turn.at < node.connected_at + wait_s
        and (_is_due(node, job) if is_older else job.name in (node.announced or ()))
    }


def _newest_save(job: Job) -> int:
    """The newest step that the ranks of the running generation may have saved, and that may be restored; 0 = none."""
    known, newest, limit = job.checkpoints, job.progress.newest_step, job.restore_limit
    steps = {*known.at_home, newest - newest % job.interval_steps}
    asked = known.on_demand
    if asked is not None and job.running is not None and asked.generation == job.running.number:
        steps.add(asked.at_step if asked.at_step <= newest else 0)
    steps -= {each.step for each in known.skipped}
    return max((each for each in steps if limit is None or each <= limit.step), default=0)


def _is_due(node: Node, job: Job) -> bool:
    """Whether the node may still report shards of `job`: it has announced them, or does not announce."""
    return not node.announced or job.name in node.announced


def large_rework_expected(job: Job) -> bool:
    """Whether a start from step 0 would cost more than an ordinary loss, so that waiting for lost holders is worth it."""
    return job.checkpoints.ever_saved and job.progress.best_step > 2 * job.interval_steps


def newer_with_nodes_away(turn: Turn, job: Job, election: Election) -> tuple[str, float] | None:
    """Why to wait for disconnected nodes that hold much newer steps, and until when; None if it is not worth it. The wait is at
    most as long as repeating the steps in between would take: if the nodes do not return, the job has lost at most twice the
    unavoidable time."""
    restore, known = election.restore, job.checkpoints.step
    pace_s = job.progress.seconds_per_step
    most = 2 * job.interval_steps
    if pace_s <= 0 or known - restore.step <= most:
        return None
    newest = newest_anywhere(turn, job)
    if newest.step - restore.step <= most:
        return None
    since = turn.at if job.held_since is None else job.held_since
    until = since + min((newest.step - restore.step) * pace_s, turn.config.scratch_s)
    if turn.at >= until:
        return None
    return f"nodes that are away had step {newest.step}, those at hand have step {restore.step}", until


# ---------------------------------------------------------------- learning


def learn(turn: Turn, name: str, inventory: Inventory) -> None:
    """Fold the part of an inventory that concerns the object store: the node's knowledge of it outlives the node.

    A reported damage counts, even if other nodes reported the step as intact; they check again with the next generation.
    """
    job = turn.jobs[name]
    line = Line(job.checkpoints.lineage)
    known = {(each.attempt, each.step): each for each in job.checkpoints.stored}
    for each in inventory.stored:
        old = known.get((each.attempt, each.step))
        if old is None or not old.damage:
            known[each.attempt, each.step] = each
    # As many as the store keeps: the newest ones may turn out to be of a corrupt state.
    count_max = max(turn.config.stored_max, min(job.spec.checkpoint.store_keep + 1, turn.config.stored_limit))
    newest = sorted((key for key in known if line.holds(*key)), reverse=True)[:count_max]
    stored = tuple(known[key] for key in newest)
    before = job.checkpoints
    if stored != before.stored:
        turn.put_checkpoints(name, stored=stored, ever_saved=before.ever_saved or bool(stored))
        if before.saved_at and before.step in {each.step for each in stored} - {each.step for each in before.stored}:
            turn.put_checkpoints(name, measured=before.measured.uploaded(turn.at - before.saved_at))


def learn_sharding(turn: Turn, name: str, generation: Generation, step: int) -> None:
    """Every shard of `step` is known now: find out whether the replicas' shards differ."""
    job = turn.jobs[name]
    if generation.mesh.dp > 1 and not job.checkpoints.sharded:
        sharded = replicas_differ(_own_runs(turn, name, generation, step))
        if sharded is not job.checkpoints.sharded:
            turn.put_checkpoints(name, sharded=sharded)


def _own_runs(turn: Turn, name: str, generation: Generation, step: int) -> Iterator[ShardRun]:
    """The shards of this step on the nodes of their own ranks, without copies in another tier."""
    attempt, known = generation.attempt, turn.nodes.get
    for placement in generation.placements:
        if (node := known(placement.node)) is not None:
            first, end, digests = placement.first_rank, placement.first_rank + placement.nproc, ""
            for run in shard_runs(node.inventory.get(name, ())):
                if run[1] == step and first <= run[5] < end and run[0] == attempt and run[8] is not digests:
                    digests = run[8]
                    yield run


def held(turn: Turn, job: Job, attempt: int, step: int) -> Iterator[tuple[Node, ShardRecord]]:
    """Every copy of a shard of this step that a known node holds, connected or not."""
    for node in map(turn.nodes.__getitem__, turn.found(By.KEEPS, job.name)):
        for run in shard_runs(node.inventory.get(job.name, ())):
            if run.attempt == attempt and run.step == step:
                yield from ((node, record) for record in run.records())


def newest_at_home(turn: Turn, name: str, inventories: Iterable[tuple[str, Sequence[ShardRecord]]]) -> int:
    """Nodes have reported these inventories. Returns the newest step of the running attempt, beyond the newest known one, whose
    shards are all on their own ranks' nodes; 0 = none. Reads only these nodes: the job has the progress of the others."""
    job = turn.jobs[name]
    running = job.running
    if running is None:
        return 0
    reported: list[int] = []  # slots
    own: dict[int, list[int]] = defaultdict(list)  # step → slots
    place_of, attempt = running.placement_of, running.attempt
    for node, shards in inventories:
        if (placement := place_of(node)) is not None:
            slot = placement.slot
            reported.append(slot)
            for step in _own_steps(shards, attempt, placement):
                own[step].append(slot)
    before, at_home, known = job.checkpoints.at_home, {}, Numbers(reported)
    for step in sorted({*before, *own}):
        slots = before.get(step, _NONE) - known | Numbers(own.get(step, ()))
        if slots and step > job.checkpoints.step:
            at_home[step] = slots
    if at_home != before:
        turn.put_checkpoints(name, at_home=at_home)
    return max((step for step, slots in at_home.items() if len(slots) == len(running.placements)), default=0)


def _own_steps(shards: Iterable[ShardRecord], attempt: int, placement: Placement) -> set[int]:
    """Steps for which the shards of all ranks of `placement` are among these."""
    first, end = placement.first_rank, placement.first_rank + placement.nproc
    whole: set[int] = set()
    in_parts: dict[int, set[int]] = {}  # step → ranks
    for run in shard_runs(shards):
        begin, step = run[5], run[1]
        if begin >= end or step in whole or run[0] != attempt or (behind := begin + run[6]) <= first:
            continue
        if begin <= first and end <= behind:
            whole.add(step)
        else:
            in_parts.setdefault(step, set()).update(range(max(first, begin), min(end, behind)))
    if not in_parts:
        return whole
    return whole | {step for step, ranks in in_parts.items() if len(ranks) == placement.nproc}


# ---------------------------------------------------------------- what must not be restored


def is_corruption(finding: Finding) -> bool:
    """Whether the finding reports a corrupted state: by a check of the state, or by a loss that stays NaN."""
    return finding.kind in (FindingKind.SILENT_CORRUPTION, FindingKind.NUMERICAL)


def is_unexplained_corruption(incident: Incident) -> bool:
    """Whether an unknown node computes wrongly, so that all nodes of the job must test themselves."""
    return incident.kind == FindingKind.SILENT_CORRUPTION and not incident.node


def limit_restore_to_verified(turn: Turn, job: Job, finding: Finding) -> None:
    """The state was corrupted without an error: no step after the last verified one may be restored."""
    verified, known = finding.verified_step, job.checkpoints
    if verified is None:
        turn.note(job.name, f"no saved step is distrusted, for the finding names no verified_step: {finding.summary}")
        return
    may_end = finding.kind is FindingKind.NUMERICAL and (known.trusted is None or known.finite_from is not None)
    lower = known.trusted is None or verified < known.trusted.step
    trusted = Trusted(verified, finding.summary) if lower else known.trusted
    turn.put_checkpoints(job.name, trusted=trusted, finite_from=0 if may_end else None)


def judge_loss(turn: Turn, job: Job, step: int, loss: float | None) -> None:
    """A loss that stayed NaN for some steps and is finite again for `DOUBT_STEPS_MAX` was not computed from NaN weights: an
    optimizer does not repair them. All steps may then be restored again, or the next crash would undo the whole run since."""
    since = job.checkpoints.finite_from
    if since is None or loss is None:
        return
    if not math.isfinite(loss):
        since = 0
    elif since == 0:
        since = step
    elif step - since >= DOUBT_STEPS_MAX:
        turn.put_checkpoints(job.name, trusted=None, finite_from=None)
        turn.note(job.name, f"the loss has been finite since step {since}: later steps may be restored again")
        return
    if since != job.checkpoints.finite_from:
        turn.put_checkpoints(job.name, finite_from=since)


def sources_changed(turn: Turn, order: Prepare) -> bool:
    """Whether a node that was a source of a shard for `order` no longer is, so that a new election is worth it."""
    for restore in order.restore:
        for source in restore.sources:
            node = turn.nodes.get(source.node)
            if source.node != OBJECT_STORE and (node is None or not _holds(node, order.job, restore.shard)):
                return True
    return False


def _holds(node: Node, job: str, key: object) -> bool:
    return node.connected and any(record.key == key for record in node.inventory.get(job, ()))


def skip_checkpoint(turn: Turn, job: Job, node: str, reason: str, *, replaceable: bool) -> bool:
    """No source delivers the shards that `node` was to restore: skip that step for a while.

    Returns False if `node` must be excluded instead, and is `replaceable`, by a spare: it failed with this step before, or
    it has failed with another step as well. Then its own network or replicator is the likely cause, and older and older steps
    would lose work for it: what only this node could not restore is tried again without it.
    """
    assert job.change is not None
    assert job.generation is not None
    point = job.generation.restore
    mine = [each for each in job.checkpoints.skipped if (each.attempt, each.step) == (point.attempt, point.step)]
    nodes, tries = (mine[0].nodes, mine[0].tries) if mine else ((), 0)
    others = [
        each for each in job.checkpoints.skipped if each not in mine and node in each.nodes and turn.at < each.until
    ]
    if replaceable and (node in nodes or others):
        if others:
            kept = tuple(each for each in job.checkpoints.skipped if each.nodes != (node,))
            turn.put_checkpoints(job.name, skipped=kept)
        return False
    until = turn.at + turn.config.unrestorable_s * (tries + 1)
    each = SkippedCheckpoint(point.attempt, point.step, reason, until, tries + 1, tuple(sorted({*nodes, node})))
    rest = [other for other in job.checkpoints.skipped if other not in mine]
    turn.put_checkpoints(job.name, skipped=(*rest, each)[-turn.config.passed_over_max :])
    return True


def next_try(turn: Turn, job: Job) -> float:
    """When a skipped step may be tried again; 0 = there is none."""
    return min((each.until for each in job.checkpoints.skipped if turn.at < each.until), default=0.0)


def forget_doubts(turn: Turn, name: str) -> None:
    """A generation has started: later steps are abandoned, and earlier ones need no doubt any more."""
    job = turn.jobs[name]
    line = Line(job.checkpoints.lineage)
    stored = tuple(each for each in job.checkpoints.stored if line.holds(each.attempt, each.step) and not each.damage)
    turn.put_checkpoints(name, skipped=(), trusted=None, finite_from=None, stored=stored)
