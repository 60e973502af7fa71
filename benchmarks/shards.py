"""Compares a save and a copy with their physical limits, interleaved in one run: median (min … max) of 5.

    python benchmarks/shards.py [MiB]

* staging: `ImageSet.stage` into prepared images, against a plain memory copy of the same bytes and `torch.save`;
* transport: a shard fetched over the data plane (checksummed, committed), against the same bytes through a bare socket.
"""

from __future__ import annotations

import io
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from holdfast.domain.generations import ShardSource
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.intake import Intake
from holdfast.replicator.transport.server import Server
from holdfast.replicator.view import Held, Tier
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Image, ImageSet, Manifest, Plan, Staged, TensorSpec

ROUNDS = 5
TENSORS = 32
TOKEN = "benchmark"


def main() -> None:
    total = int(sys.argv[1] if len(sys.argv) > 1 else 256) << 20
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        tensors = [torch.rand(total // TENSORS // 4) for _ in range(TENSORS)]
        staged = staging(Path(root), tensors, total)
        transport(Path(root), staged, total)


def staging(root: Path, tensors: list[torch.Tensor], total: int) -> Staged:
    plan = Plan(tuple(TensorSpec(f"t{i}", "float32", (t.numel(),), t.nbytes) for i, t in enumerate(tensors)))
    images = ImageSet(root / "job" / "w0")
    images.prepare(plan)
    images.stage(plan, 1, 1, 0, {"dp": 1}, lambda image: fill(image, tensors), b"")
    images.prepare(plan)
    warm = [torch.empty_like(tensor) for tensor in tensors]
    for copy, tensor in zip(warm, tensors, strict=True):
        copy.copy_(tensor)
    results: list[Staged] = []

    def stage() -> None:
        outcome = images.stage(plan, 1, 2 + len(results), 0, {"dp": 1}, lambda image: fill(image, tensors), b"")
        assert isinstance(outcome, Staged), outcome
        results.append(outcome)

    def memcpy() -> None:
        for copy, tensor in zip(warm, tensors, strict=True):
            copy.copy_(tensor)

    compare(total, {"stage": stage, "memcpy": memcpy, "torch.save (memory)": lambda: torch.save(tensors, io.BytesIO())})
    return results[-1]


def fill(image: Image, tensors: list[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        torch.frombuffer(image.view(f"t{index}"), dtype=torch.float32).copy_(tensor)


def transport(root: Path, staged: Staged, total: int) -> None:
    checksummer = Checksummer(2)
    images = ImageTier(root, "a", checksummer, overflow=root / "disk")
    (seen,) = (seen for seen in images.scan("job") if seen.header.stamp.key == staged.key)
    manifest = images.commit("job", seen)
    server = Server(
        limits=Limits(),
        sockets=OpenSockets(),
        tiers=((Tier.IMAGE, images),),
        arrivals=Arrivals(0),
        intake=Intake(FileTier("memory", root / "in-memory"), FileTier("disk", root / "on-disk")),
        takers=ThreadPoolExecutor(1),
        token_of=lambda job: TOKEN,
        arrived=_unexpected_arrival,
        suspect=_unexpected_suspect,
    )
    into = FileTier("memory", root / "fetched")
    client = Client(Limits(), OpenSockets())

    def fetch() -> None:
        with listening(server.serve) as endpoint:
            client.fetch(ShardSource("a", endpoint), "job", TOKEN, Wanted.like(manifest), into)
        into.delete("job", staged.key)

    payload = memoryview(bytearray(total))
    sink = memoryview(bytearray(8 << 20))

    def plain() -> None:
        with listening(lambda sock: send_all(sock, payload)) as endpoint:
            host, _, port = endpoint.rpartition(":")
            with socket.create_connection((host, int(port))) as sock:
                while sock.recv_into(sink):
                    pass

    compare(total, {"fetch": fetch, "bare socket": plain})
    checksummer.close()


def send_all(sock: socket.socket, payload: memoryview) -> None:
    with sock:
        sock.sendall(payload)


class listening:  # noqa: N801
    """Serve one connection in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=lambda: serve(self._listener.accept()[0]))

    def __enter__(self) -> str:
        self._thread.start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *error: object) -> None:
        self._thread.join()
        self._listener.close()


def compare(total: int, ways: dict[str, Callable[[], None]]) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if round_number:  # the first warms up
                times[name].append(time.perf_counter() - start)
    for name, each in times.items():
        median = statistics.median(each)
        print(
            f"{name:22} {median * 1e3:8.1f} ms ({min(each) * 1e3:.1f} … {max(each) * 1e3:.1f})  "
            f"{total / median / 1e9:6.2f} GB/s"
        )


def _unexpected_arrival(job: str, manifest: Manifest, tier: Tier) -> None:
    raise AssertionError(f"no shard is pushed in this benchmark, but {manifest.key} of {job} was received in {tier}")


def _unexpected_suspect(job: str, held: Held) -> None:
    raise AssertionError(f"{held} of {job} was not transferred completely")


if __name__ == "__main__":
    main()
