"""The default policy, the check of answers, and scripts that do what scripts do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.domain import old_evidence
from holdfast.domain.errors import PolicyError
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import Action, ActionKind, Incident
from holdfast.policy import JobView, check, cordon, default, hot_swap, notify, restart, scale_down, scale_up, stop
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job, try_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.py"


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


def test_the_second_worker_fault_on_a_node_swaps_it_when_a_spare_is_free() -> None:
    before = replace(incident("worker_crash"), t_fault=900.0)
    assert ask("worker_crash", recent=(before,)) == Action(
        ActionKind.HOT_SWAP,
        "n1 has had 2 worker faults in 10 minutes: the node is suspect and a spare is free",
        ("n1",),
    )
    assert ask("worker_crash", recent=(before,), spares=()).kind is ActionKind.RESTART
    assert ask("worker_crash", recent=(replace(before, t_fault=300.0),)).kind is ActionKind.RESTART


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


def test_a_node_that_is_back_restarts() -> None:
    assert ask("node_lost", unusable=()).kind is ActionKind.RESTART


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
        ("gpu_error", Action(ActionKind.GPU_RESET, "x"), {}, "not available"),
        ("gpu_error", cordon("x"), {}, "names no node"),
    ],
)
def test_what_cannot_be_done_is_said(kind: str, action: Action, changes: dict[str, object], said: str) -> None:
    view = replace(sample_job(incident(kind)), **changes)  # type: ignore[arg-type]
    assert said in check(action, incident(kind), view)


def test_healthy_replicas() -> None:
    view = replace(sample_job(incident("node_lost")), unusable=("n1",))
    assert (view.dp, view.healthy_replicas) == (3, 2)


# ---------------------------------------------------------------- scripts


@pytest.fixture
def script(tmp_path: Path) -> Iterator[PolicyScript]:
    with PolicyScript(tmp_path / "policy.py", deadline_s=0.5) as one:
        yield one


def decide(script: PolicyScript, source: str) -> Action:
    Path(script.path).write_text(source)
    crash = incident("worker_crash")
    return script.decide(crash, sample_job(crash))


def test_the_example_answers_every_incident_with_what_can_be_done() -> None:
    trials = try_script(EXAMPLE)
    assert {trial.kind for trial in trials} >= {FindingKind.NODE_LOST, FindingKind.HANG, "repair"}
    assert [trial.problem for trial in trials if trial.problem] == []
    assert len(EXAMPLE.read_text().splitlines()) <= 30


def test_a_script_decides_may_print_and_is_loaded_again_when_it_changes(script: PolicyScript) -> None:
    source = "from holdfast.policy import *\nprint('hello')\ndef decide(i, j):\n    print(i)\n    return stop({!r})\n"
    assert decide(script, source.format("one")) == stop("one")
    assert decide(script, source.format("three")) == stop("three")


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
        ("def decide(i, j):\n    while True: pass\n", r"took longer than 0\.5 s"),
        ("import os\ndef decide(i, j):\n    os._exit(1)\n", "its process ended"),
        (
            "from holdfast.policy import *\ndef decide(i, j):\n    return Action('explode', 'x')\n",
            "makes no sense|no valid Action",
        ),
    ],
)
def test_a_useless_script_is_an_error_that_says_where(script: PolicyScript, source: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        decide(script, source)


def test_a_script_that_overran_is_asked_again_in_a_new_process(script: PolicyScript) -> None:
    with pytest.raises(PolicyError, match="took longer"):
        decide(script, "def decide(i, j):\n    while True: pass\n")
    assert decide(script, "from holdfast.policy import *\ndef decide(i, j):\n    return restart('fine now')\n")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="No such file"):
        PolicyScript(tmp_path / "missing.py").load()


def test_the_view_is_frozen() -> None:
    view: JobView = sample_job(incident("hang"))
    with pytest.raises(AttributeError):
        view.step = 5  # type: ignore[misc]
