"""Answers with several rungs as policies write them: how they are built, which are refused, how they travel, how people see
them. What the supervisor does with them is in core/test_recipes.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.explain import story
from holdfast.cli.incidents import _brief
from holdfast.cli.main import application
from holdfast.domain.incidents import Action, ActionKind, Incident, IncidentState, Rung, RungEnd
from holdfast.domain.job import PolicySpec
from holdfast.policy import (
    RUNGS_MAX,
    check,
    checkpoint_now,
    cordon,
    default,
    flaw,
    gpu_reset,
    hot_swap,
    notify,
    restart,
    scale_down,
    stop,
    wait,
)
from holdfast.supervisor.api import incident_views
from holdfast.supervisor.policies.review import Review
from holdfast.supervisor.policies.script import PolicyScript, sample_incidents, sample_job, try_script
from holdfast.supervisor.published import PolicyAsked
from holdfast.wire import records

EXAMPLE = Path(__file__).parents[2] / "examples" / "policies" / "one_try_in_place.py"
RECIPE = (
    gpu_reset("reset")
    .then(restart("start"))
    .within(300)
    .otherwise(cordon("broken", "n1").then(hot_swap("swap", "n1")))
    .otherwise(scale_down("shrink").otherwise(stop("the end")))
)
HEAD = "from holdfast.policy import *\n"


def incident(kind: str) -> Incident:
    return next(sample for sample in sample_incidents() if sample.kind == kind)


# ---------------------------------------------------------------- what a recipe is


def test_a_recipe_is_a_plain_value_with_its_rungs_in_order() -> None:
    assert RECIPE.recipe == (
        "gpu_reset within 300 s otherwise cordon then hot_swap otherwise scale_down otherwise stop"
    )
    assert [rung.kind for rung in RECIPE.rungs] == [
        ActionKind.GPU_RESET, ActionKind.HOT_SWAP, ActionKind.SCALE_DOWN, ActionKind.STOP,
    ]  # fmt: skip
    assert all(not rung.fallbacks for rung in RECIPE.rungs)
    assert records.loads(records.dumps(RECIPE, Action), Action) == RECIPE
    assert hash(RECIPE)


def test_an_action_of_an_earlier_version_is_one_rung() -> None:
    old = b'{"kind":"restart","reason":"x","nodes":[],"dp":null,"retry_s":0.0}'
    assert records.loads(old, Action) == restart("x")
    assert restart("x").rungs == (restart("x"),)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: restart("a").otherwise(stop("b")).then(restart("c")), "joins the steps of one rung"),
        (lambda: notify("a").then(restart("b").otherwise(stop("c"))), "joins the steps of one rung"),
        (lambda: notify("a").then(restart("b").within(5)), "a limit holds for the whole rung"),
        (lambda: restart("a").otherwise(stop("b")).within(5), "a limit holds for one rung"),
    ],
)
def test_what_is_ambiguous_is_an_error_where_it_is_written(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (
            restart("a").then(hot_swap("b")),
            "nothing can follow restart in a rung, only cordon, checkpoint_now, set_interval, notify",
        ),
        (gpu_reset("a").then(hot_swap("b")), "nothing can follow gpu_reset in a rung"),
        (wait("a").then(restart("b")), "nothing can follow wait in a rung"),
        (notify("a").within(5), "notify is done at once: a limit of 5 s has no meaning"),
        (restart("a").within(0.5), "restart: within 0.5 s is not between 1 and 86400"),
        (restart("a").within(float("nan")), "restart: within nan s"),
        (restart("a").otherwise(hot_swap("")), "hot_swap has no reason"),
        (cordon("").then(hot_swap("a")), "cordon has no reason"),
    ],
)
def test_a_recipe_without_a_meaning_is_refused_with_the_reason(action: Action, said: str) -> None:
    assert said in flaw(action)
    lost = incident("worker_crash")
    assert said in check(action, lost, sample_job(lost))


def test_too_many_rungs_are_named() -> None:
    recipe = restart("0")
    for place in range(1, RUNGS_MAX):
        recipe = recipe.otherwise(restart(str(place)))
    assert not flaw(recipe)
    assert flaw(recipe.otherwise(hot_swap("9"))) == (
        "the recipe has 9 rungs, but at most 8 are allowed; hot_swap is the first too many"
    )


def test_a_recipe_is_possible_if_one_of_its_rungs_is() -> None:
    crash = incident("worker_crash")
    job = replace(sample_job(crash), spares=())
    assert "needs 1 spare node" in check(hot_swap("a"), crash, job)
    assert not check(hot_swap("a").otherwise(restart("b")), crash, job)
    problem = check(hot_swap("a").otherwise(scale_down("b", dp=7)), crash, job)
    assert problem.startswith("no rung is possible: hot_swap of n1 needs 1 spare node; free: 0; scale_down to dp 7")


def test_steps_are_checked_with_their_rung() -> None:
    crash, slow = incident("worker_crash"), incident("straggler")
    assert "has ended the run" in check(checkpoint_now("a").then(hot_swap("b")), crash, sample_job(crash))
    assert not check(checkpoint_now("a").then(hot_swap("b")), slow, sample_job(slow))
    assert not check(notify("a").then(restart("b")), crash, sample_job(crash))
    taken = cordon("a", "n2").then(hot_swap("b", "n1"))
    assert check(taken, crash, sample_job(crash)) == "hot_swap of n1, n2 needs 2 spare nodes; free: 1"
    own_spare = cordon("a", "n9").then(hot_swap("b", "n1"))
    assert check(own_spare, crash, sample_job(crash)) == "hot_swap of n1 needs 1 spare node; free: 0"


# ---------------------------------------------------------------- scripts


def test_a_script_answers_a_recipe_and_sees_the_walk(tmp_path: Path) -> None:
    source = HEAD + (
        "def decide(i, j):\n"
        "    if i.walk:\n"
        "        return stop(f'{i.walk[-1].action} {i.walk[-1].end}: {i.walk[-1].why}')\n"
        "    return restart('a').within(60).otherwise(hot_swap('b'))\n"
    )
    crash = incident("worker_crash")
    tried = crash.walked(Rung(1, 1, ActionKind.RESTART, "restart", "a", 1.0, 60.0, 61.0, RungEnd.LATE, "too slow"))
    with PolicyScript(PolicySpec("p.py", source), deadline_s=10.0) as script:
        assert script.decide(crash, sample_job(crash)) == restart("a").within(60).otherwise(hot_swap("b"))
        assert script.decide(tried, sample_job(crash)) == stop("restart late: too slow")


def test_policy_check_names_a_flaw_and_shows_the_recipe(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(HEAD + "def decide(i, j):\n    return default(i, j).otherwise(stop('no more'))\n")
    bad.write_text(HEAD + "def decide(i, j):\n    return restart('a').then(hot_swap('b'))\n")
    env = {"COLUMNS": "300"}
    done = CliRunner().invoke(application(), ["policy", "check", str(good)], env=env)
    assert "restart otherwise stop" in done.output
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(application(), ["policy", "check", str(bad)], env=env)
    assert done.exit_code == 2
    assert "nothing can follow restart in a rung" in done.output


def test_policy_actions_teaches_the_forms() -> None:
    output = CliRunner().invoke(application(), ["policy", "actions"], env={"COLUMNS": "300"}).output
    for part in (
        "a.otherwise(b)",
        "a.within(s)",
        "a.then(b)",
        "At most 8 rungs",
        "cordon, checkpoint_now, set_interval, notify",
    ):
        assert part in output


def test_the_example_of_the_docs_falls_back_and_leaves_the_rest_to_the_default() -> None:
    trials = try_script(PolicySpec(str(EXAMPLE)), deadline_s=10.0)
    answers = {trial.kind: trial.action for trial in trials}
    crash = answers["worker_crash"]
    assert crash is not None
    assert crash.recipe == "restart within 120 s otherwise hot_swap otherwise scale_down otherwise wait"
    lost = incident("node_lost")
    assert answers["node_lost"] == default(lost, sample_job(lost))


def test_other_fallbacks_are_another_decision_and_other_reasons_are_not() -> None:
    crash = incident("worker_crash")
    recipe = restart("a").otherwise(hot_swap("b"))
    asked = PolicyAsked(1.0, crash, sample_job(crash), recipe, "p.py")
    assert not Review(asked, restart("c").otherwise(hot_swap("d")), "").differs
    assert Review(asked, restart("a"), "").differs


# ---------------------------------------------------------------- for people


def walked() -> Incident:
    rungs = (
        Rung(1, 1, ActionKind.GPU_RESET, "gpu_reset", "reset", 10.0, 300.0, 14.5, RungEnd.FAILED, "the driver refused"),
        Rung(1, 2, ActionKind.HOT_SWAP, "cordon then hot_swap", "swap", 14.5, nodes=("n1",)),
    )
    action = replace(RECIPE.rungs[1], fallbacks=RECIPE.rungs[2:])
    return replace(incident("worker_crash"), state=IncidentState.STARTING, action=action, walk=rungs)


def test_the_api_shows_the_walk_and_what_is_left() -> None:
    shown = incident_views.incident(walked()).model_dump(mode="json")
    assert shown["walk"] == [
        {
            "recipe": 1, "rung": 1, "action": "gpu_reset", "nodes": [], "began_at": 10.0, "ended_at": 14.5,
            "within_s": 300.0, "end": "failed", "reason": "reset", "why": "the driver refused",
        },
        {
            "recipe": 1, "rung": 2, "action": "cordon then hot_swap", "nodes": ["n1"], "began_at": 14.5,
            "ended_at": None, "within_s": 0.0, "end": None, "reason": "swap", "why": "",
        },
    ]  # fmt: skip
    assert [rung["kind"] for rung in shown["action"]["fallbacks"]] == ["scale_down", "stop"]
    assert [step["kind"] for step in shown["action"]["before"]] == ["cordon"]


def test_explain_and_show_tell_the_walk() -> None:
    shown = incident_views.incident(walked()).model_dump(mode="json")
    text = "\n".join(line.plain for line in story(None, shown))
    assert "rung 1.1       gpu_reset, failed after 4.5 s, at most 300 s: the driver refused" in text
    assert "rung 1.2       cordon then hot_swap of n1, since " in text
    assert "not tried      scale_down → stop" in text
    brief = _brief(shown)
    assert brief["action"] == {
        "kind": "hot_swap", "reason": "swap", "nodes": ["n1"], "dp": None,
        "after": ["cordon"], "otherwise": ["scale_down", "stop"],
    }  # fmt: skip
    assert len(brief["walk"]) == 2
    plain = incident_views.incident(replace(incident("worker_crash"), action=restart("x"))).model_dump(mode="json")
    assert "walk" not in _brief(plain)


def test_an_incident_of_an_earlier_version_has_no_walk() -> None:
    raw = records.dumps(incident("worker_crash"), Incident)
    old = raw.replace(b',"walk":[],"recipes_exhausted":0', b"")
    assert old != raw
    assert records.loads(old, Incident) == incident("worker_crash")
