"""Which API a command uses without a URL."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from holdfast.cli import connection, local_runs
from holdfast.cli.local_runs import api_url, running
from holdfast.domain.errors import Unavailable


class Answer(BaseHTTPRequestHandler):
    status, body = 200, json.dumps({"version": "1.0", "protocol_version": 1}).encode()

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_arguments: object) -> None:
        return


@contextmanager
def server(handler: type[Answer] = Answer) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No API at the default URL, and a directory of local runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("HOLDFAST_LOCAL_API_PORT", str(port))
    monkeypatch.delenv("HOLDFAST_API", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return local_runs.RUNS.expanduser()


def announce(runs: Path, name: str, content: str) -> None:
    ready = runs / name / "supervisor" / "ready.json"
    ready.parent.mkdir(parents=True)
    ready.write_text(content)


def test_the_only_local_run_is_asked_and_named(runs: Path) -> None:
    said: list[str] = []
    with server() as url:
        announce(runs, "train", json.dumps({"api": url}))
        announce(runs, "over", json.dumps({"api": "http://127.0.0.1:9"}))
        assert api_url(say=said.append) == url
    assert said == [f"the local run train, at {url}"]


def test_of_several_local_runs_that_of_the_job_is_asked(runs: Path) -> None:
    with server() as first, server() as second:
        announce(runs, "train", json.dumps({"api": first}))
        announce(runs, "other", json.dumps({"api": second}))
        assert running() == {"train": first, "other": second}
        assert api_url("other") == second
        with pytest.raises(Unavailable, match=f"2 local runs do: .*train at {first}.* with --api URL or HOLDFAST_API"):
            api_url("third")


def test_a_url_that_is_given_or_answers_comes_first(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as local, server() as default:
        announce(runs, "train", json.dumps({"api": local}))
        monkeypatch.setenv("HOLDFAST_LOCAL_API_PORT", default.rpartition(":")[2])
        assert api_url() == default
        monkeypatch.setenv("HOLDFAST_API", "http://fleet:8470")
        assert api_url() == "http://fleet:8470"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"api": 5}', '{"api": "http://[::"}', "[" * 100_000, '{"api": "file:///x"}']
)
def test_what_cannot_be_read_is_no_local_run(runs: Path, content: str) -> None:
    announce(runs, "train", content)
    assert running() == {}
    assert api_url() == connection.default_url()


def test_what_is_no_holdfast_is_no_local_run(runs: Path) -> None:
    """The port of a run that is over may have gone to another program."""

    class Other(Answer):
        status, body = 404, b"not here"

    with server(Other) as url:
        announce(runs, "train", json.dumps({"api": url}))
        assert running() == {}


def test_a_run_whose_directory_is_taken_away_meanwhile(runs: Path) -> None:
    announce(runs, "train", "{}")
    ready = runs / "train" / "supervisor" / "ready.json"
    ready.unlink()
    os.symlink("/nowhere", ready)
    assert running() == {}
