"""The step loop as the script sees it: what it says to the agent, and how it obeys."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast.train as hf
from holdfast.domain import worker
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import Phase
from holdfast.shards import peek
from holdfast.train import run as run_module
from holdfast.train.channels import Control, Notes
from holdfast.train.environment import Environment, RestoreTarget, World
from holdfast.train.observing import observed_steps

MESH = Mesh.of({"dp": 2})


class Agent:
    """The other ends of a run's channels."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notes"
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.bind(str(self.path))
        self._notes.setblocking(False)
        self._control: socket.socket | None = None
        self._seen: list[dict[str, Any]] = []

    def connect(self) -> int:
        """A new worker; returns its end of the control channel."""
        if self._control is not None:
            self._control.close()
        self._control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return child.detach()

    def order(self, kind: str, **fields: object) -> None:
        assert self._control is not None
        self._control.send(worker.encode(kind, **fields))

    def votes(self) -> list[tuple[int, bool]]:
        """The answers to proposals since the last call."""
        assert self._control is not None
        found: list[tuple[int, bool]] = []
        while True:
            try:
                message = worker.decode(self._control.recv(worker.MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return found
            assert message["type"] == "vote"
            found.append((message["ballot"], message["yes"]))

    def order_once_saving(self, patch: pytest.MonkeyPatch, step: int, kind: str, **fields: object) -> None:
        """Send the order once, when the save of `step` has begun and before it goes on."""
        say, orders = Notes.phase, [(kind, fields)]

        def saying(notes: Notes, phase: Phase, at: float, of_step: int) -> None:
            say(notes, phase, at, of_step)
            while orders and (phase, of_step) == (Phase.CHECKPOINT, step):
                name, values = orders.pop()
                self.order(name, **values)

        patch.setattr(Notes, "phase", saying)

    def notes(self, kind: str) -> list[dict[str, Any]]:
        while True:
            try:
                self._seen.append(dict(worker.decode(self._notes.recv(worker.MESSAGE_BYTES_MAX))))
            except BlockingIOError:
                return [note for note in self._seen if note["type"] == kind]

    def close(self) -> None:
        for end in (self._notes, self._control):
            if end is not None:
                end.close()


@pytest.fixture(autouse=True)
def changes_are_dropped_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LEAVING_S_MAX", 0.02)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.close()


StartRun = Callable[..., hf.Run]


@pytest.fixture
def start_run(agent: Agent, tmp_path: Path) -> Iterator[StartRun]:
    channels: list[Notes | Control] = []

    def start(**changes: Any) -> hf.Run:
        environment = replace(
            Environment(World(MESH, 1, 3), job="t", attempt=1, images=str(tmp_path / "images"), interval_steps=5),
            **changes,
        )
        notes = Notes(agent=str(agent.path), replicator="", job="t", generation=3, rank=1)
        control = Control(agent.connect())
        channels.extend((notes, control))
        return hf.Run(
            environment=environment, device=torch.device("cpu"), notes=notes, control=control, process_group_s=0.25
        )

    yield start
    for channel in channels:
        channel.close()


def loop(
    run: hf.Run, steps: int, *, state: dict[str, Any] | None = None, start: int = 0, listener: Agent | None = None
) -> list[int]:
    """The README's loop; returns the steps that were saved. `listener` takes its notes as they come."""
    saved = []
    for step in range(start, start + steps):
        with run.step(step):
            pass
        if run.checkpoint(state or {"w": torch.ones(2)}, step + 1):
            saved.append(step + 1)
        if listener is not None:
            listener.notes("step")
    return saved


class Waits:
    """In place of `DDPWaits`: what it says, step by step."""

    def __init__(self, *waited_s: float | None) -> None:
        self._waited_s = iter(waited_s)

    def take(self, every: int = 1, *, on_cpu_only: bool = False) -> float | None:
        assert (every, on_cpu_only) == (1, True)
        return next(self._waited_s)


def test_what_ddp_waited_is_reported_unless_the_script_measures_it_itself(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    run._waits = Waits(0.25, None, 0.25)  # type: ignore[assignment]
    loop(run, 2)
    with run.step(2), run.comm_wait():
        pass
    first, second, third = [note["comm_wait_s"] for note in agent.notes("step")]
    assert (first, second) == (0.25, None)
    assert 0 <= third < 0.25


def test_a_step_is_reported_with_what_was_logged(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    with run.step(0) as s:
        with run.data_wait():
            pass
        s.log(loss=torch.tensor(2.5), tokens=10)
        s.log(grad_norm=0.5, tokens=5)
    (note,) = agent.notes("step")
    assert note["comm_wait_s"] is None, "nobody measures it here: not the same as no wait"
    assert (note["job"], note["generation"], note["rank"], note["step"]) == ("t", 3, 1, 1)
    assert (note["loss"], note["grad_norm"], note["tokens"]) == (2.5, 0.5, 15)
    assert 0 < note["data_s"] < note["ended_at"] - note["started_at"] < 5


def test_waits_for_other_ranks_add_up_within_a_step_and_begin_anew_with_the_next(
    agent: Agent, start_run: StartRun
) -> None:
    run = start_run()
    for step, waits in enumerate((2, 1)):
        with run.step(step):
            for _ in range(waits):
                with run.comm_wait():
                    pass
    first, second = agent.notes("step")
    for note in (first, second):
        assert 0 < note["comm_wait_s"] < note["ended_at"] - note["started_at"]


def test_the_start_is_accounted_for_once(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    assert run.restore({}) == 0
    loop(run, 3)
    (note,) = agent.notes("started")
    assert set(note["phases_s"]) == {"process_group", "build", "first_step"}
    assert note["phases_s"]["process_group"] == 0.25


def test_the_imports_of_the_script_are_accounted_for(agent: Agent, start_run: StartRun) -> None:
    run = start_run(began_s=time.monotonic() - 14.25)
    loop(run, 1)
    (note,) = agent.notes("started")
    assert 14.0 <= note["phases_s"]["script"] < 74.0, "until the library was called, without the process group's 0.25 s"


def test_a_step_that_raises_is_not_finished(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    with pytest.raises(ZeroDivisionError), run.step(0):
        raise ZeroDivisionError
    assert agent.notes("step") == []


def test_saves_come_at_the_interval_and_are_announced(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    assert loop(run, 11, listener=agent) == [5, 10]
    saved = agent.notes("saved")
    assert [note["step"] for note in saved] == [5, 10]
    header = peek(Path(saved[-1]["image"]))
    assert header is not None
    assert (header.stamp.key.attempt, header.stamp.key.step, header.stamp.key.rank) == (1, 10, 1)
    stalled = [note["step"] for note in agent.notes("step") if note["stall_s"] > 0]
    assert stalled == [6, 11], "the stall is reported with the step after the save"
    assert [note["phase"] for note in agent.notes("phase")] == ["checkpoint", "step"] * 2


def test_force_saves_at_once(start_run: StartRun) -> None:
    run = start_run()
    with run.step(0):
        pass
    assert run.checkpoint({}, 1, force=True)


def test_a_wrongly_numbered_save_is_refused(start_run: StartRun) -> None:
    run = start_run()
    with run.step(0):
        pass
    with pytest.raises(InvalidSpec, match="step: 0 is not valid; expected 1"):
        run.checkpoint({}, 0, force=True)


def test_a_save_within_a_step_says_where_it_belongs(start_run: StartRun) -> None:
    run = start_run()
    with run.step(0):
        pass
    with pytest.raises(InvalidSpec, match="expected 1, the number of finished steps; a step has begun"), run.step(1):
        run.checkpoint({}, 2)


@pytest.mark.parametrize("asks", [True, False])
def test_a_run_that_saves_and_never_restores_is_warned(
    start_run: StartRun, caplog: pytest.LogCaptureFixture, asks: bool
) -> None:
    run = start_run()
    if asks:
        assert run.restore({}) == 0
    for step in range(2):
        with run.step(step):
            pass
        run.checkpoint({}, step + 1, force=True)
    warnings = [each.message for each in caplog.records if "run.restore was not" in each.message]
    assert len(warnings) == (not asks)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (
            {"buffer": torch.zeros(3)},
            r"state\['buffer'\]: 'torch.float32 \(3,\)' is not valid; expected torch.float32 \(2,\), as",
        ),
        ({"buffer": torch.zeros(2).double()}, r"state\['buffer'\]: 'torch.float64"),
        ({"buffer": None}, r"state\['buffer'\]: 'without torch.float32"),
        ({"deep": {}}, r"state\['deep'\]\['model'\]: 'without an object"),
        (
            {"ema": torch.nn.Linear(1, 1)},
            r"state\['ema'\]: 'an object with state_dict' is not valid; expected an object that run.restore was given",
        ),
    ],
)
def test_a_save_that_the_script_could_not_restore_is_refused(
    start_run: StartRun, agent: Agent, changed: dict[str, Any], complaint: str
) -> None:
    """A restart builds the state as this start did, and gives it to `restore`."""
    state: dict[str, Any] = {
        "buffer": torch.zeros(2),
        "deep": {"model": torch.nn.Linear(1, 1)},
        "best": {},
        "ema": None,
    }
    run = start_run()
    assert run.restore(state) == 0
    with run.step(0):
        pass
    state["best"]["loss"] = torch.zeros(4)
    state["later"] = [torch.zeros(1)]
    assert run.checkpoint(state, 1, force=True)
    with run.step(1):
        pass
    with pytest.raises(InvalidSpec, match=complaint):
        run.checkpoint({**state, **changed}, 2, force=True)


def test_checkpoint_now_saves_after_the_named_step(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    agent.order("checkpoint_now", at_step=3)
    assert loop(run, 4) == [3]
    agent.order("checkpoint_now", at_step=5)  # the interval's own
    assert loop(run, 4, start=4) == [5]


def test_a_save_that_comes_too_late_is_missed_not_made_up(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    loop(run, 3)
    agent.order("checkpoint_now", at_step=2)
    assert loop(run, 1, start=3) == []
    (note,) = agent.notes("missed")
    assert note["step"] == 2
    assert "already finished step 4" in note["reason"]


def test_stop_ends_the_script_after_its_step(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    loop(run, 1)
    agent.order("stop", save=False)
    with pytest.raises(hf.Interrupted) as caught:
        loop(run, 5, start=1)
    assert (caught.value.code, caught.value.step, caught.value.saved) == (worker.EXIT_INTERRUPTED, 2, False)
    assert [note["step"] for note in agent.notes("step")] == [1, 2], "the step itself counts"


def test_stop_with_a_save_leaves_through_checkpoint(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    agent.order("stop", save=True)
    with pytest.raises(hf.Interrupted) as caught:
        loop(run, 5)
    assert (caught.value.step, caught.value.saved) == (1, True)
    assert [note["step"] for note in agent.notes("saved")] == [1]


def test_a_script_that_never_checkpoints_still_stops(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    agent.order("stop", save=True)
    with run.step(0):
        pass
    with pytest.raises(hf.Interrupted, match="after step 1"), run.step(1):
        pytest.fail("a step began after stop")


def test_unknown_orders_are_ignored(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    for order in ({"kind": "dance"}, {"kind": "checkpoint_now", "at_step": "soon"}, {"kind": "checkpoint_now"}):
        agent.order(str(order.pop("kind")), **order)
    assert loop(run, 2) == []


def test_training_goes_on_without_the_agent(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    agent.close()
    assert loop(run, 6) == [5]


def test_phases_are_said_and_left(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    loop(run, 2)
    with run.phase("eval"):
        assert agent.notes("phase")[-1]["phase"] == "eval"
    assert [(note["phase"], note["step"]) for note in agent.notes("phase")] == [("eval", 2), ("step", 2)]
    with pytest.raises(ValueError, match="dance"), run.phase("dance"):
        pass


def test_a_phase_and_a_wait_end_also_if_the_work_raises(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    with pytest.raises(OSError, match="no data"), run.phase("eval"):
        raise OSError("no data")
    assert [note["phase"] for note in agent.notes("phase")] == ["eval", "step"]
    with run.step(0):
        for wait in (run.data_wait, run.comm_wait):
            with pytest.raises(TimeoutError), wait():
                raise TimeoutError
    (step,) = agent.notes("step")
    assert step["data_s"] > 0
    assert step["comm_wait_s"] > 0


def test_without_an_agent_nothing_is_saved_and_that_is_said_once(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(images="")
    with caplog.at_level(logging.WARNING):
        assert loop(run, 11) == []
    assert sum("nothing is saved" in record.message for record in caplog.records) == 1


def saved_by(start_run: StartRun, agent: Agent) -> RestoreTarget:
    loop(start_run(), 5, state={"w": torch.full((2,), 7.0)})
    return RestoreTarget(5, 1, agent.notes("saved")[-1]["image"])


@pytest.fixture
def restart(start_run: StartRun, agent: Agent) -> StartRun:
    """A run that continues from one saved at step 5 by the same rank of `MESH`."""
    target = saved_by(start_run, agent)

    def start(previous: Mesh) -> hf.Run:
        return start_run(restore=target, previous_mesh=previous)

    return start


def test_optimizer_steps_are_observed_until_a_step_is_finished(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that begins a step and never ends it trains all the same."""
    closed: list[str] = []
    part = SimpleNamespace(close=lambda: closed.append("part"))
    monkeypatch.setattr(observed_steps, "_running", (part, part))
    run = start_run()
    for _ in range(3):
        run.begin_step(0)
    assert not closed
    run.end_step()
    assert closed


def test_a_restart_continues_where_it_was_saved(agent: Agent, restart: StartRun) -> None:
    run, state = restart(MESH), {"w": torch.zeros(2)}
    with pytest.raises(Conflict, match=r"run\.restore"):
        run.step(0)
    assert run.restore(state) == 5
    with pytest.raises(InvalidSpec, match=r"5, which run\.restore returned"):
        run.step(0)
    assert state["w"].tolist() == [7.0, 7.0]
    assert run.restore(state) == 5, "a second call changes nothing"
    assert loop(run, 5, start=5) == [10]
    assert agent.notes("step")[-1]["step"] == 10
    assert set(agent.notes("started")[-1]["phases_s"]) == {"process_group", "build", "restore", "first_step"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_on_resize_is_called_once_whenever_the_callback_is_registered(when: str, restart: StartRun) -> None:
    run, calls = restart(Mesh.of({"dp": 3})), []

    def resized(old: hf.World, new: hf.World) -> None:
        calls.append((old.dp_size, new.dp_size))

    if when == "before":
        run.on_resize(resized)
    run.restore({"w": torch.zeros(2)})
    if when == "after":
        run.on_resize(resized)
    assert calls == [(3, 2)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_error_of_an_on_resize_callback_ends_the_script_and_names_it(when: str, restart: StartRun) -> None:
    run = restart(Mesh.of({"dp": 3}))

    def scale(old: hf.World, new: hf.World) -> None:
        raise KeyError("momentum")

    def register_and_restore() -> None:
        if when == "before":
            run.on_resize(scale)
        run.restore({"w": torch.zeros(2)})
        if when == "after":
            run.on_resize(scale)

    with pytest.raises(KeyError, match="momentum") as caught:
        register_and_restore()
    assert "on_resize callback" in caught.value.__notes__[0]
    assert "scale (" in caught.value.__notes__[0]


def test_the_world_that_saved_is_passed_with_the_rank_of_this_shard(restart: StartRun) -> None:
    run, worlds = restart(Mesh.of({"dp": 3})), []
    run.restore({"w": torch.zeros(2)})
    run.on_resize(lambda old, new: worlds.extend([old, new]))
    assert worlds == [World(Mesh.of({"dp": 3}), 1, 0), World(MESH, 1, 3)]


def test_a_start_without_a_checkpoint_is_no_resize(start_run: StartRun) -> None:
    run = start_run()
    run.on_resize(lambda old, new: pytest.fail("not a resize"))
    assert run.restore({"w": torch.zeros(2)}) == 0


def test_a_restart_of_the_same_size_is_no_resize(restart: StartRun) -> None:
    run = restart(MESH)
    run.on_resize(lambda old, new: pytest.fail("not a resize"))
    run.restore({"w": torch.zeros(2)})


def test_leaving_is_called_before_the_save_of_its_step_and_only_then(agent: Agent, start_run: StartRun) -> None:
    run, calls = start_run(), []
    state = {"w": torch.zeros(1)}

    @run.on_leaving
    def leaving(change: hf.Leaving) -> None:
        calls.append((change, len(agent.notes("saved"))))
        state["w"] += 1

    agent.order("checkpoint_now", at_step=3, leaving="scale_up: n3 is back")
    agent.order("checkpoint_now", at_step=4)
    assert loop(run, 6, state=state) == [3, 4, 5]
    assert calls == [(hf.Leaving(3, "scale_up: n3 is back"), 0)], "not for the other saves"
    agent.order("checkpoint_now", at_step=8, leaving="scale_up: again")
    assert loop(run, 3, state=state, start=6) == [8]
    assert [change.step for change, _ in calls] == [3, 8], "a change that was postponed asks again"


def test_leaving_is_announced_as_a_phase_so_that_it_is_no_hang(agent: Agent, start_run: StartRun) -> None:
    run, phases = start_run(), []
    run.on_leaving(lambda change: phases.extend(agent.notes("phase")))
    agent.order("checkpoint_now", at_step=2, leaving="hot_swap: n2 leaves")
    loop(run, 2)
    assert [(note["phase"], note["step"]) for note in phases] == [("checkpoint", 2)]


def test_a_leaving_callback_that_raises_does_not_keep_the_step_from_being_saved(
    agent: Agent, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run()

    @run.on_leaving
    def flush(change: hf.Leaving) -> None:
        raise OSError("no network")

    agent.order("checkpoint_now", at_step=2, leaving="hot_swap: n2 leaves")
    assert loop(run, 3) == [2]
    assert "flush (" in caplog.text
    assert "no network" in caplog.text


def test_leaving_is_not_called_for_a_step_that_is_over_nor_for_a_stop_that_saves_nothing(
    agent: Agent, start_run: StartRun
) -> None:
    run = start_run()
    run.on_leaving(lambda change: pytest.fail(f"called: {change}"))
    loop(run, 3)
    agent.order("checkpoint_now", at_step=2, leaving="scale_up: late")
    loop(run, 2, start=3)
    agent.order("stop", save=False)
    with pytest.raises(hf.Interrupted):
        loop(run, 1, start=5)


def test_after_the_save_of_a_planned_change_no_step_is_begun_that_would_be_done_again(
    agent: Agent, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "LEAVING_S_MAX", 60.0)
    run = start_run()
    agent.order("checkpoint_now", at_step=3, leaving="hot_swap: maintenance of n1")
    agent.order_once_saving(monkeypatch, 3, "stop", save=False)
    with pytest.raises(hf.Interrupted) as caught:
        loop(run, 6)
    assert (caught.value.step, caught.value.saved) == (3, True)
    assert [note["step"] for note in agent.notes("step")] == [1, 2, 3]


def test_a_save_that_is_ordered_meanwhile_for_the_same_step_is_missed(
    agent: Agent, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "LEAVING_S_MAX", 0.2)
    run = start_run()
    agent.order("checkpoint_now", at_step=1, leaving="hot_swap: maintenance of n1")
    agent.order_once_saving(monkeypatch, 1, "checkpoint_now", at_step=1)
    assert loop(run, 3) == [1], "the change was dropped: training goes on"
    assert [note["step"] for note in agent.notes("missed")] == [1]


# ---------------------------------------------------------------- agreement on a save


def test_a_save_that_is_agreed_is_made_at_its_step(agent: Agent, start_run: StartRun) -> None:
    run, calls = start_run(), list[hf.Leaving]()
    run.on_leaving(calls.append)
    agent.order("checkpoint_now", at_step=3, ballot=1)
    assert loop(run, 1) == []
    assert agent.votes() == [(1, True)]
    agent.order("checkpoint_now", at_step=3, leaving="scale_up: n3 is back")
    assert loop(run, 3, start=1) == [3]
    assert calls == [hf.Leaving(3, "scale_up: n3 is back")]
    assert agent.notes("missed") == []


def test_a_rank_that_has_passed_the_step_says_so_and_is_bound_to_nothing(agent: Agent, start_run: StartRun) -> None:
    run = start_run()
    loop(run, 3)
    agent.order("checkpoint_now", at_step=3, ballot=7)
    assert loop(run, 2, start=3) == [5], "the interval's own"
    assert agent.votes() == [(7, False)]
    assert [note["phase"] for note in agent.notes("phase")].count("checkpoint") == 1, "it did not wait at any step"


def test_a_void_proposal_saves_nothing(agent: Agent, start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "AGREEMENT_S_MAX", 60.0)
    run = start_run()
    run.on_leaving(lambda change: pytest.fail(f"called: {change}"))
    agent.order("checkpoint_now", at_step=3, ballot=1)
    loop(run, 1)
    agent.order("void", at_step=3)
    assert loop(run, 3, start=1) == []


@pytest.mark.parametrize(("result", "saved"), [("checkpoint_now", [3]), ("void", [])])
@pytest.mark.parametrize("by_due", [False, True])
def test_a_rank_waits_at_the_step_for_the_result(
    agent: Agent,
    start_run: StartRun,
    monkeypatch: pytest.MonkeyPatch,
    result: str,
    saved: list[int],
    by_due: bool,
) -> None:
    monkeypatch.setattr(run_module, "AGREEMENT_S_MAX", 60.0)
    run = start_run()
    agent.order("checkpoint_now", at_step=3, ballot=1)
    agent.order_once_saving(monkeypatch, 3, result, at_step=3)  # sent only when the rank waits
    found = []
    for step in range(4):
        with run.step(step):
            pass
        if by_due:
            due = run.due()
            assert due == (step + 1 in saved), "equal on every rank: a script may save collectively if it is due"
        if run.checkpoint({"w": torch.ones(2)}, step + 1):
            found.append(step + 1)
    assert found == saved


def test_training_goes_on_without_a_result_and_a_late_one_is_missed(
    agent: Agent, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "AGREEMENT_S_MAX", 0.02)
    run = start_run()
    run.on_leaving(lambda change: pytest.fail(f"called: {change}"))
    agent.order("checkpoint_now", at_step=2, ballot=1)
    assert loop(run, 2) == []
    (note,) = agent.notes("missed")
    assert note["step"] == 2
    assert "0.02 s after rank 1 reached it" in note["reason"]
    agent.order("checkpoint_now", at_step=2, leaving="scale_up: late")
    assert loop(run, 2, start=2) == []
    assert [each["step"] for each in agent.notes("missed")] == [2, 2]


def test_a_stop_ends_the_wait_for_a_result(agent: Agent, start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "AGREEMENT_S_MAX", 60.0)
    run = start_run()
    agent.order("checkpoint_now", at_step=2, ballot=1)
    agent.order_once_saving(monkeypatch, 2, "stop", save=True)
    with pytest.raises(hf.Interrupted) as caught:
        loop(run, 4)
    assert (caught.value.step, caught.value.saved) == (2, True)


def test_two_proposals_have_their_own_results(
    agent: Agent, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "AGREEMENT_S_MAX", 60.0)
    run = start_run()
    for ballot, step in ((1, 2), (2, 4)):
        agent.order("checkpoint_now", at_step=step, ballot=ballot)
    agent.order_once_saving(monkeypatch, 2, "void", at_step=2)
    assert loop(run, 3) == []
    agent.order_once_saving(monkeypatch, 4, "checkpoint_now", at_step=4)
    assert loop(run, 1, start=3) == [4]
    assert agent.votes() == [(1, True), (2, True)]
