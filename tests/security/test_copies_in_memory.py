"""Digests of a copy that came over an encrypted connection are compared when it leaves memory: on its way to disk, and before a
restore (docs/adr/0075). Until then a peer that lies has put changed bytes there; they never become weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from replicator_node import JOB, Node
from spoiling import MARK, NBYTES, changed, save, weights
from tls_nodes import pair
from waiting import wait_until

from holdfast.domain.errors import IntegrityError
from holdfast.domain.generations import RankRestore, ShardKey
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.runtime.trust.authority import Authority
from holdfast.shards import ImageSet, Manifest, Plan, Staged, TensorSpec

KEY = ShardKey(1, 10, 0)
HEADER_BYTES = 4096


def changed_weights(span: bytes) -> bytes:
    """Change weights, and leave header and index, which say for themselves that they are whole."""
    half = len(span) // 2
    return span[:half] + changed(span[half:]) if len(span) > HEADER_BYTES else span


def of_weights(manifest: Manifest) -> int:
    """Number of the span of the weights."""
    return max(range(len(manifest.spans)), key=lambda number: manifest.spans[number].size)


@contextmanager
def two_nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """With certificates, and with memory that has room for copies."""
    authority = Authority.create(tmp_path / "ca", "main", 10)
    with TemporaryDirectory(dir="/dev/shm") as memory, pair(authority, tmp_path) as made:
        for node in made:
            node.stop()
            node.memory = Path(memory) / node.name
            node.start()
        yield made


def change_image(node: Node) -> None:
    """Change the weights in the memory of a node; no checksum sees it."""
    found = 0
    for path in node.memory.rglob("*.image"):
        data = path.read_bytes()
        if (at := data.find(MARK)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(changed(data[at : at + NBYTES]))
            found += 1
    assert found == 1


def test_a_copy_that_a_peer_has_changed_comes_to_memory_and_no_further(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (a, b):
        a.configure()
        b.configure(ranks=(1,))
        key, _ = save(a)
        change_image(a)
        a.configure(peers=(b,))
        wait_until(lambda: "corrupt shard quarantined" in b.log, description="b to find it on the way to disk")
        assert "right checksum and a wrong digest" in b.log
        # When it comes again it is compared on arrival, so that a learns which of its copies is damaged, and sends another.
        wait_until(lambda: "corrupt shard quarantined" in a.log, description="a to look at its own image")
        b.wait_for(key, "disk")
        assert b.shard_file(key).read_bytes() == a.shard_file(key).read_bytes()
        assert weights(b.shard_file(key))


def test_an_honest_copy_is_restored_after_its_sender_and_a_restart(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as (a, b):
        a.configure()
        b.configure(ranks=(1,))
        key, record = save(a)
        content = a.shard_file(key).read_bytes()
        a.configure(peers=(b,))
        b.wait_for(key, "memory")
        a.stop()
        b.stop()
        b.start()
        (staged,) = b.stage_all(RankRestore(0, key, record.digest, (), root=record.root))
        assert Path(staged.path).read_bytes() == content


# ---------------------------------------------------------------- what a tier knows of its copies


@pytest.fixture
def source(tmp_path: Path) -> Iterator[OpenShard]:
    """A committed image of one worker, with two spans."""
    plan = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
    images = ImageSet(tmp_path / "sender" / JOB / "w0")
    staged = images.stage(
        plan, 1, 10, 0, {"dp": 1}, lambda image: image.view("w").__setitem__(slice(None), bytes(NBYTES)), b""
    )
    assert isinstance(staged, Staged)
    checksummer = Checksummer(1)
    tier = ImageTier(tmp_path / "sender", "a", checksummer, overflow=tmp_path / "overflow")
    tier.commit(JOB, tier.scan(JOB)[0])
    checksummer.close()
    with tier.open(JOB, KEY) as shard:
        yield shard
    images.close()


class Copies:
    """The memory and the disk of a node that receives `source`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.restart()
        self.disk = FileTier("disk", root / "disk")

    def restart(self) -> None:
        (self.root / "memory").mkdir(parents=True, exist_ok=True)
        warm = WarmFiles(self.root / "memory")
        self.memory = FileTier("memory", self.root / "memory", "staged", warm=warm, compares_later=True)

    def receive(
        self,
        source: OpenShard,
        change: Callable[[bytes], bytes] = bytes,
        *,
        unchanged: bool = True,
        later: bool = True,
    ) -> None:
        """`unchanged`: over an encrypted connection. `later`: for memory, not for a restore."""
        incoming = self.memory.incoming(JOB, source.manifest, later=later)
        try:
            for number in incoming.claim(0, 1):
                span = incoming.spans[number]
                data = change(bytes(source.data[span.offset : span.offset + span.size]))
                incoming.arrive(number, _filler(data), unchanged=unchanged)
            incoming.commit()
        finally:
            incoming.close()

    def to_disk(self) -> None:
        with self.memory.open(JOB, KEY) as shard:
            self.disk.put(JOB, shard, lambda nbytes: None)

    def compared(self) -> bool:
        with self.memory.open(JOB, KEY) as shard:
            return shard.compared is None


def _filler(data: bytes) -> Callable[[memoryview], None]:
    left = [data]

    def receive(piece: memoryview) -> None:
        piece[:] = left[0][: len(piece)]
        left[0] = left[0][len(piece) :]

    return receive


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "receiver")


def test_what_is_changed_is_found_on_the_way_to_disk(copies: Copies, source: OpenShard) -> None:
    copies.receive(source, changed_weights)
    assert not copies.compared()
    with pytest.raises(IntegrityError, match="right checksum and a wrong digest"):
        copies.to_disk()
    assert not copies.disk.shards(JOB)
    assert not copies.compared()
    copies.memory.quarantine(JOB, KEY)
    with pytest.raises(IntegrityError, match="right checksum and a wrong digest"):
        copies.receive(source, changed_weights)  # on arrival this time
    copies.receive(source)
    assert copies.compared()


@pytest.mark.parametrize(("unchanged", "later"), [(False, True), (True, False), (False, False)])
def test_what_is_not_encrypted_or_for_a_restore_is_compared_on_arrival(
    unchanged: bool, later: bool, copies: Copies, source: OpenShard
) -> None:
    with pytest.raises(IntegrityError, match="right checksum and a wrong digest"):
        copies.receive(source, changed_weights, unchanged=unchanged, later=later)
    assert not copies.memory.shards(JOB)
    copies.receive(source, unchanged=unchanged, later=later)
    assert copies.compared()


def test_a_copy_is_compared_once(copies: Copies, source: OpenShard) -> None:
    copies.receive(source)
    assert not copies.compared()
    copies.to_disk()
    assert copies.compared()
    copies.memory.delete(JOB, KEY)
    copies.receive(source)
    assert not copies.compared(), "another copy, of which nothing is known"
    copies.to_disk()
    copies.restart()
    assert not copies.compared(), "what a process knew has ended with it"


def test_a_disk_compares_all_on_arrival(copies: Copies, source: OpenShard) -> None:
    incoming = copies.disk.incoming(JOB, source.manifest, later=True)
    number = of_weights(source.manifest)
    span = incoming.spans[number]
    data = changed_weights(bytes(source.data[span.offset : span.offset + span.size]))
    with pytest.raises(IntegrityError, match="right checksum and a wrong digest"):
        incoming.arrive(number, _filler(data), unchanged=True)
    incoming.close()


def test_one_plain_span_among_encrypted_ones_is_compared(copies: Copies, source: OpenShard) -> None:
    """With TLS optional, each connection of a transfer may be of another kind."""
    incoming = copies.memory.incoming(JOB, source.manifest, later=True)
    spans = [bytes(source.data[span.offset : span.offset + span.size]) for span in incoming.spans]
    plain = of_weights(source.manifest)
    assert len(spans) > 1
    with pytest.raises(IntegrityError, match="right checksum and a wrong digest"):
        incoming.arrive(plain, _filler(changed_weights(spans[plain])), unchanged=False)
    with ThreadPoolExecutor(2) as lanes:
        list(
            lanes.map(
                lambda number: incoming.arrive(number, _filler(spans[number]), unchanged=number != plain),
                range(len(spans)),
            )
        )
    incoming.commit()
    incoming.close()
    assert not copies.compared()


@pytest.mark.parametrize("digests", [False, True])
def test_verification_compares_digests_if_asked(digests: bool, source: OpenShard) -> None:
    data = bytearray(source.data)
    span = source.manifest.spans[of_weights(source.manifest)]
    data[span.offset : span.offset + span.size] = changed_weights(bytes(data[span.offset : span.offset + span.size]))
    checksummer = Checksummer(1)
    try:
        checksummer.verify(source.manifest, source.data, digests=digests)
        if digests:
            with pytest.raises(IntegrityError, match="right checksum and a wrong digest"):
                checksummer.verify(source.manifest, memoryview(data), digests=True)
        else:
            checksummer.verify(source.manifest, memoryview(data))
        old: Manifest = source.manifest.without_digests()
        checksummer.verify(old, memoryview(data), digests=digests)
    finally:
        checksummer.close()
