"""Nodes that take the same tensors from a store: each piece leaves the store once, and nobody depends on anybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.domain.errors import NotFound, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.replicator import bucket as bucket_module
from holdfast.replicator.bucket import Bucket
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.sharing import FAILED_MAX, Arrivals, Sharers
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.replicator.wanted import Wanted
from holdfast.shards import CHUNK_BYTES, ImageSet, Plan, Staged, TensorSpec
from holdfast.stores import unpaced
from holdfast.stores.memory import InMemory

JOB = "llm"
NODES = ("a", "b", "c")
PIECES = 7
NBYTES = PIECES * CHUNK_BYTES - 9000  # the index is in front of them
SOURCES = tuple(ShardSource(node, f"{node}:1") for node in NODES)

Read = Callable[[str, ShardSource, int, memoryview], None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InMemory:
    """Step 20 of three replicas, complete; and a piece is one span."""
    monkeypatch.setattr(bucket_module, "READ_BYTES", CHUNK_BYTES)
    kept = InMemory()
    images = ImageTier(tmp_path / "memory", "old", Checksummer(1), overflow=tmp_path / "disk")
    plan = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
    for rank in range(len(NODES)):
        saved = ImageSet(tmp_path / "memory" / JOB / f"w{rank}").stage(
            plan, 1, 20, rank, {"dp": 3}, lambda image: image.view("w").__setitem__(slice(None), pattern()), b"e" * 99
        )
        assert isinstance(saved, Staged)
    for seen in images.scan(JOB):
        images.commit(JOB, seen)
        with images.open(JOB, seen.header.stamp.key) as shard:
            Bucket(kept, JOB).upload(shard, unpaced)
    assert Bucket(kept, JOB).complete(1, 20, len(NODES)) is not None
    kept.calls.clear()
    return kept


def pattern() -> bytes:
    return (bytes(range(251)) * (NBYTES // 251 + 1))[:NBYTES]


def tensor_reads(store: InMemory) -> int:
    return sum(1 for operation, key in store.calls if operation == "read_into" and key.endswith(".tensors"))


def fetch_all(store: InMemory, root: Path, arrivals: dict[str, Arrivals], read: Read) -> None:
    """Every node fetches its rank's shard at the same time, through `read(asking, asked, offset, target)`."""

    def fetch(rank: int, node: str) -> None:
        bucket, inbox = Bucket(store, JOB), FileTier("memory", root / node, "staged", warm=WarmFiles(root / node))
        manifest = bucket.manifest_of(Wanted(ShardKey(1, 20, rank)))
        sharers = Sharers(SOURCES, node, lambda source, offset, target: read(node, source, offset, target))
        bucket.fetch(manifest, inbox, None, (sharers, arrivals[node]))
        with inbox.open(JOB, manifest.key) as shard:
            assert bytes(shard.reader.view("w")) == pattern()

    with ThreadPoolExecutor(len(NODES)) as pool:
        list(pool.map(fetch, range(len(NODES)), NODES))


def test_each_piece_leaves_the_store_once(store: InMemory, tmp_path: Path) -> None:
    arrivals = {node: Arrivals(wait_s=10) for node in NODES}
    asked: Counter[tuple[str, str]] = Counter()
    digest = Bucket(store, JOB).manifest_of(Wanted(ShardKey(1, 20, 0))).digest

    def read(asking: str, source: ShardSource, offset: int, target: memoryview) -> None:
        asked[asking, source.node] += 1
        target[:] = arrivals[source.node].read(JOB, digest, offset, len(target))

    fetch_all(store, tmp_path, arrivals, read)
    assert tensor_reads(store) == PIECES
    assert sum(asked.values()) == PIECES * (len(NODES) - 1)
    assert all(asking != source for asking, source in asked)


@pytest.mark.parametrize("trouble", ["dead", "lying"])
def test_a_node_that_does_not_help_costs_nothing_but_the_store(store: InMemory, tmp_path: Path, trouble: str) -> None:
    tries: Counter[tuple[str, str]] = Counter()

    def read(asking: str, source: ShardSource, offset: int, target: memoryview) -> None:
        tries[asking, source.node] += 1
        if trouble == "dead":
            raise Unavailable("nobody there")
        target[:] = bytes(len(target))

    fetch_all(store, tmp_path, {node: Arrivals(wait_s=0) for node in NODES}, read)
    assert tensor_reads(store) == PIECES * len(NODES)
    # Of one that has failed nothing more is asked, but for what was asked before it was known.
    assert max(tries.values()) <= bucket_module.READ_STREAMS


def test_after_two_have_failed_nobody_is_asked_any_more() -> None:
    sources = tuple(ShardSource(f"n{number}", "") for number in range(8))
    asked: list[str] = []

    def read(source: ShardSource, offset: int, target: memoryview) -> None:
        asked.append(source.node)
        raise Unavailable("timed out")

    sharers = Sharers(sources, "n3", read)
    assert not any(sharers.read(number, 0, memoryview(bytearray(1))) for number in range(16))
    assert asked == ["n0", "n1"]
    assert len(asked) == FAILED_MAX
    assert [sharers.turn(number) for number in (3, 4, 11, 2)] == [0, 1, 0, 7]


def test_what_has_arrived_or_does_not_come(store: InMemory, tmp_path: Path) -> None:
    bucket, inbox = Bucket(store, JOB), FileTier("memory", tmp_path, "staged", warm=WarmFiles(tmp_path))
    manifest = bucket.manifest_of(Wanted(ShardKey(1, 20, 0)))
    arrivals = Arrivals(wait_s=0)
    span = manifest.spans[2]
    with pytest.raises(NotFound, match="did not arrive on this node in time"):
        arrivals.read(JOB, manifest.digest, span.offset, span.size)
    with inbox.receive(JOB, manifest) as incoming, arrivals.announcing(JOB, incoming, inbox):
        data = memoryview(pattern()[-span.size :])
        with pytest.raises(Exception, match="arrived damaged"):
            incoming.write_span(2, data)
        with pytest.raises(NotFound):
            arrivals.read(JOB, manifest.digest, span.offset, span.size)
    with pytest.raises(NotFound):  # through, but not whole
        arrivals.read(JOB, manifest.digest, span.offset, span.size)
    bucket.fetch(manifest, inbox, None, (Sharers(SOURCES[:1], "a", unused), arrivals))
    with inbox.open(JOB, manifest.key) as shard:
        assert arrivals.read(JOB, manifest.digest, span.offset, span.size) == bytes(
            shard.data[span.offset : span.offset + span.size]
        )
    with pytest.raises(NotFound):
        arrivals.read("another job", manifest.digest, span.offset, span.size)


def unused(source: ShardSource, offset: int, target: memoryview) -> None:
    raise AssertionError("everything is this node's own")
