"""A sick, slow or dead agent never slows a step: every send and every look returns at once."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.domain import worker
from holdfast.domain.signals import Phase
from holdfast.train.channels import ORDERS_PER_POLL_MAX, WAITING_NOTES_MAX, Control, Notes

NotesTo = Callable[..., Notes]


@pytest.fixture
def notes_to() -> Iterator[NotesTo]:
    made: list[Notes] = []

    def make(agent: Path | str = "", replicator: Path | str = "") -> Notes:
        made.append(Notes(agent=str(agent), replicator=str(replicator), job="gpt", generation=3, rank=1))
        return made[-1]

    yield make
    for notes in made:
        notes.close()


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(path))
    listener.setblocking(False)
    return listener


def received(listener: socket.socket) -> list[dict[str, object]]:
    messages = []
    while True:
        try:
            messages.append(dict(worker.decode(listener.recv(worker.MESSAGE_BYTES_MAX))))
        except BlockingIOError:
            return messages


def say_step(notes: Notes, step: int) -> None:
    notes.step(
        step=step,
        started_at=1.0,
        ended_at=2.0,
        ended_uptime_s=3.0,
        data_s=0.1,
        stall_s=0.0,
        tokens=64,
        loss=float("nan"),
        grad_norm=None,
    )


def test_notes_carry_whose_they_are(tmp_path: Path, notes_to: NotesTo) -> None:
    with listen(tmp_path / "agent") as agent, listen(tmp_path / "replicator") as replicator:
        notes = notes_to(tmp_path / "agent", tmp_path / "replicator")
        notes.phase(Phase.RESTORE, at=5.0, step=0)
        notes.saved(step=4, attempt=1, image="/dev/shm/x", stall_s=0.01)
        say_step(notes, 5)
        notes.close()
        phase, saved, step = received(agent)
        assert phase == {
            "type": "phase",
            "job": "gpt",
            "generation": 3,
            "rank": 1,
            "phase": "restore",
            "at": 5.0,
            "step": 0,
        }
        assert received(replicator) == [saved]
        assert (saved["type"], saved["image"]) == ("saved", "/dev/shm/x")
        assert (step["loss"], step["grad_norm"]) == (math.inf, None), "a NaN loss was reported, an absent one was not"


def test_an_agent_that_does_not_read_costs_notes_not_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, notes_to: NotesTo
) -> None:
    with listen(tmp_path / "agent") as agent, caplog.at_level(logging.WARNING):
        notes = notes_to(tmp_path / "agent")
        began = time.perf_counter()
        for step in range(1, 2001):
            say_step(notes, step)
        assert time.perf_counter() - began < 20.0  # a note that waited for the agent would wait for ever
        assert 0 < notes.dropped < 2000
        assert len(caplog.records) == 1, "said once, then only counted"

        dropped = notes.dropped
        queued = received(agent)  # the agent wakes up
        notes.close()
        late = received(agent)
        assert len(queued) + len(late) + dropped >= 2000 - WAITING_NOTES_MAX
        steps = [int(str(note["step"])) for note in queued + late]
        assert steps == sorted(steps), "what was late is still in order"


def test_a_short_pause_of_the_agent_costs_nothing(tmp_path: Path, notes_to: NotesTo) -> None:
    with listen(tmp_path / "agent") as agent:
        notes = notes_to(tmp_path / "agent")
        for step in range(1, 41):  # more than the kernel queues, less than we keep
            say_step(notes, step)
        got: list[dict[str, object]] = []
        for step in range(41, 61):
            got += received(agent)
            say_step(notes, step)
        got += received(agent)
        assert [note["step"] for note in got] == list(range(1, 61))
        assert notes.dropped == 0


@pytest.mark.parametrize("corpse", ["never there", "closed", "not a socket"])
def test_a_dead_agent_is_counted_and_survived(tmp_path: Path, corpse: str, notes_to: NotesTo) -> None:
    path = tmp_path / "agent"
    if corpse == "closed":
        listen(path).close()
    elif corpse == "not a socket":
        path.write_text("")
    notes = notes_to(path)
    say_step(notes, 1)
    say_step(notes, 2)
    assert notes.dropped == 2


def test_an_agent_that_comes_back_is_found_again(tmp_path: Path, notes_to: NotesTo) -> None:
    path = tmp_path / "agent"
    notes = notes_to(path)
    say_step(notes, 1)
    with listen(path) as agent:
        say_step(notes, 2)
        assert [note["step"] for note in received(agent)] == [2]


def test_nobody_listening_is_no_error(notes_to: NotesTo) -> None:
    notes = notes_to()
    say_step(notes, 1)
    notes.close()
    assert notes.dropped == 0


def control_pair() -> tuple[socket.socket, Control]:
    agent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return agent, Control(child.detach())


def test_orders_come_in_order_and_looking_never_waits() -> None:
    agent, control = control_pair()
    with agent:
        assert control.poll() == []
        agent.send(worker.encode("checkpoint_now", at_step=7))
        agent.send(worker.encode("stop", save=True))
        assert [order["type"] for order in control.poll()] == ["checkpoint_now", "stop"]
        assert control.poll() == []
        control.close()


def test_a_flood_of_orders_is_taken_in_portions() -> None:
    agent, control = control_pair()
    with agent:
        for step in range(ORDERS_PER_POLL_MAX + 1):
            agent.send(worker.encode("checkpoint_now", at_step=step))
        assert [len(control.poll()) for _ in range(3)] == [ORDERS_PER_POLL_MAX, 1, 0]
        control.close()


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"[]", b"{}", b'{"type": 3}'])
def test_garbage_is_no_order(garbage: bytes) -> None:
    agent, control = control_pair()
    with agent:
        agent.send(garbage)
        assert control.poll() == [{}]
        control.close()


def test_an_agent_that_is_gone_gives_no_orders() -> None:
    agent, control = control_pair()
    agent.send(worker.encode("stop", save=False))
    agent.close()
    assert [order["type"] for order in control.poll()] == ["stop"]
    assert control.poll() == control.poll() == []


def test_no_agent_no_orders() -> None:
    assert Control(None).poll() == []
