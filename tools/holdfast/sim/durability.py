"""The promises about lost work: what is saved reaches the next tiers in time, and a job restores the newest step that is left.

**The plan keeps up** (`keeps_up`, checked at each save). After a time without faults, a save, or a newer one of the same
attempt, is

* on the disk of its node, `copy_s_max` twice and `SLACK_S` later: a copy that runs already is finished first, and the next one
  takes the newest save;
* on another machine, in memory at least, for each peer that the order to prepare has named; and on its disk after the time
  that this takes. A lost message begins the time anew;
* complete in the object store, if the disks of all nodes are fast: of the saves that all ranks have, at least one in two
  intervals of the store. (A node with a slow disk may miss the step that the others have chosen. Ranks that a new interval has
  not reached, because the leader has ended, choose other steps than the rest until the next leader sends it again.)

A fault is a start or an end of the replicator or of its machine, a corrupt copy, another configuration, and the store's
absence. While the nodes of a job are reached by no order, they have the peers of the last one, and copy to them.

**A copy counts as held when it is whole** (`is_on_disk`, `listed`). What a replicator takes for being on the disk of a peer is
there, and its inventory names exactly what the machine has, in the right tier.

**The election takes the newest step** (`newest_whole`, checked for each planned generation). No step is newer than the selected
one, on the lineage, and whole: each rank's shard is on a connected node, is in the node's inventory as the supervisor knew it,
and is still there, or the object store has it. What has not been reported does not count, because reports are late or lost. A
report of an earlier agent process of the node does not count as soon as the supervisor has the Hello of the next one, whose
inventory follows: the machine may have been booted, or replaced, in between. Nor do these, because the core must not use them:
steps that could not be restored, copies with different digests, and copies of the running attempt beyond the newest step that
is known to be complete, on nodes without ranks in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh
from holdfast.domain.replication import Configure
from holdfast.replicator.schedule import ARCHIVE_PAUSE_MAX_S
from holdfast.replicator.view import Tier
from holdfast.sim.replicator import Replicator
from holdfast.sim.store import Store
from holdfast.sim.world import Violation
from holdfast.supervisor.core import State

SLACK_S = 2.0  # for pauses after an attempt that failed
PUSH_S = 5.0  # of all shards of a node to one peer
STORE_S = 30.0  # of uploads by all nodes, one after the other, with the pauses of those that wait for the others

# ---------------------------------------------------------------- copies


def keeps_up(replicators: Mapping[str, Replicator], store: Store | None, job: str, name: str, now: float) -> None:
    """Called when the node `name` saves. Raises Violation."""
    mine = replicators[name]
    config = mine.jobs[job].config
    assert config is not None
    for rank in config.ranks:
        _reaches_disk(mine, config, rank, now)
        for peer in config.peers:
            if peer.node == name:
                raise Violation(f"{name} is to copy its shards to itself")
            _reaches_peer(mine, replicators[peer.node], config, rank, now)
    if store is not None and config.store and 0 in config.ranks:
        _reaches_store(list(replicators.values()), store, config, now)


def _reaches_disk(mine: Replicator, config: Configure, rank: int, now: float) -> None:
    limit_s = 2 * mine.copy_s_max + SLACK_S
    due = mine.undisturbed.due(config.job, config.attempt, rank, mine.undisturbed.since, now - limit_s)
    if due is not None and not _has(mine, config.job, due, (Tier.DISK,)):
        raise Violation(f"{mine.name} has had {limit_s:g} s for {due}, and neither it nor a newer one is on its disk")


def _reaches_peer(mine: Replicator, peer: Replicator, config: Configure, rank: int, now: float) -> None:
    disk_s = 2 * mine.copy_s_max + SLACK_S
    since = max(mine.undisturbed.since, mine.undisturbed.reached_since, peer.undisturbed.since)
    for limit_s, tiers in (
        (disk_s + PUSH_S, (Tier.STAGED, Tier.DISK)),
        (disk_s + PUSH_S + 2 * peer.copy_s_max + SLACK_S, (Tier.DISK,)),
    ):
        due = mine.undisturbed.due(config.job, config.attempt, rank, since, now - limit_s)
        if due is not None and not _has(peer, config.job, due, tiers):
            where = "on its disk" if tiers == (Tier.DISK,) else "in its memory or on its disk"
            raise Violation(f"{mine.name} has had {limit_s:g} s for {due}, and {peer.name} has no copy of it {where}")


def _has(replicator: Replicator, job: str, due: ShardKey, tiers: tuple[Tier, ...]) -> bool:
    return any(
        held.key.rank == due.rank and held.tier in tiers and held.key.checkpoint >= due.checkpoint
        for held in replicator.files(job)
    )


def _reaches_store(replicators: Iterable[Replicator], store: Store, config: Configure, now: float) -> None:
    members = [each for each in replicators if _is_member(each, config)]
    # After an absence of the store, each node asks again when its pause is over.
    since = max((store.undisturbed_since + ARCHIVE_PAUSE_MAX_S, *(each.undisturbed.since for each in members)))
    ranks = {rank for each in members for rank in each.config_of(config.job).ranks}
    if len(ranks) < config.mesh.world_size or any(each.slow_disk for each in members):
        return
    saves = _saves(members, config, since)
    saved = {step: max(found) for step, found in saves.items() if len(found) == config.mesh.world_size}
    steps = sorted(saved)
    gap_s = max((saved[later] - saved[earlier] for earlier, later in pairwise(steps)), default=inf)
    begin, end = now - STORE_S - 2 * max(config.store_interval_s, gap_s) - gap_s, now - STORE_S
    due = [step for step in steps if begin <= saved[step] <= end]
    intervals_differ = any(step not in saved and begin <= max(found) <= end for step, found in saves.items())
    if since > begin or not due or intervals_differ:
        return
    newest = max((each.step for each in store.complete(config.job) if each.attempt == config.attempt), default=0)
    if newest < due[0]:
        raise Violation(
            f"steps {due} were saved by all ranks at least {STORE_S:g} s ago, the object store takes one in "
            f"{config.store_interval_s:g} s, and its newest is step {newest}"
        )


def _is_member(each: Replicator, config: Configure) -> bool:
    known = each.jobs[config.job].config if each.alive and config.job in each.jobs else None
    return known is not None and (known.generation, known.token) == (config.generation, config.token)


def _saves(members: Iterable[Replicator], config: Configure, since: float) -> dict[int, list[float]]:
    """Return the steps that have been saved since then, with the time of each rank."""
    times: dict[int, list[float]] = {}
    for each in members:
        for rank in each.config_of(config.job).ranks:
            for at, key in each.undisturbed.saves.get((config.job, rank), ()):
                if key.attempt == config.attempt and at > since:
                    times.setdefault(key.step, []).append(at)
    return times


# ---------------------------------------------------------------- elections


def newest_whole(
    before: State,
    after: State,
    replicators: Mapping[str, Replicator],
    store: Store | None,
    name: str,
    lineage: Mapping[int, int | None],
    now: float,
) -> CheckpointId | None:
    """Return the newest step of `lineage` (attempt → its last step that counts) that is whole. `now`: of the core.

    `before` and `after` the fold that plans: what the fold itself learns may come after its election."""
    job = before.jobs.get(name)
    if job is None:
        return None
    skipped = {CheckpointId(each.attempt, each.step) for each in job.checkpoints.skipped if now < each.until} | {
        CheckpointId(each.attempt, each.step) for each in after.jobs[name].checkpoints.skipped if now < each.until
    }
    found: dict[CheckpointId, dict[int, set[str]]] = {}
    meshes: dict[CheckpointId, Mesh] = {}
    for node in before.nodes.values():
        now_known = after.nodes.get(node.name)
        if not (node.connected and now_known is not None and now_known.connected):
            continue
        if now_known.facts.incarnation != node.facts.incarnation:
            continue  # this fold has its Hello: what its earlier agent process has reported may be gone
        has = {held.key for held in replicators[node.name].intact(name)}
        takes_part = job.running is not None and job.running.placement_of(node.name) is not None
        for record in node.inventory.get(name, ()):
            at = record.key.checkpoint
            is_new = job.running is not None and at > (job.running.attempt, job.checkpoints.step)
            if record.key in has and (takes_part or not is_new):
                found.setdefault(at, {}).setdefault(record.key.rank, set()).add(record.digest)
                meshes[at] = record.mesh
    whole = {
        at
        for at, ranks in found.items()
        if len(ranks) == meshes[at].world_size and all(len(digests) == 1 for digests in ranks.values())
    }
    if store is not None:
        has_stored = {each.id for each in store.complete(name)}
        whole |= {each.id for each in job.checkpoints.stored if not each.damage and each.id in has_stored}
    on_it = {at for at in whole - skipped if at.attempt in lineage and _counts(lineage[at.attempt], at.step)}
    return max(on_it, default=None)


def _counts(last: int | None, step: int) -> bool:
    return last is None or step <= last
