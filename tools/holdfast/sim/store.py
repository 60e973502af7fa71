"""The simulated object store, which is unavailable at times. It contains what replicators put there, until they delete it."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IntegrityError
from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.replicator.bucket import Surveyed
from holdfast.replicator.view import Archived
from holdfast.shards import Manifest
from holdfast.sim.world import World

URL = "gs://simulated/store"


class Store:
    def __init__(self, world: World) -> None:
        self.world = world
        self.undisturbed_since = -inf
        self._away = False
        self.ever_complete: set[CheckpointId] = set()  # for the invariants
        self._stored: dict[tuple[str, CheckpointId], StoredStep] = {}
        self._shards: dict[tuple[str, ShardKey], tuple[Manifest, float]] = {}  # with the time of the upload

    @property
    def away(self) -> bool:
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away, self.undisturbed_since = away, self.world.now

    def complete(self, job: str) -> list[StoredStep]:
        return [stored for (name, _), stored in self._stored.items() if name == job]

    def put(self, job: str, manifest: Manifest) -> None:
        self._shards.setdefault((job, manifest.key), (manifest, self.world.now))

    def get(self, job: str, key: ShardKey) -> Manifest | None:
        found = self._shards.get((job, key))
        return found[0] if found is not None else None

    def complete_step(self, job: str, checkpoint_id: CheckpointId, world_size: int) -> StoredStep | None:
        """Complete a checkpoint if the shards of all ranks are there. Returns None if not. Raises IntegrityError if more ranks
        have saved it: the job has fewer replicas since."""
        found = [self.get(job, ShardKey(*checkpoint_id, rank)) for rank in range(world_size)]
        shards = [each for each in found if each is not None]
        if len(shards) < world_size:
            return None
        if (job, checkpoint_id) not in self._stored:
            mesh = shards[0].domain_mesh()
            if mesh.world_size != world_size:
                raise IntegrityError(f"{checkpoint_id} was saved by {mesh.world_size} ranks, not by {world_size}")
            by_position: dict[int, set[str]] = {}
            for each in shards:
                by_position.setdefault(mesh.position_of(each.rank), set()).add(each.digest)
            sharded = any(len(digests) > 1 for digests in by_position.values())
            self._stored[job, checkpoint_id] = StoredStep(*checkpoint_id, mesh, sharded)
            self.ever_complete.add(checkpoint_id)
            self.world.say(f"the object store has step {checkpoint_id.step} of attempt {checkpoint_id.attempt}")
        return self._stored[job, checkpoint_id]

    def discard(self, job: str, checkpoint_id: CheckpointId) -> None:
        """Delete a checkpoint. Its manifest goes first."""
        self._stored.pop((job, checkpoint_id), None)
        for name, key in [each for each in self._shards if each[0] == job and each[1].checkpoint == checkpoint_id]:
            del self._shards[name, key]

    def survey(self, job: str) -> Surveyed:
        keys = {key: at for (name, key), (_, at) in self._shards.items() if name == job}
        stored = {checkpoint_id: step for (name, checkpoint_id), step in self._stored.items() if name == job}
        newest_at = max(keys.values(), default=0.0)
        ids = sorted({key.checkpoint for key in keys}, reverse=True)
        return Surveyed(
            tuple(Archived(*each, each in stored, newest_at - _updated_at(each, keys.items())) for each in ids),
            stored,
            frozenset(keys),
        )


def _updated_at(checkpoint_id: CheckpointId, uploads: Iterable[tuple[ShardKey, float]]) -> float:
    return max(at for key, at in uploads if key.checkpoint == checkpoint_id)
