"""All ranks save the same step, or none does: under every order of steps and polls."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported without saying so

from holdfast.train.standalone.agreement import POLL_S, Agreement, Gate, Proposal
from holdfast.train.standalone.board import REQUESTS_PER_S_MAX, Board


class Ranks:
    """Some ranks whose watchers poll, and whose training threads step, when the test says so."""

    def __init__(self, count: int) -> None:
        board = Board(HashStore())
        self.now_s = 0.0  # a step takes a second
        self.gates = [Gate(lambda: self.now_s) for _ in range(count)]
        self.agreements = [Agreement(board, gate, rank=i, world_size=count) for i, gate in enumerate(self.gates)]
        self.steps = [0] * count
        self.saved: list[list[Proposal]] = [[] for _ in range(count)]
        self.saved_at: list[list[int]] = [[] for _ in range(count)]

    def poll(self, rank: int) -> None:
        self.agreements[rank].poll()

    def step(self, rank: int) -> None:
        """One step of training; nothing, if the training thread would wait there for a verdict."""
        step = self.steps[rank] + 1
        if self.gates[rank].blocks(step):
            return
        self.steps[rank] = step
        self.now_s += 1.0 / len(self.steps)
        proposal = self.gates[rank].due(step)
        if proposal is not None:
            self.saved[rank].append(proposal)
            self.saved_at[rank].append(step)


def test_a_world_of_one_saves_its_next_step() -> None:
    ranks = Ranks(1)
    ranks.step(0)
    ranks.agreements[0].ask(leave=True)
    ranks.poll(0)
    ranks.poll(0)
    ranks.step(0)
    assert ranks.saved_at == [[2]]
    assert ranks.saved[0][0].leave


def test_a_rank_that_has_passed_the_step_voids_it_for_all_and_a_later_one_is_found() -> None:
    ranks = Ranks(2)
    ranks.agreements[1].ask(leave=False)
    ranks.poll(0)  # proposes, and promises for itself
    for _ in range(50):
        ranks.step(1)  # far past the proposal before it looks
    ranks.poll(1)
    for _ in range(200):
        for rank in (0, 1):
            ranks.poll(rank)
            ranks.step(rank)
    assert ranks.saved_at[0] == ranks.saved_at[1]
    assert len(ranks.saved_at[0]) == 1
    assert ranks.saved_at[0][0] > 50


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["step", "poll", "poll", "poll", "ask"])), max_size=150),
)
@settings(deadline=None, max_examples=400)
def test_no_rank_ever_saves_alone(count: int, schedule: list[tuple[int, str]]) -> None:
    ranks = Ranks(count)
    asked = False
    for rank, what in schedule:
        rank %= count
        match what:
            case "step":
                ranks.step(rank)
            case "poll":
                ranks.poll(rank)
            case _:
                ranks.agreements[rank].ask(leave=rank == 0)
                asked = True
    for _ in range(400):  # and then everybody goes on at one pace
        for rank in range(count):
            ranks.poll(rank)
            ranks.step(rank)
    assert all(at == ranks.saved_at[0] for at in ranks.saved_at)
    assert bool(ranks.saved_at[0]) == asked


def test_the_training_thread_waits_for_a_verdict_and_goes_on_when_none_comes(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.due(1)
    assert gate.promise(Proposal(1, 2, leave=False))
    assert gate.due(2, timeout_s=0.01) is None
    assert "no agreement" in caplog.text
    assert gate.promise(Proposal(2, 3, leave=False))
    decider = threading.Timer(0.01, gate.decide, (2, True))
    decider.start()
    assert gate.due(3) == Proposal(2, 3, leave=False)
    decider.join()


def test_a_script_that_checkpoints_every_few_steps_saves_at_the_first_of_them_after_the_proposal() -> None:
    gate = Gate()
    gate.due(10)
    assert gate.promise(Proposal(1, 12, leave=True))
    gate.decide(1, agreed=True)
    assert gate.due(20) == Proposal(1, 12, leave=True)


@pytest.mark.parametrize("world_size", [1, 8, 12_500, 100_000])
def test_the_more_ranks_there_are_the_more_seldom_each_asks_the_store(world_size: int) -> None:
    agreement = Agreement(Board(HashStore()), Gate(), rank=1, world_size=world_size)
    assert world_size / agreement.poll() <= REQUESTS_PER_S_MAX
    assert agreement.poll() == POLL_S or world_size > 12_500
