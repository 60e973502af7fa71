"""Compares transfers between replicators with the network's limit: iperf3 and a bare socket, one stream each, in the same
round.

* replicate: from the assignment of a peer to a shard on one node's disk, until the shard is verified and listed in the peer's
  memory (`holdfast`) and on its disk (`holdfast_to_disk`). Measured on the third copy, which reuses the memory pages of the
  first as in a run; `holdfast_first` is the first copy.
* restore from a peer: from the request to stage the shard on a node without it, until the shard is verified in the node's
memory.
  Measured for a spare with preallocated memory (`holdfast`), and for a node without (`holdfast_cold`).

Rate limits are disabled, because the defaults leave bandwidth to training and would determine the result.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, replace

import psutil

from benchmarks.checkpoint.pages import recall
from benchmarks.checkpoint.protocol import Request
from benchmarks.checkpoint.replicators import ATTEMPT, Replicator
from benchmarks.checkpoint.results import OURS, Measured, TrialFailed
from benchmarks.checkpoint.saves import save_once
from benchmarks.checkpoint.scratch import Scratch
from benchmarks.ports import free_port
from holdfast.domain.generations import ShardKey, ShardRecord

PIECE_BYTES = 1 << 20
LIMIT_BYTES_MIN = 1 << 28  # shorter streams give no useful result
TIMEOUT_S = 60.0
COPIES = 3  # the third copy is the first one that reuses pages
SHARD_OVERHEAD_MAX = 0.02  # bytes of a shard in addition to the state, as a fraction


def measure(request: Request, place: Scratch) -> Measured:
    """Measure one round. Raises TrialFailed."""
    ready = {
        "HOLDFAST_REPLICATOR_PREALLOCATED_SHARDS": "1",
        "HOLDFAST_REPLICATOR_PREALLOCATED_SHARD_BYTES": str(int(request.nbytes * (1 + SHARD_OVERHEAD_MAX))),
    }
    with (
        Replicator("a", place, unlimited=True) as holder,
        Replicator("b", place, unlimited=True) as other,
        Replicator("c", place, unlimited=True, settings=ready) as spare,
    ):
        holder.configure((0,))
        other.configure((1,))
        copies = [copy_to_peer(replace(request, mark=step), place, holder, other) for step in range(1, COPIES + 1)]
        record = copies[-1].record
        limits = _limits(max(record.size, LIMIT_BYTES_MIN))  # before and after: the loopback rate varies by half
        holder.configure((0,))  # without a peer, so that it does not send the shard again
        other.forget()
        for node in (other, spare):
            node.configure((1,))
        restored_s = {
            OURS: restore_from_peer(record, spare, holder),
            f"{OURS}_cold": restore_from_peer(record, other, holder),
        }
    limits += _limits(max(record.size, LIMIT_BYTES_MIN))
    values = [
        ("replicate_gb_s", OURS, copies[-1].in_memory_s),
        ("replicate_gb_s", f"{OURS}_to_disk", copies[-1].on_disk_s),
        ("replicate_gb_s", f"{OURS}_first", copies[0].in_memory_s),
        *(("restore_peer_gb_s", name, seconds) for name, seconds in restored_s.items()),
    ]
    return [
        *((measure, name, record.size / seconds / 1e9) for measure, name, seconds in values),
        *((measure, name, gb_s) for measure in dict.fromkeys(value[0] for value in values) for name, gb_s in limits),
    ]


@dataclass(frozen=True, slots=True)
class Copied:
    record: ShardRecord
    in_memory_s: float
    on_disk_s: float


def copy_to_peer(request: Request, place: Scratch, holder: Replicator, other: Replicator) -> Copied:
    """Save, and then copy the shard to the other node, which reuses the pages of the last copy but one, if there is one."""
    holder.configure((0,))
    save_once(request, place, holder)
    key = ShardKey(ATTEMPT, request.mark, 0)
    record = holder.wait_for("disk", key)
    recall(record.size)
    began = time.perf_counter()
    holder.configure((0,), other)
    other.wait_for("memory", key)
    in_memory_s = time.perf_counter() - began
    other.wait_for("disk", key)
    return Copied(record, in_memory_s, time.perf_counter() - began)


def restore_from_peer(record: ShardRecord, node: Replicator, holder: Replicator) -> float:
    recall(record.size)
    began = time.perf_counter()
    staged = node.stage(record.key, holder)
    duration_s = time.perf_counter() - began
    if staged.source != holder.node:
        raise TrialFailed(f"the shard was staged from {staged.source}, not from the peer")
    return duration_s


def _limits(nbytes: int) -> list[tuple[str, float]]:
    """Return the GB/s of one stream through the loopback, from memory; the receiver discards the bytes."""
    limits = [("socket", bare_socket(nbytes))]
    return [*limits, ("iperf3", iperf3(nbytes))] if has_iperf3() else limits


def has_iperf3() -> bool:
    return shutil.which("iperf3") is not None


def iperf3(nbytes: int) -> float:
    """Return iperf3's own measurement of received bytes. Uses pieces of 1 MiB, which are faster than its default."""
    port = free_port()
    with subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _wait_for_listener(port, server)
            client = subprocess.run(
                ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-n", str(nbytes), "-l", "1M", "-J"],
                check=False,  # its output explains more than its exit code
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            if client.returncode:
                raise TrialFailed(f"iperf3: {client.stdout[-300:]}{client.stderr[-300:]}")
            return float(json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9
        finally:
            server.terminate()


def bare_socket(nbytes: int) -> float:
    """Measure `sendall` in one thread and `recv_into` in another. Both release the interpreter lock while they work."""
    payload, sink = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray(PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                for _ in range(-(-nbytes // PIECE_BYTES)):
                    connection.sendall(payload)

        sender = threading.Thread(target=send, name="limit")
        sender.start()
        with socket.create_connection(listener.getsockname()) as connection:
            began, received = time.perf_counter(), 0
            while count := connection.recv_into(sink):
                received += count
            duration_s = time.perf_counter() - began
        sender.join()
    return received / duration_s / 1e9


def _wait_for_listener(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until the port is listed in the kernel's table. A test connection would count as the server's only client."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if any(connection.laddr.port == port for connection in psutil.Process(server.pid).net_connections("tcp")):
            return
        time.sleep(0.01)
    raise TrialFailed(f"iperf3 does not listen on port {port}")
