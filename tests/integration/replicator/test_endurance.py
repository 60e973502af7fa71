"""Many saves, and a node that is swapped again before it has its shard: nothing is left, and nothing is in the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from replicator_node import JOB, PLAN, Node, fill, nodes
from waiting import TIMEOUT_S, wait_until

from holdfast.domain.generations import ShardKey
from holdfast.shards import ImageSet, Plan, Reader, Staged, TensorSpec

SAVES = 1000
SMALL = Plan((TensorSpec("w", "uint8", (100_000,), 100_000),))
MEMORY_GROWTH_BYTES_MAX = 24 << 20
CONNECTIONS_MORE_MAX = 2  # they come and go
KEPT_MAX = 10


@pytest.mark.slow  # a minute on a busy machine
def test_a_thousand_saves_in_a_row_leak_no_byte_no_file_and_no_descriptor(tmp_path: Path) -> None:
    """As fast as they are taken, each skipped save tried again: what is there after a hundred is all there ever is."""
    with nodes(tmp_path, "a", "b") as (a, b):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(peers=(b,))
        images = a.images()
        at_rest: list[_Held] = []
        for step in range(1, SAVES + 1):
            wait_until(lambda step=step: _save(a, images, step), description=f"step {step} to be saved")  # type: ignore[misc]
            if step in (99, SAVES - 1):  # not skipped as superseded: nodes at rest keep two
                for node in (a, b):
                    node.wait_for(ShardKey(1, step, 0), "disk")
            if step in (100, SAVES):
                at_rest.append(_at_rest(a, b, ShardKey(1, step, 0)))
        early, late = at_rest
        assert late.files == early.files
        grown = [more - before for more, before in zip(late.descriptors, early.descriptors, strict=True)]
        assert max(grown) <= CONNECTIONS_MORE_MAX, "a leak would be hundreds"
        assert late.bytes_on_disk == early.bytes_on_disk
        assert late.resident - early.resident < MEMORY_GROWTH_BYTES_MAX
        assert "corrupt" not in a.log + b.log, "an image that is overwritten while it is looked at is not damaged"


def _save(node: Node, images: ImageSet, step: int) -> bool:
    saved = images.stage(SMALL, 1, step, 0, {"dp": 2}, lambda image: None, b"extra")
    if not isinstance(saved, Staged):
        return False
    node.tell_saved(step, saved.path)
    return True


class _Held:
    """But for the pages that are kept for the next copy, at most as many files as there were copies in memory at a time: one,
    and more if copies have waited for a slow disk."""

    def __init__(self, *held_by: Node) -> None:
        roots = [root for node in held_by for root in (node.root, node.memory)]
        found = [path for root in roots for path in root.rglob("*") if path.is_file() and path.name != "log"]
        kept = [len([path for path in found if path.is_relative_to(node.memory / ".warm")]) for node in held_by]
        assert max(kept) <= KEPT_MAX, "a leak would be hundreds"
        files = [path for path in found if path.parent.name != ".warm"]
        processes = [psutil.Process(node.pid) for node in held_by]
        self.files = len(files)
        self.bytes_on_disk = sum(path.stat().st_blocks for path in files if path.suffix != ".json")
        self.descriptors = [process.num_fds() - 2 * pages for process, pages in zip(processes, kept, strict=True)]
        self.resident = sum(process.memory_info().rss for process in processes)


def _at_rest(a: Node, b: Node, key: ShardKey) -> _Held:
    """Once both nodes have the step and nothing is being moved any more."""
    for node in (a, b):
        node.wait_for(key, "disk")
        node.retain(key.step)

    def held(node: Node, tier: str) -> int:
        return len([key for key, where in node.holdings() if where == tier])

    wait_until(
        lambda: held(a, "disk") == held(a, "memory") == held(b, "disk") == 2 and held(b, "memory") <= 1,
        description="older steps gone",
    )
    latest = _Held(a, b)

    def settled() -> bool:
        nonlocal latest
        before, latest = latest, _Held(a, b)
        return (before.files, before.descriptors) == (latest.files, latest.descriptors)

    wait_until(settled, description="connections closed")
    return latest


@contextmanager
def stalling_way(to: str, bytes_first: int) -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A way to a peer on which nothing comes after `bytes_first` bytes until the second event is set; the first says so."""
    stalled, go_on = threading.Event(), threading.Event()
    host, _, port = to.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        count = 0
        with suppress(OSError):
            while data := source.recv(65536):
                count += len(data)
                if limit is not None and count > limit and not go_on.is_set():
                    stalled.set()
                    go_on.wait(TIMEOUT_S)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def converse(inner: socket.socket) -> None:
        with inner, socket.create_connection((host, int(port))) as outer:
            up = threading.Thread(target=pump, args=(inner, outer, None))
            up.start()
            pump(outer, inner, bytes_first)
            up.join()

    def serve() -> None:
        with suppress(OSError):
            while True:
                inner, _ = listener.accept()
                threading.Thread(target=converse, args=(inner,)).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", stalled, go_on
    finally:
        go_on.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_node_that_is_swapped_twice_during_one_fetch_has_the_shard_in_the_end(tmp_path: Path) -> None:
    """Generation 2's fetch is still under way when generation 3 takes its place, and 3's when 4 does."""
    with nodes(tmp_path, "a", "b", "spare", HOLDFAST_REPLICATOR_IO_TIMEOUT_S="30") as (a, b, spare):
        b.configure(ranks=(1,), peers=(a,))
        a.configure(peers=(b,))
        key = a.save(a.images(), 10)
        record = a.wait_for(key, "disk")
        b.wait_for(key, "disk")
        with stalling_way(a.endpoint, 3 << 20) as (way, stalled, _):
            slow = Node("a", a.root)
            slow.endpoint = way
            for generation in (2, 3):
                spare.configure(generation=generation, attempt=generation)
                call = spare.begin_stage(key, slow, digest=record.digest)
                assert stalled.wait(TIMEOUT_S)
                with pytest.raises(grpc.FutureTimeoutError):
                    call.result(1.0)
                call.cancel()  # as an agent whose PREPARE has been overtaken
            spare.configure(generation=4, attempt=4)
            staged = spare.stage(key, b, digest=record.digest)
            assert staged.source == "b"
            with Reader(Path(staged.path)) as reader:
                assert reader.key == key
        spare.wait_for(key, "disk")
        wait_until(
            lambda: not [*spare.memory.rglob("*.part"), *spare.disk.rglob("*.part")],
            description="what was begun to be gone",
        )
        images = spare.images(restored=(1, 10))
        assert isinstance(images.stage(PLAN, 4, 11, 0, {"dp": 2}, lambda image: fill(image, 11), b""), Staged)
        assert JOB in {path.name for path in spare.disk.iterdir()}
