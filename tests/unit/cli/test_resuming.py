"""What becomes of a name's checkpoints is asked for by options, and sent as such: `run --resume`, `--fresh`, `jobs resume`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from holdfast.cli import jobs, run
from holdfast.cli.client import Client
from holdfast.cli.main import application
from holdfast.domain.errors import Conflict, InvalidSpec

URL = "http://127.0.0.1:8470"
DETAIL = "x has checkpoints, the newest of step 20 (on n0): submit it with --resume ... or with --fresh ..."
JOB = {"name": "x", "goes_on_from": 20, "kept": None, "spec": {"checkpoint": {"store": None}}}
RUN = ("run", "--api", URL, "--detach", "--name", "x")


class Api:
    """Accepts what says what becomes of the checkpoints of x; remembers what it was asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, params = request.url.path, dict(request.url.params)
        if request.method == "GET":
            views = {"/v1/operations/o": {"id": "o", "state": "done", "reason": ""}, "/v1/jobs/x": JOB}
            return httpx.Response(200, json=views.get(path, {"items": [], "next_cursor": None}))
        self.asked.append((path, params, json.loads(request.content or b"null")))
        if path == "/v1/jobs" and not params:
            body = {"type": "urn:x", "title": "Conflict", "status": 409, "detail": DETAIL}
            return httpx.Response(409, json=body, headers={"content-type": "application/problem+json"})
        return httpx.Response(202, json={"id": "o", "state": "pending"}, headers={"Location": "/v1/operations/o"})


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Api:
    api = Api()
    for module in (run, jobs):
        monkeypatch.setattr(module, "Client", partial(Client, transport=httpx.MockTransport(api), sleep=lambda _: None))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return api


def holdfast(*arguments: str) -> Result:
    return CliRunner().invoke(application(arguments[0]), arguments)


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (["--resume"], {"resume": "true"}),
        (["--resume", "--step", "10"], {"resume": "true", "step": "10"}),
        (["--fresh"], {"fresh": "true"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_submission_says_it(api: Api, options: list[str], sent: dict[str, str]) -> None:
    result = holdfast(*RUN, *options, "train.py")
    assert result.exit_code == 0, result.output
    [(path, parameters, body)] = api.asked
    assert (path, parameters, body["name"]) == ("/v1/jobs", sent, "x")
    assert ("resuming from step 20" in result.output) == ("--resume" in options)


def test_one_that_does_not_say_it_is_refused(api: Api) -> None:
    result = holdfast(*RUN, "train.py")
    assert isinstance(result.exception, Conflict)
    assert str(result.exception) == DETAIL
    assert [parameters for _, parameters, _ in api.asked] == [{}]


@pytest.mark.parametrize(
    ("options", "field"), [(["--resume", "--fresh"], "--fresh"), (["--step", "10"], "--step")], ids=["both", "step"]
)
def test_one_that_contradicts_itself_is_sent_to_nobody(api: Api, options: list[str], field: str) -> None:
    result = holdfast(*RUN, *options, "train.py")
    assert isinstance(result.exception, InvalidSpec)
    assert result.exception.field == field
    assert not api.asked


@pytest.mark.parametrize(("options", "step"), [([], None), (["--step", "10"], 10)], ids=["newest", "named"])
def test_a_finished_job_is_started_again_by_its_name(api: Api, options: list[str], step: int | None) -> None:
    result = holdfast("jobs", "resume", "x", *options, "--api", URL)
    assert result.exit_code == 0, result.output
    assert api.asked == [("/v1/jobs/x/resume", {}, {"step": step})]
    assert "x: resuming from step 20" in result.output
