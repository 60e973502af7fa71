"""What a run does at a restart, a resize, a planned change, and a save that the ranks agree on."""

from __future__ import annotations

import pytest
import torch
from run_channels import MESH, Agent, StartRun, loop

import holdfast.train as hf
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.mesh import Mesh
from holdfast.train import run as run_module
from holdfast.train.environment import World

pytestmark = pytest.mark.usefixtures("changes_are_dropped_soon")


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
