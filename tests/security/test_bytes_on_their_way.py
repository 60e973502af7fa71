"""Whoever stands between two machines and changes bytes so that every checksum still matches is found by the digests.

`spoil` changes them, and `relayed` does it to a connection of the data plane."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from relays import relayed
from replicator_node import JOB, TOKEN, Node, nodes
from spoiling import changed, save, spoil, weights
from waiting import wait_until

from holdfast.domain.errors import HoldfastError, IntegrityError
from holdfast.domain.generations import RankRestore, ShardSource
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Manifest
from holdfast.stores.checksum import crc32c


def test_the_attack_is_one() -> None:
    data = bytes(range(256)) * 20
    assert changed(data) != data
    assert crc32c(changed(data)) == crc32c(data)


def fetch(source: ShardSource, wanted: Wanted, into: FileTier) -> Path:
    return Client(Limits(30, 30), OpenSockets()).fetch(source, JOB, TOKEN, wanted, into)


def test_weights_that_a_relay_changes_are_not_restored(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        key, record = save(a)
        assert record.root
        inbox = FileTier("disk", tmp_path / "inbox")
        with relayed(a.endpoint, spoil) as way, pytest.raises(HoldfastError, match="right checksum and a wrong digest"):
            fetch(ShardSource("a", way), Wanted(key, record.digest, record.root), inbox)
        assert not inbox.shards(JOB)
        # What the attack has left is not what a later transfer goes on from.
        path = fetch(a.source, Wanted(key, record.digest, record.root), inbox)
        assert path.read_bytes() == a.shard_file(key).read_bytes()
        assert weights(path)


def test_the_checksums_alone_do_not_see_the_change(tmp_path: Path) -> None:
    """Of saves without digests, as those of earlier releases: what the tests here would miss, if `spoil` did nothing."""
    with nodes(tmp_path, "a", HOLDFAST_REPLICATOR_DIGESTS="false") as (a,):
        a.configure()
        key, record = save(a)
        assert not record.root
        with relayed(a.endpoint, spoil) as way:
            path = fetch(ShardSource("a", way), Wanted(key, record.digest), FileTier("disk", tmp_path / "inbox"))
        assert path.read_bytes() != a.shard_file(key).read_bytes()


def test_a_node_restores_from_an_honest_source_instead(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        a.configure()
        b.configure(ranks=(1,))
        key, record = save(a)
        with relayed(a.endpoint, spoil) as way:
            sources = (ShardSource("relay", way), a.source)
            (staged,) = b.stage_all(RankRestore(0, key, record.digest, sources, root=record.root))
        assert staged.source == "a"
        assert weights(Path(staged.path)) == weights(a.shard_file(key))


def test_the_copy_that_a_peer_receives_is_compared_too(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,))
        with relayed(b.endpoint, spoil) as way:
            a.configure(peers=(ShardSource("b", way),))
            save(a)
            wait_until(lambda: "right checksum and a wrong digest" in a.log, description="the refusal")
        assert not list(b.disk.rglob("*.shard"))
        assert not [path for path in b.memory.rglob("*.shard") if not path.name.startswith(".")]


def leave_digests_out(node: Node) -> None:
    """Write the manifests as an earlier release did."""
    found = [*node.disk.rglob("rank-*.json"), *node.memory.rglob("*.image.json")]
    assert found
    for path in found:
        path.write_bytes(Manifest.read(path).without_digests().encode())


def test_a_source_cannot_leave_the_digests_out(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        key, record = save(a)
        inbox = FileTier("disk", tmp_path / "inbox")
        leave_digests_out(a)
        with pytest.raises(IntegrityError, match="its root is not known"):
            fetch(a.source, Wanted(key, record.digest, record.root), inbox)
        # A shard whose order knows no root is of an earlier release.
        assert weights(fetch(a.source, Wanted(key, record.digest), inbox))


@pytest.mark.parametrize("field", ["step", "created_at", "producer", "tensors_end"])
def test_the_root_is_of_the_whole_manifest(field: str) -> None:
    digests = bytes(32 * 3)
    manifest = Manifest(
        "j", "n", 1, 120, 3, (("dp", 4),), None, 20_000, 16_384, "d", 7, (1, 2, 3), 1.5, "torch", span_blake3=digests
    )
    value = getattr(manifest, field)
    changes: Any = {field: f"{value} " if isinstance(value, str) else value + 1}
    other = replace(manifest, **changes)
    assert len({manifest.root, other.root, replace(manifest, span_blake3=b"\1" + digests[1:]).root}) == 3
    assert manifest.without_digests().root == ""


def test_a_manifest_of_an_earlier_release_and_one_that_it_reads() -> None:
    manifest = Manifest(
        "j", "n", 1, 120, 3, (("dp", 4),), None, 20_000, 16_384, "d", 7, (1, 2, 3), 1.5, "torch", span_blake3=bytes(96)
    )
    raw = manifest.encode()
    assert Manifest.decode(raw) == manifest
    envelope = json.loads(raw)
    digests = envelope.pop("blake3")
    assert Manifest.decode(json.dumps(envelope).encode()) == manifest.without_digests()
    assert set(envelope) == {"manifest", "self"}
    assert "span_blake3" not in envelope["manifest"]
    for wrong in ([digests[0][4:], digests[1]], [digests[0], digests[1] + 1], [1, 2], "text", None, [digests[0]]):
        with pytest.raises(IntegrityError):
            Manifest.decode(json.dumps(envelope | {"blake3": wrong}).encode())
