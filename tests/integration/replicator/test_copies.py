"""Copies of peers are whole in memory before they are on the disk: what that is worth, and what it must not break."""

from __future__ import annotations

import signal
from pathlib import Path

from replicator_node import Node, nodes
from waiting import wait_until

from holdfast.domain.generations import ShardKey
from holdfast.shards import Reader

CRAWL = {"HOLDFAST_REPLICATOR_DISK_BYTES_PER_S_MAX": "1"}  # nothing comes to the disk while a test lasts


def is_step(path: str | Path, step: int) -> bool:
    with Reader(Path(path)) as reader:
        return reader.key.step == step and bytes(reader.view("w")) == bytes([step]) * len(reader.view("w"))


def crawling_pair(a: Node, b: Node) -> None:
    """`a` copies to `b`, which is started again with a disk that takes a byte a second."""
    b.stop()
    b._env.update(CRAWL)
    b.start()
    b.configure(ranks=(1,))
    a.configure(peers=(b,))


def start_at_full_speed(node: Node) -> None:
    for name in CRAWL:
        node._env.pop(name)
    node.start()


def test_a_copy_is_in_memory_then_on_disk_and_only_the_newest_stays_in_memory(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        images = a.images()
        keys = [a.save(images, 10)]
        b.wait_for(keys[0], "memory")
        b.wait_for(keys[0], "disk")
        for step in (20, 30):
            keys.append(a.save(images, step))
            b.wait_for(keys[-1], "memory")
            b.wait_for(keys[-1], "disk")
            b.wait_without(keys[-2], "memory")
        assert (keys[-1], "memory") in b.holdings()
        files = [path for path in b.memory.rglob("*") if path.is_file() and path.suffix != ".json"]
        assert len(files) <= 2, "one copy, and the pages for the next"


def test_what_is_in_the_memory_of_a_peer_survives_its_sender(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare):
        crawling_pair(a, b)
        key = a.save(a.images(), 10)
        record = b.wait_for(key, "memory")
        a.stop(signal.SIGKILL)
        assert (key, "disk") not in b.holdings()
        spare.configure(generation=2, attempt=2, peers=(b,))
        staged = spare.stage(key, a, b, digest=record.digest)
        assert staged.source == "b"
        assert is_step(staged.path, 10)


def test_a_replicator_killed_between_memory_and_disk_carries_on(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        crawling_pair(a, b)
        key = a.save(a.images(), 10)
        b.wait_for(key, "memory")
        b.stop(signal.SIGKILL)
        assert not list(b.disk.rglob("*.shard"))
        start_at_full_speed(b)
        b.wait_for(key, "disk")
        assert is_step(b.shard_file(key), 10)


def test_a_sender_deletes_nothing_for_what_is_only_in_the_memory_of_its_peer(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        crawling_pair(a, b)
        images = a.images()
        for step in (10, 20, 30, 40):
            a.wait_for(a.save(images, step), "disk")
        b.wait_for(ShardKey(1, 40, 0), "memory")
        a.retain(40)
        assert {(ShardKey(1, step, 0), "disk") for step in (10, 20, 30, 40)} <= a.holdings()
        b.stop(signal.SIGKILL)
        start_at_full_speed(b)
        b.wait_for(ShardKey(1, 40, 0), "disk")
        a.wait_without(ShardKey(1, 10, 0), "disk")


def test_a_copy_that_rots_in_memory_is_found_on_its_way_to_the_disk(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        crawling_pair(a, b)
        key = a.save(a.images(), 10)
        b.wait_for(key, "memory")
        b.stop(signal.SIGKILL)
        with b.shard_file(key, "memory").open("r+b") as file:
            file.seek(2 << 20)
            file.write(b"\xff")
        start_at_full_speed(b)
        b.wait_for(key, "disk")  # from its sender once more
        assert is_step(b.shard_file(key), 10)
        wait_until(lambda: "corrupt shard quarantined" in b.log, description="the report")


def test_a_spare_receives_into_memory_that_it_has_kept_ready(tmp_path: Path) -> None:
    ready = {
        "HOLDFAST_REPLICATOR_PREALLOCATED_SHARDS": "2",
        "HOLDFAST_REPLICATOR_PREALLOCATED_SHARD_BYTES": str(7 << 20),
    }
    with nodes(tmp_path, "a") as (a,), nodes(tmp_path, "spare", **ready) as (spare,):
        a.configure()
        key = a.save(a.images(), 10)
        a.wait_for(key, "disk")
        kept = wait_until(lambda: kept_by(spare, 2), description="the memory that is kept ready")
        spare.configure(generation=2, attempt=2)
        staged = Path(spare.stage(key, a).path)
        assert staged.stat().st_ino in kept
        assert is_step(staged, 10)
        spare.forget()
        assert wait_until(lambda: kept_by(spare, 2), description="as much again") != kept


def kept_by(node: Node, count: int) -> set[int] | None:
    """The inodes, as soon as there are so many."""
    kept = {path.stat().st_ino for path in node.memory.glob(".warm/[0-9]*")}
    return kept if len(kept) == count else None
