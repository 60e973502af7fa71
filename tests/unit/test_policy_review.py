"""Dry runs: a policy is asked again about what others were asked, and only what would be done differently is a difference."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import policy as command
from holdfast.cli.main import application
from holdfast.domain.errors import InvalidSpec, PolicyError
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import ActionKind
from holdfast.domain.job import PolicySpec
from holdfast.policy import default, hot_swap, restart
from holdfast.supervisor.policies.review import review
from holdfast.supervisor.policies.script import sample_incidents, sample_job
from holdfast.supervisor.published import PolicyAsked
from holdfast.wire import records

NOW = time.time() - 30 * 86_400.0
HEAD = "from holdfast.policy import *\n"


def questions() -> list[PolicyAsked]:
    """One about every kind of incident, as the default policy answered it."""
    jobs = [(incident, sample_job(incident)) for incident in sample_incidents()]
    return [
        PolicyAsked(NOW - 1000.0 + number, incident, job, default(incident, job), "default policy")
        for number, (incident, job) in enumerate(jobs)
    ]


def test_the_policy_that_decided_differs_in_nothing() -> None:
    found = questions()
    for policy in (PolicySpec(), PolicySpec("p.py", HEAD + "def decide(i, j):\n    return default(i, j)\n")):
        reviews = review(policy, found)
        assert [each.asked for each in reviews] == found
        assert not any(each.differs or each.problem for each in reviews)


def test_another_reason_is_no_difference_and_another_node_is_one() -> None:
    incident = next(each for each in sample_incidents() if each.kind == FindingKind.WORKER_CRASH)
    asked = PolicyAsked(1.0, incident, sample_job(incident), hot_swap("why", "n1"), "p.py")
    for answer, differs in (
        ("hot_swap('other', 'n1')", False),
        ("hot_swap('why', 'n2')", True),
        ("restart('why')", True),
    ):
        [found] = review(PolicySpec("p.py", HEAD + f"def decide(i, j):\n    return {answer}\n"), [asked])
        assert found.differs is differs, answer


def test_where_the_policy_fails_or_answers_what_cannot_be_done_the_default_decides_and_it_is_said() -> None:
    lost = next(each for each in questions() if each.incident.kind == FindingKind.NODE_LOST)
    crash = next(each for each in questions() if each.incident.kind == FindingKind.WORKER_CRASH)
    source = HEAD + "def decide(i, j):\n    return restart('x') if i.kind == 'node_lost' else j.no_such\n"
    refused, raised = review(PolicySpec("p.py", source), [lost, crash])
    assert (refused.action.kind, refused.differs) == (ActionKind.HOT_SWAP, False)
    assert "restart is not possible" in refused.problem
    assert raised.action.kind is ActionKind.RESTART
    assert "p.py:3: AttributeError" in raised.problem


def test_a_policy_sees_its_parameters() -> None:
    source = HEAD + "def decide(i, j):\n    return hot_swap('x', 'n1') if j.params['swaps'] > 2 else restart('x')\n"
    crash = replace(next(each for each in questions() if each.incident.kind == FindingKind.WORKER_CRASH))
    answers = [review(PolicySpec("p.py", source, {"swaps": swaps}), [crash])[0].action.kind for swaps in (2, 3)]
    assert answers == [ActionKind.RESTART, ActionKind.HOT_SWAP]


def test_a_policy_that_does_not_load_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"p\.py:1: ModuleNotFoundError"):
        review(PolicySpec("p.py", "import no_such_module_of_anybody\n"), questions())


# ---------------------------------------------------------------- the command, without a supervisor


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"".join(records.dumps(each, PolicyAsked) + b"\n" for each in questions()))
    return path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(application(), ["policy", "test", *arguments], env={"COLUMNS": "120"})
    return done.exit_code, done.output


def test_the_table_shows_what_would_have_been_decided_differently(exported: Path, tmp_path: Path) -> None:
    script = tmp_path / "p.py"
    script.write_text(HEAD + "def decide(i, j):\n    return stop('no more') if i.kind == 'hang' else default(i, j)\n")
    code, output = run(str(script), "--from", str(exported), "--since", "100d")
    assert code == 0, output
    assert "1 would have been decided differently" in output
    assert "sample-hang" in output
    assert "no more" in output
    assert "sample-node_lost" not in output
    code, output = run("default", "--from", str(exported), "--since", "100d")
    assert (code, "the same decisions" in output) == (0, True)


def test_where_a_policy_fails_the_table_and_the_exit_code_say_so(exported: Path, tmp_path: Path) -> None:
    script = tmp_path / "p.py"
    script.write_text(HEAD + "def decide(i, j):\n    return restart('x') if i.kind == 'node_lost' else default(i, j)\n")
    code, output = run(str(script), "--from", str(exported), "--since", "100d")
    assert code == 2
    assert "restart is not possible" in " ".join(output.split())
    assert "the same decisions" in output
    assert "it failed 1 time" in output


def test_json_has_every_question(exported: Path) -> None:
    code, output = run("default", "--from", str(exported), "--since", "100d", "--json")
    assert code == 0
    assert {row["incident"] for row in json.loads(output)} == {each.incident.id for each in questions()}


def test_what_is_older_is_left_out(exported: Path) -> None:
    assert "no policy was asked in the last 7 days" in run("default", "--from", str(exported))[1]


def test_garbage_is_named_with_its_line(exported: Path) -> None:
    exported.write_bytes(exported.read_bytes() + b'{"at": 5}\n')
    done = CliRunner().invoke(application(), ["policy", "test", "default", "--from", str(exported)])
    assert isinstance(done.exception, InvalidSpec)
    assert f"{exported}:{len(questions()) + 1}" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=3", 3), ("a=2.5", 2.5), ("a=true", True), ("a=n1, n2", "n1, n2"), ("a=", ""), ("a=2026-11-23", "2026-11-23")],
)
def test_parameters_have_the_type_that_they_would_have_in_a_job_file(text: str, value: object) -> None:
    assert command._param(text) == ("a", value)


def test_a_parameter_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="NAME=VALUE"):
        command._param("swaps")


def test_a_question_survives_its_record() -> None:
    asked = replace(questions()[0], action=restart("x"))
    asked = replace(asked, job=replace(asked.job, params={"a": 1, "b": "x", "c": True, "d": 1.5}))
    assert records.loads(records.dumps(asked, PolicyAsked), PolicyAsked) == asked
