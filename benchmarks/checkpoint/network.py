"""Replicator to replicator, next to what the network gives: iperf3 and a bare socket, one stream each, in the same round.

* replicate: a shard on one node's disk is given a peer; until it is verified, durable and listed there.
* restore from a peer: a node that holds nothing is asked to stage the shard; until it is verified in its memory.

Rate limits are off: the defaults are meant to leave bandwidth to training, and would be all that is measured.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time

import psutil

from benchmarks.checkpoint.pages import recall
from benchmarks.checkpoint.protocol import Request
from benchmarks.checkpoint.replicators import Replicator
from benchmarks.checkpoint.results import Measured, TrialFailed
from benchmarks.checkpoint.saves import save_once
from benchmarks.checkpoint.scratch import Scratch

PIECE_BYTES = 1 << 20
LIMIT_BYTES_MIN = 1 << 28  # a shorter stream says nothing
TIMEOUT_S = 60.0


def measure(request: Request, place: Scratch) -> Measured:
    """One round. Raises TrialFailed."""
    with Replicator("a", place, unlimited=True) as holder, Replicator("b", place, unlimited=True) as other:
        holder.configure((0,))
        other.configure((1,))
        save_once(request, place, holder)
        record = holder.wait_for("disk")
        limits = _limits(max(record.size, LIMIT_BYTES_MIN))  # before and after: loopback swings by half

        recall(record.size)
        began = time.perf_counter()
        holder.configure((0,), other)
        other.wait_for("disk", record.key)
        replicate_s = time.perf_counter() - began

        other.forget()
        other.configure((1,))
        recall(record.size)
        began = time.perf_counter()
        staged = other.stage(record.key, holder)
        restore_s = time.perf_counter() - began
        if staged.source != holder.node:
            raise TrialFailed(f"the shard was staged from {staged.source}, not from the peer")
    limits += _limits(max(record.size, LIMIT_BYTES_MIN))
    values = [("replicate_gb_s", replicate_s), ("restore_peer_gb_s", restore_s)]
    return [
        *((measure, "holdfast", record.size / seconds / 1e9) for measure, seconds in values),
        *((measure, name, gb_s) for measure, _ in values for name, gb_s in limits),
    ]


def _limits(nbytes: int) -> list[tuple[str, float]]:
    """GB/s of one stream through the loopback, memory to nowhere."""
    limits = [("socket", bare_socket(nbytes))]
    return [*limits, ("iperf3", iperf3(nbytes))] if has_iperf3() else limits


def has_iperf3() -> bool:
    return shutil.which("iperf3") is not None


def iperf3(nbytes: int) -> float:
    """Its own count of what arrived. Pieces of 1 MiB: faster than its default."""
    port = _free_port()
    with subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _wait_for_listener(port, server)
            client = subprocess.run(
                ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-n", str(nbytes), "-l", "1M", "-J"],
                check=False,  # its own words say more than its exit code
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
    """`sendall` of memory in one thread, `recv_into` in another: both leave the interpreter while they work."""
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
            took_s = time.perf_counter() - began
        sender.join()
    return received / took_s / 1e9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_listener(port: int, server: subprocess.Popen[bytes]) -> None:
    """By the kernel's table: a connection would be taken for the one client."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if any(connection.laddr.port == port for connection in psutil.Process(server.pid).net_connections("tcp")):
            return
        time.sleep(0.01)
    raise TrialFailed(f"iperf3 does not listen on port {port}")
