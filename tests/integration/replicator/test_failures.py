"""What breaks while shards move: peers, disks, processes, bytes. Nothing half-written is ever seen, nothing whole is lost."""

from __future__ import annotations

import errno
import json
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from replicator_node import JOB, TOKEN, Node, nodes, small_tmpfs
from waiting import wait_until

from holdfast.domain.errors import OutOfSpace
from holdfast.domain.generations import OBJECT_STORE, ShardKey, ShardSource
from holdfast.domain.worker import encode
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers import find
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.part import full_is_out_of_space
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Manifest, Plan, Reader, Staged, TensorSpec


def require_whole(path: Path) -> int:
    """Every byte belongs to the step that the header names, and the manifest agrees. Returns the step."""
    manifest = Manifest.read(path.with_suffix(".json"))
    checksummer = Checksummer(1)
    with Reader(path) as reader:
        checksummer.verify(manifest, reader.data)
        mark = reader.key.step % 251
        for spec, view in reader.items():
            assert bytes(view) == bytes([mark]) * spec.nbytes, f"{path} is mixed"
        assert reader.extra == bytes([mark]) * 99
    checksummer.close()
    return manifest.step


@contextmanager
def relay(to: str, bytes_max: int, breaking: Callable[[], object] = lambda: None) -> Iterator[tuple[str, list[int]]]:
    """A way to a peer that breaks every connection after `bytes_max` bytes from the peer: a death in mid-transfer. Before the
    connection breaks, `breaking` is called."""
    host, _, port = to.rpartition(":")
    carried: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        count = 0
        try:
            while data := source.recv(65536):
                count += len(data)
                sink.sendall(data)
                if limit is not None and count > limit:
                    breaking()
                    break
        except OSError:
            pass
        if limit is not None:
            carried.append(count)
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def serve() -> None:
        while True:
            try:
                inner, _ = listener.accept()
            except OSError:
                return
            with inner:
                try:
                    outer = socket.create_connection((host, int(port)))
                except ConnectionRefusedError:
                    continue  # dead: the one who connected is hung up on
                with outer:
                    up = threading.Thread(target=pump, args=(inner, outer, None))
                    up.start()
                    pump(outer, inner, bytes_max)
                    up.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", carried
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_broken_fetch_goes_on_from_the_last_good_span(tmp_path: Path) -> None:
    """24 MiB through a line that breaks every 10 MiB: three tries, no span twice."""
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        key = big_save(a, 24 << 20)
        record = a.wait_for(key, "disk")
        with relay(a.endpoint, 10 << 20) as (way, carried):
            inbox = FileTier("disk", tmp_path / "inbox")
            client = Client(Limits(60, 60), OpenSockets())
            path = client.fetch(ShardSource("a", way), JOB, TOKEN, Wanted(key, record.digest, record.root), inbox)
        assert len(carried) == 3
        assert sum(carried) < 1.5 * (24 << 20)
        assert path.read_bytes() == a.shard_file(key).read_bytes()
        assert [each.name for each in path.parent.iterdir() if each.name.startswith(".")] == []


def big_save(node: Node, nbytes: int) -> ShardKey:
    noise = random.Random(5).randbytes(nbytes)
    staged = node.images().stage(
        Plan((TensorSpec("w", "uint8", (nbytes,), nbytes),)), 1, 10, 0, {"dp": 2},
        lambda image: image.view("w").__setitem__(slice(None), noise), b"e",
    )  # fmt: skip
    assert isinstance(staged, Staged)
    return staged.key


def test_a_source_killed_in_mid_transfer_is_left_for_the_next(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", "spare") as (a, b, spare):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        key = big_save(a, 24 << 20)
        record = a.wait_for(key, "disk")
        b.wait_for(key, "disk")
        spare.configure(generation=2, attempt=2)
        with relay(a.endpoint, 9 << 20, lambda: a.stop(signal.SIGKILL)) as (way, carried):
            dying = Node("a", a.root)
            dying.endpoint = way
            staged = spare.stage(key, dying, b, digest=record.digest)
        assert max(carried) > 9 << 20, "it died amid the transfer"
        assert staged.source == "b"
        assert Path(staged.path).read_bytes() == b.shard_file(key).read_bytes()


def test_a_peer_that_dies_while_it_takes_a_copy_has_nothing_and_gets_it_later(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b", HOLDFAST_REPLICATOR_PEER_BYTES_PER_S_MAX=str(12 << 20)) as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        key = big_save(a, 24 << 20)
        wait_until(lambda: list(b.memory.rglob("*.part")), description="the push to have begun")
        b.stop(signal.SIGKILL)
        assert not [*b.memory.rglob("*.shard"), *b.disk.rglob("*.shard")]
        b.start()
        assert b.holdings() <= {(key, "memory"), (key, "disk")}
        b.wait_for(key, "disk")
        assert b.shard_file(key).read_bytes() == a.shard_file(key).read_bytes()


def test_a_full_disk_is_said_and_the_peer_becomes_the_next_tier(tmp_path: Path) -> None:
    small = tmp_path / "a" / "disk"
    with small_tmpfs(small, "4m"), nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        key = a.save(a.images(), 10)
        record = b.wait_for(key, "disk")
        wait_until(lambda: "no room for" in a.log, description="the reason in the log")
        assert a.holdings() == {(key, "memory")}
        assert not list(small.rglob("*.shard"))
        assert a.stage(key, a, b, digest=record.digest).source == "memory"


def test_when_memory_is_full_a_restore_goes_to_the_disk(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "spare" / "memory", "4m"), nodes(tmp_path, "a", "spare") as (a, spare):
        a.configure()
        key = a.save(a.images(), 10)
        record = a.wait_for(key, "disk")
        spare.configure(generation=2, attempt=2)
        staged = spare.stage(key, a, digest=record.digest)
        assert Path(staged.path) == spare.shard_file(key)
        assert require_whole(Path(staged.path)) == 10


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from replicator_node import Node
node = Node("a", Path(sys.argv[1]))
node.memory = Path(sys.argv[3])
images = node.images()
step = 0
while True:
    step += 1
    try:
        node.save(images, step)
    except AssertionError:  # skipped: both images busy
        continue
    except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
        continue  # the replicator is being restarted
"""


def test_overwriting_while_replicating_never_mixes_a_shard(tmp_path: Path) -> None:
    """A worker that saves as fast as it can, against the replicator that copies, pushes and is killed now and then."""
    chance = random.Random(7)
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(a.root), str(Path(__file__).parents[2]), str(a.memory)]
        )
        try:
            for _ in range(3):
                wait_for_progress(a)
                threading.Event().wait(chance.random() * 0.1)
                a.stop(signal.SIGKILL)
                checked(a)
                a.start()
            wait_until(lambda: checked(b), description="copies at the peer")
        finally:
            saver.kill()
            saver.wait()
        newest = max(step for _, step in checked(a))
        assert newest > 3
        assert max(record.key.step for record in next(a.watch())) >= newest


def wait_for_progress(node: Node) -> None:
    seen = checked(node)
    wait_until(lambda: [found for found in checked(node) if found not in seen], description="new steps on disk")


def checked(node: Node) -> list[tuple[Path, int]]:
    """Every committed shard on the node's disk, verified."""
    found: list[tuple[Path, int]] = []
    for manifest in find(node.disk, "*/a*/s*/rank-*.json"):
        try:
            found.append((manifest, require_whole(manifest.with_suffix(".shard"))))
        except FileNotFoundError:
            continue  # deleted by retention while we looked
    return found


def test_a_replicator_in_the_middle_of_a_generation_goes_on_after_a_kill(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,))
        a.configure(peers=(b,))
        images = a.images()
        b.wait_for(a.save(images, 10), "disk")
        a.stop(signal.SIGKILL)
        key = a.save(images, 20, note=False)
        a.start()
        b.wait_for(key, "disk")


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"HFD1\xff\xff\xff\xff", b"HFD1\0\0\0\x40" + b"x" * 64]
)
def test_garbage_on_every_socket_is_survived(tmp_path: Path, garbage: bytes) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        host, _, port = a.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(garbage)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
            for raw in (
                garbage,
                b"{",
                encode("saved", job="../..", image="/etc/passwd"),
                json.dumps({"type": 3}).encode(),
            ):
                notes.sendto(raw, str(a.notes))
        a.wait_for(a.save(a.images(), 10), "disk")


def test_sigterm_during_a_copy_is_prompt_and_leaves_nothing_visible(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", HOLDFAST_REPLICATOR_DISK_BYTES_PER_S_MAX=str(8 << 20)) as (a,):
        a.configure()
        key = big_save(a, 24 << 20)
        wait_until(lambda: list(a.disk.rglob("*.part")), description="the copy to have begun")
        assert a.stop() == 0
        assert not list(a.disk.rglob("*.shard"))
        assert not a.notes.exists()
        a.start()
        assert (key, "memory") in a.holdings()


def test_a_copy_that_rots_on_disk_is_found_reported_and_replaced_from_the_peer(tmp_path: Path) -> None:
    scrub = {"HOLDFAST_REPLICATOR_SCRUB_INTERVAL_S": "0.3", "HOLDFAST_REPLICATOR_SCRUB_BYTES_PER_S_MAX": "0"}
    with nodes(tmp_path, "a", "b", **scrub) as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(peers=(b,))
        key = a.save(a.images(), 10)
        a.wait_for(key, "disk")
        b.wait_for(key, "disk")
        for holder in (b, a):  # the copy, then the original: its memory has it as well
            whole = holder.shard_file(key).read_bytes()
            with holder.shard_file(key).open("r+b") as file:
                file.seek(5 << 20)
                file.write(b"\xff")
            wait_until(lambda holder=holder: "found while scrubbing" in holder.log, description="the report")  # type: ignore[misc]
            wait_until(
                lambda holder=holder, whole=whole: (  # type: ignore[misc]
                    holder.shard_file(key).exists() and holder.shard_file(key).read_bytes() == whole
                ),
                description="a good copy",
            )
            holder.wait_for(key, "disk")
            assert list(holder.disk.rglob("*.corrupt"))


@pytest.mark.parametrize("left", range(5))
def test_a_node_without_descriptors_says_so_and_restores_once_it_has_some(tmp_path: Path, left: int) -> None:
    """An error that was its own cause kept the replicator busy for ever."""
    url = f"file://{tmp_path / 'store'}"
    with nodes(tmp_path, "a", "b") as (a, b):
        a.configure(ranks=(0, 1), store=url)
        key, _ = (a.save(a.images(rank), 10, rank=rank) for rank in (0, 1))
        a.wait_stored(10)
        b.configure(generation=2, attempt=2, store=url)
        process = psutil.Process(b.pid)
        limits = process.rlimit(resource.RLIMIT_NOFILE)
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + left, limits[1]))
        try:
            with suppress(grpc.RpcError):  # with some left it may succeed
                b.stage(key, store=url, timeout_s=5.0)
        finally:
            process.rlimit(resource.RLIMIT_NOFILE, limits)
        assert b.stage(key, store=url).source in (OBJECT_STORE, "memory"), (
            "the first attempt may have come as far as that"
        )


def test_an_error_of_the_file_system_is_not_its_own_cause(tmp_path: Path) -> None:
    for number, kind in ((errno.EIO, OSError), (errno.ENOSPC, OutOfSpace)):
        with pytest.raises(kind) as raised, full_is_out_of_space(tmp_path / "shard", 10):
            raise OSError(number, "broken")
        assert raised.value.__cause__ is not raised.value


def test_files_that_a_user_deletes_are_no_copies_any_more_and_the_newest_is_copied_again(tmp_path: Path) -> None:
    """`rm -r` of a job's directory while it trains. What is not there must not be listed, nor elected for a restore."""
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        older = a.wait_for(a.save(images := a.images(), 10), "disk").key
        newest = a.wait_for(a.save(images, 20), "disk").key
        a.wait_for(older, "disk")
        shutil.rmtree(a.disk / JOB / "a1")
        a.wait_without(older, "disk")
        wait_until(
            lambda: (newest, "disk") in a.holdings() and a.shard_file(newest).exists(), description="another copy"
        )
        assert require_whole(a.shard_file(newest)) == 20
        assert "shards deleted by another program" in a.log
        a.stop()
        a.start()
        assert (older, "disk") not in a.holdings()


@pytest.mark.parametrize("error", [PermissionError(), OSError(errno.EIO, "input/output error")], ids=repr)
def test_a_file_that_cannot_be_looked_at_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    tier, key = FileTier("disk", tmp_path), ShardKey(1, 10, 0)
    assert tier.is_deleted(JOB, key)
    monkeypatch.setattr(Path, "lstat", lambda _: (_ for _ in ()).throw(error))
    assert not tier.is_deleted(JOB, key)
