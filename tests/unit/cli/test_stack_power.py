"""The switches of a local stack over a real socket, with askers of every kind."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import stack_power
from holdfast.cli.stack_power import LINE_BYTES_MAX, SOCKET_NAME, StackPower, ask, socket_of
from holdfast.domain.errors import Conflict, HoldfastError, Unavailable


class Switches:
    def __init__(self) -> None:
        self.thrown: list[tuple[str, str]] = []
        self.failure: Exception | None = None

    def on(self, node: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.thrown.append(("power_on", node))

    def off(self, node: str) -> None:
        self.thrown.append(("power_off", node))


@pytest.fixture
def switches() -> Switches:
    return Switches()


@pytest.fixture
def room(tmp_path: Path, switches: Switches) -> Iterator[Path]:
    opened = StackPower(tmp_path, {"power_on": switches.on, "power_off": switches.off})
    yield tmp_path / SOCKET_NAME
    opened.close()
    assert not (tmp_path / SOCKET_NAME).exists()


def raw(path: Path, data: bytes) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as replies:
            reply: dict[str, object] = json.loads(replies.readline())
    return reply


def test_a_switch_is_thrown(room: Path, switches: Switches) -> None:
    ask(room, "power_off", "node-1")
    ask(room, "power_on", "node-1")
    assert switches.thrown == [("power_off", "node-1"), ("power_on", "node-1")]


def test_a_refusal_reaches_the_asker(room: Path, switches: Switches) -> None:
    switches.failure = Conflict("node-1 is running")
    with pytest.raises(HoldfastError, match="node-1 is running"):
        ask(room, "power_on", "node-1")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), subprocess.TimeoutExpired("agent", 15.0)])
def test_a_switch_that_breaks_is_reported_and_the_next_one_works(
    room: Path, switches: Switches, failure: Exception
) -> None:
    switches.failure = failure
    with pytest.raises(HoldfastError, match="power_on of node-1 failed"):
        ask(room, "power_on", "node-1")
    switches.failure = None
    ask(room, "power_on", "node-2")
    assert switches.thrown == [("power_on", "node-2")]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\n",
        b"not json\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b'{"operation": "power_on"}\n',
        b'{"node": "node-1"}\n',
        b"x" * (LINE_BYTES_MAX + 1),
    ],
)
def test_garbage_is_answered_and_does_no_harm(room: Path, switches: Switches, garbage: bytes) -> None:
    assert "not a request" in str(raw(room, garbage)["error"])
    ask(room, "power_on", "node-1")
    assert switches.thrown == [("power_on", "node-1")]


def test_an_unknown_operation_is_named_with_those_there_are(room: Path) -> None:
    with pytest.raises(HoldfastError, match=r"'explode' is not known; expected one of \['power_off', 'power_on'\]"):
        ask(room, "explode", "node-1")


def test_an_asker_that_leaves_does_not_stop_the_room(room: Path, switches: Switches) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(room))
    ask(room, "power_on", "node-1")
    assert switches.thrown == [("power_on", "node-1")]


def test_a_silent_asker_holds_nobody_up_for_long(
    room: Path, switches: Switches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_power, "REQUEST_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(room))
        ask(room, "power_on", "node-1")
    assert switches.thrown == [("power_on", "node-1")]


def test_no_stack_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no local stack answers at .*stack\.sock.*holdfast up"):
        ask(tmp_path / SOCKET_NAME, "power_on", "node-1")


@pytest.mark.parametrize("reply", [b"", b"garbage\n", b"[1]\n"])
def test_unexpected_reply_on_stack_socket_is_rejected(tmp_path: Path, reply: bytes) -> None:
    path = tmp_path / SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(LINE_BYTES_MAX)
                connection.sendall(reply)

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(HoldfastError):
            ask(path, "power_on", "node-1")
        server.join()


def test_a_socket_left_by_a_killed_stack_is_replaced(tmp_path: Path, switches: Switches) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_NAME))
    room = StackPower(tmp_path, {"power_on": switches.on})
    ask(tmp_path / SOCKET_NAME, "power_on", "node-1")
    room.close()
    assert switches.thrown == [("power_on", "node-1")]


def test_the_switchboard_of_a_node(tmp_path: Path) -> None:
    assert socket_of(str(tmp_path / "nodes" / "node-3")) == tmp_path / SOCKET_NAME
