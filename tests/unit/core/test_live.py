"""Which generations may live on which nodes: sets by job say what rows by node would, whoever joins, leaves or is forgotten."""

from __future__ import annotations

from fleet import JOB, job, running
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.evolve import evolve
from holdfast.domain.nodes import NodeFacts, NodeState, RunningWorker
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Stop, WorkersChanged
from holdfast.supervisor.core import Config, Node, State
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.protocol import JobPhase, JobStopRequested, MachineDeleted

NODES, JOBS = [f"n{index}" for index in range(6)], ["a", "b", "c"]
_some = st.lists(st.sampled_from(NODES), unique=True)
_one = st.tuples(st.sampled_from(["join", "leave", "begin", "end"]), _some, st.sampled_from(JOBS), st.integers(1, 4))


def _joining(name: str) -> Node:
    return Node(NodeFacts(name, f"{name}-1", name, "", "", 1, "", 1, "", ""), True, NodeState.SPARE)


@given(st.lists(st.lists(_one, max_size=6), max_size=6))
def test_sets_of_nodes_are_what_each_node_would_know(turns: list[list[tuple[str, list[str], str, int]]]) -> None:
    state, model = State(born=1.0), dict[str, dict[str, set[int]]]()
    parts = {name: raw for name, raw in snapshot.changes(None, state).items() if raw is not None}
    for steps in turns:
        turn = Turn(state, 2.0)
        for what, some, of, generation in steps:
            known = [name for name in some if name in model]
            if what == "join":
                for name in set(some) - model.keys():
                    turn.add_node(_joining(name))
                    model[name] = {}
            for name in known:
                by_job = model[name]
                match what:
                    case "leave":
                        turn.drop_node(name)
                        del model[name]
                    case "begin":
                        by_job[of] = by_job.get(of, set()) | {generation}
                    case "end":
                        by_job[of] = {each for each in by_job.get(of, ()) if each > generation}
            if what == "begin" and known:
                turn.begin_live(of, generation, known)
            if what == "end":
                turn.end_live(of, known, generation)
        before, state = state, turn.finish()
        for name, by_job in model.items():
            expected = {each: tuple(sorted(by_job[each])) for each in sorted(by_job) if by_job[each]}
            assert state.live_on(state.nodes[name]) == expected
            assert turn.found(By.HELD, name) == [*expected]
        numbers = [node.number for node in state.nodes.values()]
        assert sorted([*numbers, *state.unused_numbers]) == [*range(len(numbers) + len(state.unused_numbers))]
        assert all(live and all(live.values()) for live in state.live.values())
        assert state.index is None or state.index == index_of(state)
        changes = snapshot.changes(before, state, turn.written)
        parts = {name: raw for name, raw in (parts | changes).items() if raw is not None}
        assert snapshot.load(parts) == state


def test_a_node_that_takes_the_number_of_a_forgotten_one_holds_nothing_of_it() -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.report("n2", WorkersChanged(3, (RunningWorker("unknown", 4, 0, 77, fleet.now),)))
    forgotten = fleet.state.nodes["n2"]
    assert fleet.state.live_on(forgotten) == {"unknown": (4,)}
    fleet.lose("n2")
    fleet.fold(MachineDeleted(fleet.now, "n2", "its machine is gone"))
    assert "n2" not in fleet.state.nodes
    assert fleet.state.live.keys() == {JOB}
    assert fleet.state.unused_numbers == Numbers([forgotten.number])
    fleet.connect("n3")
    assert fleet.state.nodes["n3"].number == forgotten.number
    assert not fleet.state.unused_numbers
    assert fleet.state.live_on(fleet.state.nodes["n3"]) == {}
    fleet.lose("n1")
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.nodes() == ("n0", "n3")


def test_a_job_that_is_removed_is_still_held_by_the_node_that_has_not_stopped_it() -> None:
    """The list of finished jobs is limited, and a node that is away when its job ends may still run it."""
    fleet = running(job(dp=2), spares=1)
    fleet.state = evolve(fleet.state, config=Config(finished_jobs_max=0))
    fleet.gone("n1")
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough", False))
    fleet.answer_orders("n1")
    fleet.wait(30.0)
    assert JOB not in fleet.state.jobs
    assert [fleet.state.live_on(fleet.state.nodes[node]) for node in ("n0", "n1")] == [{}, {JOB: (1,)}]
    fleet.submit(job(dp=2))  # the same name again
    assert fleet.nodes() == ("n0", "n2"), "the node that may still run the earlier run is away"
    assert fleet.job.number > 1, "no number is used twice while workers of it may live"
    fleet.hello("n1")
    assert "n1" in fleet.orders(Stop)
    fleet.done("n1", Stop)
    assert fleet.state.live_on(fleet.state.nodes["n1"]) == {}
