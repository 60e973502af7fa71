"""The object store as a tier, with real processes and a directory as store: what goes there, and the way back."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from replicator_node import JOB, TENSOR_BYTES, Node, nodes
from waiting import wait_until

from holdfast.domain.generations import OBJECT_STORE, RankRestore, ShardKey, ShardSource
from holdfast.shards import ImageSet, Reader
from holdfast.stores import open_store
from holdfast.stores.fake_gcs import FakeGcs
from holdfast.stores.layout import load, steps, survey


def url_of(directory: Path) -> str:
    return f"file://{directory / 'bucket'}"


def content_is(path: str | Path, value: int, extra: int) -> bool:
    with Reader(Path(path)) as reader:
        return bytes(reader.view("w")) == bytes([value]) * TENSOR_BYTES and reader.extra == bytes([extra]) * 99


def save_both(a: Node, b: Node, step: int, images: list[ImageSet], *, attempt: int = 1, sharded: bool = False) -> None:
    for rank, node in enumerate((a, b)):
        node.save(images[rank], step, rank=rank, attempt=attempt, value=step % 251 + rank * sharded)


def store_both_ranks(node: Node, url: str, *values: int) -> None:
    """Step 10 of a job that one node has to itself, whole in the store; rank 0's bytes are the first of `values`."""
    node.configure(ranks=(0, 1), store=url)
    for rank, value in enumerate(values):
        node.save(node.images(rank), 10, rank=rank, value=value)
    node.wait_stored(10)


def test_a_step_of_two_nodes_becomes_complete_and_replicas_store_it_once(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "b") as (a, b):
        a.configure(ranks=(0,), peers=(b,), store=url)
        b.configure(ranks=(1,), peers=(a,), store=url)
        save_both(a, b, 10, [a.images(), b.images()])
        (stored,) = a.wait_stored(10)
        b.wait_stored(10)
        assert not stored.sharded
        store = open_store(url)
        (found,) = survey(store, JOB)
        assert len([key for key in found.keys if key.endswith(".tensors")]) == 1
        assert [entry.rank for entry in load(store, JOB, 1, 10).ranks] == [0, 1]


def test_a_step_that_was_asked_for_goes_whatever_the_interval_says_and_whoever_was_restarted(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "b") as (a, b):
        a.configure(ranks=(0,), peers=(b,), store=url, store_interval_s=3600.0)
        b.configure(ranks=(1,), peers=(a,), store=url, store_interval_s=3600.0)
        images = [a.images(), b.images()]
        for step in (10, 20):
            save_both(a, b, step, images)
            a.wait_for(ShardKey(1, step, 0), "disk")
            b.wait_for(ShardKey(1, step, 1), "disk")
        for node in (a, b):
            node.wait_stored(10)  # the first of a run
            node.archive(30)
        b.stop(signal.SIGKILL)
        b.notes.unlink()
        b.start()
        wait_until(b.notes.exists, description="b to listen to notes")
        save_both(a, b, 30, images)
        a.wait_stored(30, 10)
        b.wait_stored(30, 10)
        with pytest.raises(grpc.RpcError, match="is not the current one on this node"):
            a.archive(40, generation=2)


def test_both_nodes_are_lost_and_two_new_ones_start_from_the_store(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "b", "c", "d") as (a, b, c, d):
        for rank, (node, peer) in enumerate(((a, b), (b, a))):
            node.configure(ranks=(rank,), peers=(peer,), store=url)
        save_both(a, b, 10, [a.images(), b.images()], sharded=True)
        (stored,) = a.wait_stored(10)
        b.wait_stored(10)
        assert stored.sharded
        for node in (a, b):
            node.stop(signal.SIGKILL)
        for rank, node in enumerate((c, d)):
            node.configure(generation=2, attempt=2, ranks=(rank,), store=url)
            node.wait_stored(10)  # from the listing alone
            staged = node.stage(ShardKey(1, 10, rank), a, b, store=url)
            assert staged.source == OBJECT_STORE
            assert content_is(staged.path, 10 + rank, 10 + rank)
            node.wait_for(ShardKey(1, 10, rank), "disk")


def test_another_jobs_checkpoint_becomes_this_ones_first_shards(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "c", "d") as (a, c, d):
        store_both_ranks(a, url, 10, 11)
        source = (ShardSource(OBJECT_STORE, url, JOB),)
        for rank, node in enumerate((c, d)):
            node.configure(attempt=5, ranks=(rank,), peers=(c, d)[1 - rank : 2 - rank], job="heir")
            (staged,) = node.stage_all(RankRestore(rank, ShardKey(1, 10, rank), "", source), job="heir")
            assert content_is(staged.path, 10 + rank, 10 + rank)
        d.stop(signal.SIGKILL)
        d.start()
        held = {(record.key, record.tier) for record in next(d.watch("heir"))}
        assert (ShardKey(1, 10, 1), "memory") in held


def test_parts_of_a_resharded_state_come_down_for_one_rank(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "b", "c") as (a, b, c):
        for rank, node in enumerate((a, b)):
            node.configure(ranks=(rank,), store=url)
        save_both(a, b, 10, [a.images(), b.images()], sharded=True)
        a.wait_stored(10)
        c.configure(generation=2, attempt=2, ranks=(0,), world=1, store=url)
        source = (ShardSource(OBJECT_STORE, url),)
        parts = c.stage_all(*(RankRestore(0, ShardKey(1, 10, rank), "", source) for rank in (0, 1)))
        assert [(part.rank, part.shard.rank) for part in parts] == [(0, 0), (0, 1)]
        assert all(content_is(part.path, 10 + part.shard.rank, 10 + part.shard.rank) for part in parts)


def test_tensors_that_ranks_of_a_node_share_come_once(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "c") as (a, c):
        store_both_ranks(a, url, 7, 7)
        c.configure(generation=2, attempt=2, ranks=(0, 1), store=url)
        tensors = next(Path(tmp_path, "bucket").rglob("*.tensors"))
        source = (ShardSource(OBJECT_STORE, url),)
        first = c.stage_all(RankRestore(0, ShardKey(1, 10, 0), "", source))
        tensors.write_bytes(b"gone")  # whoever needs it again would see that
        second = c.stage_all(RankRestore(1, ShardKey(1, 10, 1), "", source))
        assert content_is(first[0].path, 7, 7)
        assert content_is(second[0].path, 7, 7)


def test_tensors_that_nodes_share_come_from_the_first_and_a_dead_one_is_no_harm(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "c", "d") as (a, c, d):
        store_both_ranks(a, url, 7, 7)
        from_store = (ShardSource(OBJECT_STORE, url),)
        for rank, node in enumerate((c, d)):
            node.configure(generation=2, attempt=2, ranks=(rank,), store=url)
        dead = ShardSource("dead", "127.0.0.1:1")
        (first,) = c.stage_all(RankRestore(0, ShardKey(1, 10, 0), "", from_store, (dead, c.source)))
        assert content_is(first.path, 7, 7)
        assert "shared download failed" in c.log
        next(Path(tmp_path, "bucket").rglob("*.tensors")).write_bytes(b"gone")  # whoever needs it would see that
        (second,) = d.stage_all(RankRestore(1, ShardKey(1, 10, 1), "", from_store, (c.source, d.source)))
        assert content_is(second.path, 7, 7)


def test_rot_in_the_store_is_never_handed_out(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "c") as (a, c):
        store_both_ranks(a, url, 10, 10)
        c.configure(generation=2, attempt=2, ranks=(0, 1), store=url)
        for pattern in ("*.tensors", "rank-0.rest", "rank-0.json", "manifest.json"):
            (victim,) = Path(tmp_path, "bucket").rglob(pattern)
            whole = victim.read_bytes()
            middle = len(whole) // 2
            for broken in (b"", whole[:-2], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
                victim.write_bytes(broken)
                for part in c.memory.rglob("*.part"):  # what an earlier try has verified would not be fetched again
                    part.unlink()
                with pytest.raises(grpc.RpcError) as raised:
                    c.stage(ShardKey(1, 10, 0), store=url)
                assert raised.value.code() is grpc.StatusCode.ABORTED
                assert "object store: " in str(raised.value.details())
            victim.write_bytes(whole)
        assert content_is(c.stage(ShardKey(1, 10, 0), store=url).path, 10, 10)


def test_what_rots_in_the_store_is_found_reported_and_written_anew_while_a_node_has_it(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    scrub = {
        "HOLDFAST_REPLICATOR_STORE_SCRUB_INTERVAL_S": "0.1",
        "HOLDFAST_REPLICATOR_STORE_SCRUB_BYTES_PER_S_MAX": "0",
    }
    with nodes(tmp_path, "a", "c", **scrub) as (a, c):
        store_both_ranks(a, url, 10, 10)
        for pattern in ("*.tensors", "rank-1.rest", "rank-0.json"):
            (victim,) = Path(tmp_path, "bucket").rglob(pattern)
            whole = victim.read_bytes()
            victim.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
            wait_until(lambda victim=victim, whole=whole: victim.read_bytes() == whole, description="a good object")  # type: ignore[misc]
        assert a.log.count("corrupt object found in the object store") >= 3
        a.stop()
        c.configure(generation=2, attempt=2, ranks=(0, 1), store=url)
        c.wait_stored(10)
        victim.unlink()
        wait_until(lambda: "corrupt object not repaired" in c.log, description="the report")
        wait_damage(c, "rank-0.json")
        assert steps(open_store(url), JOB) == [], "for everybody who lists the bucket, too"
        victim.write_bytes(whole)
        wait_damage(c, "")
        assert steps(open_store(url), JOB) == [(1, 10)]


def wait_damage(node: Node, problem: str) -> None:
    """Wait until step 10 is reported with this problem; "" = with none."""
    for inventory in node.inventories():
        damage = [stored.damage for stored in inventory.stored]
        if damage == [""] if not problem else problem in "".join(damage):
            return
    raise AssertionError(f"never reported: {node.log}")


def test_what_arrives_damaged_at_a_restore_is_not_offered_again(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "c") as (a, c):
        store_both_ranks(a, url, 10, 10)
        a.stop()
        (victim,) = Path(tmp_path, "bucket").rglob("rank-1.rest")
        victim.write_bytes(victim.read_bytes()[:-1])
        c.configure(generation=2, attempt=2, ranks=(0, 1), store=url)
        c.wait_stored(10)
        with pytest.raises(grpc.RpcError):
            c.stage(ShardKey(1, 10, 1), store=url)
        wait_damage(c, "rank-1.rest")
        assert steps(open_store(url), JOB) == []


def test_the_store_keeps_what_it_is_asked_to_and_the_owner_deletes(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "b") as (a, b):
        for rank, node in enumerate((a, b)):
            node.configure(ranks=(rank,), store=url, store_keep=2)
        images: list[ImageSet] = [a.images(), b.images()]
        for step in (1, 2, 3, 4):
            save_both(a, b, step, images)
            wait_until(lambda step=step: (1, step) in steps(open_store(url), JOB), description=f"step {step} stored")  # type: ignore[misc]
        a.wait_stored(4, 3, 1)  # no later step is known to be on every node
        for node in (a, b):
            node.retain(4)
        a.wait_stored(4, 3)
        wait_until(lambda: len(survey(open_store(url), JOB)) == 2, description="older steps gone whole")


def test_a_node_that_starts_again_goes_on_with_the_step_it_had_begun(tmp_path: Path) -> None:
    """Between the shard and the manifest: rank 1 comes late, and the node of rank 0 has died in between."""
    url = url_of(tmp_path)
    with nodes(tmp_path, "a", "b") as (a, b):
        for rank, node in enumerate((a, b)):
            node.configure(ranks=(rank,), store=url)
        a.save(a.images(), 10)
        wait_until(lambda: survey(open_store(url), JOB)[:1] and survey(open_store(url), JOB)[0].ranks == (0,),
                   description="rank 0's share")  # fmt: skip
        a.stop(signal.SIGKILL)
        b.save(b.images(), 10, rank=1)
        b.wait_stored(10)
        a.start()
        a.wait_stored(10)


def test_a_store_that_is_not_there_holds_up_neither_disk_nor_peers(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/not/mounted"
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), store=url)
        a.configure(peers=(b,), store=url)
        images = a.images()
        for step in (10, 20, 30):
            key = a.save(images, step)
            a.wait_for(key, "disk")
            b.wait_for(key, "disk")
        wait_until(lambda: "mounted" in a.log, description="the reason")
        (tmp_path / "not").mkdir()
        b.save(b.images(), 30, rank=1)
        a.wait_stored(30)  # it has come back, and nobody had to do anything
        assert a.stop() == 0


def test_cloud_storage_that_throttles_breaks_off_and_stalls_is_only_slower(tmp_path: Path) -> None:
    url = "gs://bucket/checkpoints"
    with FakeGcs() as cloud, nodes(tmp_path, "a", "b", "c", STORAGE_EMULATOR_HOST=cloud.endpoint) as (a, b, c):
        cloud.fault(status=429, times=3)
        cloud.fault(status=503, method="POST", times=2)
        cloud.fault(after_bytes=1 << 20, path_part=".tensors")
        cloud.fault(answer_lost=True, path_part="manifest.json")
        for rank, node in enumerate((a, b)):
            node.configure(ranks=(rank,), store=url)
        save_both(a, b, 10, [a.images(), b.images()])
        a.wait_stored(10)
        c.configure(generation=2, attempt=2, ranks=(0,), store=url)
        cloud.fault(status=503, method="GET", times=2)
        cloud.fault(after_bytes=1 << 20, method="GET", path_part=".tensors")
        assert content_is(c.stage(ShardKey(1, 10, 0), store=url, timeout_s=30).path, 10, 10)


def test_a_store_that_hangs_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    """Every request is taken and none is answered: disk, peers, a restore from a peer and the end of the process go on."""
    url = "gs://bucket/checkpoints"
    with FakeGcs() as cloud, nodes(tmp_path, "a", "b", STORAGE_EMULATOR_HOST=cloud.endpoint) as (a, b):
        cloud.fault(stall_s=60, times=1000)
        b.configure(ranks=(1,), store=url)
        a.configure(peers=(b,), store=url)
        images = a.images()
        for step in (10, 20, 30):
            key = a.save(images, step)
            a.wait_for(key, "disk")
            b.wait_for(key, "disk")
        assert b.stage(key, a, store=url).source in ("memory", "disk", "a")
        a.forget()
        assert b.stop() == 0
