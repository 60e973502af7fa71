"""A replicator among files that it cannot decode or may not read: it starts, and the other jobs' checkpoints go on."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from replicator_node import JOB, Node, nodes
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.generations import ShardKey
from holdfast.domain.replication import TroubleKind
from holdfast.shards.layout import COMPLETE, MAGIC, PAGE
from holdfast.shards.sealed import seal
from holdfast.v1 import replicator_pb2 as pb

BAD = "bad"
STAMP = {
    "attempt": 1, "step": 10, "rank": 0, "mesh": [["dp", 2]], "parent": None, "created_at": 1000.0, "producer": "test",
}  # fmt: skip
INDEX = b"[]"


def image(stamp: bytes, *, index_bytes: int = len(INDEX), tensors_end: int = 2 * PAGE, layout: int = 2) -> bytes:
    """An image whose header has the right checksum, with anything as its stamp."""
    body = struct.pack("<IIQQIQQ", layout, len(stamp), 1, index_bytes, zlib.crc32(INDEX), tensors_end, 0)
    header = MAGIC + COMPLETE + struct.pack("<I", zlib.crc32(body + stamp)) + body + stamp
    return header.ljust(PAGE, b"\0") + INDEX.ljust(PAGE, b"\0")


def stamped(**fields: object) -> bytes:
    return json.dumps(STAMP | fields).encode()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def not_unicode(path: Path, part: bytes) -> Path:
    return Path(os.fsdecode(bytes(path) + part))


def sparse(path: Path) -> None:
    size = 8 << 30
    write(path, image(stamped(), tensors_end=size))
    os.truncate(path, size)


def manifest_of_half_a_character(node: Node) -> None:
    """A disk shard that is whole, and a manifest, sealed, with a node that no message has room for."""
    source = max((node.disk / JOB).glob("a1/s*/rank-0.shard"))
    fields = json.loads(source.with_suffix(".json").read_bytes())["manifest"]
    write(node.disk / BAD / "a1" / "s10" / "rank-0.json", seal("manifest", fields | {"job": BAD, "node": "\ud800"}))
    shutil.copyfile(source, node.disk / BAD / "a1" / "s10" / "rank-0.shard")


def forty(node: Node) -> None:
    for number in range(40):
        write(node.memory / BAD / "w0" / f"{number}.image", image(stamped(), layout=9))


def a_link_to_itself(node: Node) -> None:
    path = node.memory / BAD / "w0" / "a.image"
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)


BIG = b"9" * 3800
JUNK: dict[str, Callable[[Node], object]] = {
    "no stamp": lambda node: write(node.memory / BAD / "w0" / "a.image", image(b"\xff{")),
    "half a character in the mesh": lambda node: write(
        node.memory / BAD / "w0" / "a.image", image(stamped(mesh=[["\ud800", 2]]))
    ),
    "a mesh of 3,800 digits": lambda node: write(
        node.memory / BAD / "w0" / "a.image", image(stamped(mesh=[["dp", 7]]).replace(b"7", BIG))
    ),
    "a directory that is not Unicode": lambda node: write(
        not_unicode(node.memory / BAD / "w", b"\xff") / "a.image", b"x"
    ),
    "an image that is not Unicode": lambda node: write(
        not_unicode(node.memory / BAD / "w0" / "a", b"\xff.image"), b"x"
    ),
    "an index larger than memory": lambda node: write(
        node.memory / BAD / "w0" / "a.image", image(stamped(), index_bytes=1 << 36, tensors_end=1 << 37)
    ),
    "a size that is a hole": lambda node: sparse(node.memory / BAD / "w0" / "a.image"),
    "a manifest of half a character": manifest_of_half_a_character,
    "forty of another release": forty,
    "an image that links to itself": a_link_to_itself,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with nodes(tmp_path_factory.mktemp("node"), "a") as [node]:
        yield node


def inventories_of(node: Node, *jobs: str) -> dict[str, pb.ReplicatorInventory]:
    """What an agent is sent, which follows every job."""
    sent: dict[str, pb.ReplicatorInventory] = {}
    try:
        for message in node._stub.WatchInventory(pb.WatchInventoryRequest(job=""), timeout=TIMEOUT_S):
            sent[message.job] = message
            if sent.keys() >= set(jobs):
                return sent
    except grpc.RpcError as error:
        raise AssertionError(f"only {sorted(sent)} came before {error}: {node.log}") from error
    raise AssertionError(f"only {sorted(sent)} came: {node.log}")


def troubles_of(node: Node, job: str) -> list[pb.Trouble]:
    """They may come after the first inventory."""
    return wait_until(
        lambda: list(inventories_of(node, JOB, job)[job].troubles), description=f"troubles of {job}: {node.log}"
    )


@pytest.mark.parametrize("name", JUNK)
def test_what_cannot_be_decoded_is_named_and_the_others_go_on(node: Node, name: str) -> None:
    """Where it comes while the replicator runs, and where it is there at the start."""
    generation = 10 * (1 + list(JUNK).index(name))
    node.configure(generation=generation)
    with closing(node.images()) as images:
        node.wait_for(node.save(images, generation), "disk")
        JUNK[name](node)
        node.tell_saved(1, node.memory)
        node.wait_for(node.save(images, generation + 1), "disk")
        node.stop()
        clean(node)
        JUNK[name](node)
        node.start()
        node.configure(generation=generation + 1)
        troubles = troubles_of(node, BAD)
        assert {trouble.kind for trouble in troubles} <= {TroubleKind.SET_ASIDE, TroubleKind.LEFT_ALONE}
        assert (ShardKey(1, generation + 1, 0), "disk") in node.holdings()
        node.wait_for(node.save(images, generation + 2), "disk")
    clean(node)


def clean(node: Node) -> None:
    for root in (node.memory, node.disk):
        shutil.rmtree(root / BAD, ignore_errors=True)


def test_a_link_to_another_jobs_directory_takes_nothing_from_it(node: Node) -> None:
    """Its files looked like damaged ones of the job that the link is named after, and were set aside."""
    node.configure(generation=1000)
    with closing(node.images()) as images:
        key = node.save(images, 1000)
        node.wait_for(key, "disk")
        node.stop()
        links = (node.disk / BAD, node.memory / BAD)
        for link in links:
            link.symlink_to(JOB)
        before = set(node.disk.rglob("*"))
        node.start()
        places = {trouble.place for trouble in troubles_of(node, BAD)}
        assert {str(link) for link in links} <= places
        assert set(node.disk.rglob("*")) <= before, "nothing is set aside; old steps may be dropped meanwhile"
        assert {tier for held, tier in node.holdings() if held == key} == {"memory", "disk"}
        with pytest.raises(grpc.RpcError, match="is a symbolic link"):
            node.configure(job=BAD)
        node.configure(generation=1001)
        node.wait_for(node.save(images, 1001), "disk")
    for link in links:
        link.unlink()


def test_a_copy_of_a_jobs_directory_is_left_as_it_is(node: Node) -> None:
    """As somebody makes it before an experiment. Its shards are whole, and of another name."""
    node.configure(generation=2000)
    with closing(node.images()) as images:
        node.wait_for(node.save(images, 2000), "disk")
    node.stop()
    shutil.copytree(node.disk / JOB, node.disk / BAD)
    before = sorted((node.disk / BAD).rglob("*"))
    node.start()
    assert {trouble.kind for trouble in troubles_of(node, BAD)} == {TroubleKind.LEFT_ALONE}
    assert sorted((node.disk / BAD).rglob("*")) == before
    clean(node)


def test_directories_that_may_not_be_read_stop_nobody(tmp_path: Path) -> None:
    """As those of another user: a job's directory, a worker's, one with shards; and one that may be listed only."""
    with TemporaryDirectory(dir="/dev/shm") as memory:
        node = Node("a", tmp_path / "a")
        node.asks_permission, node.memory = True, Path(memory) / "a"
        closed = [
            node.memory / "foreign",
            node.disk / "foreign",
            node.memory / BAD / "w0",
            node.disk / BAD / "a1" / "s1",
        ]
        listed = node.disk / BAD / "a1" / "s2"
        for path in (*closed, listed):
            path.mkdir(parents=True)
        (listed / "rank-0.shard").write_bytes(b"x")
        try:
            for path in closed:
                path.chmod(0)
            listed.chmod(0o400)
            for generation in (1, 2):
                node.start()
                node.configure(generation=generation)
                with closing(node.images()) as images:
                    node.wait_for(node.save(images, generation), "disk")
                troubles = troubles_of(node, BAD) + troubles_of(node, "foreign")
                assert {trouble.kind for trouble in troubles} == {TroubleKind.LEFT_ALONE}
                assert {trouble.place for trouble in troubles} >= {str(path) for path in closed}
                assert node.stop() == 0
        finally:
            node.close()
            for path in (*closed, listed):
                path.chmod(0o700)
        assert (listed / "rank-0.shard").exists()
