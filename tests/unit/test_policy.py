"""The default policy, the check of answers, and scripts that do what scripts do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.domain import old_evidence
from holdfast.domain.errors import PolicyError
from holdfast.domain.findings import Attribution, Blamed, FindingKind, Remedy
from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.domain.job import PolicySpec
from holdfast.domain.mesh import Mesh
from holdfast.policy import (
    JobView,
    PendingReset,
    check,
    cordon,
    default,
    gpu_reset,
    hot_swap,
    notify,
    restart,
    scale_down,
    scale_up,
    stop,
)
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job, try_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.py"
PATIENCE_S = 30.0  # of tests that are not about being late


def incident(kind: str) -> Incident:
    return next(sample for sample in sample_incidents() if sample.kind == kind)


def ask(kind: str, **changes: object) -> Action:
    view = replace(sample_job(incident(kind)), **changes)  # type: ignore[arg-type]
    action = default(incident(kind), view)
    assert not check(action, incident(kind), view), "the default answers what can be done"
    assert action.reason
    return action


# ---------------------------------------------------------------- the default


@pytest.mark.parametrize("kind", ["worker_crash", "worker_exception", "hang", "ranks_missing"])
def test_worker_faults_restart_in_place(kind: str) -> None:
    assert ask(kind).kind is ActionKind.RESTART


def test_a_script_that_cannot_begin_is_stopped_at_the_first_start_only() -> None:
    cannot = replace(
        incident("worker_crash"),
        attribution=Attribution(blame=Blamed.USER, error_class="usage"),
        cause="exited with 2.",
    )
    view = replace(sample_job(cannot), spares=(), step=0, furthest_step=0, recent=())
    assert default(cannot, view).kind is ActionKind.STOP
    assert "exited with 2." in default(cannot, view).reason
    for changes in (
        {"spares": ("n9",)},
        {"step": 3},
        {"furthest_step": 3},
        {"recent": (replace(cannot, fault_at=900.0),)},
    ):
        assert default(cannot, replace(view, **changes)).kind is not ActionKind.STOP
    for other in (Attribution(blame=Blamed.UNKNOWN, error_class="usage"), Attribution(blame=Blamed.USER)):
        assert default(replace(cannot, attribution=other), view).kind is ActionKind.RESTART


def test_a_hang_that_waits_for_a_node_without_contact_takes_a_spare_at_once() -> None:
    hang = replace(incident("hang"), recommended_actions=(Remedy.REPLACE_NODE,))
    view = sample_job(hang)
    assert hang.node in view.nodes
    swap = default(hang, view)
    assert (swap.kind, swap.nodes) == (ActionKind.HOT_SWAP, (hang.node,))
    assert default(hang, replace(view, spares=())).kind is ActionKind.RESTART
    assert default(replace(hang, node=""), view).kind is ActionKind.RESTART


def test_the_second_worker_fault_on_a_node_swaps_it_when_a_spare_is_free() -> None:
    before = replace(incident("worker_crash"), fault_at=900.0)
    assert ask("worker_crash", recent=(before,)) == Action(
        ActionKind.HOT_SWAP,
        "n1 has had 2 worker faults in 10 minutes: the node is suspect and a spare is free",
        ("n1",),
    )
    assert ask("worker_crash", recent=(before,), spares=()).kind is ActionKind.RESTART
    assert ask("worker_crash", recent=(replace(before, fault_at=300.0),)).kind is ActionKind.RESTART


def test_the_reason_of_a_restart_is_what_the_evidence_bears_out() -> None:
    """Nothing is called healthy that the evidence blames, or that nobody has looked at."""

    def reason(kind: str, spares: tuple[str, ...] = (), **evidence: str) -> str:
        fault = replace(incident(kind), evidence=evidence, attribution=old_evidence.attribution(kind, evidence))
        return default(fault, replace(sample_job(fault), unusable=(), spares=spares)).reason

    hardware: dict[str, Any] = {"blame": "hardware", "because": "at the same time: Xid 94"}
    assert "the failure is attributed to the hardware of n1 (at the same time: Xid 94), and no spare is free" in reason(
        "worker_crash", **hardware
    )
    assert "at the next fault a spare takes over" in reason("worker_crash", ("n9",), **hardware)
    assert "attributed to the script (seen twice)" in reason("worker_exception", blame="user", because="seen twice")
    assert "the failure is not attributed to a node" in reason("hang")
    assert not any("healthy" in reason(kind) for kind in ("worker_crash", "worker_exception", "hang", "gpu_error"))


@pytest.mark.parametrize("kind", ["node_lost", "gpu_error"])
def test_node_faults_swap_else_shrink_else_wait(kind: str) -> None:
    assert ask(kind).kind is ActionKind.HOT_SWAP
    assert ask(kind, spares=(), reachable_dp=2) == replace(ask(kind, spares=(), reachable_dp=2), dp=2)
    assert ask(kind, spares=(), reachable_dp=2).kind is ActionKind.SCALE_DOWN
    assert ask(kind, spares=(), reachable_dp=0).kind is ActionKind.WAIT


@pytest.mark.parametrize("kind", ["gpu_error", "worker_crash", "node_lost", "hang"])
def test_a_gpu_that_must_be_reset_is_reset_whatever_was_found(kind: str) -> None:
    due: dict[str, Any] = {"unusable": ("n1",), "resets": {"n1": PendingReset((0, 3))}, "resettable": ("n1",)}
    assert ask(kind, **due).kind is ActionKind.GPU_RESET
    assert "GPU 0, 3 of n1 must be reset before it is used again" in ask(kind, **due).reason
    assert ask(kind, **due, spares=()).kind is ActionKind.GPU_RESET
    assert ask(kind, **{**due, "unusable": ("n1", "n2")}, spares=("n8", "n9")).kind is ActionKind.HOT_SWAP


@pytest.mark.parametrize("kind", ["gpu_error", "worker_crash"])
def test_a_gpu_that_cannot_be_reset_is_treated_as_a_lost_node(kind: str) -> None:
    pending = PendingReset((), "its agent has no command that resets GPUs")
    due: dict[str, Any] = {"unusable": ("n1",), "resets": {"n1": pending}}
    assert ask(kind, **due).kind is ActionKind.HOT_SWAP
    assert "a GPU of n1 must be reset before it is used again, which is not possible (its agent has no command" in (
        ask(kind, **due).reason
    )
    assert ask(kind, **due, spares=(), reachable_dp=2).kind is ActionKind.SCALE_DOWN
    assert ask(kind, **due, spares=(), reachable_dp=0).kind is ActionKind.WAIT


def test_a_node_that_is_back_restarts() -> None:
    assert ask("node_lost", unusable=()).kind is ActionKind.RESTART


def test_a_node_that_the_job_has_no_more_is_not_replaced_again() -> None:
    """A decision may be made again when the next generation, without the node, is planned and not started."""
    gone: dict[str, Any] = {"nodes": ("n0", "n9", "n2"), "unusable": ()}
    before = replace(incident("worker_crash"), fault_at=900.0)
    assert ask("worker_crash", recent=(before,), **gone).kind is ActionKind.RESTART
    again = ask("silent_corruption", **gone)
    assert again.kind is ActionKind.RESTART
    assert "n1, which computes wrong results, has already been removed" in again.reason
    assert ask("silent_corruption", **{**gone, "unusable": ("n2",)}) == Action(
        ActionKind.HOT_SWAP, "n2 cannot be used, and a spare node is free", ("n2",)
    )


def test_a_node_that_computes_wrong_results_leaves_with_the_others_that_cannot_be_used() -> None:
    out: dict[str, Any] = {"unusable": ("n1", "n2")}
    assert ask("silent_corruption", **out, spares=("n8", "n9")).nodes == ("n1", "n2")
    fewer = ask("silent_corruption", **out, spares=("n9",), reachable_dp=2)
    assert (fewer.kind, fewer.dp) == (ActionKind.SCALE_DOWN, 2)


def test_no_progress_stops_and_so_does_the_users_bug() -> None:
    assert ask("worker_crash", restarts_without_progress=3).kind is ActionKind.STOP
    assert ask("repeated_exception").kind is ActionKind.STOP


def test_a_repair_scales_up() -> None:
    assert (ask("repair").kind, ask("repair").dp) == (ActionKind.SCALE_UP, 3)


# ---------------------------------------------------------------- answers that cannot be carried out


@pytest.mark.parametrize(
    ("kind", "action", "changes", "said"),
    [
        ("worker_crash", Action(ActionKind.RESTART, ""), {}, "has no reason"),
        ("node_lost", restart("x"), {}, "restart needs every node of the job, but n1 cannot be used"),
        ("node_lost", hot_swap("x"), {"spares": ()}, "needs 1 spare node; free: 0"),
        ("repair", hot_swap("x"), {}, "names no node"),
        ("node_lost", scale_down("x", dp=3), {}, "runs dp 3"),
        ("node_lost", scale_down("x", "n1"), {"min_dp": 3}, "its minimum number of replicas"),
        ("repair", scale_up("x", dp=9), {}, "accepts at most 4"),
        ("repair", scale_up("x"), {"reachable_dp": 2}, "the available nodes can run 2"),
        ("hang", notify("x"), {}, "is only for a running job"),
        ("gpu_error", gpu_reset("x"), {}, "the agent of n1 cannot reset GPUs"),
        ("repair", gpu_reset("x"), {}, "is for faults"),
        ("gpu_error", cordon("x"), {}, "names no node"),
    ],
)
def test_what_cannot_be_done_is_said(kind: str, action: Action, changes: dict[str, object], said: str) -> None:
    view = replace(sample_job(incident(kind)), **changes)  # type: ignore[arg-type]
    assert said in check(action, incident(kind), view)


def test_healthy_replicas() -> None:
    view = replace(sample_job(incident("node_lost")), unusable=("n1",))
    assert (view.dp, view.healthy_replicas) == (3, 2)


def test_replicas_without_a_node_in_any_order_of_the_mesh() -> None:
    view = replace(sample_job(incident("node_lost")), mesh=Mesh.of({"pp": 2, "dp": 3}), nodes=tuple("abcdef"))
    assert [view.replicas_without(*nodes) for nodes in ("a", "ad", "ae", "abc")] == [2, 2, 1, 0]
    assert replace(view, mesh=Mesh.of({"pp": 6, "dp": 2})).replicas_without("b") == 0, (
        "two ranks of each stage on a node"
    )


# ---------------------------------------------------------------- scripts

Decide = Callable[[str], Action]


@pytest.fixture
def decide(tmp_path: Path) -> Iterator[Decide]:
    """Asks a script of this text about a crash."""
    path = tmp_path / "policy.py"
    with ExitStack() as cleanup:

        def ask(source: str) -> Action:
            path.unlink(missing_ok=True)  # its text has travelled: nobody reads the file
            script = cleanup.enter_context(PolicyScript(PolicySpec(str(path), source), deadline_s=PATIENCE_S))
            crash = incident("worker_crash")
            return script.decide(crash, sample_job(crash))

        yield ask


@pytest.mark.parametrize("path", sorted((EXAMPLE.parent / "policies").glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_of_the_docs_answer_every_incident_with_what_can_be_done(path: Path) -> None:
    assert [trial.problem for trial in try_script(PolicySpec(str(path)), deadline_s=PATIENCE_S) if trial.problem] == []
    assert f"(../examples/policies/{path.name})" in (EXAMPLE.parents[1] / "docs" / "policies.md").read_text()


def test_the_examples_of_the_docs_do_what_the_docs_say() -> None:
    slow, crash, lost = (replace(incident(kind)) for kind in ("straggler", "worker_crash", "node_lost"))
    short = replace(sample_job(slow), remaining_s=200.0)  # 20 s are lost, a swap costs 10 s
    answers = {}
    for name in ("spares_are_cheap", "spares_are_dear", "spot_fleet"):
        with PolicyScript(PolicySpec(str(EXAMPLE.parent / "policies" / f"{name}.py")), deadline_s=PATIENCE_S) as script:
            script.load()
            answers[name] = [
                script.decide(slow, short).kind,
                script.decide(crash, replace(sample_job(crash), recent=(replace(crash, fault_at=900.0),))).kind,
                script.decide(lost, replace(sample_job(lost), spares=(), reachable_dp=2)).kind,
            ]
            due = replace(
                incident("gpu_error"),
                severity="warning",
                recommended_actions=(Remedy.WATCH, Remedy.RESET_GPU),
                node="n1",
            )
            answers[name].append(script.decide(due, replace(sample_job(due), resettable=("n1",), remaining_s=1e5)).kind)
    swap, down = ActionKind.HOT_SWAP, ActionKind.SCALE_DOWN
    assert answers == {
        "spares_are_cheap": [swap, swap, down, swap],
        "spares_are_dear": [ActionKind.NOTIFY, ActionKind.RESTART, down, ActionKind.GPU_RESET],
        "spot_fleet": [ActionKind.NOTIFY, swap, down, swap],
    }


def test_a_script_that_saves_nothing_is_not_interrupted_for_a_warning() -> None:
    slow = replace(incident("straggler"), cost_share=0.4)
    view = replace(sample_job(slow), remaining_s=1e6)
    assert default(slow, view).kind is ActionKind.HOT_SWAP
    answer = default(slow, replace(view, reports_steps=False))
    assert answer.kind is ActionKind.NOTIFY
    assert "interrupts this script without a save" in answer.reason


def test_a_warning_is_no_earlier_fault_of_a_node() -> None:
    before = replace(incident("straggler"), fault_at=900.0)
    view = replace(sample_job(before), recent=(before, replace(incident("worker_crash"), fault_at=950.0)))
    assert [each.kind for each in view.recent_on("n1", 600.0)] == [FindingKind.WORKER_CRASH]
    assert view.recent_on("n1", 600.0, FindingKind.STRAGGLER) == (before,)


def test_the_example_answers_every_incident_with_what_can_be_done() -> None:
    trials = try_script(PolicySpec(str(EXAMPLE)), deadline_s=PATIENCE_S)
    assert {trial.kind for trial in trials} >= {FindingKind.NODE_LOST, FindingKind.HANG, "repair"}
    assert [trial.problem for trial in trials if trial.problem] == []
    assert len(EXAMPLE.read_text().splitlines()) <= 30


def test_a_script_decides_and_may_print_and_needs_no_file(decide: Decide) -> None:
    source = "from holdfast.policy import *\nprint('hello')\ndef decide(i, j):\n    print(i)\n    return stop({!r})\n"
    assert decide(source.format("one")) == stop("one")
    assert decide(source.format("three")) == stop("three")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_this_name\n", r"policy\.py:1: ModuleNotFoundError"),
        ("x = 1\ndef decide(:\n", r"policy\.py:2: SyntaxError"),
        ("import sys\nsys.exit(3)\n", r"policy\.py:2: SystemExit"),
        ("x = 1\n", r"it defines no decide\(incident, job\)"),
        ("decide = 5\n", "decide is int, not a function"),
        ("def decide(i, j):\n    return i.colour\n", r"policy\.py:2: AttributeError"),
        ("def decide(i, j):\n    return 'restart'\n", "returned 'restart', not an Action"),
        ("import os\ndef decide(i, j):\n    os._exit(1)\n", "its process ended"),
        (
            "from holdfast.policy import *\ndef decide(i, j):\n    return Action('explode', 'x')\n",
            "makes no sense|no valid Action",
        ),
    ],
)
def test_a_useless_script_is_an_error_that_says_where(decide: Decide, source: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        decide(source)


def test_a_script_that_overran_is_asked_again_in_a_new_process(tmp_path: Path) -> None:
    late = "import os\nfrom holdfast.policy import *\ndef decide(i, j):\n    while not os.path.exists({0!r}): pass\n"
    late += "    return restart('fine now')\n"
    crash = incident("worker_crash")
    with PolicyScript(PolicySpec("p.py", late.format(str(tmp_path / "asked"))), deadline_s=2.0) as script:
        with pytest.raises(PolicyError, match="took longer than 2 s"):
            script.decide(crash, sample_job(crash))
        (tmp_path / "asked").touch()
        assert script.decide(crash, sample_job(crash)).reason == "fine now"


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="No such file"):
        PolicyScript(PolicySpec(str(tmp_path / "missing.py"))).load()


def test_the_view_is_frozen() -> None:
    view: JobView = sample_job(incident("hang"))
    with pytest.raises(AttributeError):
        view.step = 5  # type: ignore[misc]
