"""What the soak breaks things with does break them, and nothing else."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import TIMEOUT_S, wait_until

from benchmarks.soak import corrupt, network
from benchmarks.soak.clock import Clocks
from benchmarks.soak.network import HOST, Network
from benchmarks.soak.relay import Mode, Relay

ANSWER_S = 5.0
SILENCE_S = 0.3

# ---------------------------------------------------------------- relay


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection:
                try:
                    while read := connection.recv(4096):
                        connection.sendall(read)
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(echo: int) -> Iterator[Relay]:
    relay = Relay(("127.0.0.1", echo))
    yield relay
    relay.close()


def test_a_relay_passes_on_stalls_and_goes_on(relay: Relay) -> None:
    with socket.create_connection(("127.0.0.1", relay.port), ANSWER_S) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        for mode in (Mode.STALL, Mode.STALL_TO_SERVER, Mode.STALL_TO_CLIENT):
            relay.mode = mode
            client.sendall(b"two")
            client.settimeout(SILENCE_S)
            with pytest.raises(TimeoutError):
                client.recv(10)
            relay.mode = Mode.OPEN
            client.settimeout(ANSWER_S)
            assert client.recv(10) == b"two"  # late, and not lost


def test_a_relay_resets_what_there_is_and_what_comes(relay: Relay) -> None:
    with socket.create_connection(("127.0.0.1", relay.port), ANSWER_S) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        relay.mode = Mode.RESET
        with pytest.raises(ConnectionResetError):
            client.recv(10)
    address = ("127.0.0.1", relay.port)
    with pytest.raises(ConnectionResetError), socket.create_connection(address, ANSWER_S) as client:
        client.recv(10)  # if it came so far: connecting may be reset as well
    wait_until(lambda: relay.connections == 0, description="no connection to be left")


# ---------------------------------------------------------------- clock


@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="no C compiler")
def test_a_clock_jumps_in_one_process_and_waits_do_not(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    script = """
import threading, time
print(time.time() - time.monotonic(), flush=True)
input()
began = time.monotonic()
lock = threading.Condition()
with lock:
    lock.wait(0.2)
print(time.time() - time.monotonic(), time.monotonic() - began, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=clocks.environment("one"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        before = float(process.stdout.readline())
        clocks.set("one", 3600.0)
        after, _ = process.communicate("\n", timeout=TIMEOUT_S)
    offset_s, waited_s = map(float, after.split())
    assert offset_s - before == pytest.approx(3600.0, abs=1.0)
    assert 0.1 < waited_s < 30.0
    assert abs(time.time() - time.monotonic() - before) < 1.0  # nobody else's


# ---------------------------------------------------------------- network

PING = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(float(sys.argv[3]))
    s.connect((sys.argv[1], int(sys.argv[2])))
    for _ in range(int(sys.argv[4])):
        s.send(b"ping")
    try:
        print(s.recv(10).decode())
    except TimeoutError:
        print("nothing")
"""


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_a_network_of_namespaces_carries_delays_and_cuts() -> None:
    with Network(2) as net, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((net.host, 0))
        server.settimeout(ANSWER_S)
        port = str(server.getsockname()[1])

        def ping(wait_s: float = ANSWER_S) -> str:
            """What node 0 hears from this machine; it says something, this machine answers."""
            command = net.inside(0, [sys.executable, "-c", PING, net.host, port, str(wait_s), "1"])
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                try:
                    _, address = server.recvfrom(10)
                    server.sendto(b"pong", address)
                except TimeoutError:
                    pass  # it was lost
                answer, _ = process.communicate(timeout=TIMEOUT_S)
            return answer.strip()

        assert ping() == "pong"
        net.cut(HOST, 0)  # one way: what node 0 says still arrives
        assert ping(SILENCE_S) == "nothing"
        net.heal(0)
        net.delay(0, 0.2)
        began = time.monotonic()
        assert ping() == "pong"
        assert time.monotonic() - began > 0.35  # there and back
        net.heal(0)
        net.cut(0, HOST)
        server.settimeout(2.0)
        assert ping(SILENCE_S) == "nothing"
        net.heal(0)
        assert ping() == "pong"
        assert net.alive


# ---------------------------------------------------------------- stored copies


def test_exactly_one_bit_flips_and_only_in_what_is_committed(tmp_path: Path) -> None:
    chance = random.Random(1)
    shards = tmp_path / "tier/job/a1"
    for step, rank in ((10, 0), (20, 0), (20, 1)):
        path = shards / f"s{step}/rank-{rank}.shard"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8192))
        path.with_suffix(".json").write_text("{}")
    uncommitted = shards / "s30/rank-0.shard"
    uncommitted.parent.mkdir()
    uncommitted.write_bytes(bytes(8192))

    def flipped() -> list[Path]:
        return sorted(path for path in shards.rglob("*.shard") if path.read_bytes().count(0) == 8191)

    assert "step 20" in corrupt.shard(tmp_path, "job", chance, rank=0)
    assert flipped() == [shards / "s20/rank-0.shard"]
    assert sum(byte.bit_count() for byte in flipped()[0].read_bytes()) == 1
    assert "step 20" in corrupt.shard(tmp_path, "job", chance, rank=1)
    assert len(flipped()) == 2
    assert corrupt.shard(tmp_path, "job", chance, rank=7) == ""
    assert corrupt.stored(tmp_path, "job", chance) == ""
    assert corrupt.image(tmp_path, "job", chance) == ""
