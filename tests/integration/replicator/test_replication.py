"""A save's way through the tiers, and back to a rank, with real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from replicator_node import JOB, PLAN, TENSOR_BYTES, nodes
from waiting import wait_until

from holdfast.domain.generations import ShardKey
from holdfast.replicator.plan import BACKLOG_STEPS_MAX
from holdfast.shards import Reader


def content_is(path: str | Path, value: int) -> bool:
    with Reader(Path(path)) as reader:
        return bytes(reader.view("w")) == bytes([value]) * TENSOR_BYTES and reader.extra == bytes([value]) * 99


def test_a_save_reaches_memory_disk_and_peer(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(ranks=(0,), peers=(b,))
        key = a.save(a.images(), 10)
        in_memory = a.wait_for(key, "memory")
        on_disk = a.wait_for(key, "disk")
        copy = b.wait_for(key, "disk")
        assert in_memory.digest == on_disk.digest == copy.digest
        assert in_memory.size == copy.size
        assert copy.owner == "a"
        assert content_is(b.shard_file(key), 10)
        staged = a.stage(key, a, b, digest=in_memory.digest)
        assert staged.source == "memory"
        assert content_is(staged.path, 10)
        assert a.stop() == 0
        assert b.stop() == 0


def test_a_lost_note_costs_a_rescan_only(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        a.wait_for(a.save(a.images(), 10, note=False), "disk")


def test_equal_tensors_have_equal_digests_whatever_rank_and_step(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure(ranks=(0, 1))
        first = a.wait_for(a.save(a.images(0), 10, rank=0, value=7), "memory")
        second = a.wait_for(a.save(a.images(1), 11, rank=1, value=7), "memory")
        third = a.wait_for(a.save(a.images(1), 12, rank=1, value=8), "memory")
        assert first.digest == second.digest != third.digest


def test_a_replacement_node_fetches_what_it_lacks(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(ranks=(0,), peers=(b,))
        record = b_copy = None
        key = a.save(a.images(), 10)
        record = a.wait_for(key, "memory")
        b_copy = b.wait_for(key, "disk")
        a.stop(signal.SIGKILL)
        spare.configure(generation=2, attempt=2, ranks=(0,), peers=(b,))
        staged = spare.stage(key, a, b, digest=record.digest)
        assert staged.source == "b"
        assert content_is(staged.path, 10)
        assert (key, "memory") in spare.holdings()
        assert b_copy.owner == "a"
        spare.wait_for(key, "disk")  # and is as safe there as it was before


def test_a_flipped_byte_is_found_set_aside_and_fetched_from_elsewhere(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(ranks=(0,), peers=(b,))
        images = a.images()
        key = a.save(images, 10)
        record = a.wait_for(key, "disk")
        b.wait_for(key, "disk")
        image = next(a.memory.glob(f"{JOB}/w0/*.image"))
        for victim in (image, a.shard_file(key)):
            with victim.open("r+b") as file:
                file.seek(2 << 20)
                file.write(b"\xff")
        staged = a.stage(key, a, b, digest=record.digest)
        assert staged.source == "b"
        assert content_is(staged.path, 10)
        assert list(a.disk.rglob("*.corrupt"))
        assert (key, "disk") not in a.holdings() or content_is(a.shard_file(key), 10)
        a.save(images, 20)  # the worker notices that its image was taken away
        a.wait_for(ShardKey(1, 20, 0), "disk")


def test_a_corrupt_copy_at_a_peer_is_refused_and_the_next_source_asked(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "c", "spare") as (a, b, c, spare):
        for node, rank in ((b, 1), (c, 2)):
            node.configure(ranks=(rank,), world=3)
        a.configure(peers=(b, c), world=3)
        key = a.save(a.images(), 10)
        record = a.wait_for(key, "memory")
        b.wait_for(key, "disk")
        c.wait_for(key, "disk")
        for tier in ("memory", "disk"):
            with b.shard_file(key, tier).open("r+b") as file:
                file.seek(5 << 20)
                file.write(b"\xff")
        spare.configure(generation=2, attempt=2, world=3)
        staged = spare.stage(key, b, c, digest=record.digest)
        assert staged.source == "c"
        assert content_is(staged.path, 10)
        b.wait_without(key, "memory")  # its holder has looked, too, at what it handed out


def test_when_every_source_fails_each_is_named_with_its_reason(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "c") as (a, b, c):
        c.stop(signal.SIGKILL)
        a.configure()
        b.configure(ranks=(1,), token="another secret")
        with pytest.raises(grpc.RpcError) as raised:
            a.stage(ShardKey(1, 10, 0), a, b, c)
        assert raised.value.code() is grpc.StatusCode.ABORTED
        text = str(raised.value.details())
        assert "rank 0 cannot restore step 10 of rank 0 (attempt 1)" in text
        assert "not held here" in text
        assert "unknown job or wrong token" in text
        assert "c (127.0.0.1" in text


def test_a_wrong_token_neither_reads_nor_writes(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), token="theirs")
        a.configure(peers=(b,), token="ours")
        key = a.save(a.images(), 10)
        a.wait_for(key, "disk")
        wait_until(lambda: "unknown job or wrong token" in a.log and "was refused" in b.log, description="the refusals")
        assert b.holdings() == set()
        assert not list(b.disk.rglob("*.shard"))


def test_a_restarted_replicator_finds_everything_again(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        a.configure()
        key = a.save(a.images(), 10)
        record = a.wait_for(key, "disk")
        part = a.shard_file(key).with_name(".rank-0.shard.0badc0de.part")
        part.write_bytes(b"half")
        a.shard_file(ShardKey(1, 9, 0)).parent.mkdir()
        a.shard_file(ShardKey(1, 9, 0)).write_bytes(b"no manifest")
        a.stop(signal.SIGKILL)
        a.start()
        assert a.holdings() == {(key, "memory"), (key, "disk")}
        assert not part.exists()
        assert not a.shard_file(ShardKey(1, 9, 0)).exists()
        b.configure(ranks=(0,))  # and hands it out before anybody has configured it: it remembers the token
        assert b.stage(key, a, digest=record.digest).source == "a"


def test_retention_keeps_the_newest_and_the_restore_point(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure(keep=2)
        images = a.images()
        for step in (10, 20, 30):
            a.wait_for(a.save(images, step), "disk")
        a.retain(20)
        a.retain(10)  # late
        a.wait_without(ShardKey(1, 10, 0), "disk")
        assert {(ShardKey(1, 20, 0), "disk"), (ShardKey(1, 30, 0), "disk")} <= a.holdings()
        a.configure(keep=2, generation=2, attempt=2)
        a.stage(ShardKey(1, 20, 0), a)  # step 30 was lost elsewhere
        again = a.images(restored=(1, 20))
        a.wait_for(a.save(again, 25, attempt=2), "disk")
        assert {(ShardKey(1, 20, 0), "disk"), (ShardKey(2, 25, 0), "disk")} <= a.holdings()
        a.wait_for(a.save(again, 35, attempt=2), "disk")
        a.retain(35, attempt=2)
        a.wait_without(ShardKey(1, 20, 0), "disk")
        assert (ShardKey(1, 30, 0), "disk") in a.holdings(), "given up, and the newest of that: the user may want it"


def test_what_every_node_has_outlives_newer_steps_and_the_process(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure(keep=2)
        images = a.images()
        first = a.save(images, 10)
        a.wait_for(first, "disk")
        a.retain(10)
        a.stop(signal.SIGKILL)
        a.start()  # remembers the word
        for step in range(20, 20 + 10 * (2 + BACKLOG_STEPS_MAX), 10):
            a.wait_for(a.save(images, step), "disk")
        a.wait_for(a.save(images, 500), "disk")
        a.wait_without(ShardKey(1, 20, 0), "disk")  # might have become the next, and there is an end to it
        assert (first, "disk") in a.holdings()
        a.retain(500)
        a.wait_without(first, "disk")


def test_forget_leaves_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        images = a.images()
        key = a.save(images, 10)
        b.wait_for(key, "disk")
        for node in (a, b):
            node.forget()
            assert not [path for path in (*node.memory.rglob("*"), *node.disk.rglob("*")) if path.is_file()]
            assert node.holdings() == set()


def test_bad_requests_are_refused_with_a_reason(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        with pytest.raises(grpc.RpcError) as raised:
            a.configure(job="../../etc")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as raised:
            a.stage(ShardKey(1, 1, 0))
        assert "has not been configured here" in str(raised.value.details())
        a.configure(generation=5)
        with pytest.raises(grpc.RpcError) as raised:
            a.configure(generation=4)
        assert "only the newest is served" in str(raised.value.details())


def test_an_image_being_overwritten_leaves_the_inventory(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        images = a.images()
        first = a.save(images, 10)
        a.wait_for(first, "disk")
        a.wait_for(a.save(images, 20), "disk")

        def stuck(image: object) -> None:
            a.wait_without(first, "memory")
            assert a.stage(first, a).source == "disk"
            raise RuntimeError("killed while saving")

        with pytest.raises(RuntimeError, match="killed while saving"):
            images.stage(PLAN, 1, 30, 0, {"dp": 2}, stuck, b"")
