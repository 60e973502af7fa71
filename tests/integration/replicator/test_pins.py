"""What was handed out for a restore stays as it is until training has gone on, and not longer."""

from __future__ import annotations

from pathlib import Path

from replicator_node import PLAN, fill, nodes
from waiting import wait_until

from holdfast.domain.generations import ShardKey
from holdfast.shards import Reader, Skipped, Staged


def test_an_image_handed_out_is_not_overwritten_before_training_goes_on(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure(ranks=(0, 1))
        images = a.images(0)
        first = a.save(images, 10)
        a.wait_for(first, "disk")
        a.wait_for(a.save(images, 20), "disk")
        images.close()
        a.configure(ranks=(0, 1), generation=2, attempt=2)
        staged = a.stage(first, a)
        assert staged.source == "memory"
        again = a.images(0, restored=(1, 10))
        a.wait_for(a.save(again, 15, attempt=2), "disk")  # into the image of the lineage given up
        with Reader(Path(staged.path)) as reader:
            assert reader.key == first
        refused = again.stage(PLAN, 2, 25, 0, {"dp": 2}, lambda image: fill(image, 25), b"")
        assert isinstance(refused, Skipped), "rank 1 may still be restoring"
        a.save(a.images(1), 15, attempt=2, rank=1)

        def saved() -> bool:
            return isinstance(again.stage(PLAN, 2, 25, 0, {"dp": 2}, lambda image: fill(image, 25), b""), Staged)

        wait_until(saved, description="the lock to be given back")


def test_a_fetched_shard_leaves_memory_after_the_first_save_that_is_on_disk(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "spare") as (a, spare):
        a.configure()
        key = a.save(a.images(), 10)
        a.wait_for(key, "disk")
        spare.configure(generation=2, attempt=2)
        staged = spare.stage(key, a)
        assert Path(staged.path) == spare.shard_file(key, "memory")
        spare.wait_for(key, "disk")
        assert Path(staged.path).exists()
        spare.wait_for(spare.save(spare.images(restored=(1, 10)), 15, attempt=2), "disk")
        wait_until(lambda: not Path(staged.path).exists(), description="memory to be given back")


def test_a_newer_generation_lets_go_of_the_previous_restore(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        images = a.images()
        first = a.save(images, 10)
        a.wait_for(first, "disk")
        a.wait_for(a.save(images, 20), "disk")
        a.configure(generation=2, attempt=2)
        a.stage(first, a)
        a.configure(generation=3, attempt=3)
        a.stage(ShardKey(1, 20, 0), a)
        images.close()
        after = a.images(restored=(1, 20))
        a.wait_for(a.save(after, 25, attempt=3), "disk")
        a.retain(25, attempt=3)
        # Two newer steps are complete on disk, other nodes have the newest, and nobody restores from the oldest any more.
        wait_until(lambda: not a.shard_file(first).exists(), description="the first step to be let go of")
        with Reader(a.shard_file(ShardKey(1, 20, 0))) as reader:
            assert reader.key.step == 20


def test_several_ranks_restore_from_one_shard(tmp_path: Path) -> None:
    """After a resize two ranks may start from the same position's shard: it is staged once."""
    with nodes(tmp_path, "a", "b") as (a, b):
        a.configure()
        key = a.save(a.images(), 10)
        a.wait_for(key, "disk")
        b.configure(generation=2, attempt=2, ranks=(2, 3), world=4)
        first, second = b.stage(key, a, rank=2), b.stage(key, a, rank=3)
        assert (first.rank, second.rank) == (2, 3)
        assert first.path == second.path
        assert (first.source, second.source) == ("a", "memory")
