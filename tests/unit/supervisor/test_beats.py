"""What of agents' beats is passed to the core: steps, when diagnostics is silent or to end a start, and the starts."""

from __future__ import annotations

from fleet import JOB, Fleet, job, running

from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import OrderDone, Prepare, RanksStarted, RanksStepping, Start, StepReached
from holdfast.supervisor.agents.beats import starts_to_fold, steps_to_fold
from holdfast.supervisor.agents.unanswered import FIRST_S, Unanswered
from holdfast.supervisor.core.progress import SECOND_WITNESS_S, start_patience_s
from holdfast.supervisor.protocol import JobPhase, StartsSeen


def reported(fleet: Fleet, step: int) -> bool:
    """Whether this step is passed to the core; marks it as passed."""
    due = steps_to_fold([("n1", StepReached(JOB, fleet.job.number, step))], fleet.state, fleet.now)
    for _, each in due:
        fleet.beat(each.step)
    return bool(due)


def starting() -> Fleet:
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    fleet.answer_orders()
    fleet.all_live()
    assert fleet.job.phase is JobPhase.STARTING
    return fleet


def test_a_run_of_which_diagnostics_tells_needs_no_beats() -> None:
    fleet = running(job(dp=3))
    fleet.train(20)
    fleet.wait(SECOND_WITNESS_S - 1.0)
    assert not reported(fleet, 25)
    fleet.wait(1.0)
    assert reported(fleet, 26)


def test_the_second_step_of_a_start_is_passed_on_at_once_when_beats_contained_the_first() -> None:
    """The order to start came late, and the ranks' reports of their first steps were lost."""
    fleet = starting()
    assert not reported(fleet, 1)
    fleet.wait(start_patience_s(fleet.job) - 3.0)
    assert reported(fleet, 1)
    fleet.wait(1.0)
    assert reported(fleet, 2)
    fleet.wait(5.0)
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.number == 1


# ---------------------------------------------------------------- starts


def ordered_to_start() -> Fleet:
    """Every node has prepared, and none has answered its order to start."""
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    for node in fleet.nodes():
        fleet.done(node, Prepare)
    assert fleet.job.phase is JobPhase.STARTING
    assert list(fleet.state.unanswered[JOB]) == [0, 1, 2]
    return fleet


def beats_say(fleet: Fleet, *nodes: str, generation: int | None = None) -> list[StartsSeen]:
    """What the core is told when the beats of these nodes name a started generation; then it is."""
    number = fleet.job.number if generation is None else generation
    seen = starts_to_fold([(node, RanksStarted(JOB, number)) for node in nodes], fleet.state, fleet.now)
    for each in seen:
        fleet.fold(each)
    return seen


def test_beats_answer_the_order_to_start() -> None:
    fleet = ordered_to_start()
    first, second, third = fleet.nodes()
    [seen] = beats_say(fleet, first, third)
    assert list(seen.slots) == [0, 2]
    assert list(fleet.state.unanswered[JOB]) == [1]
    assert not beats_say(fleet, first, third), "beats say it twice a second; the core is told once"
    beats_say(fleet, second)
    assert JOB not in fleet.state.broadcasts
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)


def test_the_first_steps_answer_it_too() -> None:
    fleet = ordered_to_start()
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    assert JOB not in fleet.state.broadcasts


def test_first_steps_that_are_reported_after_the_change_is_over_answer_it() -> None:
    fleet = ordered_to_start()
    generation = fleet.job.generation
    assert generation is not None
    fleet.train(2)  # diagnostics is quicker than the nodes' reports
    fleet.wait(fleet.state.config.stepping_s + 0.1)
    fleet.expect(JobPhase.RUNNING)
    assert list(fleet.state.unanswered[JOB]) == [0, 1, 2]
    fleet.step_all()
    assert JOB not in fleet.state.broadcasts


def test_beats_of_another_generation_or_node_answer_nothing() -> None:
    fleet = ordered_to_start()
    assert not beats_say(fleet, *fleet.nodes(), generation=fleet.job.number - 1)
    assert not beats_say(fleet, "nobody")
    fleet.fold(StartsSeen(fleet.now, JOB, fleet.job.number - 1, Numbers((0, 1, 2))))  # folded after the next change
    fleet.fold(StartsSeen(fleet.now, "another", 1, Numbers((0, 1, 2))))
    assert list(fleet.state.unanswered[JOB]) == [0, 1, 2]


def test_a_node_that_prepares_has_not_started() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    assert not beats_say(fleet, *fleet.nodes())
    assert list(fleet.state.unanswered[JOB]) == [0, 1, 2]


def test_an_order_that_no_beat_answers_is_sent_again_and_its_answer_counts() -> None:
    """An agent of an earlier version, one whose workers ended at once, or a session without beats."""
    fleet, unanswered = ordered_to_start(), Unanswered()
    first, second, third = fleet.nodes()
    assert not unanswered.due(fleet.state, {first, second, third}, 0.0)
    beats_say(fleet, first, second)
    [send] = unanswered.due(fleet.state, {first, second, third}, FIRST_S)
    assert (send.node, type(send.order)) == (third, Start)
    fleet.report(third, OrderDone(send.command_id, ok=True, at=fleet.now))
    assert JOB not in fleet.state.broadcasts
    fleet.report(third, OrderDone(send.command_id, ok=True, at=fleet.now))  # the repetition of a repetition
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)


def test_a_start_that_failed_is_still_an_answer() -> None:
    fleet = ordered_to_start()
    number, third = fleet.job.number, fleet.nodes()[2]
    beats_say(fleet, *fleet.nodes()[:2])
    fleet.done(third, Start, ok=False, reason="its workers are gone")
    assert fleet.job.number > number or fleet.job.phase is not JobPhase.STARTING


def test_nobody_answers_for_others_by_reporting_steps() -> None:
    fleet = ordered_to_start()
    first, *_ = fleet.nodes()
    generation = fleet.job.generation
    assert generation is not None
    ranks = tuple(generation.placements[1].ranks)
    fleet.report(first, RanksStepping(JOB, generation.number, ranks, 1, fleet.now))
    assert list(fleet.state.unanswered[JOB]) == [0, 1, 2]
