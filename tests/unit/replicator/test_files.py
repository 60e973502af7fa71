"""Shards as files: what arrives damaged, twice, in the wrong order or not at all."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.sockets import OpenSockets, of_one_transfer
from holdfast.replicator.threads import Pace
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.pending_commit import PendingCommit, Seen
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Header, ImageSet, Manifest, Plan, Staged, TensorSpec

JOB, KEY = "llm", ShardKey(1, 10, 0)
NBYTES = 17 << 20  # enough for O_DIRECT and three spans
NO_LIMIT = Pace(0)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[OpenShard]:
    """A committed image of one worker."""
    plan = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
    staged = ImageSet(tmp_path / "memory" / JOB / "w0").stage(
        plan, KEY.attempt, KEY.step, KEY.rank, {"dp": 1},
        lambda image: image.view("w").__setitem__(slice(None), bytes(range(1, 18)) * (NBYTES // 17)), b"rest" * 50,
    )  # fmt: skip
    assert isinstance(staged, Staged)
    checksummer = Checksummer(1)
    images = ImageTier(tmp_path / "memory", "a", checksummer, overflow=tmp_path / "disk")
    images.commit(JOB, images.scan(JOB)[0])
    checksummer.close()
    shard = images.open(JOB, KEY)
    yield shard
    shard.close()


def test_an_image_that_memory_had_no_room_for_is_an_image_like_any_other(tmp_path: Path) -> None:
    plan = Plan((TensorSpec("w", "uint8", (NBYTES,), NBYTES),))
    checksummer = Checksummer(1)
    images = ImageTier(tmp_path / "memory", "a", checksummer, overflow=tmp_path / "disk")
    made = ImageSet(tmp_path / "disk" / JOB / "overflow" / "w0")
    made.stage(plan, KEY.attempt, KEY.step, KEY.rank, {"dp": 1}, lambda image: None, b"")
    made.close()
    assert images.jobs() == [JOB]
    images.commit(JOB, images.scan(JOB)[0])
    checksummer.close()
    disk = FileTier("disk", tmp_path / "disk")
    with images.open(JOB, KEY) as shard:
        disk.put(JOB, shard, NO_LIMIT)
    assert disk.sweep(JOB) == 0
    assert [manifest.key for manifest in (*images.shards(JOB), *disk.shards(JOB))] == [KEY, KEY]
    images.forget(JOB)
    assert images.jobs() == []
    assert disk.jobs() == [JOB]


def test_an_image_is_opened_where_it_was_seen_without_a_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is elsewhere meanwhile, or was never seen, is found all the same."""
    plan = Plan((TensorSpec("w", "uint8", (10_000,), 10_000),))
    checksummer = Checksummer(1)
    images = ImageTier(tmp_path / "memory", "a", checksummer, overflow=tmp_path / "disk")
    keys = [ShardKey(KEY.attempt, KEY.step, rank) for rank in range(4)]
    for key in keys:
        with closing(ImageSet(tmp_path / "memory" / JOB / f"w{key.rank}")) as made:
            made.stage(plan, key.attempt, key.step, key.rank, {"dp": 4}, lambda image: None, b"")
    for seen in images.scan(JOB):
        images.commit(JOB, seen)
    checksummer.close()
    peeked: list[Path] = []
    peek = ImageTier._peek

    def noted(tier: ImageTier, path: Path) -> Header | None:
        peeked.append(path)
        return peek(tier, path)

    monkeypatch.setattr(ImageTier, "_peek", noted)
    with images.open(JOB, keys[3]) as shard:
        assert shard.manifest.key == keys[3]
    assert [path.parent.name for path in peeked] == ["w3"]
    (tmp_path / "memory" / JOB / "w2").rename(tmp_path / "memory" / JOB / "w9")
    for tier in (images, ImageTier(tmp_path / "memory", "a", checksummer, overflow=tmp_path / "disk")):
        with tier.open(JOB, keys[2]) as shard:
            assert (shard.manifest.key, shard.path.parent.name) == (keys[2], "w9")
    images.delete(JOB, keys[1])
    with pytest.raises(NotFound):
        images.open(JOB, keys[1])


READ = """
import os, sys
from pathlib import Path
from holdfast.domain.errors import IntegrityError
from holdfast.replicator.checksum import Checksummer
from holdfast.shards import Manifest, Reader

path, threads = Path(sys.argv[1]), int(sys.argv[2])
with Reader(path) as reader:
    os.truncate(path, reader.header.size - (1 << 20))
    for verify in (
        lambda: Checksummer(threads).verify(Manifest.read(path.with_suffix(".json")), reader.data, reader.prefault),
        lambda: reader.verify(lambda data: 0),
    ):
        try:
            verify()
        except IntegrityError as error:
            print(error)
"""


def test_a_medium_that_does_not_give_its_bytes_ends_no_process(tmp_path: Path, source: OpenShard) -> None:
    """To who reads a mapping, a page that cannot be read is SIGBUS: here the file is shorter than it was when it was mapped."""
    disk = FileTier("disk", tmp_path / "disk")
    disk.put(JOB, source, NO_LIMIT)
    path = disk.path(JOB, KEY)
    ended = subprocess.run(
        [sys.executable, "-c", READ, path, "2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended
    assert ended.stdout.count("the medium is damaged, or the file truncated") == 2, ended


def piece(shard: OpenShard, number: int) -> memoryview:
    span = shard.manifest.spans[number]
    return shard.data[span.offset : span.offset + span.size]


def test_a_copy_is_the_same_bytes_and_listed_once_committed(tmp_path: Path, source: OpenShard) -> None:
    disk = FileTier("disk", tmp_path / "disk")
    assert disk.shards(JOB) == []
    path = disk.put(JOB, source, NO_LIMIT)
    assert path.read_bytes() == bytes(source.data)
    assert disk.shards(JOB) == [source.manifest]
    assert disk.jobs() == [JOB]
    with disk.open(JOB, KEY) as copy:
        assert copy.manifest == source.manifest
    disk.delete(JOB, KEY)
    assert disk.shards(JOB) == []
    assert not list((tmp_path / "disk" / JOB).iterdir())
    with pytest.raises(NotFound):
        disk.open(JOB, KEY)


def fresh_of(source: OpenShard) -> PendingCommit:
    """As if the image was being committed just now."""
    return PendingCommit(Seen(source.path, source.reader.header))


def test_an_image_on_its_way_to_the_disk_is_listed_when_its_checksums_are_there(
    tmp_path: Path, source: OpenShard
) -> None:
    disk, fresh = FileTier("disk", tmp_path / "disk"), fresh_of(source)
    with ThreadPoolExecutor(1) as copier:
        copying = copier.submit(disk.put_fresh, JOB, fresh, NO_LIMIT)
        with pytest.raises(TimeoutError):
            copying.result(0.05)
        assert disk.shards(JOB) == []
        fresh.promised.set_result(source.manifest)
        assert copying.result() == source.manifest
    assert disk.shards(JOB) == [source.manifest]
    assert disk.path(JOB, KEY).read_bytes() == bytes(source.data)


@pytest.mark.parametrize("promise", ["broken", "of another save", "never locked"])
def test_an_image_that_is_not_committed_leaves_nothing_on_the_disk(
    tmp_path: Path, source: OpenShard, promise: str
) -> None:
    disk, fresh = FileTier("disk", tmp_path / "disk"), fresh_of(source)
    match promise:
        case "broken":
            fresh.fail(Conflict("overwritten"))
            fresh.fail(Conflict("only the first reason counts"))
        case "of another save":
            fresh.promised.set_result(replace(source.manifest, created_at=source.manifest.created_at + 1))
        case _:
            header = replace(source.reader.header, sequence=source.reader.header.sequence + 1)
            fresh = PendingCommit(Seen(source.path, header))
    with pytest.raises(Conflict, match=r"overwritten|contains a newer save"):
        disk.put_fresh(JOB, fresh, NO_LIMIT)
    assert disk.shards(JOB) == []
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]


def test_a_damaged_span_is_refused_and_the_good_ones_are_kept(tmp_path: Path, source: OpenShard) -> None:
    disk = FileTier("disk", tmp_path / "disk")
    with disk.receive(JOB, source.manifest) as incoming:
        incoming.write(piece(source, 0))
        incoming.write(piece(source, 1))
        broken = bytearray(piece(source, 2))
        broken[77] ^= 4
        with pytest.raises(IntegrityError, match="arrived damaged"):
            incoming.write(memoryview(broken))
        with pytest.raises(Conflict, match="not complete"):
            incoming.commit()
        with pytest.raises(Conflict, match="another transfer is writing"), disk.receive(JOB, source.manifest):
            pass
    assert disk.shards(JOB) == []
    with disk.receive(JOB, source.manifest) as incoming:
        assert incoming.next_span == 2
        for number in range(2, len(source.manifest.spans)):
            incoming.write(piece(source, number))
        assert incoming.commit().read_bytes() == bytes(source.data)


def test_parts_of_other_bytes_are_not_continued_and_old_ones_are_dropped(tmp_path: Path, source: OpenShard) -> None:
    disk = FileTier("disk", tmp_path / "disk")
    with disk.receive(JOB, source.manifest) as incoming:
        incoming.write(piece(source, 0))
        disk.drop_unfinished(JOB, CheckpointId(9, 9))
        assert len(list((tmp_path / "disk").rglob("*.part"))) == 1, "what is under way is left alone"
    disk.drop_unfinished(JOB, CheckpointId(1, 10))
    assert list((tmp_path / "disk").rglob("*.part"))
    disk.drop_unfinished(JOB, CheckpointId(1, 11))
    assert not list((tmp_path / "disk").rglob("*.part"))


@pytest.mark.parametrize("torn", ["no manifest", "no shard", "truncated", "garbled manifest", "another's manifest"])
def test_half_a_checkpoint_is_none(tmp_path: Path, source: OpenShard, torn: str) -> None:
    disk = FileTier("disk", tmp_path / "disk")
    path = disk.put(JOB, source, NO_LIMIT)
    manifest = path.with_suffix(".json")
    match torn:
        case "no manifest":
            manifest.unlink()
        case "no shard":
            path.unlink()
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "garbled manifest":
            manifest.write_bytes(manifest.read_bytes().replace(b'"step":10', b'"step":11'))
        case _:
            replace(source.manifest, step=11).write(manifest)
    assert disk.shards(JOB) == []
    with pytest.raises((NotFound, IntegrityError)):
        disk.open(JOB, KEY)
    assert disk.sweep(JOB) == (1 if torn.startswith("no ") else 0)


def test_a_manifest_that_lies_is_refused_before_anything_is_written(tmp_path: Path, source: OpenShard) -> None:
    disk = FileTier("disk", tmp_path / "disk")
    for lie in (replace(source.manifest, job="other"), replace(source.manifest, digest="00-0")):
        with pytest.raises(IntegrityError), disk.receive(JOB, lie):
            pass
    for changes in ({"size": 1 << 60}, {"attempt": "../.."}, {"step": -1}, {"tensors_end": 1}):
        with pytest.raises(IntegrityError):
            Manifest.decode(replace(source.manifest, **changes).encode())
    assert not (tmp_path / "disk").exists()


def answering(reply: Callable[[socket.socket, str], None]) -> tuple[str, threading.Thread]:
    """A peer that greets, hears the request and answers as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            frames.send(sock, {"version": 1, "nonce": "n"})
            reply(sock, str(frames.receive(sock).fields["nonce"]))

    thread = threading.Thread(target=serve)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("reply", "expected", "text"),
    [
        (lambda s, n: frames.send(s, {"ok": True, "manifest": ""}), Unavailable, "does not know this job's token"),
        (lambda s, n: frames.send(s, {"ok": True}, token="wrong", challenge=n), Unavailable, "does not know"),
        (
            lambda s, n: frames.send(s, {"ok": True, "manifest": "{"}, token="t", challenge=n),
            IntegrityError,
            "manifest",
        ),
        (lambda s, n: frames.send(s, {"ok": False, "error": "not_found", "reason": "gone"}), NotFound, "gone"),
        (lambda s, n: s.sendall(b"HTTP/1.1 200 OK"), HoldfastError, "another data protocol"),
    ],
)
def test_what_a_peer_may_answer(
    tmp_path: Path, reply: Callable[[socket.socket, str], None], expected: type[HoldfastError], text: str
) -> None:
    endpoint, thread = answering(reply)
    client = Client(Limits(60, 60), OpenSockets())
    with pytest.raises(expected, match=text):
        client._fetch_once(
            ShardSource("b", endpoint), JOB, "t", Wanted(KEY), FileTier("disk", tmp_path), of_one_transfer()
        )
    thread.join()


def test_a_silent_peer_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(Limits(0.1, 0.1), OpenSockets())
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Unavailable, match="timed out"):
            client.fetch(ShardSource("b", endpoint), JOB, "t", Wanted(KEY), FileTier("disk", tmp_path))
