"""An order that nobody answers is sent again, ever more rarely, to nodes that can hear it."""

from __future__ import annotations

import itertools

from holdfast.domain.orders import Stop
from holdfast.supervisor.agents.unanswered import FIRST_S, PAUSE_S_MAX, Unanswered
from holdfast.supervisor.protocol import Send

OUTBOX = {command: Send(node, command, Stop("job", 1)) for command, node in (("c-1", "n0"), ("c-2", "n1"))}


def times(unanswered: Unanswered, until_s: int, nodes: set[str]) -> list[int]:
    """When the order for n0 goes out again."""
    return [at for at in range(until_s) if any(send.node == "n0" for send in unanswered.due(OUTBOX, nodes, float(at)))]


def test_an_order_is_sent_again_ever_more_rarely() -> None:
    sent = times(Unanswered(), 200, {"n0", "n1"})
    assert sent[0] == FIRST_S
    pauses = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert pauses == sorted(pauses)
    assert max(pauses) == PAUSE_S_MAX


def test_an_answered_order_and_one_of_a_node_without_a_session_are_not_sent() -> None:
    unanswered = Unanswered()
    assert not unanswered.due(OUTBOX, {"n1"}, 0.0)
    assert [send.node for send in unanswered.due(OUTBOX, {"n1"}, 10.0)] == ["n1"]
    assert not unanswered.due({}, {"n0", "n1"}, 100.0)


def test_a_node_that_is_back_has_its_time_to_answer() -> None:
    unanswered = Unanswered()
    unanswered.due(OUTBOX, set(), 0.0)
    assert not unanswered.due(OUTBOX, {"n0"}, 50.0), "the core has sent it with the Hello"
    assert unanswered.due(OUTBOX, {"n0"}, 50.0 + FIRST_S)
