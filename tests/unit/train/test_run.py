"""The step loop as the script sees it: what it says to the agent, and how it obeys."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_channels import Agent, StartRun, loop

import holdfast.train as hf
from holdfast.domain import worker
from holdfast.domain.errors import InvalidSpec
from holdfast.shards import peek
from holdfast.train.observing import observed_steps

pytestmark = pytest.mark.usefixtures("changes_are_dropped_soon")


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
