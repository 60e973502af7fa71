"""The roster: newest generations, placements, stops and new runs, from whatever order the nodes report them in."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.diagnostics.roster import Placement, Roster, RunStarted
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, GenerationStopped, Phase, RankProgress, WorkerExited

T0 = 1_700_000_000.0
MESH = Mesh.of({"dp": 4})


def started(
    node: str = "n0", number: int = 1, ranks: tuple[int, ...] = (0, 1), *, at: float = T0, submission: str = ""
) -> GenerationStarted:
    return GenerationStarted(node, at, "gpt", number, MESH, ranks, HangSpec(floor_s=7.0), submission)


def progress(node: str = "n0", number: int = 1, ranks: tuple[int, ...] = (0, 1)) -> RankProgress:
    n = len(ranks)
    return RankProgress(
        node, T0, "gpt", number, ranks, (1,) * n, (Phase.STEP,) * n, (T0,) * n, ("S",) * n, (0.0,) * n, (-1,) * n
    )


def stopped(node: str = "n0", number: int = 1, *, finished: bool = False, submission: str = "") -> GenerationStopped:
    return GenerationStopped(node, T0, "gpt", number, finished, submission)


def exited(node: str, number: int, rank: int, *, submission: str = "") -> WorkerExited:
    return WorkerExited(node, T0, "gpt", number, rank, 1, 1, None, 0, False, submission=submission)


def of(*items: object) -> Roster:
    roster = Roster()
    for item in items:
        roster.observe(item)
    return roster


def test_starts_describe_a_generation() -> None:
    roster = of(started(at=T0 + 2), started("n1", ranks=(2, 3), at=T0 + 1))
    generation = roster.current("gpt", 1)
    assert generation is not None
    assert (generation.mesh, generation.world_size, generation.hang.floor_s) == (MESH, 4, 7.0)
    assert (generation.started_at, generation.starts) == (T0 + 1, {"n0": T0 + 2, "n1": T0 + 1})
    assert (generation.node_of, generation.spread) == ({0: "n0", 1: "n0", 2: "n1", 3: "n1"}, True)
    assert roster.on("n1") == {"gpt": Placement(1, (2, 3))}
    assert (roster.last_job("n1"), roster.began_at("gpt"), roster.newest_started("gpt")) == ("gpt", T0 + 1, 1)


def test_nothing_is_known_of_strangers() -> None:
    roster = Roster()
    assert (roster.current("gpt", 1), roster.generation("gpt", 1), roster.began_at("gpt")) == (None, None, None)
    assert (roster.on("n0"), roster.last_job("n0"), roster.newest_started("gpt")) == ({}, "", -1)
    assert not roster.is_new_run(started())


def test_a_newer_generation_is_current_and_the_older_one_is_kept() -> None:
    roster = of(started(), started("n1", 2))
    assert roster.current("gpt", 1) is None
    assert roster.current("gpt", 2) is not None
    assert roster.generation("gpt", 1) is not None
    assert roster.on("n0") == {"gpt": Placement(1, (0, 1))}, "its node has not moved on yet"


def test_few_generations_of_a_job_are_kept() -> None:
    roster = of(*(started(number=number) for number in range(1, 100)), exited("n0", 1, 0), stopped(number=2))
    assert roster.generation("gpt", 1) is None
    assert roster.generation("gpt", 95) is None
    assert roster.current("gpt", 99) is not None
    assert roster.on("n0") == {"gpt": Placement(99, (0, 1))}


def test_progress_places_ranks_for_a_process_that_started_late() -> None:
    roster = of(progress("n0", 3, (0, 1)))
    generation = roster.current("gpt", 3)
    assert generation is not None
    assert (generation.mesh, generation.world_size, generation.node_of) == (None, 0, {})
    assert roster.on("n0") == {"gpt": Placement(3, (0, 1))}
    assert roster.newest_started("gpt") == -1


def test_a_placement_lists_the_ranks_as_they_were_first_reported() -> None:
    assert of(started(), progress(ranks=(1,))).on("n0") == {"gpt": Placement(1, (0, 1))}


def test_a_stop_ends_a_placement_and_late_progress_does_not_restore_it() -> None:
    for late in (progress(), started(), progress(number=0)):
        roster = of(started(), stopped(), late)
        assert roster.on("n0") == {}
    assert of(started(), stopped(), started(number=2)).on("n0") == {"gpt": Placement(2, (0, 1))}


def test_one_node_that_stops_on_purpose_ends_the_generation_and_those_before() -> None:
    roster = of(started(), started("n1", ranks=(2, 3)), started("n2", 2, (2, 3)), stopped("n2", 2))
    for number in (1, 2):
        generation = roster.generation("gpt", number)
        assert generation is not None
        assert generation.over
    generation = roster.generation("gpt", 2)
    assert generation is not None
    assert generation.left == {"n2"}
    assert roster.on("n0") == {"gpt": Placement(1, (0, 1))}, "this node has not stopped its ranks yet"


def test_a_stop_that_comes_before_its_start_ends_the_generation_as_well() -> None:
    generation = of(stopped(number=2), started("n1", 1), started("n1", 2)).generation("gpt", 1)
    assert generation is not None
    assert generation.over


def test_ranks_that_all_finished_leave_and_the_generation_goes_on() -> None:
    roster = of(started(), started("n1", ranks=(2, 3)), stopped(finished=True))
    generation = roster.current("gpt", 1)
    assert generation is not None
    assert not generation.over
    assert generation.left == {"n0"}
    assert roster.on("n0") == {}


def test_an_exit_tells_where_a_rank_was() -> None:
    generation = of(exited("n9", 4, 3)).generation("gpt", 4)
    assert generation is not None
    assert (generation.node_of, generation.nodes) == ({3: "n9"}, {"n9"})
    assert of(exited("n9", 4, 3)).current("gpt", 4) is None, "only a start or progress makes a generation the newest"


def test_another_submission_is_a_new_run() -> None:
    roster = of(started(submission="s1"), started("n1", ranks=(2, 3), submission="s1"))
    assert not roster.is_new_run(started(number=2, submission="s1"))
    assert roster.is_new_run(started(submission="s2"))


def replaced(*, over: bool) -> Roster:
    """A run whose generation 7 was on two nodes, and generation 1 of the run that has replaced it."""
    roster = of(started(number=7, submission="s1"), started("n1", 7, (2, 3), submission="s1"))
    if over:
        roster.observe(stopped(number=7, submission="s1"))
    roster.observe(RunStarted("gpt", "n2"))
    roster.observe(started("n2", 1, (0, 1), submission="s2"))
    return roster


def test_late_signals_of_an_earlier_run_are_recognized_whatever_their_generation() -> None:
    roster = replaced(over=True)
    for late in (
        started("n1", 7, submission="s1"),
        started("n3", 7, submission="s1"),
        stopped("n1", 7, submission="s1"),
        exited("n1", 7, 2, submission="s1"),
        exited("n3", 1, 0, submission="s1"),
        progress("n1", 7),
    ):
        assert roster.is_of_earlier_run(late), late
    for present in (
        started("n0", 1, submission="s2"),
        exited("n2", 1, 0, submission="s2"),
        exited("n2", 1, 0),
        progress("n2", 1),
        progress("n3", 1),
        started("n1", 8, submission="s1"),
        started("n1", 1, submission="s3"),
    ):
        assert not roster.is_of_earlier_run(present), present


def test_a_node_of_an_earlier_run_belongs_to_the_new_one_once_it_has_started_ranks_of_it() -> None:
    roster = replaced(over=True)
    assert roster.is_of_earlier_run(progress("n1", 1))
    roster.observe(started("n1", 1, (2, 3), submission="s2"))
    assert not roster.is_of_earlier_run(progress("n1", 1))
    assert roster.is_of_earlier_run(exited("n1", 7, 2, submission="s1"))


def test_a_run_that_no_node_has_left_may_go_on() -> None:
    """Diagnostics that was restarted may hear of the older of two runs last."""
    roster = replaced(over=False)
    assert not roster.is_of_earlier_run(progress("n1", 7))
    assert roster.is_of_earlier_run(started("n1", 7, submission="s1")), "a repeat"
    again = started("n3", 7, submission="s1")
    assert not roster.is_of_earlier_run(again)
    assert roster.is_new_run(again)


def test_a_node_that_begins_the_next_run_has_left_the_one_before() -> None:
    roster = of(started(number=7, submission="s1"), started("n1", 7, (2, 3), submission="s1"))
    roster.observe(RunStarted("gpt", "n0"))
    roster.observe(started("n0", 1, submission="s2"))
    assert roster.is_of_earlier_run(progress("n1", 7))
    assert not roster.is_of_earlier_run(progress("n0", 1))


def test_a_run_that_goes_on_replaces_the_one_that_seemed_to_have_replaced_it() -> None:
    roster = replaced(over=True)
    later = started("n1", 8, (2, 3), submission="s1")
    assert roster.is_new_run(later)
    roster.observe(RunStarted("gpt", "n1"))
    roster.observe(later)
    assert roster.newest_started("gpt") == 8
    assert not roster.is_of_earlier_run(stopped("n1", 8, submission="s1"))
    assert roster.is_of_earlier_run(exited("n2", 1, 0, submission="s2"))


def test_an_exit_before_any_start_begins_a_run_after_one_that_has_ended_or_never_started() -> None:
    running = started(submission="s1")
    exit_of_next = exited("n0", 1, 0, submission="s2")
    assert not of(running).is_new_run(exit_of_next)
    assert of(running, stopped(submission="s1")).is_new_run(exit_of_next)
    assert of(exited("n0", 1, 1, submission="s1")).is_new_run(exit_of_next)
    assert not of(exited("n0", 1, 1, submission="s1")).is_new_run(exited("n0", 1, 0, submission="s1"))
    assert not of(running, stopped(submission="s1")).is_new_run(exited("n0", 1, 0)), "an agent of an earlier version"
    began = of(exit_of_next)
    assert not began.is_new_run(started(submission="s2")), "its exit is not forgotten"


def test_few_earlier_runs_are_kept() -> None:
    roster = Roster()
    for number in range(100):
        roster.observe(RunStarted("gpt", "n0"))
        roster.observe(started(number=1, submission=f"s{number}"))
    known = [number for number in range(100) if roster.is_of_earlier_run(exited("n9", 1, 0, submission=f"s{number}"))]
    assert known == [95, 96, 97, 98]


def test_without_submissions_a_stopped_number_that_starts_again_is_a_new_run() -> None:
    roster = of(started(number=3))
    assert not roster.is_new_run(started("n1", 3)), "another node of the same generation"
    assert not roster.is_new_run(started("n1", 2)), "a late report"
    roster.observe(stopped(number=3))
    assert roster.is_new_run(started(number=3))
    assert roster.is_new_run(started(number=1))
    assert not roster.is_new_run(started(number=4))
    roster.observe(started(number=4))
    assert not roster.is_new_run(started(number=3)), "generation 4 has not been stopped"


def test_a_new_run_forgets_the_job_and_no_other() -> None:
    roster = of(started(), started("n1", ranks=(2, 3)), progress("n2", 1, (2,)))
    roster.observe(GenerationStarted("n1", T0, "other", 7, MESH, (0,), HangSpec()))
    roster.observe(RunStarted("gpt"))
    assert roster.generation("gpt", 1) is None
    assert (roster.began_at("gpt"), roster.newest_started("gpt")) == (None, -1)
    assert [roster.on(node) for node in ("n0", "n1", "n2")] == [{}, {"other": Placement(7, (0,))}, {}]


def test_a_job_that_makes_progress_outlives_any_number_of_jobs_that_have_ended() -> None:
    roster = of(started())
    for number in range(40_000):
        roster.observe(GenerationStarted("n1", T0, f"job{number}", 1, MESH, (0,), HangSpec()))
        if number % 1000 == 0:
            roster.observe(progress())
    assert roster.current("gpt", 1) is not None
    assert roster.current("job0", 1) is None
    assert len(roster.on("n1")) < 100


def test_progress_restores_a_job_that_was_forgotten() -> None:
    roster = of(started())
    for number in range(40_000):
        roster.observe(GenerationStarted("n1", T0, f"job{number}", 1, MESH, (0,), HangSpec()))
    assert roster.current("gpt", 1) is None
    roster.observe(progress())
    generation = roster.current("gpt", 1)
    assert generation is not None
    assert generation.nodes == {"n0"}


SIGNALS = st.lists(
    st.one_of(
        st.builds(started, st.sampled_from(["n0", "n1"]), st.integers(1, 9)),
        st.builds(progress, st.sampled_from(["n0", "n1"]), st.integers(1, 9)),
        st.builds(stopped, st.sampled_from(["n0", "n1"]), st.integers(1, 9), finished=st.booleans()),
        st.builds(exited, st.sampled_from(["n0", "n1"]), st.integers(1, 9), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(SIGNALS)
@example([started("n0", 1), *(stopped("n0", number) for number in (2, 3, 4, 5))])
@example([started("n0", 1), *(stopped("n0", number) for number in (3, 4, 5)), started("n0", 2)])
@example([*(stopped("n0", number) for number in (2, 3, 4, 5)), started("n0", 1)])
def test_in_any_order(signals: list[object]) -> None:
    """The newest generation is the largest that was reported to run, and no node is placed in one that it has left."""
    roster = of(*signals)
    newest = max(
        (item.generation for item in signals if isinstance(item, GenerationStarted | RankProgress)), default=-1
    )
    assert [number for number in range(10) if roster.current("gpt", number) is not None] == [newest] * (newest > 0)
    for node in ("n0", "n1"):
        left = [item.generation for item in signals if isinstance(item, GenerationStopped) and item.node == node]
        for placement in roster.on(node).values():
            generation = roster.generation("gpt", placement.generation)
            assert generation is None or node not in generation.left
            assert placement.generation <= newest
            assert placement.generation not in left
