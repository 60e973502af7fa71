"""Which questions to the policies go out when."""

from __future__ import annotations

from holdfast.supervisor.core import State
from holdfast.supervisor.policies.questions import PER_TURN_BEHIND_MAX, PER_TURN_MAX, Questions
from holdfast.supervisor.protocol import Evaluate


def storm(incidents: int) -> tuple[Questions, State]:
    """So many incidents of as many jobs, each waiting for its policy."""
    names = [f"i-{index}" for index in range(incidents)]
    questions = Questions()
    for index, name in enumerate(names):
        questions.add(Evaluate(name, f"job{index}"))
    return questions, State(questions=tuple(names))


def incidents(asked: list[Evaluate]) -> list[str]:
    return [question.incident for question in asked]


def test_one_fault_is_asked_about_at_once_whatever_waits() -> None:
    questions, state = storm(1)
    assert incidents(questions.due(state, behind=True)) == ["i-0"]
    assert not questions


def test_while_facts_wait_few_are_asked_and_every_turn_asks_some() -> None:
    questions, state = storm(3 * PER_TURN_BEHIND_MAX)
    asked = [questions.due(state, behind=True) for _ in range(3)]
    assert [len(each) for each in asked] == [PER_TURN_BEHIND_MAX] * 3
    assert incidents([question for each in asked for question in each]) == list(state.questions)
    assert not questions


def test_no_turn_has_more_answers_to_fold_than_a_lease_can_wait_for() -> None:
    questions, state = storm(PER_TURN_MAX + 1)
    assert len(questions.due(state, behind=False)) == PER_TURN_MAX
    assert questions
    assert incidents(questions.due(state, behind=False)) == [f"i-{PER_TURN_MAX}"]


def test_what_nobody_wants_to_know_any_more_is_not_asked() -> None:
    questions, _ = storm(PER_TURN_MAX + 2)
    last = f"i-{PER_TURN_MAX + 1}"
    assert incidents(questions.due(State(questions=(last,)), behind=True)) == [last]
    assert not questions


def test_what_is_asked_twice_before_it_goes_out_is_asked_once() -> None:
    questions, state = storm(2)
    questions.add(Evaluate("i-0", "job0"))
    assert incidents(questions.due(state, behind=False)) == ["i-0", "i-1"]
