"""An order that nobody answers is sent again to nodes that can hear it: ever more rarely, or a start at an even pace."""

from __future__ import annotations

import itertools

import pytest

from holdfast.domain.generations import Placement
from holdfast.domain.job import CheckpointSpec, HangSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Prepare, Start, Stop
from holdfast.supervisor.agents.unanswered import FIRST_S, PAUSE_S_MAX, Unanswered
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Broadcast, Send

STOPS = {command: Send(node, command, Stop("job", 1)) for command, node in (("c-1", "n0"), ("c-2", "n1"))}
PREPARE = Prepare(
    job="job",
    generation=1,
    attempt=1,
    mesh=Mesh.of({"dp": 2}),
    placement=Placement(0, "n0", 0, 1),
    nnodes=2,
    launch=LaunchSpec(script="/train.py"),
    checkpoint=CheckpointSpec(),
    hang=HangSpec(),
    token="secret",
    restore_step=0,
)
PLACEMENTS = (Placement(0, "n0", 0, 1), Placement(1, "n1", 1, 1))


def broadcast(order: Prepare | Start) -> State:
    return State(broadcasts={"job": Broadcast("c-3", order, PLACEMENTS)}, unanswered={"job": Numbers((0, 1))})


OUTBOXES = (State(outbox=STOPS), broadcast(PREPARE))

of_both = pytest.mark.parametrize("outbox", OUTBOXES, ids=["orders", "broadcast"])


def times(unanswered: Unanswered, outbox: State, until_s: int, nodes: set[str]) -> list[int]:
    """When the order for n0 goes out again."""
    return [at for at in range(until_s) if any(send.node == "n0" for send in unanswered.due(outbox, nodes, float(at)))]


@of_both
def test_an_order_is_sent_again_ever_more_rarely(outbox: State) -> None:
    sent = times(Unanswered(), outbox, 200, {"n0", "n1"})
    assert sent[0] == FIRST_S
    pauses = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert pauses == sorted(pauses)
    assert max(pauses) == PAUSE_S_MAX


def test_a_start_is_sent_again_at_an_even_pace() -> None:
    sent = times(Unanswered(), broadcast(Start("job", 1, "n0:1")), 100, {"n0", "n1"})
    assert {later - earlier for earlier, later in itertools.pairwise(sent)} == {FIRST_S}


@of_both
def test_an_answered_order_and_one_of_a_node_without_a_session_are_not_sent(outbox: State) -> None:
    unanswered = Unanswered()
    assert not unanswered.due(outbox, {"n1"}, 0.0)
    assert [send.node for send in unanswered.due(outbox, {"n1"}, 10.0)] == ["n1"]
    assert not unanswered.due(State(), {"n0", "n1"}, 100.0)


@of_both
def test_a_node_that_is_back_has_its_time_to_answer(outbox: State) -> None:
    unanswered = Unanswered()
    unanswered.due(outbox, set(), 0.0)
    assert not unanswered.due(outbox, {"n0"}, 50.0), "the core has sent it with the Hello"
    assert unanswered.due(outbox, {"n0"}, 50.0 + FIRST_S)
