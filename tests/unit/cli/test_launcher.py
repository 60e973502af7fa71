"""Which job a launcher attaches to, and when it submits one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.launcher import ENV_LAUNCHER, Launcher, Start, changed_keys
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.wire.jobfile import parse_job, to_body

SPEC = parse_job({"name": "gpt", "script": "/train.py"})


class Api:
    """A supervisor: `answers` to attach requests in turn."""

    def __init__(self, *answers: dict[str, Any] | Exception | None, refuses: bool = False) -> None:
        self.answers, self.refuses = list(answers), refuses
        self.submitted: list[dict[str, Any]] = []

    def attach(self, name: str, launcher: str) -> dict[str, Any] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def submit(self, body: dict[str, Any], **options: Any) -> None:
        if self.refuses:
            raise Conflict("a job named gpt is running")
        self.submitted.append(options)


def attach(api: Api, start: Start | None = None) -> dict[str, Any] | None:
    return Launcher("mine").submit(api, SPEC, start or Start())  # type: ignore[arg-type]


RUNNING = {"phase": "running"}
FAILED = {"phase": "failed", "permanent_failure": False}


@pytest.mark.parametrize("phase", ["pending", "running", "waiting", "suspended", "completed", "stopped", "failed"])
def test_what_it_has_submitted_is_not_submitted_again(phase: str) -> None:
    api = Api({"phase": phase})
    assert attach(api) == {"phase": phase}
    assert not api.submitted


def test_what_is_not_there_is_submitted_with_the_token() -> None:
    api = Api(None)
    assert attach(api, Start(resume=True)) is None
    assert api.submitted == [{"resume": True, "fresh": False, "step": None, "launcher": "mine"}]


def test_a_failure_that_is_worth_another_attempt_is_tried_again_when_that_is_asked_for() -> None:
    assert attach(Api(FAILED)) == FAILED
    api = Api(FAILED)
    assert attach(api, Start(resume=True)) is None
    assert api.submitted
    permanent = {**FAILED, "permanent_failure": True}
    assert attach(Api(permanent), Start(resume=True)) == permanent


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, []),
        ({"args": ["--lr", "2e-4"]}, ["args"]),
        ({"nodes": 4, "mesh": {"dp": 4}, "elastic": {"min_dp": 1, "max_dp": 4}}, ["nodes", "mesh", "elastic"]),
        ({"checkpoint": {"store": "file:///s", "keep": 4}}, ["checkpoint"]),
        ({"checkpoint": {"store": "file:///s", "resume": "file:///s/other"}}, []),
    ],
)
def test_what_has_changed_in_a_job_file_since_it_was_submitted(changes: dict[str, Any], keys: list[str]) -> None:
    given = {"name": "gpt", "script": "/train.py", "nodes": 2, "checkpoint": {"store": "file:///s"}}
    shown = {**to_body(parse_job(given)), "policy": {"name": "swap.py", "sha256": "0" * 64}}
    assert changed_keys({"spec": shown}, parse_job({**given, **changes})) == keys


def test_of_two_that_submit_at_once_the_slower_one_attaches() -> None:
    assert attach(Api(None, RUNNING, refuses=True)) == RUNNING


def test_a_stranger_s_job_is_refused() -> None:
    with pytest.raises(Conflict, match="another launcher"):
        attach(Api(Conflict("another launcher submitted it")))
    with pytest.raises(Conflict, match="is running"):
        attach(Api(None, None, refuses=True))


def test_the_token_is_given_or_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(ENV_LAUNCHER, raising=False)
    first = Launcher.of("gpt", "http://a:1")
    assert len(first.token) == 64
    assert Launcher.of("gpt", "http://a:1") == first
    assert Launcher.of("gpt", "http://b:1") != first
    assert Launcher.of("other", "http://a:1") != first
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    monkeypatch.setenv(ENV_LAUNCHER, "given")
    assert Launcher.of("gpt", "http://a:1").token == "given"


@pytest.mark.parametrize("token", ["x" * 201, "ä", "a\nb"])
def test_a_token_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(ENV_LAUNCHER, token)
    with pytest.raises(InvalidSpec, match=ENV_LAUNCHER):
        Launcher.of("gpt", "http://a:1")


def test_without_a_place_to_keep_one_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv(ENV_LAUNCHER, raising=False)
    with pytest.raises(InvalidSpec, match=ENV_LAUNCHER):
        Launcher.of("gpt", "http://a:1")
